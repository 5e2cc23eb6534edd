"""Softmax: a row is read again from the cache, or stays in registers. The longest rows first take a pass with an online sum."""

import torch
import triton.language as tl
from torch import Tensor

from liger_core import softmax
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._device import warp_size
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import (
    again,
    as_rows,
    in_pairs,
    in_vectors,
    interleaved,
    packed,
    tile_of,
    tile_read_twice,
    unpacked,
)
from liger_triton.ops._sums import multiply

# Longer rows don't fit the registers of 16 warps: at 64 columns per thread, backward spills 14 to 24 on sm_90.
LONGEST = 32768
# Up to this length, rows of 2-byte elements are held in that form.
LONGEST_PACKED = 65536
# Rows up to this length are read twice if they fill their tiles. On an H200 (triton 3.6), in bfloat16: 8192 x 16384 takes 0.131
# ms, held in registers 0.141; 8192 x 8192 0.0695 and 0.0710; 4096 x 1024 0.0093 and 0.0101.
LONGEST_READ_TWICE = 16384


@kernel
def _forward_whole(y, x, columns, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows that fill their tiles: without masks, a thread can take 64 columns and leave registers for other programs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = x + row * x_stride + column
    xs = tl.load(at, eviction_policy="evict_last").to(tl.float32)
    highest = tl.max(xs, 1, keep_dims=True)
    scale = 1.0 / tl.sum(tl.exp(xs - highest), 1, keep_dims=True)
    xs = tl.load(at, eviction_policy="evict_first").to(tl.float32)
    tl.store(y + row * columns + column, tl.exp(xs - highest) * scale)


@kernel
def _forward(y, x, rows, columns, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    xs = tl.load(x + row * x_stride + column, inside, other=float("-inf")).to(tl.float32)
    e = tl.exp(xs - tl.max(xs, 1, keep_dims=True))
    tl.store(y + row * columns + column, e * (1.0 / tl.sum(e, 1, keep_dims=True)), inside)


@kernel
def _forward_packed(y, x, columns, x_stride, BLOCK: tl.constexpr):
    """A row of 2-byte elements, held in that form. Its exponentials are computed twice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    pairs = packed(tl.load(x + row * x_stride + column, inside, other=float("-inf")))
    first, second = unpacked(pairs, x.dtype.element_ty)
    highest = tl.max(tl.maximum(first, second), 1, keep_dims=True)
    # 2^(x log2 e − c). c is rounded the same way for the whole row; below 2^20 the rounding is at most 1/16. Above 2^20, 2-byte
    # elements are 4096 apart or equal, and 2^(x − c) is 0 or 1.
    factor = tl.where(tl.abs(highest) < 1048576.0, 1.4426950408889634, 1.0)
    c = highest * factor
    pairs = again(pairs, highest)
    first, second = unpacked(pairs, x.dtype.element_ty)
    total = tl.sum(tl.exp2(tl.fma(first, factor, -c)) + tl.exp2(tl.fma(second, factor, -c)), 1, keep_dims=True)
    scale = 1.0 / total
    first, second = unpacked(again(pairs, total), x.dtype.element_ty)
    first = tl.exp2(tl.fma(first, factor, -c)) * scale
    second = tl.exp2(tl.fma(second, factor, -c)) * scale
    tl.store(y + row * columns + column, interleaved(first, second, y.dtype.element_ty), inside)


@kernel
def _forward_long(y, x, columns, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # Each lane has a maximum and a sum of its own. The least float32 stands for -inf: the difference of two is 0.
    maximum = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        xs = tl.load(x + row * x_stride + column, column < columns, other=float("-inf")).to(tl.float32)
        above = xs - maximum
        e = tl.exp(-tl.abs(above))
        total = tl.where(above > 0, total * e + 1.0, total + e)
        maximum = tl.maximum(maximum, xs)
    highest = tl.max(maximum)
    scale = 1.0 / tl.sum(total * tl.exp(maximum - highest))
    # Backwards: what was read last is still in the cache.
    for back in range(0, columns, BLOCK):
        column = (columns - 1) // BLOCK * BLOCK - back + tl.arange(0, BLOCK)
        inside = column < columns
        xs = tl.load(x + row * x_stride + column, inside, other=float("-inf")).to(tl.float32)
        tl.store(y + row * columns + column, tl.exp(xs - highest) * scale, inside)


@kernel
def _backward(dx, dy, y, rows, columns, dy_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    ys = tl.load(y + row * columns + column, inside, other=0.0).to(tl.float32)
    dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
    # Divided by the sum of y, which is 1 but for rounding, so that a constant dy gives 0.
    mean = tl.div_rn(tl.sum(multiply(ys, dys, BLOCK), 1, keep_dims=True), tl.sum(ys, 1, keep_dims=True))
    tl.store(dx + row * columns + column, ys * (dys - mean), inside)


@kernel
def _backward_packed(dx, dy, y, columns, dy_stride, BLOCK: tl.constexpr):
    """A row of 2-byte elements, held in that form."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    ys = packed(tl.load(y + row * columns + column, inside, other=0.0))
    dys = packed(tl.load(dy + row * dy_stride + column, inside, other=0.0))
    a, b = unpacked(ys, y.dtype.element_ty)
    da, db = unpacked(dys, dy.dtype.element_ty)
    mean = tl.div_rn(tl.sum(a * da + b * db, 1, keep_dims=True), tl.sum(a + b, 1, keep_dims=True))
    a, b = unpacked(again(ys, mean), y.dtype.element_ty)
    da, db = unpacked(again(dys, mean), dy.dtype.element_ty)
    tl.store(dx + row * columns + column, interleaved(a * (da - mean), b * (db - mean), y.dtype.element_ty), inside)


@kernel
def _backward_long(dx, dy, y, columns, dy_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        ys = tl.load(y + row * columns + column, inside, other=0.0).to(tl.float32)
        total += ys
        products += ys * tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(products), tl.sum(total))
    for back in range(0, columns, BLOCK):
        column = (columns - 1) // BLOCK * BLOCK - back + tl.arange(0, BLOCK)
        inside = column < columns
        ys = tl.load(y + row * columns + column, inside, other=0.0).to(tl.float32)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        tl.store(dx + row * columns + column, ys * (dys - mean), inside)


@implements(softmax)
def forward(needs: Needs, x: Tensor) -> tuple[Tensor, Saved]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, x_stride = as_rows(x)
    tile_rows, block, warps = tile_read_twice(columns)
    if columns == block <= LONGEST_READ_TWICE and rows % tile_rows == 0:
        _forward_whole[(rows // tile_rows,)](y, x, columns, x_stride, ROWS=tile_rows, BLOCK=block, num_warps=warps)
    elif LONGEST_READ_TWICE < block <= LONGEST_PACKED and in_pairs(x, columns, x_stride):
        # On an H200 (triton 3.6), 8192 x 32768 takes 0.264 ms with 32 warps, 0.278 with 16, and 0.277 at best if held in
        # float32; 8192 x 32000 0.256 and 0.274; 4096 x 65536 0.294 and 0.290, and 0.374 by `_forward_long`.
        warps = min((1 << 20) // block, 1024 // warp_size(x.device))
        _forward_packed[(rows,)](y, x, columns, x_stride, BLOCK=block, num_warps=warps)
    elif columns > LONGEST:
        _forward_long[(rows,)](y, x, columns, x_stride, BLOCK=8192, num_warps=16)
    else:
        tile_rows, block, warps = tile_of(columns)
        _forward[((rows + tile_rows - 1) // tile_rows,)](
            y, x, rows, columns, x_stride, ROWS=tile_rows, BLOCK=block, num_warps=warps
        )
    return y, (y,) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = saved
    columns = y.shape[-1]
    rows = y.numel() // columns
    dx = torch.empty_like(y)
    dy, dy_stride = as_rows(dy)
    if columns > (LONGEST if in_vectors(columns, dy_stride) else LONGEST // 2):
        _backward_long[(rows,)](dx, dy, y, columns, dy_stride, BLOCK=8192, num_warps=16)
    else:
        tile_rows, block, warps = tile_of(columns)
        if block >= 16384 and in_pairs(y, columns, dy_stride):
            # On an H200 (triton 3.6), 8192 x 32768 takes 0.382 ms, with 32 warps 0.422, held in float32 0.389; 8192 x 16384
            # 0.192, 0.211 and 0.201.
            _backward_packed[(rows,)](dx, dy, y, columns, dy_stride, BLOCK=block, num_warps=16)
        else:
            programs = (rows + tile_rows - 1) // tile_rows
            _backward[(programs,)](dx, dy, y, rows, columns, dy_stride, ROWS=tile_rows, BLOCK=block, num_warps=warps)
    return (dx,)
