"""Calls that poly_norm refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"x": randn(2, 8), "weight": randn(3), "bias": randn(1), **changed}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 2, 8))),
    BadCall("integer-weight", TypeError, ("weight", "int64"), lambda: _bad(weight=integers(0, 9, 3))),
    BadCall("integer-bias", TypeError, ("bias", "int64"), lambda: _bad(bias=integers(0, 9, 1))),
    BadCall("no-bias", TypeError, ("bias", "NoneType"), lambda: _bad(bias=None)),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: _bad(x=randn())),
    BadCall("long-weight", ValueError, ("weight", "(8,)", "(3,)"), lambda: _bad(weight=randn(8))),
    BadCall("long-bias", ValueError, ("bias", "(8,)", "(1,) or ()"), lambda: _bad(bias=randn(8))),
    BadCall("square-bias", ValueError, ("bias", "(1, 1)", "(1,) or ()"), lambda: _bad(bias=randn(1, 1))),
    BadCall("eps-not-a-number", TypeError, ("eps", "'1'"), lambda: _bad(eps="1")),
)


def small() -> dict[str, Any]:
    return {"x": randn(4, 8), "weight": randn(3), "bias": randn(1)}
