"""Cases of layer_norm."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Number, Size, Vary

KIND = "normalisation"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    bias: bool = True,
    mean: float = 0.0,
    scale: float = 1.0,
    weight_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    rows = rows if isinstance(rows, tuple) else (rows,)
    return {
        "x": make.randn(*rows, hidden) * scale + mean,
        "weight": make.randn(hidden, dtype=weight_dtype),
        "bias": make.randn(hidden, dtype=weight_dtype) if bias else None,
        **options,
    }


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size()},
    tensors=("rows hidden",),
    values={"bias": (True, False), "weight_dtype": ANY_DTYPE, "eps": Number(1e-8, 1.0)},
)

CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("batched", "odd", rows=(2, 3), hidden=65),
    Case("many-rows", "odd", rows=133, hidden=17),
    Case("thousands-of-rows", "odd", rows=2500, hidden=17),
    Case("long-row", "odd", rows=2, hidden=5000),
    Case("rows-of-8192", "option", rows=2, hidden=8192),
    Case("row-of-8193", "odd", rows=1, hidden=8193),
    Case("row-of-16385", "option", rows=1, hidden=16385),
    Case("rows-of-16400", "option", rows=2, hidden=16400),
    Case("row-of-131072", "odd", mode=CallMode(grads=("x",)), rows=1, hidden=131072),
    Case("dx-of-long-rows", "odd", mode=CallMode(grads=("x",)), rows=2, hidden=16400),
    Case("dweight-of-long-rows", "odd", mode=CallMode(grads=("weight",)), rows=2, hidden=16400),
    Case("thousands-of-rows-of-8", "odd", rows=2500, hidden=8),
    Case("one-element", "edge", rows=1, hidden=1),
    Case("one-column", "edge", rows=7, hidden=1),
    Case("vector", "edge", rows=(), hidden=33),
    Case("constant-rows", "edge", rows=4, hidden=64, scale=0.0, mean=3.0),
    Case("no-bias", "option", rows=4, hidden=96, bias=False),
    Case("eps", "option", rows=4, hidden=96, eps=0.5, scale=0.1),
    Case("float32-weight", "option", rows=4, hidden=96, weight_dtype=torch.float32),
    Case("far-from-zero", "extreme", rows=64, hidden=50, mean=1000.0),
    Case("tiny-values", "extreme", rows=4, hidden=64, scale=1e-4),
    Case("big-values", "extreme", rows=4, hidden=64, scale=1e4),
    Case("infinite-weight", "extreme", rows=4, hidden=65, holds={"weight": torch.inf}),
    Case("uneven-rows", "extreme", rows=6, hidden=97, by_row=("x",)),
    Case("small", "small", rows=2048, hidden=2048),
    Case("medium", "medium", rows=8192, hidden=4096),
    Case("large", "large", rows=16384, hidden=8192),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 3, hidden=8192)

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def liger(ops: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return ops.LigerLayerNormFunction.apply(x, weight, bias, 1e-05)
