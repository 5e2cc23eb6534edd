"""Calls that embedding refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"indices": integers(0, 5, 3), "weight": randn(5, 8), **changed}


BAD = (
    BadCall("float-indices", TypeError, ("indices", "float32"), lambda: _bad(indices=randn(3))),
    BadCall("integer-weight", TypeError, ("weight", "int64"), lambda: _bad(weight=integers(0, 9, 5, 8))),
    BadCall("vector-weight", ValueError, ("weight", "1 dimensions"), lambda: _bad(weight=randn(8))),
    BadCall("no-rows", ValueError, ("weight", "(0, 8)", "one row"), lambda: _bad(weight=randn(0, 8))),
    BadCall("padding-not-an-int", TypeError, ("padding_idx", "1.0"), lambda: _bad(padding_idx=1.0)),
    BadCall("padding-too-large", ValueError, ("padding_idx", "5", "-5 to 4"), lambda: _bad(padding_idx=5)),
    BadCall("padding-too-small", ValueError, ("padding_idx", "-6", "-5 to 4"), lambda: _bad(padding_idx=-6)),
    BadCall(
        "index-too-large",
        IndexError,
        ("indices", "5", "0 to 4"),
        lambda: _bad(indices=torch.tensor([1, 5, 0])),
    ),
    BadCall(
        "negative-index",
        IndexError,
        ("indices", "-1", "0 to 4"),
        lambda: _bad(indices=torch.tensor([1, -1, 0])),
    ),
    BadCall(
        "negative-padding-index",
        IndexError,
        ("indices", "-2", "0 to 4"),
        lambda: _bad(indices=torch.tensor([1, -2, 0]), padding_idx=-2),
    ),
)


def small() -> dict[str, Any]:
    return {"indices": torch.tensor([1, 0, 3, 3]), "weight": randn(5, 8)}
