"""Calls that fused_moe refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn, uniform


def _good(**changed: Any) -> dict[str, Any]:
    return {
        "x": randn(3, 4),
        "gate_up_weight": randn(5, 4, 4),
        "down_weight": randn(5, 4, 2),
        "expert_indices": integers(0, 5, 3, 2),
        "expert_weights": uniform(3, 2),
        **changed,
    }


def _budget(memory_budget: object) -> dict[str, Any]:
    return _good(x=randn(3, 4).requires_grad_(), memory_budget=memory_budget)


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _good(x=integers(0, 9, 3, 4))),
    BadCall("batched-x", ValueError, ("x", "3 dimensions"), lambda: _good(x=randn(1, 3, 4))),
    BadCall(
        "integer-gate-up-weight",
        TypeError,
        ("gate_up_weight", "int64"),
        lambda: _good(gate_up_weight=integers(0, 9, 5, 4, 4)),
    ),
    BadCall(
        "flat-gate-up-weight",
        ValueError,
        ("gate_up_weight", "2 dimensions"),
        lambda: _good(gate_up_weight=randn(4, 4)),
    ),
    BadCall(
        "gate-up-weight-of-another-dtype",
        TypeError,
        ("gate_up_weight", "float16", "x", "float32"),
        lambda: _good(gate_up_weight=randn(5, 4, 4, dtype=torch.float16)),
    ),
    BadCall(
        "down-weight-of-another-dtype",
        TypeError,
        ("down_weight", "bfloat16", "x", "float32"),
        lambda: _good(down_weight=randn(5, 4, 2, dtype=torch.bfloat16)),
    ),
    BadCall(
        "odd-gate-up-weight",
        ValueError,
        ("gate_up_weight", "(5, 3, 4)", "even"),
        lambda: _good(gate_up_weight=randn(5, 3, 4)),
    ),
    BadCall("narrow-x", ValueError, ("x", "(3, 5)", "(3, 4)"), lambda: _good(x=randn(3, 5))),
    BadCall(
        "down-weight-of-fewer-experts",
        ValueError,
        ("down_weight", "(4, 4, 2)", "(5, 4, 2)"),
        lambda: _good(down_weight=randn(4, 4, 2)),
    ),
    BadCall(
        "down-weight-not-transposed",
        ValueError,
        ("down_weight", "(5, 2, 4)", "(5, 4, 2)"),
        lambda: _good(down_weight=randn(5, 2, 4)),
    ),
    BadCall(
        "float-indices",
        TypeError,
        ("expert_indices", "float32"),
        lambda: _good(expert_indices=uniform(3, 2)),
    ),
    BadCall(
        "flat-indices",
        ValueError,
        ("expert_indices", "1 dimensions"),
        lambda: _good(expert_indices=integers(0, 5, 3)),
    ),
    BadCall(
        "few-indices",
        ValueError,
        ("expert_indices", "(2, 2)", "(3, K)"),
        lambda: _good(expert_indices=integers(0, 5, 2, 2)),
    ),
    BadCall(
        "no-experts-for-a-token",
        ValueError,
        ("expert_indices", "(3, 0)", "at least one"),
        lambda: _good(expert_indices=integers(0, 5, 3, 0), expert_weights=uniform(3, 0)),
    ),
    BadCall(
        "integer-expert-weights",
        TypeError,
        ("expert_weights", "int64"),
        lambda: _good(expert_weights=integers(0, 5, 3, 2)),
    ),
    BadCall(
        "few-expert-weights",
        ValueError,
        ("expert_weights", "(3, 1)", "(3, 2)"),
        lambda: _good(expert_weights=uniform(3, 1)),
    ),
    BadCall(
        "no-experts",
        ValueError,
        ("gate_up_weight", "(0, 4, 4)", "at least one"),
        lambda: _good(gate_up_weight=randn(0, 4, 4), down_weight=randn(0, 4, 2)),
    ),
    BadCall("other-activation", ValueError, ("activation", "'relu'", "'silu'"), lambda: _good(activation="relu")),
    BadCall("limit-a-string", TypeError, ("limit", "'10'"), lambda: _good(limit="10")),
    BadCall("limit-zero", ValueError, ("limit", "0.0", "greater than 0"), lambda: _good(limit=0.0)),
    BadCall("infinite-limit", ValueError, ("limit", "inf", "finite"), lambda: _good(limit=float("inf"))),
    BadCall("budget-not-an-int", TypeError, ("memory_budget", "1000000.0"), lambda: _budget(1e6)),
    BadCall("budget-zero", ValueError, ("memory_budget", "0", "at least 1"), lambda: _budget(0)),
    # Bytes of one column: 6 slots of 5 · 4, 4 for sums, 4 · 8 for x's rows and 64 for the order, and 64 · 6 of experts.
    BadCall("budget-too-small", ValueError, ("memory_budget", "1103", "at least 1104"), lambda: _budget(1103)),
    BadCall(
        "index-too-high",
        IndexError,
        ("expert_indices", "5", "-1", "4"),
        lambda: _good(expert_indices=integers(5, 6, 3, 2)),
    ),
    BadCall(
        "index-too-low",
        IndexError,
        ("expert_indices", "-2"),
        lambda: _good(expert_indices=integers(-2, -1, 3, 2)),
    ),
)
