"""Calls that fused_linear_distillation refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn
from op_calls.distillation import bad_options


def _good(**changed: Any) -> dict[str, Any]:
    return {
        "student_x": randn(3, 4),
        "student_weight": randn(8, 4),
        "teacher_x": randn(3, 5),
        "teacher_weight": randn(8, 5),
        "labels": integers(0, 8, 3),
        **changed,
    }


def _chunks(memory_budget: object) -> dict[str, Any]:
    return {**_good(), "student_weight": randn(8, 4).requires_grad_(), "memory_budget": memory_budget}


BAD = (
    *bad_options(_good),
    *(
        BadCall(
            f"integer-{name.replace('_', '-')}",
            TypeError,
            (name, "int64"),
            lambda name=name: _good(**{name: _good()[name].long()}),
        )
        for name in ("student_x", "student_weight", "teacher_x", "teacher_weight")
    ),
    BadCall(
        "student-weight-of-another-dtype",
        TypeError,
        ("student_weight", "float16", "student_x", "float32"),
        lambda: _good(student_weight=randn(8, 4, dtype=torch.float16)),
    ),
    BadCall(
        "vector-teacher-x",
        ValueError,
        ("teacher_x", "1 dimensions"),
        lambda: _good(teacher_x=randn(5)),
    ),
    BadCall(
        "narrow-student-weight",
        ValueError,
        ("student_weight", "(8, 3)", "(8, 4)"),
        lambda: _good(student_weight=randn(8, 3)),
    ),
    BadCall(
        "no-classes",
        ValueError,
        ("student_weight", "(0, 4)"),
        lambda: _good(student_weight=randn(0, 4)),
    ),
    BadCall(
        "teacher-of-a-longer-vocabulary",
        ValueError,
        ("teacher_weight", "(9, 5)", "(8, 5)", "teacher_weight[:V]"),
        lambda: _good(teacher_weight=randn(9, 5)),
    ),
    BadCall(
        "short-teacher-x",
        ValueError,
        ("teacher_x", "(2, 5)", "(3, 5)"),
        lambda: _good(teacher_x=randn(2, 5)),
    ),
    BadCall(
        "short-student-bias",
        ValueError,
        ("student_bias", "(7,)", "(8,)"),
        lambda: _good(student_bias=randn(7)),
    ),
    BadCall(
        "integer-teacher-bias",
        TypeError,
        ("teacher_bias", "int64"),
        lambda: _good(teacher_bias=integers(0, 8, 8)),
    ),
    BadCall(
        "label-too-large",
        IndexError,
        ("labels", "8", "0 to 7"),
        lambda: _good(labels=integers(8, 9, 3), hard_weight=1.0),
    ),
    BadCall("accum-dtype-a-string", TypeError, ("accum_dtype", "'fp32'"), lambda: _good(accum_dtype="fp32")),
    BadCall("budget-not-an-int", TypeError, ("memory_budget", "1000000.0"), lambda: _chunks(1e6)),
    # Bytes of one row at a time: 3 · 8 · 4 of logits, 4 · 8 and 32 · 3 as in fused_linear_cross_entropy.
    BadCall("budget-too-small", ValueError, ("memory_budget", "223", "at least 224"), lambda: _chunks(223)),
)
