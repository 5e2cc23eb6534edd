"""Cases of rms_norm."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Number, Size, Vary
from liger_core.ops.rms_norm import CASTING_MODES

KIND = "normalisation"


def build(
    make: Make, *, rows: int | tuple[int, ...], hidden: int, weight: bool = True, scale: float = 1.0, **options: Any
) -> dict[str, Any]:
    rows = rows if isinstance(rows, tuple) else (rows,)
    weight_dtype = options.pop("weight_dtype", None)
    return {
        "x": make.randn(*rows, hidden) * scale,
        "weight": make.randn(hidden, dtype=weight_dtype) if weight else None,
        **options,
    }


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size()},
    tensors=("rows hidden",),
    values={
        "weight": (True, False),
        "weight_dtype": ANY_DTYPE,
        "eps": Number(1e-8, 1.0),
        "offset": (0.0, 1.0, Number(-2.0, 2.0)),
        "casting_mode": CASTING_MODES,
    },
)

CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("batched", "odd", rows=(2, 3), hidden=65),
    Case("many-rows", "odd", rows=515, hidden=17),
    Case("thousands-of-rows", "odd", rows=2500, hidden=17),
    Case("row-of-4095", "odd", rows=1, hidden=4095),
    Case("long-row", "odd", rows=2, hidden=5000),
    Case("rows-of-8192", "option", rows=2, hidden=8192),
    Case("row-of-8193", "odd", rows=1, hidden=8193),
    Case("row-of-16385", "option", rows=1, hidden=16385),
    Case("rows-of-16400", "option", rows=2, hidden=16400),
    Case("row-of-131072", "odd", mode=CallMode(grads=("x",)), rows=1, hidden=131072),
    Case("rows-of-16368", "option", rows=3, hidden=16368),
    Case("dx-of-long-rows", "odd", mode=CallMode(grads=("x",)), rows=2, hidden=16400),
    Case("dweight-of-long-rows", "odd", mode=CallMode(grads=("weight",)), rows=2, hidden=16400),
    Case("thousands-of-rows-of-8", "odd", rows=2500, hidden=8),
    Case("one-element", "edge", rows=1, hidden=1, eps=1.0),
    Case("vector", "edge", rows=(), hidden=33),
    Case("gemma", "option", rows=4, hidden=96, offset=1.0, casting_mode="gemma"),
    Case("none", "option", rows=4, hidden=96, casting_mode="none"),
    Case("eps", "option", rows=4, hidden=96, eps=0.5, scale=0.1),
    Case("no-weight", "option", rows=4, hidden=96, weight=False),
    Case("float32-weight", "option", rows=4, hidden=96, weight_dtype=torch.float32),
    Case("tiny-values", "extreme", rows=4, hidden=64, scale=1e-4),
    Case("big-values", "extreme", rows=4, hidden=64, scale=1e3),
    # The reference's backward overflows float16 there; the gradient is small, and kernels may be right.
    Case("random-21-135", "extreme", rows=(), hidden=1, scale=1e-4, casting_mode="none"),
    Case("overflow-on-the-way", "extreme", rows=9, hidden=7, scale=1e-4, offset=1.0, casting_mode="none"),
    Case("uneven-rows", "extreme", rows=6, hidden=97, by_row=("x",)),
    Case("small", "small", rows=2048, hidden=2048),
    Case("medium", "medium", rows=8192, hidden=4096),
    Case("large", "large", rows=16384, hidden=8192),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 3, hidden=8192)

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def liger(ops: Any, x: Tensor, weight: Tensor) -> Any:
    return ops.LigerRMSNormFunction.apply(x, weight, 1e-06, 0.0, "llama", False)
