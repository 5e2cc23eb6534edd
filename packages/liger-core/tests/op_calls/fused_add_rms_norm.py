"""Calls that fused_add_rms_norm refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"x": randn(2, 8), "residual": randn(2, 8), "weight": randn(8), **changed}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 2, 8))),
    BadCall("integer-weight", TypeError, ("weight", "int64"), lambda: _bad(weight=integers(0, 9, 8))),
    BadCall("no-weight", TypeError, ("weight", "NoneType"), lambda: _bad(weight=None)),
    BadCall(
        "residual-of-another-dtype",
        TypeError,
        ("residual", "bfloat16", "float32"),
        lambda: _bad(residual=randn(2, 8, dtype=torch.bfloat16)),
    ),
    BadCall("scalar-x", ValueError, ("x", "0 dimensions"), lambda: _bad(x=randn(), residual=randn())),
    BadCall(
        "broadcast-residual",
        ValueError,
        ("residual", "(1, 8)", "(2, 8)"),
        lambda: _bad(residual=randn(1, 8)),
    ),
    BadCall("short-weight", ValueError, ("weight", "(7,)", "(8,)"), lambda: _bad(weight=randn(7))),
    BadCall("eps-not-a-number", TypeError, ("eps", "'1'"), lambda: _bad(eps="1")),
    BadCall("offset-not-a-number", TypeError, ("offset", "None"), lambda: _bad(offset=None)),
    BadCall(
        "unknown-casting-mode",
        ValueError,
        ("casting_mode", "'lama'", "'llama'"),
        lambda: _bad(casting_mode="lama"),
    ),
)


def small() -> dict[str, Any]:
    return {
        "x": randn(3, 8),
        "residual": randn(3, 8),
        "weight": randn(8),
        "casting_mode": "gemma",
    }
