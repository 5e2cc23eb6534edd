"""Calls that group_norm refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"x": randn(2, 6, 4), "num_groups": 3, "weight": randn(6), "bias": randn(6), **changed}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 2, 6, 4))),
    BadCall("integer-weight", TypeError, ("weight", "int64"), lambda: _bad(weight=integers(0, 9, 6))),
    BadCall("integer-bias", TypeError, ("bias", "int64"), lambda: _bad(bias=integers(0, 9, 6))),
    BadCall("vector-x", ValueError, ("x", "1 dimensions", "2 or more"), lambda: _bad(x=randn(6))),
    BadCall("num-groups-not-an-int", TypeError, ("num_groups", "3.0"), lambda: _bad(num_groups=3.0)),
    BadCall("no-groups", ValueError, ("num_groups", "0", "at least 1"), lambda: _bad(num_groups=0)),
    BadCall("uneven-groups", ValueError, ("num_groups", "4", "6 channels"), lambda: _bad(num_groups=4)),
    BadCall("short-weight", ValueError, ("weight", "(3,)", "(6,)"), lambda: _bad(weight=randn(3))),
    BadCall("short-bias", ValueError, ("bias", "(3,)", "(6,)"), lambda: _bad(bias=randn(3))),
    BadCall("eps-not-a-number", TypeError, ("eps", "'1'"), lambda: _bad(eps="1")),
)


def small() -> dict[str, Any]:
    return {"x": randn(3, 8, 5), "num_groups": 2, "weight": randn(8), "bias": randn(8)}
