"""Cases of fused_add_rms_norm."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Number, Size, Vary
from liger_core.ops.rms_norm import CASTING_MODES

KIND = "normalisation"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    scale: float = 1.0,
    weight_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    rows = rows if isinstance(rows, tuple) else (rows,)
    return {
        "x": make.randn(*rows, hidden) * scale,
        "residual": make.randn(*rows, hidden) * scale,
        "weight": make.randn(hidden, dtype=weight_dtype),
        **options,
    }


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size()},
    tensors=("rows hidden",),
    values={
        "weight_dtype": ANY_DTYPE,
        "eps": Number(1e-8, 1.0),
        "offset": (0.0, 1.0, Number(-2.0, 2.0)),
        "casting_mode": CASTING_MODES,
    },
)

CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("batched", "odd", rows=(2, 3), hidden=65),
    Case("many-rows", "odd", rows=133, hidden=17),
    Case("thousands-of-rows", "odd", rows=2500, hidden=17),
    Case("long-row", "odd", rows=2, hidden=5000),
    Case("rows-of-8192", "option", rows=2, hidden=8192),
    Case("row-of-8193", "odd", rows=1, hidden=8193),
    Case("row-of-16385", "option", rows=1, hidden=16385),
    Case("rows-of-16400", "option", rows=2, hidden=16400),
    Case("row-of-131072", "odd", rows=1, hidden=131072),
    Case("row-of-16384", "option", rows=1, hidden=16384),
    Case("thousands-of-rows-of-8", "odd", rows=2500, hidden=8),
    Case("one-element", "edge", rows=1, hidden=1),
    Case("vector", "edge", rows=(), hidden=33),
    Case("gemma", "option", rows=4, hidden=96, offset=1.0, casting_mode="gemma"),
    Case("none", "option", rows=4, hidden=96, casting_mode="none"),
    Case("offset", "option", rows=4, hidden=96, offset=1.0),
    Case("eps", "option", rows=4, hidden=96, eps=0.5, scale=0.1),
    Case("float32-weight", "option", rows=4, hidden=96, weight_dtype=torch.float32),
    Case("float32-weight-gemma", "option", rows=4, hidden=96, weight_dtype=torch.float32, casting_mode="gemma"),
    Case("float32-weight-none", "option", rows=4, hidden=96, weight_dtype=torch.float32, casting_mode="none"),
    Case("tiny-values", "extreme", rows=4, hidden=64, scale=1e-4),
    Case("big-values", "extreme", rows=4, hidden=64, scale=1e3),
    # As in rms_norm: the reference's backward overflows float16 in one row.
    Case("random-21-146", "extreme", rows=(35,), hidden=1, casting_mode="none"),
    Case("uneven-rows", "extreme", rows=6, hidden=97, by_row=("x", "residual")),
    Case("small", "small", rows=2048, hidden=2048),
    Case("medium", "medium", rows=8192, hidden=4096),
    Case("large", "large", rows=16384, hidden=8192),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 3, hidden=8192)

MOVES = Moves({"x": 4}, {"x": 4})


def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def liger(ops: Any, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return ops.LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-06, 0.0, "llama", False)
