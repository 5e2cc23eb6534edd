"""RMS norm: a row stays in registers from its statistics to its output. A row too long for that is read twice.

Blocks take row after row, and hold the weight meanwhile.
"""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import rms_norm
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._device import by_turns, persistent, sized, sm_count
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._math import widen_again
from liger_cutile.ops._rms import inverse_rms_of, load_weight, rounded, scaled, unscaled
from liger_cutile.ops._rows import ZERO, as_rows, blocks, hold_vector, load, load_vector, long_block, whole_rows
from liger_cutile.ops._sums import at_once, launch_total, sum_tile

# Longer rows are worked on in tiles of `long_block` columns. Rows twice as long spill registers on sm_90 (tileiras 13.4).
LONGEST_FORWARD = 16384
LONGEST_BACKWARD = 8192
# Longer rows leave room for the weight in fewer blocks. If they fill their tile, a block for each row, without TMA, is faster:
# on an H200 at 16384 x 8192 in bfloat16 it takes 0.135 ms, and blocks that take row after row 0.144. At 8192 x 4096: 0.045 and
# 0.040.
LONGEST_HELD = 4096
# The same with a residual, with which blocks that take row after row wait longer. On an H200 in bfloat16, a block for each row
# and blocks that take row after row take, in ms: 0.071 and 0.073 at 8192 x 4096, 0.070 and 0.073 at 16384 x 2048, 0.073 and
# 0.075 at 65536 x 512.
LONGEST_HELD_FUSED = 256


@ct.function
def _load_first(h, x, residual, place, ROWS, BLOCK, INSIDE):
    """x, or the rounded x + residual, which is then written to h."""
    xs = load(x, place, ROWS, BLOCK, INSIDE)
    if given(residual):
        sums = ct.astype(xs + load(residual, place, ROWS, BLOCK, INSIDE), h.dtype)
        # Not by TMA: if a loop has two such stores, tileiras 13.4 lets one's buffer be overwritten before it is read.
        ct.store(h, place, sums, check_bounds=not INSIDE, allow_tma=False)
        return ct.astype(sums, ct.float32)
    else:
        return xs


@ct.function
def _load_again(h, x, place, BLOCK):
    """The result of `_load_first`, loaded again."""
    if given(h):
        return load(h, place, 1, BLOCK)
    else:
        return load(x, place, 1, BLOCK)


@ct.function
def _load_rows(h, inverse_rms, x, residual, row, columns, eps, NATIVE, ROWS, BLOCK, INSIDE):
    """The results of `_load_first` for whole rows, and their inverse RMS, which is written as well."""
    xs = _load_first(h, x, residual, (row, 0), ROWS, BLOCK, INSIDE)
    squares = ct.sum(rounded(xs * xs, x.dtype, NATIVE), axis=1, keepdims=True)
    r = inverse_rms_of(squares, columns, eps, x.dtype, NATIVE)
    if given(inverse_rms):
        ct.store(inverse_rms, (row, 0), r, allow_tma=False)
    return xs, r


@ct.kernel
def _forward(
    y, h, inverse_rms, x, residual, weight, columns, eps, offset,
    ROUND: ConstBool, NATIVE: ConstBool, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    weights = hold_vector(weight, BLOCK)
    for row in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        xs, r = _load_rows(h, inverse_rms, x, residual, row, columns, eps, NATIVE, ROWS, BLOCK, False)
        ct.store(y, (row, 0), scaled(xs, r, weight, weights, offset, y.dtype, ROUND, NATIVE))


@ct.kernel
def _forward_inside(
    y, h, inverse_rms, x, residual, weight, columns, eps, offset, ROUND: ConstBool, NATIVE: ConstBool, BLOCK: ConstInt
):  # fmt: skip
    row = ct.bid(0)
    xs, r = _load_rows(h, inverse_rms, x, residual, row, columns, eps, NATIVE, 1, BLOCK, True)
    weights = load_weight(weight, 0, BLOCK, True)
    ys = scaled(xs, r, weight, weights, offset, y.dtype, ROUND, NATIVE)
    ct.store(y, (row, 0), ys, check_bounds=False, allow_tma=False)


@ct.kernel(occupancy=4)
def _forward_long(
    y, h, inverse_rms, x, residual, weight, columns, eps, offset, ROUND: ConstBool, NATIVE: ConstBool, BLOCK: ConstInt
):  # fmt: skip
    row = ct.bid(0)
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    squares = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        xs = _load_first(h, x, residual, (row, column), 1, BLOCK, False)
        squares += rounded(xs * xs, x.dtype, NATIVE)
    r = inverse_rms_of(ct.sum(squares, axis=1, keepdims=True), columns, eps, x.dtype, NATIVE)
    if given(inverse_rms):
        ct.store(inverse_rms, (row, 0), r)
    for column in range(tiles):
        xs = _load_again(h, x, (row, column), BLOCK)
        weights = load_weight(weight, column, BLOCK, False)
        ct.store(y, (row, column), scaled(xs, r, weight, weights, offset, y.dtype, ROUND, NATIVE))


@ct.kernel
def _backward(
    dx, partial, dy, dh, x, weight, inverse_rms, columns, offset, PAIRS: ConstBool, ROWS: ConstInt, BLOCK: ConstInt
):  # fmt: skip
    # PAIRS: for the longest rows, x and dy are held in their own dtype, beside one row of dweight.
    dweight = ct.zeros((1 if PAIRS else ROWS, BLOCK), ct.float32)
    weights = hold_vector(weight, BLOCK)
    for row in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        r = load(inverse_rms, (row, 0), ROWS, 1)
        x_tile = ct.load(x, (row, 0), (ROWS, BLOCK), padding_mode=ZERO)
        dy_tile = ct.load(dy, (row, 0), (ROWS, BLOCK), padding_mode=ZERO)
        xs, dys = ct.astype(x_tile, ct.float32), ct.astype(dy_tile, ct.float32)
        if given(dx):
            g = unscaled(dys, weight, weights, offset)
            slope = ct.sum(g * xs, axis=1, keepdims=True) / columns * r * r * r
            if PAIRS:
                xs, dys = widen_again(x_tile), widen_again(dy_tile)
                g = unscaled(dys, weight, weights, offset)
            dxs = g * r - xs * slope
            if given(dh):
                dxs += load(dh, (row, 0), ROWS, BLOCK)
            ct.store(dx, (row, 0), ct.astype(dxs, dx.dtype))
        if given(partial):
            products = dys * (xs * r)
            dweight += ct.sum(products, axis=0, keepdims=True) if PAIRS else products
    if given(partial):
        ct.store(partial, (ct.bid(0), 0), ct.sum(dweight, axis=0, keepdims=True))


@ct.kernel(occupancy=4)
def _dx_long(dx, dy, dh, x, weight, inverse_rms, columns, offset, BLOCK: ConstInt):
    row = ct.bid(0)
    r = load(inverse_rms, (row, 0), 1, 1)
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    products = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        g = load(dy, (row, column), 1, BLOCK)
        if given(weight):
            g = g * (load_vector(weight, column, BLOCK) + offset)
        products += g * load(x, (row, column), 1, BLOCK)
    slope = ct.sum(products, axis=1, keepdims=True) / columns * r * r * r
    for column in range(tiles):
        g = load(dy, (row, column), 1, BLOCK)
        if given(weight):
            g = g * (load_vector(weight, column, BLOCK) + offset)
        dxs = g * r - load(x, (row, column), 1, BLOCK) * slope
        if given(dh):
            dxs += load(dh, (row, column), 1, BLOCK)
        ct.store(dx, (row, column), ct.astype(dxs, dx.dtype))


@ct.function
def _sum_rows(dweight, dy, x, inverse_rms, column, ROWS, BLOCK):
    """dweight of a block of columns."""
    sums = ct.zeros((ROWS, BLOCK), ct.float32)
    for row in range(ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK))):
        normed = load(x, (row, column), ROWS, BLOCK) * load(inverse_rms, (row, 0), ROWS, 1)
        sums += load(dy, (row, column), ROWS, BLOCK) * normed
    ct.store(dweight, (column,), ct.astype(ct.sum(sums, axis=0), dweight.dtype))


@ct.kernel(occupancy=4)
def _dweight_long(dweight, dy, x, inverse_rms, ROWS: ConstInt, BLOCK: ConstInt):
    _sum_rows(dweight, dy, x, inverse_rms, ct.bid(0), ROWS, BLOCK)


@ct.kernel
def _backward_at_once(
    dx, dweight, dy, dh, x, weight, inverse_rms, columns, offset,
    ROWS: ConstInt, BLOCK: ConstInt, SUM_ROWS: ConstInt, SUM_COLUMNS: ConstInt,
):  # fmt: skip
    """The first blocks add up columns, the others take rows. x and dy are read twice, but no block waits for a sum."""
    sums = ct.num_tiles(x, axis=1, shape=(SUM_ROWS, SUM_COLUMNS))
    if ct.bid(0) < sums:
        _sum_rows(dweight, dy, x, inverse_rms, ct.bid(0), SUM_ROWS, SUM_COLUMNS)
    else:
        row = ct.bid(0) - sums
        r = load(inverse_rms, (row, 0), ROWS, 1)
        xs, dys = load(x, (row, 0), ROWS, BLOCK), load(dy, (row, 0), ROWS, BLOCK)
        g = dys * (load_vector(weight, 0, BLOCK) + offset)
        slope = ct.sum(g * xs, axis=1, keepdims=True) / columns * r * r * r
        dxs = g * r - xs * slope
        if given(dh):
            dxs += load(dh, (row, 0), ROWS, BLOCK)
        ct.store(dx, (row, 0), ct.astype(dxs, dx.dtype))


@opaque(writes=("y", "h", "inverse_rms"))
def launch_forward(
    y: Tensor,
    h: Tensor | None,
    inverse_rms: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
) -> None:
    """Write the norm of x; or h = x + residual and the norm of h. Write the inverse RMS of each row."""
    y, x = as_rows(y), as_rows(x)
    h, residual = (None if t is None else as_rows(t) for t in (h, residual))
    rows, columns = x.shape
    if weight is not None:
        weight = weight.contiguous()
    numbers = columns, float(eps), float(offset), casting_mode != "gemma", casting_mode == "none"
    if columns > LONGEST_FORWARD:
        launch(_forward_long, (rows,), y, h, inverse_rms, x, residual, weight, *numbers, long_block(columns))
        return
    tile_rows, block = whole_rows(columns)
    if columns == block > (LONGEST_HELD if residual is None else LONGEST_HELD_FUSED):
        launch(_forward_inside, (rows,), y, h, inverse_rms, x, residual, weight, *numbers, block)
    else:
        kernel, grid = by_turns(_forward, x, tile_rows, block, 2)
        launch(kernel, grid, y, h, inverse_rms, x, residual, weight, *numbers, tile_rows, block)


@opaque(writes=("dx", "dweight"))
def launch_backward(
    dx: Tensor | None,
    dweight: Tensor | None,
    dy: Tensor,
    dh: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    inverse_rms: Tensor,
    offset: float,
) -> None:
    """Write dx, plus `dh` if there is one, and dweight."""
    dy, x = as_rows(dy), as_rows(x)
    dx, dh = (None if t is None else as_rows(t) for t in (dx, dh))
    rows, columns = x.shape
    if weight is not None:
        weight = weight.contiguous()
    if columns > LONGEST_BACKWARD:
        if dx is not None:
            block = long_block(columns)
            launch(_dx_long, (rows,), dx, dy, dh, x, weight, inverse_rms, columns, float(offset), block)
        if dweight is not None:
            # Rows are long here: blocks of 64 columns, a 128-byte line of bf16, still give more than 128 blocks.
            launch(_dweight_long, (blocks(columns, 64),), dweight, dy, x, inverse_rms, 64, 64)
        return
    tile_rows, block = whole_rows(columns)
    if dx is not None and dweight is not None and at_once(x, dy):
        sums = sum_tile(x)
        grid = (blocks(rows, tile_rows) + blocks(columns, sums[1]),)
        launch(
            sized(_backward_at_once, tile_rows * block), grid, dx, dweight, dy, dh, x, weight, inverse_rms,
            columns, float(offset), tile_rows, block, *sums,
        )  # fmt: skip
        return
    # On an H200, 16384 x 8192 in bfloat16 takes 0.229 ms in pairs, and 0.246 row by row. In pairs, rows that don't fill their
    # tile spill; if dweight isn't wanted, some rows do on sm_100.
    pairs = columns == LONGEST_BACKWARD and x.dtype is torch.bfloat16 and dweight is not None
    if pairs:
        tile_rows = 2
    kernel, resident = persistent(_backward, tile_rows * block)
    grid, partial = blocks(rows, tile_rows), None
    if dweight is not None:
        grid = min(grid, sm_count(x.device) * resident)
        partial = torch.empty((grid, columns), dtype=torch.float32, device=x.device)
    launch(
        kernel, (grid,), dx, partial, dy, dh, x, weight, inverse_rms, columns, float(offset), pairs, tile_rows, block
    )
    if partial is not None:
        launch_total(dweight, partial)


@implements(rms_norm)
def forward(
    needs: Needs,
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if True not in needs:
        launch_forward(y, None, None, x, None, weight, eps, offset, casting_mode)
        return y, ()
    inverse_rms = torch.empty((x.numel() // x.shape[-1], 1), dtype=torch.float32, device=x.device)
    launch_forward(y, None, inverse_rms, x, None, weight, eps, offset, casting_mode)
    return y, (x, weight, inverse_rms)


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    x, weight, inverse_rms = saved
    needs_x, needs_weight = needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    launch_backward(dx, dweight, dy, None, x, weight, inverse_rms, offset)
    return dx, dweight
