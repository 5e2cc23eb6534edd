"""Cases of quantize_gated."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.cases import quantize
from liger_conformance.vary import Size, Vary
from liger_core.ops.gated_mlp import ACTIVATIONS
from liger_core.ops.quantize import SCALES

KIND = "8 bits"


def build(
    make: Make, *, tokens: int, inner: int, scale: float = 1.0, halves: bool = False, **options: Any
) -> dict[str, Any]:
    """With `halves`, gate and up are the two halves of each row of one tensor, as one product for both gives them."""
    gate, up = make.randn(tokens, inner) * scale, make.randn(tokens, inner)
    if halves:
        gate, up = torch.cat((gate, up), -1).chunk(2, -1)
    return {"gate": gate, "up": up, **options}


VARY = Vary(
    sizes={"tokens": Size(), "inner": Size()},
    tensors=("tokens inner",),
    values={
        "activation": ACTIVATIONS,
        "scales": SCALES,
        "rows": (True, False),
        "columns": lambda rows: (True, not rows),
    },
)

CASES = (
    Case("odd", "odd", tokens=5, inner=123, columns=True),
    Case("rows-alone", "option", tokens=130, inner=40),
    Case("several-tiles", "odd", tokens=131, inner=259, columns=True),
    Case("columns-alone", "option", tokens=130, inner=40, rows=False, columns=True),
    Case("in-vectors", "option", tokens=144, inner=272, columns=True),
    Case("halves", "option", tokens=130, inner=144, columns=True, halves=True),
    Case("gelu", "option", tokens=131, inner=259, columns=True, activation="gelu_tanh"),
    Case("float32-scales", "option", tokens=131, inner=259, columns=True, scales="float32"),
    Case("gelu-float32-scales", "option", tokens=5, inner=40, activation="gelu_tanh", scales="float32"),
    Case("one-element", "edge", tokens=1, inner=1, columns=True),
    Case("tiny-values", "extreme", tokens=4, inner=140, scale=1e-4, columns=True),
    Case("big-values", "extreme", tokens=4, inner=140, scale=1e3, columns=True),
    Case("uneven-rows", "extreme", tokens=6, inner=140, by_row=("up",)),
    Case("small", "small", tokens=2048, inner=5632),
    Case("medium", "medium", tokens=8192, inner=14336),
    Case("large", "large", tokens=16384, inner=28672),
)

HUGE = Case("huge", "large", tokens=(1 << 18) + 16, inner=8192, columns=True)

MOVES = Moves({"gate": 2.5}, {})


def eager(gate: Tensor, up: Tensor) -> Any:
    return quantize.eager(F.silu(gate) * up)


liger = None
