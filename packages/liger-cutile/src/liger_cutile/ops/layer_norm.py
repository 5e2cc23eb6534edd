"""Layer norm: a row stays in registers from its statistics to its output. A row too long for that is read again."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import layer_norm
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._device import packed, persistent, sized, sm_count
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._math import widen_again
from liger_cutile.ops._rows import (
    ZERO,
    as_rows,
    blocks,
    hold_vector,
    load,
    load_column,
    load_vector,
    long_block,
    whole_rows,
)
from liger_cutile.ops._sums import add_four, add_two, at_once, launch_totals, sum_tile

# Longer rows are worked on in tiles of `long_block` columns.
LONGEST_FORWARD = 16384
LONGEST_BACKWARD = 8192


@ct.function
def _centre(xs, mean, first, columns, BLOCK):
    """x − mean, and 0 beyond the last column. The tile starts at column `first`."""
    column = first + ct.arange(BLOCK, dtype=ct.int32)
    return ct.where(ct.reshape(column, (1, BLOCK)) < columns, xs - mean, 0.0)


@ct.function
def _store_statistics(statistics, row, mean, rstd, ROWS):
    if given(statistics):
        ct.store(statistics, (0, row), ct.reshape(mean, (1, ROWS)), allow_tma=False)
        ct.store(statistics, (1, row), ct.reshape(rstd, (1, ROWS)), allow_tma=False)


@ct.function
def _scaled(normed, weight, bias, column, dtype, BLOCK, INSIDE):
    ys = normed * load_vector(weight, column, BLOCK, INSIDE)
    if given(bias):
        ys += load_vector(bias, column, BLOCK, INSIDE)
    return ct.astype(ys, dtype)


@ct.kernel
def _forward(y, statistics, x, weight, bias, columns, eps, INSIDE: ConstBool, ROWS: ConstInt, BLOCK: ConstInt):
    row = ct.bid(0)
    xs = load(x, (row, 0), ROWS, BLOCK, INSIDE)
    mean = ct.sum(xs, axis=1, keepdims=True) / columns
    centred = xs - mean if INSIDE else _centre(xs, mean, 0, columns, BLOCK)
    rstd = ct.rsqrt(ct.sum(centred * centred, axis=1, keepdims=True) / columns + eps)
    _store_statistics(statistics, row, mean, rstd, ROWS)
    ys = _scaled(centred * rstd, weight, bias, 0, y.dtype, BLOCK, INSIDE)
    ct.store(y, (row, 0), ys, check_bounds=not INSIDE, allow_tma=not INSIDE)


@ct.kernel(occupancy=4)
def _forward_long(y, statistics, x, weight, bias, columns, eps, BLOCK: ConstInt):
    row = ct.bid(0)
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    sums = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        sums += load(x, (row, column), 1, BLOCK)
    mean = ct.sum(sums, axis=1, keepdims=True) / columns
    squares = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        centred = _centre(load(x, (row, column), 1, BLOCK), mean, column * BLOCK, columns, BLOCK)
        squares += centred * centred
    rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / columns + eps)
    _store_statistics(statistics, row, mean, rstd, 1)
    for column in range(tiles):
        normed = (load(x, (row, column), 1, BLOCK) - mean) * rstd
        ct.store(y, (row, column), _scaled(normed, weight, bias, column, y.dtype, BLOCK, False))


@ct.function
def _store_partial(partial, which, sums, ROWS, BLOCK):
    # tileiras 13.4 doesn't drop a sum over one row. That sum would cut the buffers of the loop's loads from 113 KB to 73 on
    # sm_90.
    if ROWS > 1:
        sums = ct.sum(sums, axis=0)
    ct.store(partial, (which, ct.bid(0), 0), ct.reshape(sums, (1, 1, BLOCK)), allow_tma=False)


@ct.kernel
def _backward(
    dx, partial, dy, x, weight, statistics, columns,
    WEIGHT: ConstBool, BIAS: ConstBool, SINGLE: ConstBool, TILES: ConstInt, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    # An iteration takes one tile, or two that cross no edge. Threads wait for each other once per iteration, for all sums of
    # rows.
    dweight = ct.zeros((ROWS, BLOCK), ct.float32)
    dbias = ct.zeros((ROWS, BLOCK), ct.float32)
    weights = hold_vector(weight, BLOCK)
    for turn in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(TILES * ROWS, BLOCK)), ct.num_blocks(0)):
        x_tiles, dy_tiles, sums = (), (), ()
        for i in ct.static_iter(range(TILES)):
            x_tiles += (ct.load(x, (turn * TILES + i, 0), (ROWS, BLOCK), padding_mode=ZERO),)
            dy_tiles += (ct.load(dy, (turn * TILES + i, 0), (ROWS, BLOCK), padding_mode=ZERO),)
        if given(dx):
            for i in ct.static_iter(range(TILES)):
                g = ct.astype(dy_tiles[i], ct.float32) * ct.astype(weights, ct.float32)
                centred = ct.astype(x_tiles[i], ct.float32) - load_column(statistics, 0, turn * TILES + i, ROWS)
                sums += (g, g * centred)
            if TILES == 1:
                sums = ct.reduce(sums, 1, add_two, (0.0, 0.0), keepdims=True)
            else:
                sums = ct.reduce(sums, 1, add_four, (0.0, 0.0, 0.0, 0.0), keepdims=True)
        for i in ct.static_iter(range(TILES)):
            rstd = load_column(statistics, 1, turn * TILES + i, ROWS)
            normed = (widen_again(x_tiles[i]) - load_column(statistics, 0, turn * TILES + i, ROWS)) * rstd
            dys = widen_again(dy_tiles[i])
            if given(dx):
                scale = rstd / columns
                shift, slope = sums[2 * i] * scale, sums[2 * i + 1] * scale * rstd
                dxs = dys * ct.astype(weights, ct.float32) * rstd - shift - normed * slope
                if SINGLE:  # fusing a product with the subtraction leaves a rounding error
                    dxs = dxs * 0.0
                # On an H200, 16384 x 8192 in bfloat16 takes 0.234 ms; if TMA stored it, 0.262.
                dxs = ct.astype(dxs, dx.dtype)
                ct.store(dx, (turn * TILES + i, 0), dxs, check_bounds=TILES == 1, allow_tma=TILES == 1)
            if WEIGHT:
                dweight += dys * normed
            if BIAS:
                dbias += dys
    if WEIGHT:
        _store_partial(partial, 0, dweight, ROWS, BLOCK)
    if BIAS:
        _store_partial(partial, int(WEIGHT), dbias, ROWS, BLOCK)


@ct.kernel(occupancy=4)
def _dx_long(dx, dy, x, weight, statistics, columns, BLOCK: ConstInt):
    row = ct.bid(0)
    mean, rstd = load_column(statistics, 0, row, 1), load_column(statistics, 1, row, 1)
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    shifts = ct.zeros((1, BLOCK), ct.float32)
    slopes = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        g = load(dy, (row, column), 1, BLOCK) * load_vector(weight, column, BLOCK)
        shifts += g
        slopes += g * ((load(x, (row, column), 1, BLOCK) - mean) * rstd)
    shift = ct.sum(shifts, axis=1, keepdims=True) / columns
    slope = ct.sum(slopes, axis=1, keepdims=True) / columns
    for column in range(tiles):
        g = load(dy, (row, column), 1, BLOCK) * load_vector(weight, column, BLOCK)
        normed = (load(x, (row, column), 1, BLOCK) - mean) * rstd
        ct.store(dx, (row, column), ct.astype((g - shift - normed * slope) * rstd, dx.dtype))


@ct.function
def _sum_rows(dweight, dbias, dy, x, statistics, column, ROWS, BLOCK):
    """dweight and dbias of a block of columns, each if it is wanted."""
    products = ct.zeros((ROWS, BLOCK), ct.float32)
    sums = ct.zeros((ROWS, BLOCK), ct.float32)
    for row in range(ct.num_tiles(dy, axis=0, shape=(ROWS, BLOCK))):
        dys = load(dy, (row, column), ROWS, BLOCK)
        if given(dweight):
            centred = load(x, (row, column), ROWS, BLOCK) - load_column(statistics, 0, row, ROWS)
            products += dys * (centred * load_column(statistics, 1, row, ROWS))
        if given(dbias):
            sums += dys
    if given(dweight):
        ct.store(dweight, (column,), ct.astype(ct.sum(products, axis=0), dweight.dtype))
    if given(dbias):
        ct.store(dbias, (column,), ct.astype(ct.sum(sums, axis=0), dbias.dtype))


@ct.kernel(occupancy=4)
def _sums_long(dweight, dbias, dy, x, statistics, ROWS: ConstInt, BLOCK: ConstInt):
    _sum_rows(dweight, dbias, dy, x, statistics, ct.bid(0), ROWS, BLOCK)


@ct.kernel
def _backward_at_once(
    dx, dweight, dbias, dy, x, weight, statistics, columns,
    ROWS: ConstInt, BLOCK: ConstInt, SUM_ROWS: ConstInt, SUM_COLUMNS: ConstInt,
):  # fmt: skip
    """The first blocks add up columns, the others take rows. x and dy are read twice, but no block waits for a sum."""
    sums = ct.num_tiles(x, axis=1, shape=(SUM_ROWS, SUM_COLUMNS))
    if ct.bid(0) < sums:
        _sum_rows(dweight, dbias, dy, x, statistics, ct.bid(0), SUM_ROWS, SUM_COLUMNS)
    else:
        row = ct.bid(0) - sums
        rstd = load_column(statistics, 1, row, ROWS)
        normed = (load(x, (row, 0), ROWS, BLOCK) - load_column(statistics, 0, row, ROWS)) * rstd
        g = load(dy, (row, 0), ROWS, BLOCK) * load_vector(weight, 0, BLOCK)
        shift, slope = ct.reduce((g, g * normed), 1, add_two, (0.0, 0.0), keepdims=True)
        scale = rstd / columns
        dxs = g * rstd - shift * scale - normed * (slope * scale)
        ct.store(dx, (row, 0), ct.astype(dxs, dx.dtype))


@opaque(writes=("y", "statistics"))
def _launch_forward(
    y: Tensor, statistics: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    y, x, weight = as_rows(y), as_rows(x), weight.contiguous()
    rows, columns = x.shape
    if bias is not None:
        bias = bias.contiguous()
    if columns > LONGEST_FORWARD:
        launch(_forward_long, (rows,), y, statistics, x, weight, bias, columns, float(eps), long_block(columns))
        return
    tile_rows, block = whole_rows(columns)
    # On an H200, 8192 x 4096 in bfloat16 takes 0.039 ms without TMA and bounds checks, and 0.059 with them.
    inside = columns == block and rows % tile_rows == 0
    kernel = (packed if inside else sized)(_forward, tile_rows * block)
    grid = (blocks(rows, tile_rows),)
    launch(kernel, grid, y, statistics, x, weight, bias, columns, float(eps), inside, tile_rows, block)


@opaque(writes=("dx", "dweight", "dbias"))
def _launch_backward(
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Tensor,
) -> None:
    dy, x, weight = as_rows(dy), as_rows(x), weight.contiguous()
    rows, columns = x.shape
    if dx is not None:
        dx = as_rows(dx)
    needs_weight, needs_bias = dweight is not None, dbias is not None
    if columns > LONGEST_BACKWARD:
        if dx is not None:
            launch(_dx_long, (rows,), dx, dy, x, weight, statistics, columns, long_block(columns))
        if needs_weight or needs_bias:
            # Rows are long here: blocks of 64 columns, a 128-byte line of bf16, still give more than 128 blocks.
            launch(_sums_long, (blocks(columns, 64),), dweight, dbias, dy, x, statistics, 64, 64)
        return
    tile_rows, block = whole_rows(columns)
    if dx is not None and (needs_weight or needs_bias) and at_once(x, dy):
        sums = sum_tile(x)
        grid = (blocks(rows, tile_rows) + blocks(columns, sums[1]),)
        launch(
            sized(_backward_at_once, tile_rows * block), grid, dx, dweight, dbias, dy, x, weight, statistics,
            columns, tile_rows, block, *sums,
        )  # fmt: skip
        return
    # On an H200, 8192 x 4096 in bfloat16 takes 0.065 ms with two rows at a time, and 0.070 with one. In other dtypes two rows
    # spill.
    tiles = 2 if columns == block and tile_rows == 1 and rows % 2 == 0 and x.dtype is torch.bfloat16 else 1
    backward, resident = persistent(_backward, tile_rows * block)
    grid, partial = blocks(rows, tiles * tile_rows), None
    if needs_weight or needs_bias:
        grid = min(grid, sm_count(x.device) * resident)
        partial = torch.empty((needs_weight + needs_bias, grid, columns), dtype=torch.float32, device=x.device)
    launch(
        backward, (grid,), dx, partial, dy, x, weight, statistics, columns,
        needs_weight, needs_bias, columns == 1, tiles, tile_rows, block,
    )  # fmt: skip
    if partial is not None:
        launch_totals(dweight, dbias, partial)


@implements(layer_norm)
def forward(needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if True not in needs:
        _launch_forward(y, None, x, weight, bias, eps)
        return y, ()
    # The mean and 1 / √(variance + eps) of each row.
    statistics = torch.empty((2, x.numel() // x.shape[-1]), dtype=torch.float32, device=x.device)
    _launch_forward(y, statistics, x, weight, bias, eps)
    return y, (x, weight, bias, statistics)


def backward(needs: Needs, saved: Saved, dy: Tensor, *, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, statistics = saved
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_bias else None
    _launch_backward(dx, dweight, dbias, dy, x, weight, statistics)
    return dx, dweight, dbias
