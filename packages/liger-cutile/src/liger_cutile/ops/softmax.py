"""Softmax: a row stays in registers, and blocks take row after row.

A row too long for that is read twice, with an online sum the first time.
"""

import math

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import softmax
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._device import by_turns
from liger_cutile.ops._launch import ConstInt, launch
from liger_cutile.ops._math import LEAST, exp_like, widen_again
from liger_cutile.ops._rows import as_rows, load, whole_rows
from liger_cutile.ops._sums import add_two

# Longer rows are worked on in tiles of LONG_BLOCK columns. Rows twice as long spill registers on sm_90 (tileiras 13.4).
LONGEST_FORWARD = 32768
LONGEST_BACKWARD = 16384
LONGEST_IN_PARTS = 32768
LONG_BLOCK = 4096


@ct.kernel
def _forward(y, x, columns, ROWS: ConstInt, BLOCK: ConstInt):
    lanes = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    for row in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        # TMA can only pad with zeros.
        xs = ct.where(lanes < columns, load(x, (row, 0), ROWS, BLOCK), -math.inf)
        e = exp_like(xs - ct.max(xs, axis=1, keepdims=True), x)
        ys = e * (1.0 / ct.sum(e, axis=1, keepdims=True))
        # On an H200, 8192 x 32768 in bfloat16 takes 0.284 ms; if TMA stored it, 0.302.
        ct.store(y, (row, 0), ct.astype(ys, y.dtype), allow_tma=False)


@ct.kernel(occupancy=4)
def _forward_long(y, x, columns, BLOCK: ConstInt):
    row = ct.bid(0)
    lanes = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    # Each column of the tile has a maximum and a sum of its own.
    maximum = ct.full((1, BLOCK), LEAST, ct.float32)
    total = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        xs = ct.where(lanes < columns - column * BLOCK, load(x, (row, column), 1, BLOCK), -math.inf)
        above = xs - maximum
        e = exp_like(-ct.abs(above), x)
        total = ct.where(above > 0.0, total * e + 1.0, total + e)
        maximum = ct.maximum(maximum, xs)
    highest = ct.max(maximum, axis=1, keepdims=True)
    scale = 1.0 / ct.sum(total * ct.exp(maximum - highest), axis=1, keepdims=True)
    for back in range(tiles):
        column = tiles - 1 - back  # backwards: what was read last is still in the cache
        xs = load(x, (row, column), 1, BLOCK)
        ct.store(y, (row, column), ct.astype(exp_like(xs - highest, x) * scale, y.dtype))


@ct.kernel
def _backward(dx, dy, y, ROWS: ConstInt, BLOCK: ConstInt):
    for row in range(ct.bid(0), ct.num_tiles(y, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        ys = load(y, (row, 0), ROWS, BLOCK)
        dys = load(dy, (row, 0), ROWS, BLOCK)
        # Divided by the sum of y, which is 1 but for rounding, so that a constant dy gives 0.
        mean = ct.sum(ys * dys, axis=1, keepdims=True) / ct.sum(ys, axis=1, keepdims=True)
        ct.store(dx, (row, 0), ct.astype(ys * (dys - mean), dx.dtype))


@ct.function
def _load_part(array, place, BLOCK):
    """A part of a row that fills its tiles, in the array's dtype."""
    return ct.load(array, place, (1, BLOCK), check_bounds=False, allow_tma=False)


# Held in bfloat16, a row of 32768 elements takes 128 registers per thread. On an H200, 8192 such rows take 0.41 ms; read twice,
# 0.53.
@ct.kernel(num_worker_warps=8)
def _backward_parts(dx, dy, y, PARTS: ConstInt, BLOCK: ConstInt):
    row = ct.bid(0)
    ys, dys = (), ()
    total = ct.zeros((1, BLOCK), ct.float32)
    products = ct.zeros((1, BLOCK), ct.float32)
    for column in ct.static_iter(range(PARTS)):
        ys += (_load_part(y, (row, column), BLOCK),)
        dys += (_load_part(dy, (row, column), BLOCK),)
        part = ct.astype(ys[column], ct.float32)
        total += part
        products += part * ct.astype(dys[column], ct.float32)
    total, products = ct.reduce((total, products), 1, add_two, (0.0, 0.0), keepdims=True)
    mean = products / total
    for column in ct.static_iter(range(PARTS)):
        dxs = widen_again(ys[column]) * (widen_again(dys[column]) - mean)
        ct.store(dx, (row, column), ct.astype(dxs, dx.dtype), check_bounds=False, allow_tma=False)


@ct.kernel(occupancy=3)
def _backward_long(dx, dy, y, BLOCK: ConstInt):
    row = ct.bid(0)
    tiles = ct.num_tiles(y, axis=1, shape=(1, BLOCK))
    total = ct.zeros((1, BLOCK), ct.float32)
    products = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        ys = load(y, (row, column), 1, BLOCK)
        total += ys
        products += ys * load(dy, (row, column), 1, BLOCK)
    mean = ct.sum(products, axis=1, keepdims=True) / ct.sum(total, axis=1, keepdims=True)
    for back in range(tiles):
        column = tiles - 1 - back
        ys = load(y, (row, column), 1, BLOCK)
        dys = load(dy, (row, column), 1, BLOCK)
        ct.store(dx, (row, column), ct.astype(ys * (dys - mean), dx.dtype))


@opaque(writes=("y",))
def _launch_forward(y: Tensor, x: Tensor) -> None:
    y, x = as_rows(y), as_rows(x)
    rows, columns = x.shape
    if columns > LONGEST_FORWARD:
        launch(_forward_long, (rows,), y, x, columns, LONG_BLOCK)
    else:
        tile_rows, block = whole_rows(columns)
        kernel, grid = by_turns(_forward, x, tile_rows, block)
        launch(kernel, grid, y, x, columns, tile_rows, block)


@opaque(writes=("dx",))
def _launch_backward(dx: Tensor, dy: Tensor, y: Tensor) -> None:
    dx, dy, y = as_rows(dx), as_rows(dy), as_rows(y)
    rows, columns = y.shape
    if columns > LONGEST_BACKWARD:
        # A row in parts spills if its elements are loaded one by one, as at a ragged end, or are float16.
        if columns <= LONGEST_IN_PARTS and columns % LONG_BLOCK == 0 and y.dtype is torch.bfloat16:
            launch(_backward_parts, (rows,), dx, dy, y, columns // LONG_BLOCK, LONG_BLOCK)
        else:
            launch(_backward_long, (rows,), dx, dy, y, LONG_BLOCK)
    else:
        tile_rows, block = whole_rows(columns)
        kernel, grid = by_turns(_backward, y, tile_rows, block, 2)
        launch(kernel, grid, dx, dy, y, tile_rows, block)


@implements(softmax)
def forward(needs: Needs, x: Tensor) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_forward(y, x)
    return y, (y,) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = saved
    dx = torch.empty_like(y)
    _launch_backward(dx, dy, y)
    return (dx,)
