"""Calls that rms_norm refuses."""

from op_calls import BadCall, integers, randn

BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: {"x": integers(0, 9, 2, 8), "weight": randn(8)}),
    BadCall("x-not-a-tensor", TypeError, ("x", "list"), lambda: {"x": [1.0], "weight": randn(1)}),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: {"x": randn(), "weight": None}),
    BadCall(
        "short-weight",
        ValueError,
        ("weight", "(7,)", "(8,)"),
        lambda: {"x": randn(2, 8), "weight": randn(7)},
    ),
    BadCall(
        "unknown-casting-mode",
        ValueError,
        ("casting_mode", "'lama'", "'llama'"),
        lambda: {"x": randn(2, 8), "weight": randn(8), "casting_mode": "lama"},
    ),
    BadCall("eps-not-a-number", TypeError, ("eps", "'1'"), lambda: {"x": randn(2, 8), "weight": None, "eps": "1"}),
)
