"""Calls that quantize_gated refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def call(**values: Any) -> dict[str, Any]:
    return {"gate": randn(2, 8), "up": randn(2, 8), **values}


BAD = (
    BadCall("integer-gate", TypeError, ("gate", "int64"), lambda: call(gate=integers(0, 9, 2, 8))),
    BadCall("other-dtype", TypeError, ("up", "bfloat16", "float32"), lambda: call(up=randn(2, 8).bfloat16())),
    BadCall("vector-gate", ValueError, ("gate", "1 dimension"), lambda: call(gate=randn(8))),
    BadCall("other-shape", ValueError, ("up", "(2, 9)", "(2, 8)"), lambda: call(up=randn(2, 9))),
    BadCall("unknown-activation", ValueError, ("activation", "'relu'", "'silu'"), lambda: call(activation="relu")),
    BadCall("unknown-scales", ValueError, ("scales", "'e8m0'"), lambda: call(scales="e8m0")),
    BadCall("rows-not-a-flag", TypeError, ("rows", "1"), lambda: call(rows=1)),
    BadCall("nothing-wanted", ValueError, ("rows", "columns", "False"), lambda: call(rows=False)),
)


def small() -> dict[str, Any]:
    return call(columns=True)
