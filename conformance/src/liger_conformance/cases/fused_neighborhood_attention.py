"""Cases of fused_neighborhood_attention."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import Number, Size, Vary

KIND = "softmax, attention"


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
    def one(size: float = 1.0) -> Tensor:
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

MOVES = Moves({"q": 2, "k": 1, "v": 1}, {"q": 4, "k": 2, "v": 2})


def eager(q: Tensor, k: Tensor, v: Tensor, kernel_size: int = 7) -> Tensor:
    position = torch.arange(q.shape[2], device=q.device)
    near = (position[:, None] - position).abs() <= kernel_size // 2
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


def liger(ops: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return ops.LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 7, 1, None)
