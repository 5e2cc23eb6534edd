"""Sparsemax: Newton's method finds tau on the greatest elements of groups of columns, and a look at the whole row proves it.

tau is the root of f(tau) = Σ max(x − tau, 0) − 1, which is convex. A step of Newton's method is tau ← (sum of the elements above
tau − 1) / (their number). Steps that start left of the root stay left of it. Once the number doesn't fall any more, tau is
exact. A step divides the product of f and its slope by at least four, so every row needs few steps.

The root for a part of a row is left of the row's own root. So the first steps take only the greatest element of each group of
columns. Their root is the row's own unless two elements of a group are in the support. That is rare, and then steps go on with
all elements. Rows that fit the Unified Buffer are read once, longer ones twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import sparsemax
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._rows import as_rows, long_row_blocks, row_tiles

# Tiles alive, by the estimate. The backward has one number for 2-byte dtypes, with which a row of 8192 is still read once, and
# one for float32.
FORWARD_TILES = 4.5
FORWARD_LONG_TILES = 8
BACKWARD_TILES = 4.5, 6.5
BACKWARD_LONG_TILES = 7

GROUP = 8
"""Columns of a group: Newton's steps on the greatest of each cost 1/8, and a row of 8192 columns still has 1024 groups."""
FEWEST_GROUPS = 128
"""Two 256-byte instructions of the vector unit. Fewer groups would be no faster."""


@triton.jit
def _newton(z, tau, count):
    """Take Newton's steps from tau while the number of elements above it falls, at first below `count`. Return both.

    NaN counts as above, so it spreads.
    """
    active = 1.0
    while active > 0.0:
        below = z <= tau[:, None]
        total = tl.sum(tl.where(below, 0.0, z), 1)
        above = tl.sum(tl.where(below, 0.0, 1.0), 1)
        fewer = above < count
        tau = tl.where(fewer, (total - 1.0) / above, tau)
        count = above
        active = tl.max(tl.where(fewer, 1.0, 0.0), 0)
    return tau, count


@triton.jit
def _result(above, dtype: tl.constexpr):
    """max(above, 0). A result greater than 0 stays so when it is rounded: backward finds the support by that."""
    result = tl.maximum(above, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.float16:
        result = tl.where(above > 0.0, tl.maximum(above, 5.9604644775390625e-08), result)
    return result


@triton.jit
def _forward(y, x, rows, columns, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        xs = tl.load(x + row * x_stride + column, inside, other=float("-inf")).to(tl.float32)
        top = tl.max(xs, 1)
        z = xs - top[:, None]
        best = tl.max(tl.reshape(z, (ROWS, GROUP, BLOCK // GROUP)), 1)
        zeros = tl.zeros((ROWS,), tl.float32)
        tau, count = _newton(best, zeros - 1.0, zeros + float("inf"))
        more = tl.sum(tl.where(z <= tau[:, None], 0.0, 1.0), 1) != count
        # A row with no more elements than `count` stays as it is: the number above its tau has stopped falling.
        if tl.max(tl.where(more, 1.0, 0.0), 0) > 0.0:
            tau, _ = _newton(z, tau, tl.where(more, float("inf"), count))
        tl.store(y + row * columns + column, _result(z - tau[:, None], y.dtype.element_ty), inside)


@triton.jit
def _forward_long(y, x, rows, columns, x_stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row = x + tl.cast(index, tl.int64) * x_stride
        y_row = y + tl.cast(index, tl.int64) * columns
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            xs = tl.load(x_row + column, column < columns, other=float("-inf")).to(tl.float32)
            best = tl.maximum(best, xs, propagate_nan=tl.PropagateNan.ALL)
        top = tl.max(best, 0)
        zeros = tl.zeros((1,), tl.float32)
        row_tau, row_count = _newton((best - top)[None, :], zeros - 1.0, zeros + float("inf"))
        tau, count = tl.sum(row_tau, 0), tl.sum(row_count, 0)
        fewest = float("inf")
        active = 1.0
        while active > 0.0:  # once, unless two of a lane's columns are in the support
            totals = tl.zeros((BLOCK,), tl.float32)
            counts = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, columns, BLOCK):
                column = start + lane
                inside = column < columns
                z = tl.load(x_row + column, inside, other=float("-inf")).to(tl.float32) - top
                above = z - tau
                totals += tl.where(above <= 0.0, 0.0, z)
                counts += tl.where(above <= 0.0, 0.0, 1.0)
                tl.store(y_row + column, _result(above, y.dtype.element_ty), inside)
            total, found = tl.sum(totals, 0), tl.sum(counts, 0)
            fewer = (found != count) & (found < fewest)
            tau = tl.where(fewer, (total - 1.0) / found, tau)
            count = found
            fewest = found
            active = tl.where(fewer, 1.0, 0.0)


@triton.jit
def _backward(dx, dy, y, rows, columns, dy_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        support = tl.load(y + row * columns + column, inside, other=0.0).to(tl.float32) > 0.0
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        mean = tl.sum(tl.where(support, dys, 0.0), 1) / tl.sum(tl.where(support, 1.0, 0.0), 1)
        tl.store(dx + row * columns + column, tl.where(support, dys - mean[:, None], 0.0), inside)


@triton.jit
def _backward_long(dx, dy, y, rows, columns, dy_stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(index, tl.int64) * columns
        dy_row = dy + tl.cast(index, tl.int64) * dy_stride
        totals = tl.zeros((BLOCK,), tl.float32)
        counts = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            support = tl.load(y + at + column, inside, other=0.0).to(tl.float32) > 0.0
            dys = tl.load(dy_row + column, inside, other=0.0).to(tl.float32)
            totals += tl.where(support, dys, 0.0)
            counts += tl.where(support, 1.0, 0.0)
        mean = tl.sum(totals, 0) / tl.sum(counts, 0)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            support = tl.load(y + at + column, inside, other=0.0).to(tl.float32) > 0.0
            dys = tl.load(dy_row + column, inside, other=0.0).to(tl.float32)
            tl.store(dx + at + column, tl.where(support, dys - mean, 0.0), inside)


def _along(x: Tensor, dim: int) -> Tensor:
    """x with `dim` last."""
    return x if dim == -1 or dim == x.dim() - 1 else x.movedim(dim, -1)


def _back(y: Tensor, dim: int) -> Tensor:
    """Undoes `_along`."""
    return y if dim == -1 or dim == y.dim() - 1 else y.movedim(-1, dim)


@implements(sparsemax)
def forward(needs: Needs, x: Tensor, dim: int = -1) -> tuple[Tensor, Saved]:
    x = _along(x, dim)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    columns = x.shape[-1]
    rows = x.numel() // columns
    x, x_stride = as_rows(x)
    programs, tile_rows, block = row_tiles(x, rows, columns, FORWARD_TILES)
    if block < columns:
        programs, block = long_row_blocks(x, rows, columns, FORWARD_LONG_TILES)
        _forward_long[(programs,)](y, x, rows, columns, x_stride, BLOCK=block)
    else:
        group = min(GROUP, max(1, block // FEWEST_GROUPS))
        _forward[(programs,)](y, x, rows, columns, x_stride, ROWS=tile_rows, BLOCK=block, GROUP=group)
    y = _back(y, dim)
    return y, (y,) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, dim: int) -> tuple[Tensor | None, ...]:
    y = _along(saved[0], dim)
    dx = torch.empty_like(y)
    columns = y.shape[-1]
    rows = y.numel() // columns
    dy, dy_stride = as_rows(_along(dy, dim))
    programs, tile_rows, block = row_tiles(y, rows, columns, BACKWARD_TILES[int(y.element_size() == 4)])
    if block < columns:
        programs, block = long_row_blocks(y, rows, columns, BACKWARD_LONG_TILES)
        _backward_long[(programs,)](dx, dy, y, rows, columns, dy_stride, BLOCK=block)
    else:
        _backward[(programs,)](dx, dy, y, rows, columns, dy_stride, ROWS=tile_rows, BLOCK=block)
    return (_back(dx, dim),)
