"""Calls that geglu refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"gate": randn(2, 8), "up": randn(2, 8), **changed}


BAD = (
    BadCall("integer-gate", TypeError, ("gate", "int64"), lambda: _bad(gate=integers(0, 9, 2, 8))),
    BadCall("integer-up", TypeError, ("up", "int64"), lambda: _bad(up=integers(0, 9, 2, 8))),
    BadCall(
        "up-of-another-dtype",
        TypeError,
        ("up", "bfloat16", "float32"),
        lambda: _bad(up=randn(2, 8, dtype=torch.bfloat16)),
    ),
    BadCall("scalar-gate", ValueError, ("gate", "0 dimensions"), lambda: _bad(gate=randn(), up=randn())),
    BadCall("broadcast-up", ValueError, ("up", "(8,)", "(2, 8)"), lambda: _bad(up=randn(8))),
)


def small() -> dict[str, Any]:
    return {"gate": randn(3, 8), "up": randn(3, 8)}
