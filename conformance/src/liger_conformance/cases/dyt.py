"""Cases of dyt."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Size, Vary

KIND = "normalisation"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    beta: bool = True,
    scale: float = 1.0,
    weight_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    rows = rows if isinstance(rows, tuple) else (rows,)
    return {
        "x": make.randn(*rows, hidden) * scale,
        "alpha": make.uniform(1, dtype=weight_dtype) + 0.5,
        "gamma": make.randn(hidden, dtype=weight_dtype),
        "beta": make.randn(hidden, dtype=weight_dtype) if beta else None,
    }


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size()},
    tensors=("rows hidden",),
    values={"beta": (True, False), "weight_dtype": ANY_DTYPE},
)

CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("batched", "odd", rows=(2, 3), hidden=65),
    Case("many-rows", "odd", rows=261, hidden=17),
    Case("long-row", "odd", rows=2, hidden=5000),
    Case("one-element", "edge", rows=1, hidden=1),
    Case("vector", "edge", rows=(), hidden=33),
    Case("no-beta", "option", rows=4, hidden=96, beta=False),
    Case("float32-weight", "option", rows=4, hidden=96, weight_dtype=torch.float32),
    Case("tiny-values", "extreme", rows=4, hidden=64, scale=1e-4),
    Case("big-values", "extreme", rows=4, hidden=64, scale=1e4),
    Case("infinite-alpha", "extreme", rows=5, hidden=65, holds={"alpha": torch.inf}),
    Case("negative-infinite-alpha", "extreme", rows=5, hidden=65, holds={"alpha": -torch.inf, "x": 0.0}),
    Case("infinite-gamma", "extreme", rows=4, hidden=65, holds={"gamma": torch.inf}),
    Case("uneven-rows", "extreme", rows=6, hidden=97, by_row=("incoming",)),
    Case("small", "small", rows=2048, hidden=2048),
    Case("medium", "medium", rows=8192, hidden=4096),
    Case("large", "large", rows=16384, hidden=8192),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 3, hidden=8192)

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return gamma * torch.tanh(alpha * x) + beta


def liger(ops: Any, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Any:
    return ops.LigerDyTFunction.apply(x, alpha, gamma, beta)
