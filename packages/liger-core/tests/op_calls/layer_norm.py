"""Calls that layer_norm refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"x": randn(2, 8), "weight": randn(8), "bias": randn(8), **changed}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 2, 8))),
    BadCall("integer-weight", TypeError, ("weight", "int64"), lambda: _bad(weight=integers(0, 9, 8))),
    BadCall("no-weight", TypeError, ("weight", "NoneType"), lambda: _bad(weight=None)),
    BadCall("integer-bias", TypeError, ("bias", "int64"), lambda: _bad(bias=integers(0, 9, 8))),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: _bad(x=randn())),
    BadCall("short-weight", ValueError, ("weight", "(7,)", "(8,)"), lambda: _bad(weight=randn(7))),
    BadCall("short-bias", ValueError, ("bias", "(7,)", "(8,)"), lambda: _bad(bias=randn(7))),
    BadCall("eps-not-a-number", TypeError, ("eps", "'1'"), lambda: _bad(eps="1")),
)


def small() -> dict[str, Any]:
    return {"x": randn(3, 8), "weight": randn(8), "bias": randn(8)}
