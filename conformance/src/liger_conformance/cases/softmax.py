"""Cases of softmax."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ROWS, Size, Vary

KIND = "softmax, attention"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    columns: int,
    scale: float = 1.0,
    masked: float = 0.0,
    masked_rows: int = 0,
) -> dict[str, Any]:
    """`masked` is the probability that an element is −inf; in the first `masked_rows` rows all are."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    x = make.randn(*rows, columns) * scale
    if masked or masked_rows:
        hidden = make.mask(masked, *x.shape)
        hidden[..., 0] = False
        hidden[:masked_rows] = True
        x = x.masked_fill(hidden, -torch.inf)
    return {"x": x}


VARY = Vary(
    sizes={"rows": ROWS, "columns": Size()},
    tensors=("rows columns",),
    values={"masked": (0.0, 0.5)},
)

CASES = (
    Case("odd", "odd", rows=5, columns=123),
    Case("batched", "odd", rows=(2, 3), columns=65),
    Case("many-rows", "odd", rows=133, columns=17),
    Case("long-row", "odd", rows=2, columns=5000),
    Case("longer-row", "odd", rows=2, columns=20000),
    Case("longer-odd-row", "odd", rows=2, columns=16385),
    Case("very-long-row", "odd", rows=1, columns=(1 << 16) + 1),
    Case("row-of-16400", "option", rows=1, columns=16400),
    Case("row-of-20480", "option", rows=1, columns=20480),
    Case("row-of-262144", "option", rows=1, columns=262144),
    Case("whole-rows", "odd", rows=64, columns=64),
    Case("one-element", "edge", rows=1, columns=1),
    Case("one-column", "edge", rows=7, columns=1),
    Case("vector", "edge", rows=(), columns=33),
    Case("equal-elements", "edge", rows=4, columns=64, scale=0.0),
    Case("masked", "edge", rows=6, columns=70, masked=0.5),
    Case("one-element-left", "edge", rows=4, columns=40, masked=1.0),
    Case("all-masked-rows", "edge", rows=6, columns=70, masked=0.5, masked_rows=2),
    Case("long-all-masked-row", "edge", rows=2, columns=5000, masked=0.9, masked_rows=1),
    Case("sharp", "extreme", rows=4, columns=64, scale=20.0),
    Case("big-values", "extreme", rows=4, columns=64, scale=1e4),
    Case("long-big-values", "extreme", rows=2, columns=3000, scale=1e4),
    Case("longer-sharp", "extreme", rows=2, columns=40000, scale=20.0, masked=0.5),
    Case("tiny-values", "extreme", rows=4, columns=64, scale=1e-4),
    Case("uneven-rows", "extreme", rows=6, columns=97, by_row=("incoming",)),
    Case("small", "small", rows=4096, columns=1024),
    Case("medium", "medium", rows=8192, columns=8192),
    Case("large", "large", rows=8192, columns=32768),
)

DTYPES_APART = True  # cuTile's backward in parts takes bfloat16 alone

HUGE = Case("huge", "large", rows=(1 << 13) + 3, columns=1 << 18)

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def liger(ops: Any, x: Tensor) -> Any:
    return ops.LigerSoftmaxFunction.apply(x)
