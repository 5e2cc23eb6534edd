"""Polynomial norm: one pass makes the mean squares of a row's three powers. Rows too long to be kept are read again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import poly_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._rows import as_rows, row_tiles

# Float32 tiles by the estimate of the Unified Buffer, for long rows in float32. Others have one or two fewer.
FORWARD_TILES = 6
BACKWARD_TILES = 8


@triton.jit
def _inverse_rms(sum1, sum2, sum3, columns, eps):
    """The factors of x, x² and x³, from the sums of their squares."""
    return tl.rsqrt(sum1 / columns + eps), tl.rsqrt(sum2 / columns + eps), tl.rsqrt(sum3 / columns + eps)


@triton.jit
def _load_weight(weight):
    return tl.load(weight).to(tl.float32), tl.load(weight + 1).to(tl.float32), tl.load(weight + 2).to(tl.float32)


@triton.jit
def _means(w0, w1, w2, r1, r2, r3, sum1, sum2, sum3, columns):
    """The share of each power that dx loses, from the sums of dy·x, dy·x² and dy·x³. No intermediate product is out of range."""
    mean1 = w2 / columns * r1 * (r1 * sum1) * r1
    mean2 = 2.0 * w1 / columns * r2 * (r2 * sum2) * r2
    mean3 = 3.0 * w0 / columns * r3 * (r3 * sum3) * r3
    return mean1, mean2, mean3


@triton.jit
def _gradient(xs, dys, slope1, slope2, slope3, mean1, mean2, mean3):
    square = xs * xs
    return dys * (slope1 + xs * (slope2 + xs * slope3)) - xs * (mean1 + square * (mean2 + square * mean3))


@triton.jit
def _forward(y, inverse_rms, x, weight, bias, rows, columns, x_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    w0, w1, w2 = _load_weight(weight)
    b = tl.load(bias).to(tl.float32)
    column = tl.arange(0, BLOCK)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        square = xs * xs
        fourth = square * square
        sum1, sum2, sum3 = tl.sum(square, 1), tl.sum(fourth, 1), tl.sum(fourth * square, 1)
        r1, r2, r3 = _inverse_rms(sum1, sum2, sum3, columns, eps)
        if inverse_rms is not None:
            flat = first + tl.arange(0, ROWS)
            tl.store(inverse_rms + flat, r1, flat < rows)
            tl.store(inverse_rms + rows + flat, r2, flat < rows)
            tl.store(inverse_rms + 2 * rows + flat, r3, flat < rows)
        ys = ((w0 * r3)[:, None] * xs + (w1 * r2)[:, None]) * xs + (w2 * r1)[:, None]
        tl.store(y + row * columns + column, ys * xs + b, inside)


@triton.jit
def _forward_long(y, inverse_rms, x, weight, bias, rows, columns, x_stride, eps, BLOCK: tl.constexpr):
    w0, w1, w2 = _load_weight(weight)
    b = tl.load(bias).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x_at, at = row * x_stride, row * columns
        sum1 = tl.zeros((BLOCK,), tl.float32)
        sum2 = tl.zeros((BLOCK,), tl.float32)
        sum3 = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            xs = tl.load(x + x_at + column, column < columns, other=0.0).to(tl.float32)
            square = xs * xs
            fourth = square * square
            sum1 += square
            sum2 += fourth
            sum3 += fourth * square
        r1, r2, r3 = _inverse_rms(tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0), columns, eps)
        if inverse_rms is not None:
            tl.store(inverse_rms + row, r1)
            tl.store(inverse_rms + rows + row, r2)
            tl.store(inverse_rms + 2 * rows + row, r3)
        for start in range(0, columns, BLOCK):
            column = start + lane
            xs = tl.load(x + x_at + column, column < columns, other=0.0).to(tl.float32)
            ys = ((w0 * r3 * xs + w1 * r2) * xs + w2 * r1) * xs + b
            tl.store(y + at + column, ys, column < columns)


@triton.jit
def _backward(
    dx, partial, dy, x, weight, inverse_rms, rows, columns, dy_stride, x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    w0, w1, w2 = _load_weight(weight)
    column = tl.arange(0, BLOCK)[None, :]
    dw0 = tl.zeros((ROWS,), tl.float32)
    dw1 = tl.zeros((ROWS,), tl.float32)
    dw2 = tl.zeros((ROWS,), tl.float32)
    db = tl.zeros((ROWS,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        flat = first + tl.arange(0, ROWS)
        r1 = tl.load(inverse_rms + flat, flat < rows, other=0.0)
        r2 = tl.load(inverse_rms + rows + flat, flat < rows, other=0.0)
        r3 = tl.load(inverse_rms + 2 * rows + flat, flat < rows, other=0.0)
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        product = dys * xs
        sum1 = tl.sum(product, 1)
        product *= xs
        sum2 = tl.sum(product, 1)
        sum3 = tl.sum(product * xs, 1)
        if partial is not None:
            dw0 += sum3 * r3
            dw1 += sum2 * r2
            dw2 += sum1 * r1
            db += tl.sum(dys, 1)
        if dx is not None:
            mean1, mean2, mean3 = _means(w0, w1, w2, r1, r2, r3, sum1, sum2, sum3, columns)
            dxs = _gradient(
                xs, dys, (w2 * r1)[:, None], (2.0 * w1 * r2)[:, None], (3.0 * w0 * r3)[:, None],
                mean1[:, None], mean2[:, None], mean3[:, None],
            )  # fmt: skip
            tl.store(dx + row * columns + column, dxs, inside)
    if partial is not None:
        partial += tl.program_id(0) * 4
        tl.store(partial, tl.sum(dw0, 0))
        tl.store(partial + 1, tl.sum(dw1, 0))
        tl.store(partial + 2, tl.sum(dw2, 0))
        tl.store(partial + 3, tl.sum(db, 0))


@triton.jit
def _backward_long(
    dx, partial, dy, x, weight, inverse_rms, rows, columns, dy_stride, x_stride, BLOCK: tl.constexpr
):  # fmt: skip
    w0, w1, w2 = _load_weight(weight)
    lane = tl.arange(0, BLOCK)
    dw0 = 0.0
    dw1 = 0.0
    dw2 = 0.0
    db = 0.0
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x_at, dy_at, at = row * x_stride, row * dy_stride, row * columns
        r1, r2 = tl.load(inverse_rms + row), tl.load(inverse_rms + rows + row)
        r3 = tl.load(inverse_rms + 2 * rows + row)
        sums0 = tl.zeros((BLOCK,), tl.float32)
        sums1 = tl.zeros((BLOCK,), tl.float32)
        sums2 = tl.zeros((BLOCK,), tl.float32)
        sums3 = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            xs = tl.load(x + x_at + column, inside, other=0.0).to(tl.float32)
            dys = tl.load(dy + dy_at + column, inside, other=0.0).to(tl.float32)
            product = dys * xs
            sums0 += dys
            sums1 += product
            product *= xs
            sums2 += product
            sums3 += product * xs
        sum1, sum2, sum3 = tl.sum(sums1, 0), tl.sum(sums2, 0), tl.sum(sums3, 0)
        if partial is not None:
            dw0 += sum3 * r3
            dw1 += sum2 * r2
            dw2 += sum1 * r1
            db += tl.sum(sums0, 0)
        if dx is not None:
            mean1, mean2, mean3 = _means(w0, w1, w2, r1, r2, r3, sum1, sum2, sum3, columns)
            for start in range(0, columns, BLOCK):
                column = start + lane
                inside = column < columns
                xs = tl.load(x + x_at + column, inside, other=0.0).to(tl.float32)
                dys = tl.load(dy + dy_at + column, inside, other=0.0).to(tl.float32)
                dxs = _gradient(xs, dys, w2 * r1, 2.0 * w1 * r2, 3.0 * w0 * r3, mean1, mean2, mean3)
                tl.store(dx + at + column, dxs, inside)
    if partial is not None:
        partial += tl.program_id(0) * 4
        tl.store(partial, dw0)
        tl.store(partial + 1, dw1)
        tl.store(partial + 2, dw2)
        tl.store(partial + 3, db)


@implements(poly_norm)
def forward(needs: Needs, x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> tuple[Tensor, Saved]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    inverse_rms, saved = None, ()
    if True in needs:  # those of x, x² and x³ in each row
        inverse_rms = torch.empty((3, rows), dtype=torch.float32, device=x.device)
        saved = (x, weight, bias, inverse_rms)
    x, x_stride = as_rows(x)
    weight = weight.contiguous()
    programs, tile_rows, block = row_tiles(x, rows, columns, FORWARD_TILES)
    if block < columns:
        _forward_long[(programs,)](y, inverse_rms, x, weight, bias, rows, columns, x_stride, eps, BLOCK=block)
    else:
        _forward[(programs,)](
            y, inverse_rms, x, weight, bias, rows, columns, x_stride, eps, ROWS=tile_rows, BLOCK=block
        )
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor, *, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, inverse_rms = saved
    columns = x.shape[-1]
    rows = x.numel() // columns
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    programs, tile_rows, block = row_tiles(x, rows, columns, BACKWARD_TILES)
    partial = None
    if needs_weight or needs_bias:
        partial = torch.empty((programs, 4), dtype=torch.float32, device=x.device)
    arguments = (dx, partial, dy, x, weight.contiguous(), inverse_rms, rows, columns, dy_stride, x_stride)
    if block < columns:
        _backward_long[(programs,)](*arguments, BLOCK=block)
    else:
        _backward[(programs,)](*arguments, ROWS=tile_rows, BLOCK=block)
    if partial is None:
        return dx, None, None
    total = partial.sum(0)
    dbias = total[3:].to(bias.dtype).view(bias.shape) if needs_bias else None
    return dx, total[:3].to(weight.dtype) if needs_weight else None, dbias
