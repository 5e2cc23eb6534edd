"""Cases of rope."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import CallMode, Case, Make, Moves
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
    columns: int | None = None,
    tables: int | None = 1,
    transposed: bool = True,
    scale: float = 1.0,
    k_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """`columns` are rotated (None: all). `tables` is the batch of cos and sin; None leaves that dimension out.

    Every column has its own angle, the two halves of a head too.
    """

    def heads(number: int, dtype: torch.dtype | None) -> Tensor:
        if transposed:
            return (make.randn(batch, length, number, head, dtype=dtype) * scale).transpose(1, 2)
        return make.randn(batch, number, length, head, dtype=dtype) * scale

    leading = () if tables is None else (tables,)
    angles = make.uniform(*leading, length, columns or head, dtype=torch.float32) * 2 * math.pi
    table_dtype = table_dtype or make.dtype
    return {
        "q": heads(q_heads, None),
        "k": heads(k_heads, k_dtype),
        "cos": angles.cos().to(table_dtype),
        "sin": angles.sin().to(table_dtype),
    }


VARY = Vary(
    sizes={
        "batch": Size(most=64),
        "length": Size(most=1 << 16),
        "q_heads": Size(most=128),
        "k_heads": Size(most=128),
        "head": Size(least=2, most=512),
    },
    tensors=("batch length q_heads head", "batch length k_heads head"),
    values={
        "columns": lambda head: (head - head % 2, 2, head // 4 * 2 or 2),
        "tables": lambda batch: (1, None, batch),
        "transposed": (True, False),
        "k_dtype": ANY_DTYPE,
        "table_dtype": ANY_DTYPE,
    },
)

CASES = (
    Case("odd", "odd", batch=2, length=5, q_heads=3, k_heads=1, head=22, tables=2),
    Case("one-table", "odd", batch=2, length=7, q_heads=4, k_heads=2, head=16),
    Case("long", "odd", batch=1, length=37, q_heads=2, k_heads=1, head=8),
    Case("one-element", "edge", batch=1, length=1, q_heads=1, k_heads=1, head=2),
    Case("more-k-heads", "edge", batch=1, length=5, q_heads=2, k_heads=3, head=16),
    Case("many-heads", "edge", batch=1, length=2, q_heads=33, k_heads=5, head=16),
    Case("contiguous", "option", batch=2, length=5, q_heads=3, k_heads=1, head=22, tables=2, transposed=False),
    Case("no-batch-dimension", "option", batch=3, length=5, q_heads=2, k_heads=1, head=16, tables=None),
    Case("partial", "option", batch=2, length=5, q_heads=2, k_heads=1, head=40, columns=16),
    Case("partial-odd-halves", "option", batch=2, length=5, q_heads=2, k_heads=1, head=33, columns=10, tables=2),
    Case(
        "partial-contiguous", "option", batch=2, length=5, q_heads=2, k_heads=1, head=40, columns=24, transposed=False
    ),
    Case(
        "heads-side-by-side",
        "option",
        mode=CallMode(layouts={"q": "channels_last", "cos": "outermost_last", "sin": "expanded"}),
        batch=2,
        length=5,
        q_heads=9,
        k_heads=1,
        head=97,
        columns=48,
        tables=1,
    ),
    Case("two-columns", "option", batch=1, length=5, q_heads=2, k_heads=1, head=5, columns=2),
    Case("float32-tables", "option", batch=2, length=5, q_heads=3, k_heads=1, head=16, table_dtype=torch.float32),
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


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def liger(ops: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return ops.LigerRopeFunction.apply(q, k, cos, sin)
