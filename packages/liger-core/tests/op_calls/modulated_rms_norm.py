"""Calls that modulated_rms_norm refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {
        "x": randn(2, 3, 8),
        "weight": randn(8),
        "scale": randn(2, 1, 8),
        "shift": randn(8),
        **changed,
    }


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 2, 3, 8))),
    BadCall("integer-scale", TypeError, ("scale", "int64"), lambda: _bad(scale=integers(0, 9, 8))),
    BadCall("no-scale", TypeError, ("scale", "NoneType"), lambda: _bad(scale=None)),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: _bad(x=randn())),
    BadCall("short-weight", ValueError, ("weight", "(7,)", "(8,)"), lambda: _bad(weight=randn(7))),
    BadCall(
        "scale-of-batches",
        ValueError,
        ("scale", "(2, 8)", "(2, 3, 8)"),
        lambda: _bad(scale=randn(2, 8)),
    ),
    BadCall("one-shift", ValueError, ("shift", "(2, 3, 1)"), lambda: _bad(shift=randn(2, 3, 1))),
    BadCall(
        "scale-that-enlarges",
        ValueError,
        ("scale", "(4, 2, 3, 8)"),
        lambda: _bad(scale=randn(4, 2, 3, 8)),
    ),
    BadCall(
        "shift-that-enlarges",
        ValueError,
        ("shift", "(2, 3, 8)", "(1, 3, 8)"),
        lambda: _bad(x=randn(1, 3, 8), scale=randn(8), shift=randn(2, 3, 8)),
    ),
    BadCall(
        "unknown-casting-mode",
        ValueError,
        ("casting_mode", "'lama'", "'llama'"),
        lambda: _bad(casting_mode="lama"),
    ),
    BadCall("eps-not-a-number", TypeError, ("eps", "'1'"), lambda: _bad(eps="1")),
)
