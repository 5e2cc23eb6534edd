"""Calls that softmax refuses."""

from typing import Any

from op_calls import BadCall, integers, randn

BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: {"x": integers(0, 9, 2, 8)}),
    BadCall("x-not-a-tensor", TypeError, ("x", "list"), lambda: {"x": [1.0]}),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: {"x": randn()}),
)


def small() -> dict[str, Any]:
    return {"x": randn(3, 8)}
