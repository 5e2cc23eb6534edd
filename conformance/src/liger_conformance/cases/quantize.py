"""Cases of quantize. Results are equal to the reference's, bit by bit."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import Size, Vary
from liger_core.ops.quantize import BLOCKS, SCALES

KIND = "8 bits"
EXACT = True


def edges(x: Tensor) -> Tensor:
    """x with rows of numbers at which a scale or a rounding changes, in blocks of 128 columns of their own.

    The first row is NaN and infinity among finite numbers; the next ones zeros of both signs; the largest number of a block
    at 448 times a power of two, just above and just below; ties of float8, also of its subnormals; the dtype's largest and
    least numbers.
    """
    kind = torch.finfo(x.dtype)
    above = 448.0 + 256.0 * kind.eps  # the next number
    halves = [i / 2 + 8 for i in range(-40, 40)]
    rows: tuple[list[float], ...] = (
        [float("nan"), float("inf"), -float("inf"), 1.0],
        [0.0, -0.0],
        [448.0, 1.0],
        [above, 1.0],
        [448.0 * (1 - kind.eps), 1.0],
        [3.5, above / 128],
        [448.0, *(half / 8 for half in halves)],
        [448.0, *(half / 1024 for half in halves)],
        [kind.max, -kind.max / 3],
        [kind.smallest_normal, -kind.smallest_normal / 4],
        [kind.tiny * kind.eps],
    )
    x = x.clone()
    for row, values in zip(x[:, :128], rows, strict=False):
        row.zero_()
        row[: len(values)] = torch.tensor(values[: len(row)], dtype=torch.float64).to(x)
    return x


def build(
    make: Make, *, tokens: int, hidden: int, scale: float = 1.0, at_edges: bool = False, **options: Any
) -> dict[str, Any]:
    x = make.randn(tokens, hidden) * scale
    return {"x": edges(x) if at_edges else x, **options}


VARY = Vary(
    sizes={"tokens": Size(), "hidden": Size()},
    tensors=("tokens hidden",),
    values={"block": BLOCKS, "scales": SCALES, "rows": (True, False), "columns": lambda rows: (True, not rows)},
)

CASES = (
    Case("odd", "odd", tokens=5, hidden=123, columns=True),
    Case("rows-alone", "option", tokens=130, hidden=40),
    Case("several-tiles", "odd", tokens=131, hidden=259, columns=True),
    Case("columns-alone", "option", tokens=130, hidden=40, rows=False, columns=True),
    Case("in-vectors", "option", tokens=144, hidden=272, columns=True),
    Case("square", "option", tokens=131, hidden=259, columns=True, block="128x128"),
    Case("by-row", "option", tokens=144, hidden=272, columns=True, block="row"),
    Case("by-row-columns-alone", "option", tokens=6, hidden=40, rows=False, columns=True, block="row"),
    # A program compares the parts of 32 tiles at a time.
    Case("long-rows", "option", tokens=2, hidden=33 * 128 + 1, block="row"),
    Case("whole", "option", tokens=144, hidden=272, columns=True, block="tensor"),
    Case("whole-rows", "option", tokens=3, hidden=40, block="tensor"),
    Case("whole-columns", "option", tokens=3, hidden=40, rows=False, columns=True, block="tensor"),
    Case("float32-scales", "option", tokens=131, hidden=259, columns=True, scales="float32"),
    Case("float32-scales-square", "option", tokens=144, hidden=272, columns=True, block="128x128", scales="float32"),
    Case("float32-scales-by-row", "option", tokens=131, hidden=259, columns=True, block="row", scales="float32"),
    Case("float32-scales-whole", "option", tokens=5, hidden=259, block="tensor", scales="float32"),
    Case("one-element", "edge", tokens=1, hidden=1, columns=True),
    *(
        Case(
            f"edges-{block}-{scales}",
            "extreme",
            tokens=11,
            hidden=130,
            at_edges=True,
            block=block,
            scales=scales,
            columns=True,
        )
        for block in BLOCKS
        for scales in SCALES
    ),
    Case("tiny-values", "extreme", tokens=4, hidden=140, scale=1e-4, columns=True),
    Case("big-values", "extreme", tokens=4, hidden=140, scale=1e4, columns=True),
    Case("uneven-rows", "extreme", tokens=6, hidden=140, by_row=("x",)),
    Case("small", "small", tokens=2048, hidden=2048, columns=True),
    Case("medium", "medium", tokens=8192, hidden=4096, columns=True),
    Case("large", "large", tokens=16384, hidden=8192, columns=True),
)

HUGE = Case("huge", "large", tokens=(1 << 18) + 16, hidden=8192, columns=True)

MOVES = Moves({"x": 2}, {})


def eager(x: Tensor, rows: bool = True, columns: bool = False) -> Any:
    results: list[Tensor] = []
    for y in ((x,) if rows else ()) + ((x.mT,) if columns else ()):
        n = y.shape[1]
        blocks = F.pad(y, (0, -n % 128)).float().view(len(y), -1, 128)
        scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 448)))
        results += [(blocks / scale).to(torch.float8_e4m3fn).flatten(1)[:, :n], scale[..., 0]]
    return results


liger = None
