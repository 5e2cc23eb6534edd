"""Layer norm: short and very long rows are read again from the cache for the output. Others stay in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import layer_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._device import shared_memory, sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, in_vectors, tile_of, tile_read_twice
from liger_triton.ops._sums import BYTES_AT_ONCE, COLUMNS_AT_ONCE, STAGES_AT_ONCE, add_two, at_once, multiply, totals

# Longer rows don't fit the registers of 16 warps. Forward, which keeps x, has 64 columns per thread. Backward, which keeps x and
# dy, has 32, or 16 if it keeps the sums of dweight and dbias as well. If elements are loaded one by one, each load needs an
# address, so the limits are half.
LONGEST_FORWARD = 32768
LONGEST_BACKWARD = 16384
LONGEST_SUMMED = 8192
# Rows up to this length are read twice. On an H200 (triton 3.6), in bfloat16: 2048 x 2048 takes 0.0091 ms, held in registers
# 0.0103; 8192 x 4096 0.0384 and 0.0391; but 16384 x 8192 0.138 and 0.135.
LONGEST_READ_TWICE = 4096


@triton.jit
def _mean(sums, columns):
    """The mean, rounded to nearest: equal elements then have exactly that mean, and subtracting it leaves 0."""
    return tl.math.div_rn(sums, tl.cast(columns, tl.float32))


@kernel
def _forward(
    y, statistics, x, weight, bias, rows, columns, x_stride, eps,
    TWICE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    keep: tl.constexpr = "evict_last" if TWICE else ""
    xs = tl.load(x + row * x_stride + column, inside, other=0.0, eviction_policy=keep).to(tl.float32)
    mean = _mean(tl.sum(xs, 1, keep_dims=True), columns)
    centred = tl.where(column < columns, xs - mean, 0.0)
    # torch.compile passes floats as float64.
    rstd = tl.rsqrt(tl.sum(multiply(centred, centred, BLOCK), 1, keep_dims=True) / columns + tl.cast(eps, tl.float32))
    if statistics is not None:
        tl.store(statistics + row, mean, row < rows)
        tl.store(statistics + rows + row, rstd, row < rows)
    if TWICE:
        xs = tl.load(x + row * x_stride + column, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        centred = xs - mean
    ys = centred * rstd * tl.load(weight + column, column < columns, other=0.0).to(tl.float32)
    if bias is not None:
        ys += tl.load(bias + column, column < columns, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, ys, inside)


@kernel
def _forward_long(y, statistics, x, weight, bias, rows, columns, x_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        sums += tl.load(x + row * x_stride + column, column < columns, other=0.0).to(tl.float32)
    mean = _mean(tl.sum(sums), columns)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        xs = tl.load(x + row * x_stride + column, column < columns, other=0.0).to(tl.float32)
        centred = tl.where(column < columns, xs - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares) / columns + tl.cast(eps, tl.float32))
    if statistics is not None:
        tl.store(statistics + row, mean)
        tl.store(statistics + rows + row, rstd)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        ys = (xs - mean) * rstd * tl.load(weight + column, inside, other=0.0).to(tl.float32)
        if bias is not None:
            ys += tl.load(bias + column, inside, other=0.0).to(tl.float32)
        tl.store(y + row * columns + column, ys, inside)


@triton.jit
def _take_rows(
    dx, dy, x, scale, statistics, tile, rows, columns, dy_stride, x_stride,
    SINGLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx of a tile of rows, unless it is None, and return dy and normalised x there."""
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mean = tl.load(statistics + row, row < rows, other=0.0)[:, None]
    rstd = tl.load(statistics + rows + row, row < rows, other=0.0)[:, None]
    row = row[:, None]
    inside = (row < rows) & (column < columns)
    xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
    normed = (xs - mean) * rstd
    if dx is not None:
        g = dys * scale
        shift, slope = tl.reduce((g, multiply(g, normed, BLOCK)), 1, add_two, keep_dims=True)
        by = rstd / columns
        dxs = g * rstd - shift * by - normed * (slope * by)
        if SINGLE:  # one product is fused with the subtraction and the other isn't, which leaves a rounding error
            dxs *= 0.0
        tl.store(dx + row * columns + column, dxs, inside)
    return dys, normed


@triton.jit
def _load_scale(weight, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(weight + column, column < columns, other=0.0).to(tl.float32)


@kernel
def _backward(
    dx, partial, dy, x, weight, statistics, rows, columns, dy_stride, x_stride,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    scale = _load_scale(weight, columns, BLOCK)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        dys, normed = _take_rows(
            dx, dy, x, scale, statistics, tile, rows, columns, dy_stride, x_stride, SINGLE, ROWS, BLOCK
        )
        if WEIGHT:
            dweight += dys * normed
        if BIAS:
            dbias += dys
    column = tl.arange(0, BLOCK)
    partial_row = tl.program_id(0).to(tl.int64) * (WEIGHT + BIAS)
    if WEIGHT:
        tl.store(partial + partial_row * columns + column, tl.sum(dweight, 0), column < columns)
    if BIAS:
        tl.store(partial + (partial_row + WEIGHT) * columns + column, tl.sum(dbias, 0), column < columns)


@kernel
def _dx_long(dx, dy, x, weight, statistics, rows, columns, dy_stride, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(statistics + row), tl.load(statistics + rows + row)
    shifts = tl.zeros((BLOCK,), tl.float32)
    slopes = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        g = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        g *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
        shifts += g
        slopes += g * ((tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32) - mean) * rstd)
    shift, slope = tl.sum(shifts) / columns, tl.sum(slopes) / columns
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        g = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        g *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
        normed = (tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32) - mean) * rstd
        tl.store(dx + row * columns + column, (g - shift - normed * slope) * rstd, inside)


@triton.jit
def _sum_rows(
    dweight, dbias, dy, x, statistics, rows, columns, block, first, step, dy_stride, x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dweight and dbias of a block of columns, each unless it is None, from every step-th tile of rows."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    dys_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(first, tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mean = tl.load(statistics + row, row < rows, other=0.0)[:, None]
        rstd = tl.load(statistics + rows + row, row < rows, other=0.0)[:, None]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        dys = tl.load(dy + row[:, None] * dy_stride + column[None, :], inside, other=0.0).to(tl.float32)
        if dweight is not None:
            xs = tl.load(x + row[:, None] * x_stride + column[None, :], inside, other=0.0).to(tl.float32)
            sums += dys * ((xs - mean) * rstd)
        if dbias is not None:
            dys_sums += dys
    if dweight is not None:
        tl.store(dweight + column, tl.sum(sums, 0), column < columns)
    if dbias is not None:
        tl.store(dbias + column, tl.sum(dys_sums, 0), column < columns)


@kernel
def _sums_long(
    partial, dy, x, statistics, rows, columns, blocks, dy_stride, x_stride,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0) // blocks
    at = partial + strip.to(tl.int64) * (WEIGHT + BIAS) * columns
    dweight, dbias = None, None
    if WEIGHT:
        dweight = at
    if BIAS:
        dbias = at + WEIGHT * columns
    _sum_rows(
        dweight, dbias, dy, x, statistics, rows, columns, tl.program_id(0) % blocks, strip, tl.num_programs(0) // blocks,
        dy_stride, x_stride, ROWS, BLOCK, None,
    )  # fmt: skip


@kernel
def _backward_at_once(
    dx, dweight, dbias, dy, x, weight, statistics, rows, columns, dy_stride, x_stride,
    SINGLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr,
    SUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The first programs add up columns, the others take rows. x and dy are read twice, but no program waits for a sum."""
    blocks = tl.cdiv(columns, SUM_COLUMNS)
    if tl.program_id(0) < blocks:
        _sum_rows(
            dweight, dbias, dy, x, statistics, rows, columns, tl.program_id(0), 0, 1, dy_stride, x_stride,
            SUM_ROWS, SUM_COLUMNS, SUM_STAGES,
        )  # fmt: skip
    else:
        scale = _load_scale(weight, columns, BLOCK)
        tile = tl.program_id(0) - blocks
        _take_rows(dx, dy, x, scale, statistics, tile, rows, columns, dy_stride, x_stride, SINGLE, ROWS, BLOCK)


@implements(layer_norm)
def forward(needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> tuple[Tensor, Saved]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    statistics, saved = None, ()
    if True in needs:  # the mean and 1 / √(variance + eps) of each row
        statistics = torch.empty(2 * rows, dtype=torch.float32, device=x.device)
        saved = (x, weight, bias, statistics)
    x, x_stride = as_rows(x)
    weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    if columns <= (LONGEST_FORWARD if in_vectors(columns, x_stride) else LONGEST_FORWARD // 2):
        twice = columns <= LONGEST_READ_TWICE
        tile_rows, block, warps = tile_read_twice(columns) if twice else tile_of(columns)
        if block <= 16384:
            # The two sums come one after the other, and wait less with fewer warps. On an H200, 16384 rows of 8192 take 0.135
            # ms, with 16 warps 0.147.
            warps = min(warps, 8)
        _forward[((rows + tile_rows - 1) // tile_rows,)](
            y, statistics, x, weight, bias, rows, columns, x_stride, eps,
            TWICE=twice, ROWS=tile_rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    else:
        _forward_long[(rows,)](y, statistics, x, weight, bias, rows, columns, x_stride, eps, BLOCK=8192, num_warps=16)
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor, *, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, statistics = saved
    columns = x.shape[-1]
    rows = x.numel() // columns
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    scale = weight.contiguous()
    tile_rows, block, warps = tile_of(columns)
    programs = (rows + tile_rows - 1) // tile_rows
    sums, partial, stages = needs_weight + needs_bias, None, 1
    if needs_x and sums and at_once(x, rows, columns):
        dweight = torch.empty_like(scale) if needs_weight else None
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_bias else None
        _backward_at_once[(programs + (columns + COLUMNS_AT_ONCE - 1) // COLUMNS_AT_ONCE,)](
            dx, dweight, dbias, dy, x, scale, statistics, rows, columns, dy_stride, x_stride,
            SINGLE=columns == 1, ROWS=tile_rows, BLOCK=block, SUM_ROWS=BYTES_AT_ONCE // x.element_size(),
            SUM_COLUMNS=COLUMNS_AT_ONCE, SUM_STAGES=STAGES_AT_ONCE, num_warps=warps,
        )  # fmt: skip
        return dx, dweight, dbias
    share = 1 if in_vectors(columns, dy_stride, x_stride) else 2
    fused = sums > 0 and columns <= LONGEST_SUMMED // share
    if fused:
        # As in rms_norm: two tiles are prefetched beside the one that is worked on, if shared memory holds all three.
        tile = tile_rows * block
        stages = 3 if 3 * 2 * tile * x.element_size() < shared_memory(x.device) else 1
        programs = min(programs, sm_count(x.device) * (max(1, min(3, 8192 // tile)) if stages > 1 else 16 // warps))
        partial = torch.empty(programs * sums * columns, dtype=torch.float32, device=x.device)
    if fused or (needs_x and columns <= LONGEST_BACKWARD // share):
        _backward[(programs,)](
            dx, partial, dy, x, scale, statistics, rows, columns, dy_stride, x_stride,
            WEIGHT=fused and needs_weight, BIAS=fused and needs_bias, SINGLE=columns == 1,
            ROWS=tile_rows, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    elif needs_x:
        _dx_long[(rows,)](dx, dy, x, scale, statistics, rows, columns, dy_stride, x_stride, BLOCK=4096, num_warps=8)
    if sums and not fused:
        blocks = (columns + 255) // 256
        programs = max(1, min((rows + 15) // 16, sm_count(x.device) * 8 // blocks))
        partial = torch.empty(programs * sums * columns, dtype=torch.float32, device=x.device)
        _sums_long[(programs * blocks,)](
            partial, dy, x, statistics, rows, columns, blocks, dy_stride, x_stride,
            WEIGHT=needs_weight, BIAS=needs_bias, ROWS=16, BLOCK=256,
        )  # fmt: skip
    if partial is None:
        return dx, None, None
    dweight, dbias, _ = totals(
        partial, programs, columns, weight if needs_weight else None, bias if needs_bias else None
    )
    return dx, dweight, dbias
