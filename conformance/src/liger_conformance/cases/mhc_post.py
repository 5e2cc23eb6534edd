"""Cases of mhc_post."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Size, Vary

KIND = "residual streams"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    streams: int,
    width: int,
    coefficients: torch.dtype | None = None,
    scale: float = 1.0,
) -> dict[str, Any]:
    """`coefficients` is the dtype of post and res."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    return {
        "f": make.randn(*rows, width) * scale,
        "x": make.randn(*rows, streams, width) * scale,
        "post": make.uniform(*rows, streams, dtype=coefficients) * 2,
        "res": make.uniform(*rows, streams, streams, dtype=coefficients) / streams,
    }


VARY = Vary(
    sizes={"rows": ROWS, "streams": Size(most=8), "width": Size(most=1 << 15)},
    tensors=("rows streams width", "rows streams streams"),
    values={"coefficients": ANY_DTYPE},
)

CASES = (
    Case("odd", "odd", rows=5, streams=3, width=61),
    Case("batched", "odd", rows=(2, 3), streams=2, width=33),
    Case("many-rows", "odd", rows=133, streams=2, width=7),
    Case("four-streams", "odd", rows=3, streams=4, width=40),
    Case("eight-streams", "odd", rows=2, streams=8, width=19),
    Case("five-streams", "odd", rows=2, streams=5, width=23),
    Case("streams-alone", "odd", mode=CallMode(grads=("x",)), rows=2, streams=5, width=23),
    Case("layer-alone", "odd", mode=CallMode(grads=("f",)), rows=2, streams=5, width=23),
    Case("long-row", "odd", rows=2, streams=4, width=2100),
    Case("one-element", "edge", rows=1, streams=1, width=1),
    Case("one-stream", "edge", rows=3, streams=1, width=40),
    Case("vector", "edge", rows=(), streams=2, width=17),
    Case("float32-coefficients", "option", rows=4, streams=4, width=48, coefficients=torch.float32),
    Case("bfloat16-coefficients", "option", rows=4, streams=2, width=24, coefficients=torch.bfloat16),
    Case("tiny-values", "extreme", rows=4, streams=2, width=32, scale=1e-4),
    Case("big-values", "extreme", rows=4, streams=2, width=32, scale=1e3),
    Case(
        "uneven-rows", "extreme", rows=6, streams=2, width=48, coefficients=torch.float32, by_row=("f", "x", "incoming")
    ),
    Case("small", "small", rows=2048, streams=4, width=2048, coefficients=torch.float32),
    Case("medium", "medium", rows=8192, streams=4, width=4096, coefficients=torch.float32),
    Case("large", "large", rows=16384, streams=4, width=7168, coefficients=torch.float32),
)

HUGE = Case("huge", "large", rows=(1 << 17) + 3, streams=4, width=4096)

MOVES = Moves({"x": 1, "f": 1, "result": 1}, {"x": 2, "f": 2, "result": 1})


def eager(f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> Tensor:
    return (post[..., None] * f[..., None, :] + torch.einsum("...io,...ic->...oc", res, x.float())).to(x.dtype)


def liger(ops: Any, f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> Any:
    return ops.LigerMHCPostResFunction.apply(x, f, post, res.transpose(-1, -2))
