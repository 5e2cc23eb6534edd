"""Sparsemax: Newton's method finds tau on the greatest elements of groups of columns, and a look at the whole row proves it.

tau is the root of f(tau) = Σ max(x − tau, 0) − 1, which is convex. A step of Newton's method is tau ← (sum of the elements above
tau − 1) / (their number). Steps that start left of the root stay left of it. Once the number doesn't fall any more, tau is
exact. A step divides the product of f and its slope by at least four, so every row needs few steps.

The root for a part of a row is left of the row's own root. So the first steps take only the greatest element of each group of
columns. Their root is the row's own unless two elements of a group are in the support. That is rare, and then steps go on with
all elements. A row stays in registers; a long row does so in bfloat16 and in parts. A row too long for that is read twice.
"""

import functools
import math
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import sparsemax
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._device import sized
from liger_cutile.ops._launch import ConstInt, launch
from liger_cutile.ops._math import widen_again
from liger_cutile.ops._rows import as_rows, blocks, load, whole_rows
from liger_cutile.ops._sums import add_two

# Longer rows are worked on in tiles of LONG_BLOCK columns, with the registers of four blocks per multiprocessor. On an H200,
# 4096 rows of 32768 columns in bfloat16 take 0.199 ms forward. Held in float32 they leave room for one block only, and take
# 0.251.
LONGEST = 16384
LONG_BLOCK = 4096
# bfloat16 rows that are whole parts are held in that dtype. On an H200, 4096 rows of 8192 columns take 0.043 ms forward and
# 0.051 backward; in float32 0.051 and 0.069. Of 32768 columns they take 0.146 and 0.204; read twice 0.198 and 0.210. In other
# dtypes, and with 6144 columns, tileiras 13.4 spills tens of registers.
SHORTEST_IN_PARTS = 8192
LONGEST_IN_PARTS = 32768


@ct.function
def _sum_rows(a, b):
    """The sums of the rows of two tiles. Threads wait for each other here, so both are summed at once."""
    return ct.reduce((a, b), 1, add_two, (0.0, 0.0), keepdims=True)


@ct.function
def _any(rows):
    return ct.max(ct.where(rows, 1, 0)) > 0


@ct.function
def _newton(z, tau, count):
    """Take Newton's steps from tau while the number of elements above it falls, at first below `count`. Return both.

    NaN counts as above, so it spreads. Quotients are rounded to nearest: an element that equals tau in exact arithmetic equals
    it here.
    """
    active = True
    while active:
        below = z <= tau
        total, above = _sum_rows(ct.where(below, 0.0, z), ct.where(below, 0.0, 1.0))
        fewer = above < count
        tau = ct.where(fewer, (total - 1.0) / above, tau)
        count = above
        active = _any(fewer)
    return tau, count


@ct.function
def _newton_of_best(best, top):
    """tau of a part of each row, relative to `top`, the row's greatest element; and how many elements of the part exceed it."""
    zeros = ct.zeros(top.shape, ct.float32)
    return _newton(best - top, zeros - 1.0, zeros + math.inf)


@ct.function
def _store(y, place, above, INSIDE=False):
    """Store max(above, 0). A result greater than 0 stays so when it is rounded: backward finds the support by that."""
    result = ct.maximum(above, 0.0, propagate_nan=True)
    if y.dtype == ct.float16:
        result = ct.where(above > 0.0, ct.maximum(above, 5.9604644775390625e-08), result)
    ct.store(y, place, ct.astype(result, y.dtype), check_bounds=not INSIDE, allow_tma=not INSIDE)


@ct.function
def _load_part(array, place, BLOCK):
    """A part of a row that fills its parts, in the array's dtype."""
    return ct.load(array, place, (1, BLOCK), check_bounds=False, allow_tma=False)


@ct.function
def _add_above(totals, counts, z, tau):
    below = z <= tau
    return totals + ct.where(below, 0.0, z), counts + ct.where(below, 0.0, 1.0)


@ct.kernel
def _forward(y, x, columns, ROWS: ConstInt, BLOCK: ConstInt, GROUP: ConstInt):
    row = ct.bid(0)
    lanes = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    # TMA can only pad with zeros.
    z = ct.where(lanes < columns, load(x, (row, 0), ROWS, BLOCK), -math.inf)
    best = ct.max(ct.reshape(z, (ROWS, BLOCK // GROUP, GROUP)), axis=2)
    top = ct.max(best, axis=1, keepdims=True)
    tau, count = _newton_of_best(best, top)
    z -= top
    more = ct.sum(ct.where(z <= tau, 0.0, 1.0), axis=1, keepdims=True) != count
    if _any(more):
        tau = _newton(z, tau, ct.where(more, math.inf, count))[0]
    _store(y, (row, 0), z - tau)


@ct.kernel
def _forward_parts(y, x, PARTS: ConstInt, BLOCK: ConstInt):
    row = ct.bid(0)
    parts = ()
    for i in ct.static_iter(range(PARTS)):
        parts += (_load_part(x, (row, i), BLOCK),)
    best = parts[0]
    for i in ct.static_iter(range(1, PARTS)):
        best = ct.maximum(best, parts[i])
    best = ct.astype(best, ct.float32)
    top = ct.max(best, axis=1, keepdims=True)
    tau, count = _newton_of_best(best, top)
    zeros = ct.zeros((1, BLOCK), ct.float32)
    totals, counts = zeros, zeros
    for i in ct.static_iter(range(PARTS)):
        totals, counts = _add_above(totals, counts, ct.astype(parts[i], ct.float32) - top, tau)
    total, above = _sum_rows(totals, counts)
    active = _any(above != count)
    while active:  # two of a lane's columns are in the support: a step over the whole row, which is read again
        tau = (total - 1.0) / above
        count = above
        totals, counts = zeros, zeros
        for i in range(PARTS):
            z = ct.astype(_load_part(x, (row, i), BLOCK), ct.float32) - top
            totals, counts = _add_above(totals, counts, z, tau)
        total, above = _sum_rows(totals, counts)
        active = _any(above < count)
    for i in ct.static_iter(range(PARTS)):
        _store(y, (row, i), widen_again(parts[i]) - top - tau, True)


@ct.kernel(occupancy=4)
def _forward_long(y, x, columns, BLOCK: ConstInt, GROUP: ConstInt):
    row = ct.bid(0)
    lanes = ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    best = ct.full((1, BLOCK), -math.inf, ct.float32)
    for tile in range(tiles):
        z = ct.where(lanes < columns - tile * BLOCK, load(x, (row, tile), 1, BLOCK), -math.inf)
        best = ct.maximum(best, z)
    top = ct.max(best, axis=1, keepdims=True)
    tau, count = _newton_of_best(best, top)
    seen = ct.full((1, 1), math.inf, ct.float32)
    active = True
    while active:  # once, unless two of a lane's columns are in the support
        totals = ct.zeros((BLOCK // GROUP, 1), ct.float32)
        counts = ct.zeros((BLOCK // GROUP, 1), ct.float32)
        for back in range(tiles):
            tile = tiles - 1 - back  # backwards: what was read last is still in the cache
            z = ct.where(lanes < columns - tile * BLOCK, load(x, (row, tile), 1, BLOCK), -math.inf) - top
            above = z - tau
            taken = ct.reshape(ct.where(above <= 0.0, 0.0, z), (BLOCK // GROUP, GROUP))
            totals += ct.sum(taken, axis=1, keepdims=True)
            ones = ct.reshape(ct.where(above <= 0.0, 0.0, 1.0), (BLOCK // GROUP, GROUP))
            counts += ct.sum(ones, axis=1, keepdims=True)
            _store(y, (row, tile), above)
        total, above = ct.reduce((totals, counts), 0, add_two, (0.0, 0.0), keepdims=True)
        fewer = (above != count) & (above < seen)
        tau = ct.where(fewer, (total - 1.0) / above, tau)
        count = above
        seen = above
        active = _any(fewer)


@ct.function
def _load_support(dy, y, row, column, ROWS, BLOCK):
    """Whether y is in the support, and dy there. Most of dy is outside the support and isn't read."""
    support = load(y, (row, column), ROWS, BLOCK) > 0.0
    rows = row * ROWS + ct.reshape(ct.arange(ROWS, dtype=ct.int32), (ROWS, 1))
    columns = column * BLOCK + ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
    return support, ct.astype(ct.gather(dy, (rows, columns), mask=support, check_bounds=False), ct.float32)


@ct.kernel
def _backward(dx, dy, y, ROWS: ConstInt, BLOCK: ConstInt):
    row = ct.bid(0)
    support, dys = _load_support(dy, y, row, 0, ROWS, BLOCK)
    total, count = _sum_rows(dys, ct.where(support, 1.0, 0.0))
    ct.store(dx, (row, 0), ct.astype(ct.where(support, dys - total / count, 0.0), dx.dtype))


@ct.function
def _load_groups(dy, support, row, column, BLOCK, GROUP):
    """dy of one row, by groups of columns. A group with no element in the support is 0, and isn't read."""
    groups = (1, BLOCK // GROUP, GROUP)
    in_support = ct.max(ct.reshape(ct.where(support, 1, 0), groups), axis=2, keepdims=True) > 0
    columns = ct.reshape(column * BLOCK + ct.arange(BLOCK, dtype=ct.int32), groups)
    dys = ct.gather(dy, (row, columns), mask=in_support, check_bounds=False)
    return ct.reshape(ct.astype(dys, ct.float32), (1, BLOCK))


@ct.kernel
def _backward_parts(dx, dy, y, PARTS: ConstInt, BLOCK: ConstInt, GROUP: ConstInt):
    row = ct.bid(0)
    parts = ()
    for i in ct.static_iter(range(PARTS)):
        parts += (_load_part(y, (row, i), BLOCK),)
    totals = ct.zeros((1, BLOCK), ct.float32)
    counts = ct.zeros((1, BLOCK), ct.float32)
    for i in ct.static_iter(range(PARTS)):
        support = ct.astype(parts[i], ct.float32) > 0.0
        totals += ct.where(support, _load_groups(dy, support, row, i, BLOCK, GROUP), 0.0)
        counts += ct.where(support, 1.0, 0.0)
    total, count = _sum_rows(totals, counts)
    mean = total / count
    for i in ct.static_iter(range(PARTS)):
        support = widen_again(parts[i]) > 0.0
        dxs = ct.where(support, _load_groups(dy, support, row, i, BLOCK, GROUP) - mean, 0.0)
        ct.store(dx, (row, i), ct.astype(dxs, dx.dtype), check_bounds=False, allow_tma=False)


@ct.kernel(occupancy=4)
def _backward_long(dx, dy, y, BLOCK: ConstInt):
    row = ct.bid(0)
    tiles = ct.num_tiles(y, axis=1, shape=(1, BLOCK))
    totals = ct.zeros((1, BLOCK), ct.float32)
    counts = ct.zeros((1, BLOCK), ct.float32)
    for tile in range(tiles):
        support, dys = _load_support(dy, y, row, tile, 1, BLOCK)
        totals += dys
        counts += ct.where(support, 1.0, 0.0)
    total, count = _sum_rows(totals, counts)
    mean = total / count
    for back in range(tiles):
        tile = tiles - 1 - back
        support, dys = _load_support(dy, y, row, tile, 1, BLOCK)
        ct.store(dx, (row, tile), ct.astype(ct.where(support, dys - mean, 0.0), dx.dtype))


@functools.cache
def _in_parts(kernel: Any, columns: int, dtype: torch.dtype, block: int, occupancy: int) -> tuple[Any, int, int] | None:
    """The kernel for rows that are held in parts, the number of parts and their columns; None for other rows.

    `block` and `occupancy` are those for the shortest such rows.
    """
    hints = {"occupancy": occupancy}
    if columns > SHORTEST_IN_PARTS:
        block, hints = 2048, {"occupancy": 2, "num_worker_warps": 8}
    if dtype is not torch.bfloat16 or not SHORTEST_IN_PARTS <= columns <= LONGEST_IN_PARTS or columns % block:
        return None
    return kernel.replace_hints(**hints), columns // block, block


@opaque(writes=("y",))
def _launch_forward(y: Tensor, x: Tensor) -> None:
    y, x = as_rows(y), as_rows(x)
    rows, columns = x.shape
    group = 16 // x.element_size()  # what a thread loads at once
    if division := _in_parts(_forward_parts, columns, x.dtype, 1024, 5):
        kernel, parts, block = division
        launch(kernel, (rows,), y, x, parts, block)
    elif columns > LONGEST:
        launch(_forward_long, (rows,), y, x, columns, LONG_BLOCK, group)
    else:
        tile_rows, block = whole_rows(columns)
        launch(sized(_forward, tile_rows * block), (blocks(rows, tile_rows),), y, x, columns, tile_rows, block, group)


@opaque(writes=("dx",))
def _launch_backward(dx: Tensor, dy: Tensor, y: Tensor) -> None:
    dx, dy, y = as_rows(dx), as_rows(dy), as_rows(y)
    rows, columns = y.shape
    if division := _in_parts(_backward_parts, columns, y.dtype, 2048, 4):
        kernel, parts, block = division
        launch(kernel, (rows,), dx, dy, y, parts, block, 16 // y.element_size())
    elif columns > LONGEST:
        launch(_backward_long, (rows,), dx, dy, y, LONG_BLOCK)
    else:
        tile_rows, block = whole_rows(columns)
        launch(sized(_backward, tile_rows * block, 2), (blocks(rows, tile_rows),), dx, dy, y, tile_rows, block)


def _along(x: Tensor, dim: int) -> Tensor:
    """x with `dim` last."""
    return x if dim == -1 or dim == x.dim() - 1 else x.movedim(dim, -1)


def _back(y: Tensor, dim: int) -> Tensor:
    """Undoes `_along`."""
    return y if dim == -1 or dim == y.dim() - 1 else y.movedim(-1, dim)


@implements(sparsemax)
def forward(needs: Needs, x: Tensor, dim: int = -1) -> tuple[Tensor, Saved]:
    x = _along(x, dim)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_forward(y, x)
    y = _back(y, dim)
    return y, (y,) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, dim: int) -> tuple[Tensor | None, ...]:
    y = _along(saved[0], dim)
    dx = torch.empty_like(y)
    _launch_backward(dx, _along(dy, dim), y)
    return (_back(dx, dim),)
