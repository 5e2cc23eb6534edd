"""Calls that sparsemax refuses."""

from typing import Any

from op_calls import BadCall, integers, randn

BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: {"x": integers(0, 9, 2, 8)}),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: {"x": randn()}),
    BadCall("dim-not-an-int", TypeError, ("dim", "None"), lambda: {"x": randn(2, 8), "dim": None}),
    BadCall("dim-too-large", ValueError, ("dim", "2", "-2 to 1"), lambda: {"x": randn(2, 8), "dim": 2}),
    BadCall("dim-too-small", ValueError, ("dim", "-3", "-2 to 1"), lambda: {"x": randn(2, 8), "dim": -3}),
    BadCall("no-columns", ValueError, ("x", "(2, 0)", "one element"), lambda: {"x": randn(2, 0)}),
)


def small() -> dict[str, Any]:
    return {"x": randn(3, 8)}
