"""Cases of relu_squared."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ROWS, Size, Vary

KIND = "activation, embedding"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    scale: float = 1.0,
    gated: bool = False,
    halves: bool = False,
) -> dict[str, Any]:
    """With `halves`, x and up are the two halves of each row of one tensor, as a fused projection gives them."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    x, up = make.randn(*rows, hidden) * scale, make.randn(*rows, hidden)
    if halves:
        x, up = torch.cat((x, up), -1).chunk(2, -1)
    return {"x": x, "up": up} if gated or halves else {"x": x}


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size()},
    tensors=("rows hidden",),
    values={"gated": (False, True)},
)

CASES = (
    Case("odd", "odd", rows=5, hidden=123, gated=True),
    Case("batched", "odd", rows=(2, 3), hidden=65),
    Case("long-row", "odd", rows=2, hidden=5000),
    Case("halves", "odd", rows=3, hidden=768, halves=True),
    Case("short-halves", "odd", rows=21, hidden=64, halves=True),
    Case("one-element", "edge", rows=1, hidden=1),
    Case("vector", "edge", rows=(), hidden=33, gated=True),
    Case("tiny-values", "extreme", rows=4, hidden=64, scale=1e-4, gated=True),
    Case("big-values", "extreme", rows=4, hidden=64, scale=1e4),
    Case("uneven-rows", "extreme", rows=6, hidden=97, gated=True, by_row=("up",)),
    Case("small", "small", rows=2048, hidden=5632),
    Case("medium", "medium", rows=8192, hidden=14336),
    Case("large", "large", rows=16384, hidden=28672),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 3, hidden=8192)

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor) -> Tensor:
    return F.relu(x).square()


def liger(ops: Any, x: Tensor) -> Any:
    return ops.LigerReLUSquaredFunction.apply(x)
