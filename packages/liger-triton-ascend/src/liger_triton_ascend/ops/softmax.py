"""Softmax: rows that fit the Unified Buffer are read once. Longer ones are read twice, with an online sum the first time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import softmax
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._rows import as_rows, row_tiles

# Float32 tiles alive at once, by the suite's estimate of the Unified Buffer, with two for each tile that is transferred.
FORWARD_TILES = 3
BACKWARD_TILES = 5
LONG_TILES = 6


@triton.jit
def _forward(y, x, rows, columns, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        xs = tl.load(x + row * x_stride + column, inside, other=float("-inf")).to(tl.float32)
        e = tl.exp(xs - tl.max(xs, 1)[:, None])
        tl.store(y + row * columns + column, e * (1.0 / tl.sum(e, 1))[:, None], inside)


@triton.jit
def _forward_long(y, x, rows, columns, x_stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row = x + tl.cast(row, tl.int64) * x_stride
        y_row = y + tl.cast(row, tl.int64) * columns
        # Each lane has its own maximum and sum: a reduction in the loop would make the vector unit wait for the scalar one. The
        # least float32 stands for -inf: the difference of two of them is 0.
        maximum = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            xs = tl.load(x_row + start + lane, start + lane < columns, other=float("-inf")).to(tl.float32)
            above = tl.maximum(maximum, xs)
            total = total * tl.exp(maximum - above) + tl.exp(xs - above)
            maximum = above
        highest = tl.max(maximum, 0)
        scale = 1.0 / tl.sum(total * tl.exp(maximum - highest), 0)
        for start in range(0, columns, BLOCK):
            inside = start + lane < columns
            xs = tl.load(x_row + start + lane, inside, other=float("-inf")).to(tl.float32)
            tl.store(y_row + start + lane, tl.exp(xs - highest) * scale, inside)


@triton.jit
def _backward(dx, dy, y, rows, columns, dy_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        ys = tl.load(y + row * columns + column, inside, other=0.0).to(tl.float32)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        # Divided by the sum of y, which is 1 but for rounding, so that a constant dy gives 0.
        mean = tl.sum(ys * dys, 1) / tl.sum(ys, 1)
        tl.store(dx + row * columns + column, ys * (dys - mean[:, None]), inside)


@triton.jit
def _backward_long(dx, dy, y, rows, columns, dy_stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * columns
        dy_row = dy + tl.cast(row, tl.int64) * dy_stride
        total = tl.zeros((BLOCK,), tl.float32)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            inside = start + lane < columns
            ys = tl.load(y + at + start + lane, inside, other=0.0).to(tl.float32)
            total += ys
            products += ys * tl.load(dy_row + start + lane, inside, other=0.0).to(tl.float32)
        mean = tl.sum(products, 0) / tl.sum(total, 0)
        for start in range(0, columns, BLOCK):
            inside = start + lane < columns
            ys = tl.load(y + at + start + lane, inside, other=0.0).to(tl.float32)
            dys = tl.load(dy_row + start + lane, inside, other=0.0).to(tl.float32)
            tl.store(dx + at + start + lane, ys * (dys - mean), inside)


@implements(softmax)
def forward(needs: Needs, x: Tensor) -> tuple[Tensor, Saved]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, x_stride = as_rows(x)
    programs, tile_rows, block = row_tiles(x, rows, columns, FORWARD_TILES)
    if block < columns:
        programs, _, block = row_tiles(x, rows, columns, LONG_TILES)
        _forward_long[(programs,)](y, x, rows, columns, x_stride, BLOCK=block)
    else:
        _forward[(programs,)](y, x, rows, columns, x_stride, ROWS=tile_rows, BLOCK=block)
    return y, (y,) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = saved
    columns = y.shape[-1]
    rows = y.numel() // columns
    dx = torch.empty_like(y)
    dy, dy_stride = as_rows(dy)
    programs, tile_rows, block = row_tiles(y, rows, columns, BACKWARD_TILES)
    if block < columns:
        programs, _, block = row_tiles(y, rows, columns, LONG_TILES)
        _backward_long[(programs,)](dx, dy, y, rows, columns, dy_stride, BLOCK=block)
    else:
        _backward[(programs,)](dx, dy, y, rows, columns, dy_stride, ROWS=tile_rows, BLOCK=block)
    return (dx,)
