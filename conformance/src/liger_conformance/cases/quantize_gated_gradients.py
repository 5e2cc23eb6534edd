"""Cases of quantize_gated_gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.cases import quantize, quantize_gated

KIND = "8 bits"


def build(make: Make, *, tokens: int, inner: int, gradient: float = 1.0, **values: Any) -> dict[str, Any]:
    dy = make.randn(tokens, inner) * gradient
    return {"dy": dy, **quantize_gated.build(make, tokens=tokens, inner=inner, **values)}


VARY = quantize_gated.VARY

CASES = (
    Case("odd", "odd", tokens=5, inner=123),
    Case("rows-alone", "option", tokens=130, inner=40, columns=False),
    Case("several-tiles", "odd", tokens=131, inner=259),
    Case("columns-alone", "option", tokens=130, inner=40, rows=False),
    Case("in-vectors", "option", tokens=144, inner=272),
    Case("halves", "option", tokens=130, inner=144, halves=True),
    Case("gelu", "option", tokens=131, inner=259, activation="gelu_tanh"),
    Case("float32-scales", "option", tokens=131, inner=259, scales="float32"),
    Case("gelu-float32-scales", "option", tokens=5, inner=40, activation="gelu_tanh", scales="float32"),
    Case("one-element", "edge", tokens=1, inner=1),
    Case("tiny-values", "extreme", tokens=4, inner=140, scale=1e-4),
    Case("tiny-gradients", "extreme", tokens=4, inner=140, gradient=1e-7),
    Case("big-values", "extreme", tokens=4, inner=140, scale=1e3),
    Case("uneven-rows", "extreme", tokens=6, inner=140, by_row=("dy",)),
    Case("small", "small", tokens=2048, inner=5632),
    Case("medium", "medium", tokens=8192, inner=14336),
    Case("large", "large", tokens=16384, inner=28672),
)

HUGE = Case("huge", "large", tokens=(1 << 18) + 16, inner=8192)

MOVES = Moves({"gate": 5.5}, {})


def eager(dy: Tensor, gate: Tensor, up: Tensor) -> Any:
    act = F.silu(gate)
    gradients = torch.ops.aten.silu_backward(dy * up, gate), dy * act
    both = [result for gradient in gradients for result in quantize.eager(gradient, columns=True)]
    return both + quantize.eager(act * up, rows=False, columns=True)


liger = None
