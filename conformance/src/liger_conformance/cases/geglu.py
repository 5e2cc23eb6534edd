"""Cases of geglu."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ROWS, Size, Vary

KIND = "activation, embedding"


def build(
    make: Make, *, rows: int | tuple[int, ...], hidden: int, scale: float = 1.0, halves: bool = False
) -> dict[str, Any]:
    """With `halves`, gate and up are the two halves of each row of one tensor, as a fused projection gives them."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    gate, up = make.randn(*rows, hidden) * scale, make.randn(*rows, hidden)
    if halves:
        gate, up = torch.cat((gate, up), -1).chunk(2, -1)
    return {"gate": gate, "up": up}


VARY = Vary(sizes={"rows": ROWS, "hidden": Size()}, tensors=("rows hidden",))

CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("batched", "odd", rows=(2, 3), hidden=65),
    Case("many-rows", "odd", rows=133, hidden=17),
    Case("long-row", "odd", rows=2, hidden=5000),
    Case("halves", "odd", rows=3, hidden=768, halves=True),
    Case("short-halves", "odd", rows=21, hidden=64, halves=True),
    Case("odd-halves", "odd", rows=7, hidden=1409, halves=True),
    Case("one-element", "edge", rows=1, hidden=1),
    Case("vector", "edge", rows=(), hidden=33),
    Case("tiny-values", "extreme", rows=4, hidden=64, scale=1e-4),
    Case("big-values", "extreme", rows=4, hidden=64, scale=1e4),
    Case("uneven-rows", "extreme", rows=6, hidden=97, by_row=("up",)),
    Case("small", "small", rows=2048, hidden=5632),
    Case("medium", "medium", rows=8192, hidden=14336),
    Case("large", "large", rows=16384, hidden=28672),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 3, hidden=8192)

MOVES = Moves({"gate": 3}, {"gate": 5})


def eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def liger(ops: Any, gate: Tensor, up: Tensor) -> Any:
    return ops.LigerGELUMulFunction.apply(gate, up)
