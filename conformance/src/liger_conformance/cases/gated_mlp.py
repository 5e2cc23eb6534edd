"""Cases of gated_mlp."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Product
from liger_conformance.vary import ROWS, Size, Vary
from liger_core.budget import least_chunk
from liger_core.ops.gated_mlp import ACTIVATIONS

KIND = "activation, embedding"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    inner: int,
    out: int | None = None,
    fused: bool = False,
    size: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """With `fused`, gate_weight and up_weight are halves of one tensor."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    both = make.randn(2 * inner, hidden) * hidden**-0.5
    gate_weight, up_weight = both.chunk(2) if fused else (both[:inner].clone(), both[inner:].clone())
    return {
        "x": make.randn(*rows, hidden) * size,
        "gate_weight": gate_weight,
        "up_weight": up_weight,
        "down_weight": make.randn(hidden if out is None else out, inner) * inner**-0.5,
        **options,
    }


def budgets(rows: int | tuple[int, ...], hidden: int, inner: int) -> tuple[int | None, ...]:
    count = torch.Size(rows if isinstance(rows, tuple) else (rows,)).numel()
    enough = max(12 * inner, 20 * count * least_chunk(inner) + 4 * count * hidden)
    return None, enough, enough + 40 * count


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size(most=1 << 12), "inner": Size(most=1 << 12), "out": Size(most=1 << 12)},
    tensors=("rows hidden", "rows inner", "rows out", "inner hidden", "out inner"),
    values={
        "activation": ACTIVATIONS,
        "fused": (False, True),
        "gate_multiplier": lambda activation="silu": (1.0, 1.7, -0.3) if activation == "silu" else (1.0,),
        "down_multiplier": lambda activation="silu": (1.0, 0.85, -2.0) if activation == "silu" else (1.0,),
        "memory_budget": budgets,
    },
)

# 12 rows of 16 by 40: a budget of bfloat16 is 4 · 12 · 16 bytes of x's sum, and 10 · 12 a column.
SIZES: dict[str, Any] = {"rows": 12, "hidden": 16, "inner": 40}

CASES = (
    Case("odd", "odd", rows=5, hidden=23, inner=37, out=11),
    Case("batched", "odd", rows=(2, 3), hidden=16, inner=24),
    Case("least", "option", memory_budget=888, **SIZES),
    Case("between", "option", memory_budget=1700, **SIZES),
    # The weights' sums are smaller than x's: backward goes by rows.
    Case("by-rows", "option", memory_budget=4800, rows=64, hidden=16, inner=8),
    Case(
        "by-rows-without-up",
        "option",
        mode=CallMode(grads=("x", "gate_weight", "down_weight")),
        memory_budget=4800,
        rows=64,
        hidden=16,
        inner=8,
    ),
    Case("all-fits", "option", memory_budget=1 << 20, **SIZES),
    Case("without-dx", "option", mode=CallMode(grads=("gate_weight", "down_weight")), memory_budget=900, **SIZES),
    Case("dx-alone", "option", mode=CallMode(grads=("x",)), memory_budget=1700, **SIZES),
    Case("no-grad", "option", mode=CallMode(grads=()), memory_budget=900, **SIZES),
    Case("frozen-x", "option", mode=CallMode(grads=("gate_weight", "up_weight", "down_weight")), **SIZES),
    Case("frozen-weights", "option", mode=CallMode(grads=("x",)), **SIZES),
    Case("down-alone", "option", mode=CallMode(grads=("down_weight",)), memory_budget=1700, **SIZES),
    Case("gelu", "option", activation="gelu_tanh", rows=4, hidden=24, inner=40),
    Case("gelu-budget", "option", activation="gelu_tanh", memory_budget=1700, **SIZES),
    Case("multipliers", "option", gate_multiplier=1.7, down_multiplier=0.85, rows=4, hidden=24, inner=40),
    Case("multipliers-budget", "option", gate_multiplier=1.7, down_multiplier=0.85, memory_budget=1700, **SIZES),
    Case("fused-weights", "option", fused=True, memory_budget=1700, **SIZES),
    Case("one-element", "edge", rows=1, hidden=1, inner=1),
    Case("vector", "edge", rows=(), hidden=17, inner=12),
    Case("big-values", "extreme", rows=4, hidden=16, inner=24, size=1e2),
    Case("uneven-rows", "extreme", rows=6, hidden=16, inner=24, by_row=("x",)),
    Case("small", "small", rows=2048, hidden=2048, inner=5632),
    Case("medium", "medium", rows=8192, hidden=4096, inner=14336),
    Case("large", "large", rows=32768, hidden=4096, inner=14336),
)

HUGE = Case("huge", "large", rows=(1 << 16) + 3, hidden=512, inner=32768 + 8)

PRODUCTS = (
    Product("x", "gate_weight", 1, 2),
    Product("x", "up_weight", 1, 2),
    Product("result", "gate_weight", 1, 2),
)


def eager(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)


def liger(ops: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Any:
    return ops.LigerMLPFunction.apply(x[None], gate_weight, up_weight, down_weight, 1.0, 1.0)[0]
