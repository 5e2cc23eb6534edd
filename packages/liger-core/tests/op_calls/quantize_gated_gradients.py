"""Calls that quantize_gated_gradients refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def call(**values: Any) -> dict[str, Any]:
    return {"dy": randn(2, 8), "gate": randn(2, 8), "up": randn(2, 8), **values}


BAD = (
    BadCall("integer-dy", TypeError, ("dy", "int64"), lambda: call(dy=integers(0, 9, 2, 8))),
    BadCall("other-dtype", TypeError, ("up", "bfloat16", "float32"), lambda: call(up=randn(2, 8).bfloat16())),
    BadCall("batched-dy", ValueError, ("dy", "3 dimension"), lambda: call(dy=randn(1, 2, 8))),
    BadCall("other-shape", ValueError, ("gate", "(2, 9)", "(2, 8)"), lambda: call(gate=randn(2, 9))),
    BadCall("unknown-activation", ValueError, ("activation", "'relu'", "'silu'"), lambda: call(activation="relu")),
    BadCall("unknown-scales", ValueError, ("scales", "'e8m0'"), lambda: call(scales="e8m0")),
    BadCall("columns-not-a-flag", TypeError, ("columns", "1"), lambda: call(columns=1)),
    BadCall("nothing-wanted", ValueError, ("rows", "columns"), lambda: call(rows=False, columns=False)),
)


def small() -> dict[str, Any]:
    return call()
