"""Calls that fused_linear_cross_entropy refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn
from op_calls.cross_entropy import bad_options


def _good(**changed: Any) -> dict[str, Any]:
    return {"x": randn(3, 4), "linear_weight": randn(8, 4), "target": integers(0, 8, 3), **changed}


def _chunks(memory_budget: object) -> dict[str, Any]:
    return {**_good(), "linear_weight": randn(8, 4).requires_grad_(), "memory_budget": memory_budget}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _good(x=integers(0, 9, 3, 4))),
    BadCall("x-not-a-tensor", TypeError, ("x", "list"), lambda: _good(x=[[1.0] * 4] * 3)),
    BadCall("batched-x", ValueError, ("x", "3 dimensions"), lambda: _good(x=randn(1, 3, 4))),
    BadCall(
        "integer-linear-weight",
        TypeError,
        ("linear_weight", "int64"),
        lambda: _good(linear_weight=integers(0, 9, 8, 4)),
    ),
    BadCall(
        "linear-weight-of-another-dtype",
        TypeError,
        ("linear_weight", "float16", "x", "float32"),
        lambda: _good(linear_weight=randn(8, 4, dtype=torch.float16)),
    ),
    BadCall(
        "vector-linear-weight",
        ValueError,
        ("linear_weight", "1 dimensions"),
        lambda: _good(linear_weight=randn(4)),
    ),
    BadCall(
        "narrow-linear-weight",
        ValueError,
        ("linear_weight", "(8, 3)", "(8, 4)"),
        lambda: _good(linear_weight=randn(8, 3)),
    ),
    BadCall(
        "no-classes",
        ValueError,
        ("linear_weight", "(0, 4)"),
        lambda: _good(linear_weight=randn(0, 4)),
    ),
    BadCall("float-target", TypeError, ("target", "float32"), lambda: _good(target=randn(3))),
    BadCall("short-target", ValueError, ("target", "(2,)", "(3,)"), lambda: _good(target=integers(0, 8, 2))),
    BadCall("integer-bias", TypeError, ("bias", "int64"), lambda: _good(bias=integers(0, 9, 8))),
    BadCall("short-bias", ValueError, ("bias", "(7,)", "(8,)"), lambda: _good(bias=randn(7))),
    BadCall(
        "integer-class-weight",
        TypeError,
        ("class_weight", "int64"),
        lambda: _good(class_weight=integers(0, 9, 8)),
    ),
    BadCall(
        "short-class-weight",
        ValueError,
        ("class_weight", "(7,)", "(8,)"),
        lambda: _good(class_weight=randn(7)),
    ),
    *bad_options(_good),
    BadCall("token-scaling-not-a-bool", TypeError, ("token_scaling", "1"), lambda: _good(token_scaling=1)),
    BadCall("accum-dtype-a-string", TypeError, ("accum_dtype", "'fp32'"), lambda: _good(accum_dtype="fp32")),
    BadCall(
        "integer-accum-dtype",
        ValueError,
        ("accum_dtype", "torch.int32", "torch.float32"),
        lambda: _good(accum_dtype=torch.int32),
    ),
    BadCall("budget-not-an-int", TypeError, ("memory_budget", "1000000.0"), lambda: _chunks(1e6)),
    BadCall("budget-zero", ValueError, ("memory_budget", "0", "at least 1"), lambda: _chunks(0)),
    # Bytes of one row at a time: 2 · 8 · 4 of logits, 4 · 8 of bias's gradient, 32 · 3 of rows; the gradient of
    # linear_weight is float32, and its own accumulator.
    BadCall("budget-too-small", ValueError, ("memory_budget", "191", "at least 192"), lambda: _chunks(191)),
    BadCall(
        "label-too-high",
        IndexError,
        ("target", "8", "0 to 7", "-100"),
        lambda: _good(target=integers(8, 9, 3)),
    ),
    BadCall("negative-label", IndexError, ("target", "-1"), lambda: _good(target=integers(-1, 0, 3))),
)
