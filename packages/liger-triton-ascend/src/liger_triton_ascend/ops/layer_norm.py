"""Layer norm: rows that fit the Unified Buffer are read once. Longer ones are read twice, first for running moments."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import layer_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._math import ones_below
from liger_triton_ascend.ops._rows import as_rows, row_tiles

# Float32 tiles by the estimate of the Unified Buffer. Forward has 5 and one for the padding, and 7 for a long row. Backward has
# 9 in bfloat16, and 10 in float32. 10 would be 160 of 192 KiB for a row of 4096. With one fewer such a row is still read once.
FORWARD_TILES = 7
BACKWARD_TILES = 9


@triton.jit
def measure(x, size, BLOCK: tl.constexpr):
    """The mean of `size` adjacent elements, and the sum of their squared distances from it, read once.

    Each lane has its own moments, so that nothing in the loop waits for a reduction. Sources: Welford, Note on a Method for
    Calculating Corrected Sums of Squares and Products, 1962. For merging the lanes: Chan, Golub and LeVeque, Updating Formulae
    and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """
    lane = tl.arange(0, BLOCK)
    mean = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    before = (size - 1) // BLOCK  # whole blocks; the last block may be partial
    for block in range(0, before):
        xs = tl.load(x + tl.cast(block, tl.int64) * BLOCK + lane).to(tl.float32)
        distance = xs - mean
        mean += distance * (1.0 / (block + 1))
        squares += distance * (xs - mean)
    rest = size - before * BLOCK
    xs = tl.load(x + tl.cast(before, tl.int64) * BLOCK + lane, lane < rest, other=0.0).to(tl.float32)
    inside = ones_below(lane, rest)
    distance = (xs - mean) * inside
    mean += distance * (1.0 / (before + 1))
    squares += distance * (xs - mean)
    count = inside + before
    # Relative to the mean of the lanes, so that a large mean costs no digits.
    middle = tl.sum(mean, 0) / BLOCK
    distance = mean - middle
    total_mean = middle + tl.sum(distance * count, 0) / size
    distance = mean - total_mean
    return total_mean, tl.sum(squares + distance * distance * count, 0)


@triton.jit
def _forward(
    y, statistics, x, weight, bias, rows, columns, x_stride, eps,
    PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, column < columns, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, column < columns, other=0.0).to(tl.float32)
    if PADDED:
        ones = ones_below(column, columns)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        mean = tl.sum(xs, 1) / columns
        centred = xs - mean[:, None]
        if PADDED:
            centred *= ones
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / columns + eps)
        if statistics is not None:
            flat = first + tl.arange(0, ROWS)
            tl.store(statistics + flat, mean, flat < rows)
            tl.store(statistics + rows + flat, rstd, flat < rows)
        ys = centred * rstd[:, None] * scale
        if bias is not None:
            ys += shift
        tl.store(y + row * columns + column, ys, inside)


@triton.jit
def _forward_long(y, statistics, x, weight, bias, rows, columns, x_stride, eps, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x_at, at = row * x_stride, row * columns
        mean, squares = measure(x + x_at, columns, BLOCK)
        rstd = tl.rsqrt(squares / columns + eps)
        if statistics is not None:
            tl.store(statistics + row, mean)
            tl.store(statistics + rows + row, rstd)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            ys = (tl.load(x + x_at + column, inside, other=0.0).to(tl.float32) - mean) * rstd
            ys *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
            if bias is not None:
                ys += tl.load(bias + column, inside, other=0.0).to(tl.float32)
            tl.store(y + at + column, ys, inside)


@triton.jit
def _backward(
    dx, partial_weight, partial_bias, dy, x, weight, statistics, rows, columns, dy_stride, x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    column = lane[None, :]
    if dx is not None:
        scale = tl.load(weight + column, column < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        flat = first + tl.arange(0, ROWS)
        mean = tl.load(statistics + flat, flat < rows, other=0.0)
        rstd = tl.load(statistics + rows + flat, flat < rows, other=0.0)[:, None]
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        normed = (xs - mean[:, None]) * rstd
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        if partial_bias is not None:
            dbias += dys
        if partial_weight is not None:
            dweight += dys * normed
        if dx is not None:
            dys *= scale
            shift = tl.sum(dys, 1) / columns
            slope = tl.sum(dys * normed, 1) / columns
            dxs = (dys - shift[:, None] - normed * slope[:, None]) * rstd
            tl.store(dx + row * columns + column, dxs, inside)
    at = tl.program_id(0) * tl.cast(columns, tl.int64) + lane
    if partial_weight is not None:
        tl.store(partial_weight + at, tl.sum(dweight, 0), lane < columns)
    if partial_bias is not None:
        tl.store(partial_bias + at, tl.sum(dbias, 0), lane < columns)


@triton.jit
def _dx_long(dx, dy, x, weight, statistics, rows, columns, dy_stride, x_stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x_at, dy_at, at = row * x_stride, row * dy_stride, row * columns
        mean, rstd = tl.load(statistics + row), tl.load(statistics + rows + row)
        sums = tl.zeros((BLOCK,), tl.float32)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            g = tl.load(dy + dy_at + column, inside, other=0.0).to(tl.float32)
            g *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
            sums += g
            products += g * (tl.load(x + x_at + column, inside, other=0.0).to(tl.float32) - mean)
        shift = tl.sum(sums, 0) / columns
        slope = tl.sum(products, 0) / columns * rstd * rstd
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            g = tl.load(dy + dy_at + column, inside, other=0.0).to(tl.float32)
            g *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
            centred = tl.load(x + x_at + column, inside, other=0.0).to(tl.float32) - mean
            tl.store(dx + at + column, (g - shift - centred * slope) * rstd, inside)


@triton.jit
def _sums_long(
    partial_weight, partial_bias, dy, x, statistics, rows, columns, dy_stride, x_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program adds up its own rows, one block of columns after another."""
    partial_at = tl.program_id(0) * tl.cast(columns, tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        dweight = tl.zeros((BLOCK,), tl.float32)
        dbias = tl.zeros((BLOCK,), tl.float32)
        for index in range(tl.program_id(0), rows, tl.num_programs(0)):
            row = tl.cast(index, tl.int64)
            dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
            if partial_bias is not None:
                dbias += dys
            if partial_weight is not None:
                mean, rstd = tl.load(statistics + row), tl.load(statistics + rows + row)
                xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
                dweight += dys * ((xs - mean) * rstd)
        if partial_weight is not None:
            tl.store(partial_weight + partial_at + column, dweight, inside)
        if partial_bias is not None:
            tl.store(partial_bias + partial_at + column, dbias, inside)


@implements(layer_norm)
def forward(needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> tuple[Tensor, Saved]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    statistics, saved = None, ()
    if True in needs:  # the mean and 1 / √(variance + eps) of each row
        statistics = torch.empty((2, rows), dtype=torch.float32, device=x.device)
        saved = (x, weight, bias, statistics)
    x, x_stride = as_rows(x)
    weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    programs, tile_rows, block = row_tiles(x, rows, columns, FORWARD_TILES)
    if block < columns:
        _forward_long[(programs,)](y, statistics, x, weight, bias, rows, columns, x_stride, eps, BLOCK=block)
    else:
        _forward[(programs,)](
            y, statistics, x, weight, bias, rows, columns, x_stride, eps,
            PADDED=block > columns, ROWS=tile_rows, BLOCK=block,
        )  # fmt: skip
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor, *, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, statistics = saved
    columns = x.shape[-1]
    rows = x.numel() // columns
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    programs, tile_rows, block = row_tiles(x, rows, columns, BACKWARD_TILES)
    partial = (programs, columns)
    dweight = torch.empty(partial, dtype=torch.float32, device=x.device) if needs_weight else None
    dbias = torch.empty(partial, dtype=torch.float32, device=x.device) if needs_bias else None
    if block >= columns:
        _backward[(programs,)](
            dx, dweight, dbias, dy, x, weight.contiguous(), statistics, rows, columns, dy_stride, x_stride,
            ROWS=tile_rows, BLOCK=block,
        )  # fmt: skip
    else:
        if needs_x:
            _dx_long[(programs,)](
                dx, dy, x, weight.contiguous(), statistics, rows, columns, dy_stride, x_stride, BLOCK=block
            )
        if needs_weight or needs_bias:
            _sums_long[(programs,)](dweight, dbias, dy, x, statistics, rows, columns, dy_stride, x_stride, BLOCK=block)
    return (
        dx,
        dweight.sum(0).to(weight.dtype) if needs_weight else None,
        dbias.sum(0).to(bias.dtype) if needs_bias else None,
    )
