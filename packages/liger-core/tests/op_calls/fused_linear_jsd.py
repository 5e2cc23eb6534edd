"""Calls that fused_linear_jsd refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _good(**changed: Any) -> dict[str, Any]:
    return {
        "student_x": randn(3, 4),
        "student_weight": randn(8, 4),
        "teacher_x": randn(3, 5),
        "teacher_weight": randn(8, 5),
        **changed,
    }


def _chunks(memory_budget: object) -> dict[str, Any]:
    return {**_good(), "student_weight": randn(8, 4).requires_grad_(), "memory_budget": memory_budget}


def _integers(name: str) -> BadCall:
    return BadCall(
        f"integer-{name.replace('_', '-')}",
        TypeError,
        (name, "int64"),
        lambda: _good(**{name: _good()[name].long()}),
    )


def _dimensions(name: str) -> BadCall:
    return BadCall(
        f"vector-{name.replace('_', '-')}",
        ValueError,
        (name, "1 dimensions"),
        lambda: _good(**{name: _good()[name][0]}),
    )


BAD = (
    *(_integers(name) for name in ("student_x", "student_weight", "teacher_x", "teacher_weight")),
    *(_dimensions(name) for name in ("student_x", "student_weight", "teacher_x", "teacher_weight")),
    BadCall("x-not-a-tensor", TypeError, ("student_x", "list"), lambda: _good(student_x=[[1.0] * 4] * 3)),
    BadCall(
        "student-weight-of-another-dtype",
        TypeError,
        ("student_weight", "float16", "student_x", "float32"),
        lambda: _good(student_weight=randn(8, 4, dtype=torch.float16)),
    ),
    BadCall(
        "teacher-weight-of-another-dtype",
        TypeError,
        ("teacher_weight", "float16", "teacher_x", "float32"),
        lambda: _good(teacher_weight=randn(8, 5, dtype=torch.float16)),
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
        "short-teacher-x",
        ValueError,
        ("teacher_x", "(2, 5)", "(3, 5)"),
        lambda: _good(teacher_x=randn(2, 5)),
    ),
    BadCall(
        "teacher-of-another-vocabulary",
        ValueError,
        ("teacher_weight", "(7, 5)", "(8, 5)"),
        lambda: _good(teacher_weight=randn(7, 5)),
    ),
    BadCall("float-labels", TypeError, ("labels", "float32"), lambda: _good(labels=randn(3))),
    BadCall("short-labels", ValueError, ("labels", "(2,)", "(3,)"), lambda: _good(labels=integers(0, 8, 2))),
    BadCall("ignore-index-not-an-int", TypeError, ("ignore_index", "None"), lambda: _good(ignore_index=None)),
    BadCall("beta-not-a-number", TypeError, ("beta", "'0.5'"), lambda: _good(beta="0.5")),
    BadCall("negative-beta", ValueError, ("beta", "-0.1"), lambda: _good(beta=-0.1)),
    BadCall("beta-above-one", ValueError, ("beta", "1.1"), lambda: _good(beta=1.1)),
    BadCall("temperature-not-a-number", TypeError, ("temperature", "None"), lambda: _good(temperature=None)),
    BadCall("temperature-zero", ValueError, ("temperature", "0.0"), lambda: _good(temperature=0.0)),
    BadCall("accum-dtype-a-string", TypeError, ("accum_dtype", "'fp32'"), lambda: _good(accum_dtype="fp32")),
    BadCall(
        "integer-accum-dtype",
        ValueError,
        ("accum_dtype", "torch.int32", "torch.float32"),
        lambda: _good(accum_dtype=torch.int32),
    ),
    BadCall("budget-not-an-int", TypeError, ("memory_budget", "1000000.0"), lambda: _chunks(1e6)),
    BadCall("budget-zero", ValueError, ("memory_budget", "0", "at least 1"), lambda: _chunks(0)),
    # Bytes of one row at a time: 3 · 8 · 4 of logits, 4 · 8 and 32 · 3 as in fused_linear_cross_entropy.
    BadCall("budget-too-small", ValueError, ("memory_budget", "223", "at least 224"), lambda: _chunks(223)),
)
