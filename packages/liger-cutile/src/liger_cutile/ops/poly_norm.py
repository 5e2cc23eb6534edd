"""Polynomial norm: one pass makes the mean squares of a row's three powers. The row stays in registers, or is read again."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import poly_norm
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._device import by_turns, persistent, sm_count
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import ZERO, as_rows, blocks, load, load_column, load_vector, whole_rows
from liger_cutile.ops._sums import add_four, add_three

# Longer rows are worked on in tiles of LONG_BLOCK columns.
LONGEST_FORWARD = 16384
LONGEST_BACKWARD = 8192
LONG_BLOCK = 4096
# The long backward's blocks per multiprocessor.
LONG_BLOCKS = 2


@ct.function
def _squares(xs):
    """The squares of x, x² and x³."""
    square = xs * xs
    fourth = square * square
    return square, fourth, fourth * square


@ct.function
def _inverse_rms(squares, columns, eps):
    """The factors of x, x² and x³, from their squares. All three are summed in one exchange between the warps."""
    sum1, sum2, sum3 = ct.reduce(squares, 1, add_three, (0.0, 0.0, 0.0), keepdims=True)
    return ct.rsqrt(sum1 / columns + eps), ct.rsqrt(sum2 / columns + eps), ct.rsqrt(sum3 / columns + eps)


@ct.function
def _store_inverse_rms(inverse_rms, row, factors, ROWS):
    if given(inverse_rms):
        ct.store(inverse_rms, (0, row), ct.reshape(factors[0], (1, ROWS)), allow_tma=False)
        ct.store(inverse_rms, (1, row), ct.reshape(factors[1], (1, ROWS)), allow_tma=False)
        ct.store(inverse_rms, (2, row), ct.reshape(factors[2], (1, ROWS)), allow_tma=False)


@ct.function
def _load_inverse_rms(inverse_rms, row, ROWS):
    return (
        load_column(inverse_rms, 0, row, ROWS),
        load_column(inverse_rms, 1, row, ROWS),
        load_column(inverse_rms, 2, row, ROWS),
    )


@ct.function
def _load_weight(weight):
    return load_vector(weight, 0, 1), load_vector(weight, 1, 1), load_vector(weight, 2, 1)


@ct.function
def _polynomial(xs, factors, weight, bias):
    r1, r2, r3 = factors
    w0, w1, w2 = _load_weight(weight)
    return ((w0 * r3 * xs + w1 * r2) * xs + w2 * r1) * xs + load_vector(bias, 0, 1)


@ct.kernel
def _forward(y, inverse_rms, x, weight, bias, columns, eps, ROWS: ConstInt, BLOCK: ConstInt):
    for row in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        xs = load(x, (row, 0), ROWS, BLOCK)
        factors = _inverse_rms(_squares(xs), columns, eps)
        _store_inverse_rms(inverse_rms, row, factors, ROWS)
        ct.store(y, (row, 0), ct.astype(_polynomial(xs, factors, weight, bias), y.dtype))


@ct.kernel(occupancy=3)
def _forward_long(y, inverse_rms, x, weight, bias, columns, eps, BLOCK: ConstInt):
    row = ct.bid(0)
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    sums1 = ct.zeros((1, BLOCK), ct.float32)
    sums2 = ct.zeros((1, BLOCK), ct.float32)
    sums3 = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        square, fourth, sixth = _squares(load(x, (row, column), 1, BLOCK))
        sums1 += square
        sums2 += fourth
        sums3 += sixth
    factors = _inverse_rms((sums1, sums2, sums3), columns, eps)
    _store_inverse_rms(inverse_rms, row, factors, 1)
    for back in range(tiles):  # backwards: what was read last is still in the cache
        place = row, tiles - 1 - back
        ys = _polynomial(load(x, place, 1, BLOCK), factors, weight, bias)
        ct.store(y, place, ct.astype(ys, y.dtype))


@ct.function
def _gradient(xs, dys, factors, sums, columns, weight):
    """dx, from the sums of dy·x, dy·x² and dy·x³. The products are ordered so that no power of r is out of range."""
    (r1, r2, r3), (_, sum1, sum2, sum3) = factors, sums
    w0, w1, w2 = _load_weight(weight)
    slope = w2 * r1 + xs * (2.0 * w1 * r2 + xs * (3.0 * w0 * r3))
    mean1 = w2 / columns * r1 * (r1 * sum1) * r1
    mean2 = 2.0 * w1 / columns * r2 * (r2 * sum2) * r2
    mean3 = 3.0 * w0 / columns * r3 * (r3 * sum3) * r3
    square = xs * xs
    return dys * slope - xs * (mean1 + square * (mean2 + square * mean3))


@ct.function
def _store_partial(partial, dw0, dw1, dw2, db):
    """Store one block's column of ``partial[4, blocks]``, which is added up along the blocks."""
    ct.store(partial, (0, ct.bid(0)), ct.sum(dw0, axis=0, keepdims=True), allow_tma=False)
    ct.store(partial, (1, ct.bid(0)), ct.sum(dw1, axis=0, keepdims=True), allow_tma=False)
    ct.store(partial, (2, ct.bid(0)), ct.sum(dw2, axis=0, keepdims=True), allow_tma=False)
    ct.store(partial, (3, ct.bid(0)), ct.sum(db, axis=0, keepdims=True), allow_tma=False)


@ct.kernel
def _backward(dx, partial, dy, x, weight, inverse_rms, columns, ROWS: ConstInt, BLOCK: ConstInt):
    dw0 = ct.zeros((ROWS, 1), ct.float32)
    dw1 = ct.zeros((ROWS, 1), ct.float32)
    dw2 = ct.zeros((ROWS, 1), ct.float32)
    db = ct.zeros((ROWS, 1), ct.float32)
    for row in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        factors = _load_inverse_rms(inverse_rms, row, ROWS)
        xs = load(x, (row, 0), ROWS, BLOCK)
        dys = load(dy, (row, 0), ROWS, BLOCK)
        product = dys * xs
        powers = dys, product, product * xs, product * xs * xs
        sums = ct.reduce(powers, 1, add_four, (0.0, 0.0, 0.0, 0.0), keepdims=True)
        if given(dx):
            ct.store(dx, (row, 0), ct.astype(_gradient(xs, dys, factors, sums, columns, weight), dx.dtype))
        if given(partial):
            dw0 += sums[3] * factors[2]
            dw1 += sums[2] * factors[1]
            dw2 += sums[1] * factors[0]
            db += sums[0]
    if given(partial):
        _store_partial(partial, dw0, dw1, dw2, db)


@ct.kernel(occupancy=LONG_BLOCKS)
def _backward_long(dx, partial, dy, x, weight, inverse_rms, columns, ROWS: ConstInt, BLOCK: ConstInt):
    tiles = ct.num_tiles(x, axis=1, shape=(ROWS, BLOCK))
    dw0 = ct.zeros((ROWS, 1), ct.float32)
    dw1 = ct.zeros((ROWS, 1), ct.float32)
    dw2 = ct.zeros((ROWS, 1), ct.float32)
    db = ct.zeros((ROWS, 1), ct.float32)
    for row in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        factors = _load_inverse_rms(inverse_rms, row, ROWS)
        sums0 = ct.zeros((ROWS, BLOCK), ct.float32)
        sums1 = ct.zeros((ROWS, BLOCK), ct.float32)
        sums2 = ct.zeros((ROWS, BLOCK), ct.float32)
        sums3 = ct.zeros((ROWS, BLOCK), ct.float32)
        for column in range(tiles):
            xs = load(x, (row, column), ROWS, BLOCK)
            dys = load(dy, (row, column), ROWS, BLOCK)
            product = dys * xs
            sums0 += dys
            sums1 += product
            sums2 += product * xs
            sums3 += product * xs * xs
        sums = ct.reduce((sums0, sums1, sums2, sums3), 1, add_four, (0.0, 0.0, 0.0, 0.0), keepdims=True)
        if given(dx):
            for back in range(tiles):
                place = row, tiles - 1 - back
                xs, dys = load(x, place, ROWS, BLOCK), load(dy, place, ROWS, BLOCK)
                ct.store(dx, place, ct.astype(_gradient(xs, dys, factors, sums, columns, weight), dx.dtype))
        if given(partial):
            dw0 += sums[3] * factors[2]
            dw1 += sums[2] * factors[1]
            dw2 += sums[1] * factors[0]
            db += sums[0]
    if given(partial):
        _store_partial(partial, dw0, dw1, dw2, db)


@ct.kernel(occupancy=4)
def _total(dweight, dbias, partial, BLOCK: ConstInt):
    sums = ct.zeros((4, BLOCK), ct.float32)
    for block in range(ct.num_tiles(partial, axis=1, shape=(4, BLOCK))):
        sums += ct.load(partial, (0, block), (4, BLOCK), padding_mode=ZERO, allow_tma=False)
    totals = ct.sum(sums, axis=1)
    if given(dweight):  # the fourth sum is dropped
        ct.store(dweight, (0,), ct.astype(totals, dweight.dtype))
    if given(dbias):
        ct.store(dbias, (0,), ct.astype(ct.extract(totals, (3,), (1,)), dbias.dtype))


@opaque(writes=("y", "inverse_rms"))
def _launch_forward(y: Tensor, inverse_rms: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    y, x = as_rows(y), as_rows(x)
    bias = bias if bias.dim() else bias.view(1)
    rows, columns = x.shape
    if columns <= LONGEST_FORWARD:
        tile_rows, block = whole_rows(columns)
        # On an H200, 8192 x 4096 in bfloat16 takes 0.040 ms, and 0.055 with a block for each row.
        kernel, grid = by_turns(_forward, x, tile_rows, block, 2)
        launch(kernel, grid, y, inverse_rms, x, weight, bias, columns, float(eps), tile_rows, block)
    else:
        launch(_forward_long, (rows,), y, inverse_rms, x, weight, bias, columns, float(eps), LONG_BLOCK)


@opaque(writes=("dx", "dweight", "dbias"))
def _launch_backward(
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
) -> None:
    dy, x = as_rows(dy), as_rows(x)
    rows, columns = x.shape
    if dx is not None:
        dx = as_rows(dx)
    if columns <= LONGEST_BACKWARD:
        tile_rows, block = whole_rows(columns)
        kernel, at_once = persistent(_backward, tile_rows * block)
    else:
        tile_rows, block = 1, LONG_BLOCK
        kernel, at_once = _backward_long, LONG_BLOCKS
    grid, partial = blocks(rows, tile_rows), None
    if dweight is not None or dbias is not None:
        grid = min(grid, sm_count(x.device) * at_once)
        partial = torch.empty((4, grid), dtype=torch.float32, device=x.device)
    launch(kernel, (grid,), dx, partial, dy, x, weight, inverse_rms, columns, tile_rows, block)
    if partial is not None:
        dbias = dbias.view(1) if dbias is not None and not dbias.dim() else dbias
        launch(_total, (1,), dweight, dbias, partial, 512)


@implements(poly_norm)
def forward(needs: Needs, x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if True not in needs:
        _launch_forward(y, None, x, weight, bias, eps)
        return y, ()
    # The inverse RMS of x, x² and x³ in each row.
    inverse_rms = torch.empty((3, x.numel() // x.shape[-1]), dtype=torch.float32, device=x.device)
    _launch_forward(y, inverse_rms, x, weight, bias, eps)
    return y, (x, weight, bias, inverse_rms)


def backward(needs: Needs, saved: Saved, dy: Tensor, *, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, inverse_rms = saved
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_bias else None
    _launch_backward(dx, dweight, dbias, dy, x, weight, inverse_rms)
    return dx, dweight, dbias
