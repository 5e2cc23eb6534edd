"""Calls that fused_linear_logit_statistics refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn
from op_calls.logit_statistics import bad_options, bad_targets


def _good(**changed: Any) -> dict[str, Any]:
    return {
        "x": randn(3, 4),
        "linear_weight": randn(8, 4),
        "target": integers(0, 8, 3),
        **changed,
    }


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _good(x=integers(0, 9, 3, 4))),
    BadCall("batched-x", ValueError, ("x", "3 dimensions"), lambda: _good(x=randn(1, 3, 4))),
    BadCall(
        "weight-of-another-dtype",
        TypeError,
        ("linear_weight", "float32", "bfloat16"),
        lambda: _good(x=randn(3, 4, dtype=torch.bfloat16), linear_weight=randn(8, 4, dtype=torch.float32)),
    ),
    BadCall(
        "narrow-weight",
        ValueError,
        ("linear_weight", "(8, 3)", "(8, 4)"),
        lambda: _good(linear_weight=randn(8, 3)),
    ),
    BadCall("no-classes", ValueError, ("linear_weight", "(0, 4)"), lambda: _good(linear_weight=randn(0, 4))),
    *bad_targets(_good),
    BadCall("short-bias", ValueError, ("bias", "(7,)", "(8,)"), lambda: _good(bias=randn(7))),
    BadCall(
        "short-class-weight",
        ValueError,
        ("class_weight", "(7,)", "(8,)"),
        lambda: _good(class_weight=randn(7)),
    ),
    *bad_options(_good),
    BadCall(
        "accum-dtype-float64",
        ValueError,
        ("accum_dtype", "float64"),
        lambda: _good(accum_dtype=torch.float64),
    ),
    BadCall(
        "budget-below-the-least",
        ValueError,
        ("memory_budget", "at least"),
        lambda: _good(memory_budget=1),
    ),
)
