"""Calls that gated_mlp refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    inputs = {
        "x": randn(3, 4),
        "gate_weight": randn(8, 4),
        "up_weight": randn(8, 4),
        "down_weight": randn(5, 8),
    }
    return {**inputs, **changed}


def _budget(memory_budget: object) -> dict[str, Any]:
    return _bad(x=randn(9, 4).requires_grad_(), memory_budget=memory_budget)


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 3, 4))),
    BadCall(
        "up-of-another-dtype",
        TypeError,
        ("up_weight", "bfloat16", "float32"),
        lambda: _bad(up_weight=randn(8, 4, dtype=torch.bfloat16)),
    ),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: _bad(x=randn())),
    BadCall("short-gate", ValueError, ("gate_weight", "(8, 3)"), lambda: _bad(gate_weight=randn(8, 3))),
    BadCall("short-up", ValueError, ("up_weight", "(7, 4)"), lambda: _bad(up_weight=randn(7, 4))),
    BadCall("short-down", ValueError, ("down_weight", "(5, 7)"), lambda: _bad(down_weight=randn(5, 7))),
    BadCall("flat-gate", ValueError, ("gate_weight", "1 dimension"), lambda: _bad(gate_weight=randn(8))),
    BadCall(
        "unknown-activation",
        ValueError,
        ("activation", "'gelu'", "'gelu_tanh'"),
        lambda: _bad(activation="gelu"),
    ),
    BadCall(
        "multiplier-with-gelu",
        ValueError,
        ("gate_multiplier", "1.7"),
        lambda: _bad(activation="gelu_tanh", gate_multiplier=1.7),
    ),
    BadCall("budget-not-an-int", TypeError, ("memory_budget", "1000.0"), lambda: _budget(1000.0)),
    # 9 rows in float32: 20 · 9 bytes of a column, more than the 96 of a row.
    BadCall("budget-below-the-least", ValueError, ("memory_budget", "179", "at least 180"), lambda: _budget(179)),
)
