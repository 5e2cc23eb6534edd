"""Cases of group_norm."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary

KIND = "normalisation"


def build(
    make: Make,
    *,
    samples: int,
    channels: int,
    spatial: tuple[int, ...],
    num_groups: int,
    weight: bool = True,
    bias: bool = True,
    mean: float = 0.0,
    scale: float = 1.0,
    weight_dtype: torch.dtype | None = None,
    channels_last: bool = False,
    **options: Any,
) -> dict[str, Any]:
    x = make.randn(samples, channels, *spatial) * scale + mean
    return {
        "x": x.to(memory_format=torch.channels_last) if channels_last else x,
        "num_groups": num_groups,
        "weight": make.randn(channels, dtype=weight_dtype) if weight else None,
        "bias": make.randn(channels, dtype=weight_dtype) if bias else None,
        **options,
    }


VARY = Vary(
    sizes={
        "samples": Size(most=1 << 16),
        "num_groups": Size(most=1 << 10),
        "group": Size(most=1 << 10),
        "spatial": Size(most=1 << 20, dims=(0, 3)),
    },
    tensors=("samples num_groups group spatial",),
    values={
        "channels": lambda num_groups, group: (num_groups * group,),
        "weight": (True, False),
        "bias": (True, False),
        "weight_dtype": ANY_DTYPE,
        "eps": Number(1e-8, 1.0),
        "channels_last": lambda spatial: (False, True) if len(spatial) == 2 else (False,),
    },
)

CASES = (
    Case("odd", "odd", samples=3, channels=6, spatial=(37,), num_groups=2),
    Case("image", "odd", samples=2, channels=9, spatial=(5, 7), num_groups=3),
    Case("volume", "odd", samples=2, channels=4, spatial=(3, 2, 5), num_groups=2),
    Case("small-groups", "odd", samples=2, channels=60, spatial=(48,), num_groups=4),
    Case("many-samples", "odd", samples=33, channels=3, spatial=(11,), num_groups=1),
    Case(
        "groups-of-240",
        "odd",
        samples=2,
        channels=48,
        spatial=(15,),
        num_groups=3,
        weight_dtype=torch.float32,
    ),
    Case("long-group", "odd", samples=1, channels=6, spatial=(1501,), num_groups=2),
    Case("group-in-parts", "option", samples=1, channels=2, spatial=(8208,), num_groups=1),
    Case("odd-group-in-parts", "option", samples=1, channels=3, spatial=(4097,), num_groups=1),
    Case("groups-of-16384", "option", samples=2, channels=4, spatial=(4096,), num_groups=1),
    Case("one-long-group", "odd", samples=1, channels=5, spatial=(14001,), num_groups=1),
    Case(
        "dx-of-long-groups", "odd", mode=CallMode(grads=("x",)), samples=3, channels=2, spatial=(20000,), num_groups=1
    ),
    Case(
        "dweight-of-a-long-group",
        "odd",
        mode=CallMode(grads=("weight",)),
        samples=1,
        channels=2,
        spatial=(20000,),
        num_groups=1,
    ),
    Case("no-spatial", "edge", samples=3, channels=10, spatial=(), num_groups=2),
    Case("one-group", "edge", samples=2, channels=5, spatial=(13,), num_groups=1),
    Case("a-group-each", "edge", samples=2, channels=5, spatial=(13,), num_groups=5),
    Case("one-element", "edge", samples=1, channels=1, spatial=(), num_groups=1),
    Case("groups-of-one-element", "edge", samples=2, channels=5, spatial=(1,), num_groups=5),
    Case("constant-groups", "edge", samples=2, channels=6, spatial=(10,), num_groups=3, scale=0.0, mean=3.0),
    Case("no-weight", "option", samples=2, channels=6, spatial=(20,), num_groups=3, weight=False),
    Case("no-bias", "option", samples=2, channels=6, spatial=(20,), num_groups=3, bias=False),
    Case("normalise-only", "option", samples=2, channels=6, spatial=(20,), num_groups=3, weight=False, bias=False),
    Case("eps", "option", samples=2, channels=6, spatial=(20,), num_groups=3, eps=0.5, scale=0.1),
    Case("float32-weight", "option", samples=2, channels=6, spatial=(20,), num_groups=3, weight_dtype=torch.float32),
    Case("channels-last", "option", samples=2, channels=6, spatial=(5, 4), num_groups=3, channels_last=True),
    Case("far-from-zero", "extreme", samples=16, channels=8, spatial=(25,), num_groups=4, mean=1000.0),
    Case("tiny-values", "extreme", samples=2, channels=6, spatial=(20,), num_groups=3, scale=1e-4),
    Case("big-values", "extreme", samples=2, channels=6, spatial=(20,), num_groups=3, scale=1e4),
    Case("infinite-weight", "extreme", samples=2, channels=6, spatial=(20,), num_groups=3, holds={"weight": torch.inf}),
    Case("uneven-rows", "extreme", samples=6, channels=4, spatial=(19,), num_groups=2, by_row=("x",)),
    Case("small", "small", samples=32, channels=128, spatial=(1024,), num_groups=32),
    Case("medium", "medium", samples=64, channels=512, spatial=(2048,), num_groups=32),
    Case("large", "large", samples=128, channels=512, spatial=(8192,), num_groups=32),
)

DTYPES_APART = True  # cuTile's kernels that hold a long group take bfloat16 alone

HUGE = Case("huge", "large", samples=(1 << 10) + 3, channels=512, spatial=(4096,), num_groups=32)

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, 1e-5)


def liger(ops: Any, x: Tensor, num_groups: int, weight: Tensor, bias: Tensor) -> Any:
    return ops.LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], num_groups, 1e-05)
