"""Calls that fused_neighborhood_attention refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {"q": randn(2, 3, 5, 8), "k": randn(2, 3, 5, 8), "v": randn(2, 3, 5, 8), **changed}


BAD = (
    BadCall("integer-q", TypeError, ("q", "int64"), lambda: _bad(q=integers(0, 9, 2, 3, 5, 8))),
    BadCall("integer-k", TypeError, ("k", "int64"), lambda: _bad(k=integers(0, 9, 2, 3, 5, 8))),
    BadCall("integer-v", TypeError, ("v", "int64"), lambda: _bad(v=integers(0, 9, 2, 3, 5, 8))),
    BadCall(
        "k-of-another-dtype",
        TypeError,
        ("k", "bfloat16", "float32"),
        lambda: _bad(k=randn(2, 3, 5, 8, dtype=torch.bfloat16)),
    ),
    BadCall(
        "v-of-another-dtype",
        TypeError,
        ("v", "bfloat16", "float32"),
        lambda: _bad(v=randn(2, 3, 5, 8, dtype=torch.bfloat16)),
    ),
    BadCall("flat-q", ValueError, ("q", "3 dimensions"), lambda: _bad(q=randn(2, 5, 24))),
    BadCall("fewer-k-heads", ValueError, ("k", "(2, 1, 5, 8)"), lambda: _bad(k=randn(2, 1, 5, 8))),
    BadCall("longer-v", ValueError, ("v", "(2, 3, 6, 8)"), lambda: _bad(v=randn(2, 3, 6, 8))),
    BadCall("kernel-size-not-an-int", TypeError, ("kernel_size", "3.0"), lambda: _bad(kernel_size=3.0)),
    BadCall("even-kernel-size", ValueError, ("kernel_size", "4", "odd"), lambda: _bad(kernel_size=4)),
    BadCall("negative-kernel-size", ValueError, ("kernel_size", "-3", "at least 1"), lambda: _bad(kernel_size=-3)),
    BadCall("dilation-not-an-int", TypeError, ("dilation", "1.5"), lambda: _bad(dilation=1.5)),
    BadCall("no-dilation", ValueError, ("dilation", "0", "at least 1"), lambda: _bad(dilation=0)),
    BadCall("scale-not-a-number", TypeError, ("scale", "'1'"), lambda: _bad(scale="1")),
)


def small() -> dict[str, Any]:
    return {name: randn(2, 3, 9, 4) for name in "qkv"}
