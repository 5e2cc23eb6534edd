"""Polynomial norm: one pass makes the mean squares of a row's three powers. Then the row is read again for the output."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import poly_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._device import shared_memory, sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, tile_of
from liger_triton.ops._sums import add_four, add_three, multiply

# Longer rows don't fit registers. Forward, which adds up x's powers, has 128 columns per thread of 8 warps. Backward, which
# keeps x and dy, has 32 per thread of 16.
LONGEST_FORWARD = 32768
LONGEST_BACKWARD = 16384
# Columns per warp in the backward: 32 per thread, so that few threads exchange sums for many columns.
COLUMNS_PER_WARP = 1024


@triton.jit
def _inverse_rms(sum1, sum2, sum3, columns, eps):
    """The factors of x, x² and x³, from the sums of their squares."""
    eps = tl.cast(eps, tl.float32)  # torch.compile passes floats as float64
    return tl.rsqrt(sum1 / columns + eps), tl.rsqrt(sum2 / columns + eps), tl.rsqrt(sum3 / columns + eps)


@triton.jit
def _polynomial(xs, r1, r2, r3, weight, bias):
    w0, w1, w2 = _load_weight(weight)
    return ((w0 * r3 * xs + w1 * r2) * xs + w2 * r1) * xs + tl.load(bias).to(tl.float32)


@triton.jit
def _load_weight(weight):
    return tl.load(weight).to(tl.float32), tl.load(weight + 1).to(tl.float32), tl.load(weight + 2).to(tl.float32)


@triton.jit
def _store_inverse_rms(inverse_rms, row, rows, r1, r2, r3):
    if inverse_rms is not None:
        tl.store(inverse_rms + row, r1, row < rows)
        tl.store(inverse_rms + rows + row, r2, row < rows)
        tl.store(inverse_rms + 2 * rows + row, r3, row < rows)


@kernel
def _forward(y, inverse_rms, x, weight, bias, rows, columns, x_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    xs = tl.load(x + row * x_stride + column, inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    square = multiply(xs, xs, BLOCK)
    fourth = multiply(square, square, BLOCK)
    sum1, sum2, sum3 = tl.reduce((square, fourth, multiply(fourth, square, BLOCK)), 1, add_three, keep_dims=True)
    r1, r2, r3 = _inverse_rms(sum1, sum2, sum3, columns, eps)
    _store_inverse_rms(inverse_rms, row, rows, r1, r2, r3)
    # x is loaded again, from the cache: held, it would take registers from other programs. On an H200 (triton 3.6), 16384 x 8192
    # in bfloat16 takes 0.132 ms, held 0.136.
    xs = tl.load(x + row * x_stride + column, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(y + row * columns + column, _polynomial(xs, r1, r2, r3, weight, bias), inside)


@kernel
def _forward_long(y, inverse_rms, x, weight, bias, rows, columns, x_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    sum1 = tl.zeros((1, BLOCK), tl.float32)
    sum2 = tl.zeros((1, BLOCK), tl.float32)
    sum3 = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        xs = tl.load(x + row * x_stride + column, column < columns, other=0.0).to(tl.float32)
        square = xs * xs
        fourth = square * square
        sum1 += square
        sum2 += fourth
        sum3 += fourth * square
    total1, total2, total3 = tl.reduce((sum1, sum2, sum3), 1, add_three, keep_dims=True)
    r1, r2, r3 = _inverse_rms(total1, total2, total3, columns, eps)
    _store_inverse_rms(inverse_rms, row, rows, r1, r2, r3)
    # Backwards: what was read last is still in the cache.
    for back in range(0, columns, BLOCK):
        column = (columns - 1) // BLOCK * BLOCK - back + lane
        inside = column < columns
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        tl.store(y + row * columns + column, _polynomial(xs, r1, r2, r3, weight, bias), inside)


@triton.jit
def _load_inverse_rms(inverse_rms, row, rows):
    """The inverse root mean squares of x, x² and x³, ``[rows, 1]`` each."""
    r1 = tl.load(inverse_rms + row, row < rows, other=0.0)
    r2 = tl.load(inverse_rms + rows + row, row < rows, other=0.0)
    r3 = tl.load(inverse_rms + 2 * rows + row, row < rows, other=0.0)
    return r1[:, None], r2[:, None], r3[:, None]


@triton.jit
def _gradient(xs, dys, r1, r2, r3, sum1, sum2, sum3, columns, weight):
    """dx, from the sums of dy·x, dy·x² and dy·x³. The products are ordered so that no power of r is out of range."""
    w0, w1, w2 = _load_weight(weight)
    slope = w2 * r1 + xs * (2.0 * w1 * r2 + xs * (3.0 * w0 * r3))
    mean1 = w2 / columns * r1 * (r1 * sum1) * r1
    mean2 = 2.0 * w1 / columns * r2 * (r2 * sum2) * r2
    mean3 = 3.0 * w0 / columns * r3 * (r3 * sum3) * r3
    square = xs * xs
    return dys * slope - xs * (mean1 + square * (mean2 + square * mean3))


@triton.jit
def _store_partial(partial, dw0, dw1, dw2, db):
    """Store one program's column of ``partial[4, programs]``, which is added up along the programs."""
    programs = tl.num_programs(0)
    partial += tl.program_id(0)
    tl.store(partial, tl.sum(dw0))
    tl.store(partial + programs, tl.sum(dw1))
    tl.store(partial + 2 * programs, tl.sum(dw2))
    tl.store(partial + 3 * programs, tl.sum(db))


@kernel
def _backward(
    dx, partial, dy, x, weight, inverse_rms, rows, columns, dy_stride, x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    dw0 = tl.zeros((ROWS, 1), tl.float32)
    dw1 = tl.zeros((ROWS, 1), tl.float32)
    dw2 = tl.zeros((ROWS, 1), tl.float32)
    db = tl.zeros((ROWS, 1), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        r1, r2, r3 = _load_inverse_rms(inverse_rms, row, rows)
        row = row[:, None]
        inside = (row < rows) & (column < columns)
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        product = multiply(dys, xs, BLOCK)
        square = multiply(product, xs, BLOCK)
        powers = (dys, product, square, multiply(square, xs, BLOCK))
        sum0, sum1, sum2, sum3 = tl.reduce(powers, 1, add_four, keep_dims=True)
        if dx is not None:
            dxs = _gradient(xs, dys, r1, r2, r3, sum1, sum2, sum3, columns, weight)
            tl.store(dx + row * columns + column, dxs, inside)
        if partial is not None:
            dw0 += sum3 * r3
            dw1 += sum2 * r2
            dw2 += sum1 * r1
            db += sum0
    if partial is not None:
        _store_partial(partial, dw0, dw1, dw2, db)


@kernel
def _backward_long(
    dx, partial, dy, x, weight, inverse_rms, rows, columns, dy_stride, x_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    r1, r2, r3 = _load_inverse_rms(inverse_rms, row, rows)
    row = row[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    sum0 = tl.zeros((1, BLOCK), tl.float32)
    sum1 = tl.zeros((1, BLOCK), tl.float32)
    sum2 = tl.zeros((1, BLOCK), tl.float32)
    sum3 = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        inside = column < columns
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        product = dys * xs
        sum0 += dys
        sum1 += product
        sum2 += product * xs
        sum3 += product * xs * xs
    total0, total1, total2, total3 = tl.reduce((sum0, sum1, sum2, sum3), 1, add_four, keep_dims=True)
    if partial is not None:
        _store_partial(partial, total3 * r3, total2 * r2, total1 * r1, total0)
    if dx is not None:
        for back in range(0, columns, BLOCK):
            column = (columns - 1) // BLOCK * BLOCK - back + lane
            inside = column < columns
            xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
            dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
            dxs = _gradient(xs, dys, r1, r2, r3, total1, total2, total3, columns, weight)
            tl.store(dx + row * columns + column, dxs, inside)


@kernel
def _total(dweight, dbias, partial, programs, BLOCK: tl.constexpr):
    which = tl.arange(0, 4)
    sums = tl.zeros((4, BLOCK), tl.float32)
    for start in range(0, programs, BLOCK):
        program = start + tl.arange(0, BLOCK)[None, :]
        sums += tl.load(partial + which[:, None].to(tl.int64) * programs + program, program < programs, other=0.0)
    if dweight is not None:
        tl.store(dweight + which, tl.sum(sums, 1), which < 3)
    if dbias is not None:
        tl.store(dbias + which - 3, tl.sum(sums, 1), which == 3)


@implements(poly_norm)
def forward(needs: Needs, x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> tuple[Tensor, Saved]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    inverse_rms, saved = None, ()
    if True in needs:  # of x, x² and x³ in each row
        inverse_rms = torch.empty(3 * rows, dtype=torch.float32, device=x.device)
        saved = (x, weight, bias, inverse_rms)
    x, x_stride = as_rows(x)
    weight = weight.contiguous()
    if columns <= LONGEST_FORWARD:
        tile_rows, block, warps = tile_of(columns)
        _forward[((rows + tile_rows - 1) // tile_rows,)](
            y, inverse_rms, x, weight, bias, rows, columns, x_stride, eps, ROWS=tile_rows, BLOCK=block,
            num_warps=min(warps, 8),
        )  # fmt: skip
    else:
        _forward_long[(rows,)](y, inverse_rms, x, weight, bias, rows, columns, x_stride, eps, BLOCK=8192, num_warps=16)
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor, *, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, inverse_rms = saved
    columns = x.shape[-1]
    rows = x.numel() // columns
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    fits = columns <= LONGEST_BACKWARD
    tile_rows, block = tile_of(columns)[:2] if fits else (1, 8192)
    warps = max(4, block // COLUMNS_PER_WARP)
    programs = (rows + tile_rows - 1) // tile_rows
    partial, stages = None, 1
    if needs_weight or needs_bias:
        if fits:
            # As in rms_norm: two tiles are prefetched beside the one that is worked on, if shared memory holds all three.
            tile = tile_rows * block
            stages = 3 if tile_rows == 1 and 3 * 2 * tile * x.element_size() < shared_memory(x.device) else 1
            most = max(1, min(3, 8192 // tile)) if stages > 1 else 16 // warps
            programs = min(programs, sm_count(x.device) * most)
        partial = torch.empty(4 * programs, dtype=torch.float32, device=x.device)
    if fits:
        _backward[(programs,)](
            dx, partial, dy, x, weight.contiguous(), inverse_rms, rows, columns, dy_stride, x_stride,
            ROWS=tile_rows, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    else:
        _backward_long[(programs,)](
            dx, partial, dy, x, weight.contiguous(), inverse_rms, rows, columns, dy_stride, x_stride,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    if partial is None:
        return dx, None, None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    dbias = torch.empty_like(bias) if needs_bias else None
    _total[(1,)](dweight, dbias, partial, programs, BLOCK=1024, num_warps=8)
    return dx, dweight, dbias
