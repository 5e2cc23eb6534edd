"""Calls that tvd refuses."""

from typing import Any

from op_calls import BadCall, integers, randn, uniform


def _good(**changed: Any) -> dict[str, Any]:
    return {"p": uniform(3, 8), "q": uniform(3, 8), **changed}


BAD = (
    BadCall("integer-p", TypeError, ("p", "int64"), lambda: _good(p=integers(0, 9, 3, 8))),
    BadCall("integer-q", TypeError, ("q", "int64"), lambda: _good(q=integers(0, 9, 3, 8))),
    BadCall("p-not-a-tensor", TypeError, ("p", "list"), lambda: _good(p=[[1.0] * 8] * 3)),
    BadCall("vector-p", ValueError, ("p", "1 dimensions"), lambda: _good(p=randn(8))),
    BadCall("narrow-q", ValueError, ("q", "(3, 7)", "(3, 8)"), lambda: _good(q=randn(3, 7))),
    BadCall("float-labels", TypeError, ("labels", "float32"), lambda: _good(labels=randn(3))),
    BadCall("short-labels", ValueError, ("labels", "(2,)", "(3,)"), lambda: _good(labels=integers(0, 8, 2))),
    BadCall(
        "unknown-reduction",
        ValueError,
        ("reduction", "'average'", "'batchmean'"),
        lambda: _good(reduction="average"),
    ),
    BadCall("ignore-index-not-an-int", TypeError, ("ignore_index", "None"), lambda: _good(ignore_index=None)),
)
