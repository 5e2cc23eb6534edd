"""Calls that dyt refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"x": randn(2, 8), "alpha": randn(1), "gamma": randn(8), "beta": randn(8), **changed}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 2, 8))),
    BadCall("alpha-not-a-tensor", TypeError, ("alpha", "float"), lambda: _bad(alpha=0.5)),
    BadCall("integer-alpha", TypeError, ("alpha", "int64"), lambda: _bad(alpha=integers(0, 9, 1))),
    BadCall("integer-gamma", TypeError, ("gamma", "int64"), lambda: _bad(gamma=integers(0, 9, 8))),
    BadCall("integer-beta", TypeError, ("beta", "int64"), lambda: _bad(beta=integers(0, 9, 8))),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: _bad(x=randn())),
    BadCall("scalar-alpha", ValueError, ("alpha", "()", "(1,)"), lambda: _bad(alpha=randn())),
    BadCall("short-gamma", ValueError, ("gamma", "(7,)", "(8,)"), lambda: _bad(gamma=randn(7))),
    BadCall("short-beta", ValueError, ("beta", "(7,)", "(8,)"), lambda: _bad(beta=randn(7))),
)


def small() -> dict[str, Any]:
    return {"x": randn(3, 8), "alpha": randn(1), "gamma": randn(8), "beta": randn(8)}
