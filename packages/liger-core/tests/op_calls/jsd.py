"""Calls that jsd refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def _good(**changed: Any) -> dict[str, Any]:
    return {"student_logprobs": randn(3, 8).log_softmax(-1), "teacher_logprobs": randn(3, 8).log_softmax(-1), **changed}


BAD = (
    BadCall(
        "integer-student",
        TypeError,
        ("student_logprobs", "int64"),
        lambda: _good(student_logprobs=integers(0, 9, 3, 8)),
    ),
    BadCall(
        "integer-teacher",
        TypeError,
        ("teacher_logprobs", "int64"),
        lambda: _good(teacher_logprobs=integers(0, 9, 3, 8)),
    ),
    BadCall(
        "student-not-a-tensor",
        TypeError,
        ("student_logprobs", "list"),
        lambda: _good(student_logprobs=[[1.0] * 8] * 3),
    ),
    BadCall(
        "batched-student",
        ValueError,
        ("student_logprobs", "3 dimensions"),
        lambda: _good(student_logprobs=randn(1, 3, 8)),
    ),
    BadCall(
        "narrow-teacher",
        ValueError,
        ("teacher_logprobs", "(3, 7)", "(3, 8)"),
        lambda: _good(teacher_logprobs=randn(3, 7)),
    ),
    BadCall("float-labels", TypeError, ("labels", "float32"), lambda: _good(labels=randn(3))),
    BadCall("short-labels", ValueError, ("labels", "(2,)", "(3,)"), lambda: _good(labels=integers(0, 8, 2))),
    BadCall("beta-not-a-number", TypeError, ("beta", "'0.5'"), lambda: _good(beta="0.5")),
    BadCall("negative-beta", ValueError, ("beta", "-0.1"), lambda: _good(beta=-0.1)),
    BadCall("beta-above-one", ValueError, ("beta", "1.1"), lambda: _good(beta=1.1)),
    BadCall("ignore-index-not-an-int", TypeError, ("ignore_index", "None"), lambda: _good(ignore_index=None)),
)
