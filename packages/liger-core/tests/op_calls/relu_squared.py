"""Calls that relu_squared refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"x": randn(2, 8), "up": randn(2, 8), **changed}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 2, 8))),
    BadCall("integer-up", TypeError, ("up", "int64"), lambda: _bad(up=integers(0, 9, 2, 8))),
    BadCall(
        "up-of-another-dtype",
        TypeError,
        ("up", "bfloat16", "float32"),
        lambda: _bad(up=randn(2, 8, dtype=torch.bfloat16)),
    ),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: {"x": randn()}),
    BadCall("broadcast-up", ValueError, ("up", "(8,)", "(2, 8)"), lambda: _bad(up=randn(8))),
)


def small() -> dict[str, Any]:
    return {"x": randn(3, 8), "up": randn(3, 8)}
