"""Cases of llama4_rope."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, Size, Vary

KIND = "position"


def build(
    make: Make,
    *,
    batch: int,
    length: int,
    q_heads: int,
    k_heads: int,
    head: int,
    real: bool = False,
    conjugated: bool = False,
    transposed: bool = False,
    scale: float = 1.0,
    k_dtype: torch.dtype | None = None,
    freqs_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Frequencies have moduli between 0.5 and 1.5. `real` ones are of `freqs_dtype`."""

    def heads(number: int, dtype: torch.dtype | None) -> Tensor:
        if transposed:
            return (make.randn(batch, number, length, head, dtype=dtype) * scale).transpose(1, 2)
        return make.randn(batch, length, number, head, dtype=dtype) * scale

    moduli = make.uniform(length, head // 2, dtype=torch.float32) + 0.5
    freqs = torch.polar(moduli, make.uniform(length, head // 2, dtype=torch.float32) * 2 * math.pi)
    if real:
        freqs = torch.view_as_real(freqs).to(freqs_dtype or make.dtype)
    return {
        "q": heads(q_heads, None),
        "k": heads(k_heads, k_dtype),
        "freqs_cis": freqs.conj() if conjugated else freqs,
    }


VARY = Vary(
    sizes={
        "batch": Size(most=64),
        "length": Size(most=1 << 16),
        "q_heads": Size(most=128),
        "k_heads": Size(most=128),
        "head": Size(least=2, most=512, step=2),
    },
    tensors=("batch length q_heads head", "batch length k_heads head"),
    values={
        "real": (False, True),
        "conjugated": lambda real: (False,) if real else (False, True),
        "transposed": (False, True),
        "k_dtype": ANY_DTYPE,
        "freqs_dtype": ANY_DTYPE,
    },
)

CASES = (
    Case("odd", "odd", batch=2, length=5, q_heads=3, k_heads=1, head=22),
    Case("odd-real", "odd", batch=3, length=7, q_heads=4, k_heads=2, head=10, real=True),
    Case("long", "odd", batch=1, length=37, q_heads=2, k_heads=1, head=8),
    Case("one-element", "edge", batch=1, length=1, q_heads=1, k_heads=1, head=2),
    Case("more-k-heads", "edge", batch=1, length=5, q_heads=2, k_heads=3, head=16),
    Case("many-heads", "edge", batch=1, length=2, q_heads=33, k_heads=5, head=16),
    Case("transposed", "option", batch=2, length=5, q_heads=3, k_heads=1, head=16, transposed=True),
    Case("conjugated", "option", batch=2, length=5, q_heads=3, k_heads=1, head=16, conjugated=True),
    Case(
        "float32-real", "option", batch=2, length=5, q_heads=3, k_heads=1, head=16, real=True, freqs_dtype=torch.float32
    ),
    Case("float32-k", "option", batch=2, length=5, q_heads=3, k_heads=1, head=16, k_dtype=torch.float32),
    Case("bfloat16-k", "option", batch=2, length=5, q_heads=3, k_heads=1, head=16, k_dtype=torch.bfloat16),
    Case("big-values", "extreme", batch=1, length=5, q_heads=2, k_heads=1, head=16, scale=1e4),
    Case("uneven-rows", "extreme", batch=4, length=5, q_heads=3, k_heads=1, head=22, by_row=("q", "k", "incoming")),
    Case("small", "small", batch=1, length=2048, q_heads=32, k_heads=8, head=128),
    Case("medium", "medium", batch=4, length=2048, q_heads=32, k_heads=8, head=128),
    Case("large", "large", batch=2, length=16384, q_heads=32, k_heads=8, head=128),
)

HUGE = Case("huge", "large", batch=(1 << 9) + 3, length=1024, q_heads=32, k_heads=8, head=128)

MOVES = Moves({"q": 2, "k": 2}, {"q": 2, "k": 2})


def eager(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(3).to(x.dtype)

    return rotated(q), rotated(k)


def liger(ops: Any, q: Tensor, k: Tensor, freqs_cis: Tensor) -> Any:
    return ops.LigerLlama4RopeFunction.apply(q, k, freqs_cis)
