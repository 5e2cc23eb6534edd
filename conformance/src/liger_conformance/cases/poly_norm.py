"""Cases of poly_norm."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Number, Size, Vary

KIND = "normalisation"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    scale: float = 1.0,
    weight_dtype: torch.dtype | None = None,
    bias_shape: tuple[int, ...] = (1,),
    **options: Any,
) -> dict[str, Any]:
    rows = rows if isinstance(rows, tuple) else (rows,)
    return {
        "x": make.randn(*rows, hidden) * scale,
        "weight": make.randn(3, dtype=weight_dtype),
        "bias": make.randn(*bias_shape, dtype=weight_dtype),
        **options,
    }


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size()},
    tensors=("rows hidden",),
    values={"weight_dtype": ANY_DTYPE, "eps": Number(1e-8, 1.0)},
)

CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("batched", "odd", rows=(2, 3), hidden=65),
    Case("many-rows", "odd", rows=133, hidden=17),
    Case("long-row", "odd", rows=2, hidden=5000),
    Case("rows-of-8192", "option", rows=2, hidden=8192),
    Case("row-of-8193", "odd", rows=1, hidden=8193),
    Case("row-of-16385", "option", rows=1, hidden=16385),
    Case("rows-of-16400", "option", rows=2, hidden=16400),
    Case("row-of-131072", "odd", rows=1, hidden=131072),
    Case("rows-of-32769", "option", rows=3, hidden=32769),
    Case("one-element", "edge", rows=1, hidden=1, eps=0.5),
    Case("vector", "edge", rows=(), hidden=33),
    Case("zeros", "edge", rows=4, hidden=32, scale=0.0),
    Case("eps", "option", rows=4, hidden=96, eps=0.5),
    Case("float32-weight", "option", rows=4, hidden=96, weight_dtype=torch.float32),
    Case("scalar-bias", "option", rows=4, hidden=96, bias_shape=()),
    Case("tiny-values", "extreme", rows=4, hidden=64, scale=1e-4),
    Case("big-values", "extreme", rows=4, hidden=64, scale=1e4),
    Case("infinite-weight", "extreme", rows=4, hidden=65, holds={"weight": torch.inf}),
    Case("uneven-rows", "extreme", rows=6, hidden=97, by_row=("incoming",)),
    Case("small", "small", rows=2048, hidden=2048),
    Case("medium", "medium", rows=8192, hidden=4096),
    Case("large", "large", rows=16384, hidden=8192),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 3, hidden=8192)

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    powers = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + 1e-6) for p in (wide**3, wide**2, wide)]
    return (weight[0] * powers[0] + weight[1] * powers[1] + weight[2] * powers[2] + bias).to(x.dtype)


def liger(ops: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return ops.LigerPolyNormFunction.apply(x, weight, bias, 1e-06, False)
