"""Cases of fused_neighborhood_attention."""

from typing import Any

import torch

from liger_conformance.case import BadCall, CallMode, Case, Make
from liger_conformance.vary import Number, Size, Vary


def build(
    make: Make,
    *,
    batch: int,
    heads: int,
    length: int,
    head: int,
    magnitude: float = 1.0,
    transposed: bool = False,
    **options: Any,
) -> dict[str, Any]:
    def one(size: float = 1.0) -> torch.Tensor:
        if transposed:
            return (make.randn(batch, length, heads, head) * size).transpose(1, 2)
        return make.randn(batch, heads, length, head) * size

    return {"q": one(magnitude), "k": one(magnitude), "v": one(), **options}


VARY = Vary(
    sizes={
        "batch": Size(most=64),
        "heads": Size(most=64),
        "length": Size(most=1 << 14),
        "head": Size(most=256),
        "kernel_size": Size(most=127, step=2),
        "dilation": Size(most=64),
    },
    tensors=("batch heads length head kernel_size",),
    values={"scale": (None, Number(-1.0, 1.0)), "transposed": (False, True)},
)

CASES = (
    Case("odd", "odd", batch=2, heads=3, length=13, head=11),
    Case("small-window", "odd", batch=1, heads=2, length=29, head=16, kernel_size=3),
    Case("wide-head", "odd", batch=1, heads=3, length=9, head=130),
    Case("wider-head", "odd", batch=1, heads=1, length=9, head=80),
    Case("many-short-sequences", "odd", batch=3, heads=6, length=2, head=3),
    Case("long", "odd", batch=1, heads=1, length=150, head=16),
    Case("one-element", "edge", batch=1, heads=1, length=1, head=1),
    Case("window-of-one", "edge", batch=1, heads=2, length=7, head=16, kernel_size=1),
    Case("window-of-the-sequence", "edge", batch=1, heads=2, length=7, head=16, kernel_size=13),
    Case("window-larger-than-the-sequence", "edge", batch=1, heads=2, length=7, head=16, kernel_size=51),
    Case("dilation-larger-than-the-sequence", "edge", batch=1, heads=2, length=7, head=16, dilation=9),
    Case("wide-window", "option", batch=1, heads=1, length=70, head=16, kernel_size=41),
    Case(
        "dq-of-a-wide-window", "odd", mode=CallMode(grads=("q",)), batch=1, heads=1, length=70, head=16, kernel_size=41
    ),
    Case(
        "dv-of-a-wide-window", "odd", mode=CallMode(grads=("v",)), batch=1, heads=1, length=70, head=16, kernel_size=41
    ),
    Case("dilated", "option", batch=1, heads=2, length=23, head=16, kernel_size=5, dilation=2),
    Case("far-dilated", "option", batch=1, heads=1, length=40, head=16, kernel_size=3, dilation=17),
    Case("residues-of-two-lengths", "option", batch=1, heads=2, length=47, head=128, dilation=15),
    Case("dk-of-two-lengths", "option", mode=CallMode(grads=("k",)), batch=2, heads=1, length=23, head=128, dilation=5),
    Case("wide-window-of-two-lengths", "option", batch=1, heads=2, length=107, head=16, kernel_size=41, dilation=3),
    Case("scale", "option", batch=1, heads=2, length=11, head=16, scale=0.5),
    Case("no-scale", "option", batch=1, heads=2, length=11, head=16, scale=0),
    Case("negative-scale", "option", batch=1, heads=2, length=11, head=16, scale=-1.0),
    Case("transposed", "option", batch=2, heads=3, length=11, head=16, transposed=True),
    Case("uneven-rows", "extreme", batch=4, heads=1, length=11, head=16, by_row=("v",)),
    Case("tiny-scores", "extreme", batch=1, heads=2, length=11, head=16, magnitude=1e-3),
    Case("big-scores", "extreme", batch=1, heads=2, length=11, head=16, magnitude=6.0),
    Case("small", "small", batch=2, heads=8, length=512, head=64),
    Case("medium", "medium", batch=2, heads=16, length=2048, head=64),
    Case("large", "large", batch=1, heads=16, length=8192, head=128),
)

DTYPES_APART = True  # wide heads in float32 take tiles of their own

HUGE = Case("huge", "large", batch=(1 << 10) + 3, heads=16, length=1024, head=128, kernel_size=3)


def _bad(make: Make, **changed: Any) -> dict[str, Any]:
    return {"q": make.randn(2, 3, 5, 8), "k": make.randn(2, 3, 5, 8), "v": make.randn(2, 3, 5, 8), **changed}


BAD = (
    BadCall("integer-q", TypeError, ("q", "int64"), lambda make: _bad(make, q=make.integers(0, 9, 2, 3, 5, 8))),
    BadCall("integer-k", TypeError, ("k", "int64"), lambda make: _bad(make, k=make.integers(0, 9, 2, 3, 5, 8))),
    BadCall("integer-v", TypeError, ("v", "int64"), lambda make: _bad(make, v=make.integers(0, 9, 2, 3, 5, 8))),
    BadCall(
        "k-of-another-dtype",
        TypeError,
        ("k", "bfloat16", "float32"),
        lambda make: _bad(make, k=make.randn(2, 3, 5, 8, dtype=torch.bfloat16)),
    ),
    BadCall(
        "v-of-another-dtype",
        TypeError,
        ("v", "bfloat16", "float32"),
        lambda make: _bad(make, v=make.randn(2, 3, 5, 8, dtype=torch.bfloat16)),
    ),
    BadCall("flat-q", ValueError, ("q", "3 dimensions"), lambda make: _bad(make, q=make.randn(2, 5, 24))),
    BadCall("fewer-k-heads", ValueError, ("k", "(2, 1, 5, 8)"), lambda make: _bad(make, k=make.randn(2, 1, 5, 8))),
    BadCall("longer-v", ValueError, ("v", "(2, 3, 6, 8)"), lambda make: _bad(make, v=make.randn(2, 3, 6, 8))),
    BadCall("kernel-size-not-an-int", TypeError, ("kernel_size", "3.0"), lambda make: _bad(make, kernel_size=3.0)),
    BadCall("even-kernel-size", ValueError, ("kernel_size", "4", "odd"), lambda make: _bad(make, kernel_size=4)),
    BadCall(
        "negative-kernel-size", ValueError, ("kernel_size", "-3", "at least 1"), lambda make: _bad(make, kernel_size=-3)
    ),
    BadCall("dilation-not-an-int", TypeError, ("dilation", "1.5"), lambda make: _bad(make, dilation=1.5)),
    BadCall("no-dilation", ValueError, ("dilation", "0", "at least 1"), lambda make: _bad(make, dilation=0)),
    BadCall("scale-not-a-number", TypeError, ("scale", "'1'"), lambda make: _bad(make, scale="1")),
)
