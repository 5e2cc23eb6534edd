"""Calls that quantize refuses."""

from typing import Any

from op_calls import BadCall, integers, randn

BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: {"x": integers(0, 9, 2, 8)}),
    BadCall("vector-x", ValueError, ("x", "1 dimension"), lambda: {"x": randn(8)}),
    BadCall("batched-x", ValueError, ("x", "3 dimension"), lambda: {"x": randn(2, 3, 8)}),
    BadCall("unknown-block", ValueError, ("block", "'1x64'", "'1x128'"), lambda: {"x": randn(2, 8), "block": "1x64"}),
    BadCall("unknown-scales", ValueError, ("scales", "'e8m0'"), lambda: {"x": randn(2, 8), "scales": "e8m0"}),
    BadCall("rows-not-a-flag", TypeError, ("rows", "1"), lambda: {"x": randn(2, 8), "rows": 1}),
    BadCall("nothing-wanted", ValueError, ("rows", "columns", "False"), lambda: {"x": randn(2, 8), "rows": False}),
)


def small() -> dict[str, Any]:
    return {"x": randn(3, 8), "columns": True}
