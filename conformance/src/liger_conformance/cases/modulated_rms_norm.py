"""Cases of modulated_rms_norm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Number, Size, Vary
from liger_core.ops.rms_norm import CASTING_MODES

# Which of x's dimensions before the last one a scale or shift has, by name; the others are 1 or absent.
KIND = "normalisation"

KEPT: dict[str, Callable[[int, int], bool]] = {
    "rows": lambda place, dims: True,
    "samples": lambda place, dims: place == 0,
    "positions": lambda place, dims: place == dims - 1,
    "ends": lambda place, dims: place in (0, dims - 1),
    "middle": lambda place, dims: 0 < place < dims - 1,
    "none": lambda place, dims: False,
}


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    weight: bool = True,
    weight_dtype: torch.dtype | None = None,
    scale_of: str = "samples",
    shift_of: str | None = "samples",
    modulation_dtype: torch.dtype | None = None,
    in_one: bool = False,
    size: float = 1.0,
    small: float = 0.5,
    **options: Any,
) -> dict[str, Any]:
    """With `in_one`, scale and shift are halves of each row of one tensor, as a linear layer gives them."""
    rows = rows if isinstance(rows, tuple) else (rows,)

    def modulation(kept: str) -> Tensor:
        lead = [many if KEPT[kept](place, len(rows)) else 1 for place, many in enumerate(rows)]
        if kept == "none":
            lead = []
        tensor = make.randn(*lead, 2 * hidden if in_one else hidden, dtype=modulation_dtype) * small
        return tensor[..., hidden:] if in_one else tensor

    return {
        "x": make.randn(*rows, hidden) * size,
        "weight": make.randn(hidden, dtype=weight_dtype) if weight else None,
        "scale": modulation(scale_of),
        "shift": None if shift_of is None else modulation(shift_of),
        **options,
    }


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size()},
    tensors=("rows hidden",),
    values={
        "weight": (True, False),
        "weight_dtype": ANY_DTYPE,
        "scale_of": tuple(KEPT),
        "shift_of": (None, *KEPT),
        "modulation_dtype": ANY_DTYPE,
        "in_one": (False, True),
        "small": (1e-3, 0.5, 10.0),
        "eps": Number(1e-8, 1.0),
        "offset": (0.0, 1.0, Number(-2.0, 2.0)),
        "casting_mode": CASTING_MODES,
    },
)

CASES = (
    Case("odd", "odd", rows=(2, 3), hidden=123),
    Case("many-rows", "odd", rows=(2, 70), hidden=17),
    Case("many-rows-of-8", "odd", rows=(4, 1100), hidden=8),
    Case("rows", "odd", rows=(5, 3), hidden=33, scale_of="rows", shift_of="rows"),
    Case("positions", "odd", rows=(3, 5), hidden=33, scale_of="positions", shift_of="positions"),
    Case("ends", "odd", rows=(2, 3, 4), hidden=20, scale_of="ends", shift_of="ends"),
    Case("middle", "odd", rows=(2, 3, 4), hidden=20, scale_of="middle", shift_of="ends"),
    Case("apart", "odd", rows=(2, 3, 4), hidden=20, scale_of="samples", shift_of="positions"),
    Case("five-dimensions", "odd", rows=(2, 3, 1, 2, 2), hidden=9, scale_of="ends", shift_of="middle"),
    Case(
        "transposed",
        "odd",
        mode=CallMode(layouts={"scale": "transposed", "x": "transposed"}),
        rows=(3, 4),
        hidden=24,
        scale_of="rows",
    ),
    Case("shared", "odd", rows=(2, 9), hidden=1040),
    Case("one-group", "odd", rows=(300,), hidden=1040, scale_of="none", shift_of="none"),
    Case("row-of-5000", "odd", rows=(1, 2), hidden=5000),
    Case("rows-of-5120", "option", rows=(2, 2), hidden=5120),
    Case("row-of-8192", "option", rows=(1, 2), hidden=8192),
    Case("sums-of-8193", "odd", mode=CallMode(grads=("weight", "scale")), rows=(2, 1), hidden=8193),
    Case("rows-of-8208", "option", rows=(2, 1), hidden=8208, scale_of="none", shift_of="none"),
    Case("dx-of-8193", "odd", mode=CallMode(grads=("x",)), rows=(1, 1), hidden=8193),
    Case("row-of-16400", "odd", mode=CallMode(grads=("shift",)), rows=(1, 1), hidden=16400),
    Case("frozen-modulation", "odd", mode=CallMode(grads=("x", "weight")), rows=(2, 3), hidden=40),
    Case("frozen-x", "odd", mode=CallMode(grads=("scale", "shift")), rows=(2, 3), hidden=40),
    Case("weight-alone", "odd", mode=CallMode(grads=("weight",)), rows=(3, 3), hidden=40, scale_of="rows"),
    Case("shift-alone", "odd", mode=CallMode(grads=("shift",)), rows=(2, 3), hidden=40, shift_of="rows"),
    Case("rows-of-one", "odd", rows=(64,), hidden=1, eps=1.0),
    Case("one-element", "edge", rows=(1,), hidden=1, eps=1.0),
    Case("vector", "edge", rows=(), hidden=33, scale_of="none", shift_of="none"),
    Case("no-shift", "option", rows=(2, 3), hidden=96, shift_of=None),
    Case("no-weight", "option", rows=(2, 3), hidden=96, weight=False),
    Case("halves", "option", rows=(2, 3), hidden=48, in_one=True),
    Case("gemma", "option", rows=(2, 2), hidden=96, offset=1.0, casting_mode="gemma"),
    Case("none", "option", rows=(2, 2), hidden=96, casting_mode="none"),
    Case("eps", "option", rows=(2, 2), hidden=96, eps=0.5, size=0.1),
    Case(
        "float32-beside", "option", rows=(2, 2), hidden=96, weight_dtype=torch.float32, modulation_dtype=torch.float32
    ),
    Case("small-scale", "extreme", rows=(2, 3), hidden=96, weight=False, shift_of=None, small=3e-3),
    Case("tiny-values", "extreme", rows=(2, 2), hidden=64, size=1e-4),
    Case("big-values", "extreme", rows=(2, 2), hidden=64, size=1e3),
    # As in rms_norm: the reference's backward overflows float16 in one row.
    Case("random-21-116", "extreme", rows=(20,), hidden=1, casting_mode="none"),
    Case("uneven-rows", "extreme", rows=(6, 1), hidden=97, shift_of=None, by_row=("x", "incoming")),
    Case("small", "small", rows=(4, 512), hidden=2048),
    Case("medium", "medium", rows=(8, 1024), hidden=4096),
    Case("large", "large", rows=(4, 4096), hidden=8192),
)

HUGE = Case("huge", "large", rows=(41, 6401), hidden=8192)

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6) * (1 + scale) + shift


def liger(ops: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Any:
    return ops.LigerModulatedRMSNormFunction.apply(x, weight, scale, shift, 1e-06, 0.0, "llama", False)
