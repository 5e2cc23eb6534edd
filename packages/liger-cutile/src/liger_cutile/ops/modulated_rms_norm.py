"""RMS norm with a scale and a shift per group of rows: rms_norm's passes, with sums for each group.

In backward a block takes rows of one group after another. It adds up dy, and dy · x/rms, from which both dscale and dweight are
made.
"""

import functools
from typing import Any, NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import modulated_rms_norm
from liger_core.contract import implements
from liger_core.custom_op import opaque
from liger_core.host.modulated_rms_norm import ModulatedRMSNorm, ModulatedRMSNormKernels, Modulation
from liger_cutile.ops._device import loads_in_bulk, packed, resident, sm_count
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._rms import inverse_rms_of, load_weight, rounded, scaled, unscaled
from liger_cutile.ops._rows import (
    ZERO,
    Table,
    as_rows,
    blocks,
    hold_vector,
    load,
    long_block,
    one_tile,
    table_of,
    whole_rows,
)
from liger_cutile.ops._sums import launch_total

# Longer rows are worked on in tiles of `long_block` columns. A row of twice LONGEST_FORWARD spills registers on sm_90 (tileiras
# 13.4), and one of LONGEST_BACKWARD on sm_80.
LONGEST_FORWARD = 16384
LONGEST_BACKWARD = 8192
# Columns of the tiles for dx, and rows of the 64-column tiles for the sums. With more, sm_80 spills.
DX_COLUMNS, SUMMED_ROWS = 2048, 32
# As in rms_norm, longer rows that fill their tile take a block each, without TMA.
LONGEST_HELD = 4096


@ct.function
def _place(row, k1, k2, m1, m2, s0, s1, s2):
    """The place of the scale or the shift of a tile of rows."""
    third, second = k2 * m2, k1 * m1
    return row // third // second * s0 + row // third % second * s1 + row % third * s2


@ct.function
def _group_place(group, k1, k2, s0, s1, s2):
    return group // k2 // k1 * s0 + group // k2 % k1 * s1 + group % k2 * s2


@ct.function
def _load_modulation(table, row, column, ROWS, BLOCK):
    return ct.astype(ct.load(table, (row, column), (ROWS, BLOCK), padding_mode=ZERO, allow_tma=False), ct.float32)


@ct.function
def _modulated(normed, scale, shift, scale_row, shift_row, column, SCALE_ROWS, SHIFT_ROWS, BLOCK):
    ys = ct.astype(normed, ct.float32) * (1.0 + _load_modulation(scale, scale_row, column, SCALE_ROWS, BLOCK))
    if given(shift):
        ys += _load_modulation(shift, shift_row, column, SHIFT_ROWS, BLOCK)
    return ys


@ct.kernel
def _forward(
    y, inverse_rms, x, weight, scale, shift, columns, k1, k2, m1, m2, s0, s1, s2, t0, t1, t2, eps, offset,
    ROUND: ConstBool, NATIVE: ConstBool, SCALE_ROWS: ConstInt, SHIFT_ROWS: ConstInt, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    weights = hold_vector(weight, BLOCK)
    for row in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        xs = load(x, (row, 0), ROWS, BLOCK)
        squares = ct.sum(rounded(xs * xs, x.dtype, NATIVE), axis=1, keepdims=True)
        r = inverse_rms_of(squares, columns, eps, x.dtype, NATIVE)
        if given(inverse_rms):
            ct.store(inverse_rms, (row, 0), r, allow_tma=False)
        normed = scaled(xs, r, weight, weights, offset, x.dtype, ROUND, NATIVE)
        scale_row = _place(row, k1, k2, m1, m2, s0, s1, s2)
        shift_row = _place(row, k1, k2, m1, m2, t0, t1, t2)
        ys = _modulated(normed, scale, shift, scale_row, shift_row, 0, SCALE_ROWS, SHIFT_ROWS, BLOCK)
        ct.store(y, (row, 0), ct.astype(ys, y.dtype))


@ct.kernel
def _forward_inside(
    y, inverse_rms, x, weight, scale, shift, columns, k1, k2, m1, m2, s0, s1, s2, t0, t1, t2, eps, offset,
    ROUND: ConstBool, NATIVE: ConstBool, BLOCK: ConstInt,
):  # fmt: skip
    """A row that fills its tile."""
    row = ct.bid(0)
    xs = load(x, (row, 0), 1, BLOCK, True)
    scales = ct.load(
        scale, (_place(row, k1, k2, m1, m2, s0, s1, s2), 0), (1, BLOCK), check_bounds=False, allow_tma=False
    )
    weights = load_weight(weight, 0, BLOCK, True)
    squares = ct.sum(rounded(xs * xs, x.dtype, NATIVE), axis=1, keepdims=True)
    r = inverse_rms_of(squares, columns, eps, x.dtype, NATIVE)
    if given(inverse_rms):
        ct.store(inverse_rms, (row, 0), r, allow_tma=False)
    normed = scaled(xs, r, weight, weights, offset, x.dtype, ROUND, NATIVE)
    ys = ct.astype(normed, ct.float32) * (1.0 + ct.astype(scales, ct.float32))
    if given(shift):
        ys += load(shift, (_place(row, k1, k2, m1, m2, t0, t1, t2), 0), 1, BLOCK, True)
    ct.store(y, (row, 0), ct.astype(ys, y.dtype), check_bounds=False, allow_tma=False)


@ct.kernel(occupancy=4)
def _forward_long(
    y, inverse_rms, x, weight, scale, shift, columns, k1, k2, m1, m2, s0, s1, s2, t0, t1, t2, eps, offset,
    ROUND: ConstBool, NATIVE: ConstBool, BLOCK: ConstInt,
):  # fmt: skip
    row = ct.bid(0)
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    squares = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        xs = load(x, (row, column), 1, BLOCK)
        squares += rounded(xs * xs, x.dtype, NATIVE)
    r = inverse_rms_of(ct.sum(squares, axis=1, keepdims=True), columns, eps, x.dtype, NATIVE)
    if given(inverse_rms):
        ct.store(inverse_rms, (row, 0), r)
    scale_row = _place(row, k1, k2, m1, m2, s0, s1, s2)
    shift_row = _place(row, k1, k2, m1, m2, t0, t1, t2)
    for column in range(tiles):
        xs = load(x, (row, column), 1, BLOCK)
        weights = load_weight(weight, column, BLOCK, False)
        normed = scaled(xs, r, weight, weights, offset, x.dtype, ROUND, NATIVE)
        ys = _modulated(normed, scale, shift, scale_row, shift_row, column, 1, 1, BLOCK)
        ct.store(y, (row, column), ct.astype(ys, y.dtype))


@ct.function
def _first_row(group, k1, k2, m1, m2):
    """A group's first tile of rows."""
    return (group // k2 // k1 * (k1 * m1) + group // k2 % k1) * (k2 * m2) + group % k2


@ct.function
def _from_first(member, k1, k2, m1, m2):
    """How many tiles a member of a group lies after the group's first tile."""
    return (member // m2 // m1 * (k1 * m1) + member // m2 % m1) * (k2 * m2) + member % m2


@ct.function
def _of_group(sums, GROUP_ROWS):
    """The sums of one group, or of as many as there are rows."""
    return sums if sums.shape[0] == GROUP_ROWS else ct.sum(sums, axis=0, keepdims=True)


@ct.kernel
def _backward(
    dx, dscale, dshift, products, shifts, dweights, dy, x, weight, scale, inverse_rms, items, chunks, members, columns,
    k1, k2, m1, m2, s0, s1, s2, offset,
    SCALE_ROWS: ConstInt, GROUP_ROWS: ConstInt, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    """A block takes items, each a share of a group's rows or a whole group.

    The sums of a share go to `products` and `shifts`. For whole groups, `dweights` gets each block's part of dweight.
    """
    summed = given(products) or given(dscale) or given(dweights)
    weights = hold_vector(weight, BLOCK)
    dweight = ct.zeros((GROUP_ROWS, BLOCK), ct.float32)
    for item in range(ct.bid(0), items, ct.num_blocks(0)):
        group, chunk = item // chunks, item % chunks
        start = _first_row(group, k1, k2, m1, m2)
        scales = ct.load(
            scale, (_group_place(group, k1, k2, s0, s1, s2), 0), (SCALE_ROWS, BLOCK), padding_mode=ZERO, allow_tma=False
        )
        of_products = ct.zeros((ROWS, BLOCK), ct.float32)
        of_shifts = ct.zeros((ROWS, BLOCK), ct.float32)
        for member in range(chunk, members, chunks):
            row = start + _from_first(member, k1, k2, m1, m2)
            dys = load(dy, (row, 0), ROWS, BLOCK)
            if summed or given(dx):
                r = load(inverse_rms, (row, 0), ROWS, 1)
                xs = load(x, (row, 0), ROWS, BLOCK)
            if given(dx):
                g = unscaled(dys * (1.0 + ct.astype(scales, ct.float32)), weight, weights, offset)
                slope = ct.sum(g * xs, axis=1, keepdims=True) / columns * r * r * r
                ct.store(dx, (row, 0), ct.astype(g * r - xs * slope, dx.dtype))
            if summed:
                of_products += dys * (xs * r)
            if given(dshift) or given(shifts):
                of_shifts += dys
        if summed:
            sums = _of_group(of_products, GROUP_ROWS)
            if given(products):
                ct.store(products, (chunk * (items // chunks) + group, 0), sums, allow_tma=False)
            if given(dscale):
                ct.store(
                    dscale,
                    (group, 0),
                    ct.astype(unscaled(sums, weight, weights, offset), dscale.dtype),
                    allow_tma=False,
                )
            if given(dweights):
                dweight += sums * (1.0 + ct.astype(scales, ct.float32))
        if given(shifts):
            ct.store(shifts, (chunk * (items // chunks) + group, 0), _of_group(of_shifts, GROUP_ROWS), allow_tma=False)
        if given(dshift):
            sums = ct.astype(_of_group(of_shifts, GROUP_ROWS), dshift.dtype)
            ct.store(dshift, (group, 0), sums, allow_tma=False)
    if given(dweights):
        ct.store(dweights, (ct.bid(0), 0), ct.sum(dweight, axis=0, keepdims=True), allow_tma=False)


@ct.function
def _finish(dscale, weights, sums, weight, scale, group, scale_row, column, offset, GROUP_ROWS, SCALE_ROWS, BLOCK):
    """Write a group's dscale from the sums of dy · x/rms, and return their part of dweight."""
    if given(dscale):
        ds = unscaled(sums, weight, load_weight(weight, column, BLOCK, False), offset)
        ct.store(dscale, (group, column), ct.astype(ds, dscale.dtype), allow_tma=False)
    if given(weights):
        return sums * (1.0 + _load_modulation(scale, scale_row, column, SCALE_ROWS, BLOCK))
    else:
        return sums


@ct.function
def _sum_chunks(partial, group, column, CHUNKS, BLOCK):
    sums = ct.zeros((CHUNKS, 1, BLOCK), ct.float32)
    for chunk in range(ct.num_tiles(partial, axis=0, shape=(CHUNKS, 1, BLOCK))):
        sums += ct.load(partial, (chunk, group, column), (CHUNKS, 1, BLOCK), padding_mode=ZERO)
    return ct.reshape(ct.sum(sums, axis=0), (1, BLOCK))


@ct.kernel(occupancy=4)
def _add_up(
    dweights, dscale, dshift, products, shifts, weight, scale, k1, k2, s0, s1, s2, offset, CHUNKS: ConstInt, BLOCK: ConstInt
):  # fmt: skip
    """Add up a block of columns of the sums that the blocks of `_backward` wrote for one group."""
    column, group = ct.bid(0), ct.bid(1)
    if given(products):
        sums = _sum_chunks(products, group, column, CHUNKS, BLOCK)
        scale_row = _group_place(group, k1, k2, s0, s1, s2)
        part = _finish(dscale, dweights, sums, weight, scale, group, scale_row, column, offset, 1, 1, BLOCK)
        if given(dweights):
            ct.store(dweights, (group, column), ct.astype(part, dweights.dtype), allow_tma=False)
    if given(shifts):
        sums = _sum_chunks(shifts, group, column, CHUNKS, BLOCK)
        ct.store(dshift, (group, column), ct.astype(sums, dshift.dtype), allow_tma=False)


@ct.kernel(occupancy=4)
def _dx_long(
    dx, dy, x, weight, scale, inverse_rms, columns, k1, k2, m1, m2, s0, s1, s2, offset, BLOCK: ConstInt
):  # fmt: skip
    row = ct.bid(0)
    r = load(inverse_rms, (row, 0), 1, 1)
    scale_row = _place(row, k1, k2, m1, m2, s0, s1, s2)
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    products = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        g = load(dy, (row, column), 1, BLOCK) * (1.0 + _load_modulation(scale, scale_row, column, 1, BLOCK))
        g = unscaled(g, weight, load_weight(weight, column, BLOCK, False), offset)
        products += g * load(x, (row, column), 1, BLOCK)
    slope = ct.sum(products, axis=1, keepdims=True) / columns * r * r * r
    for column in range(tiles):
        g = load(dy, (row, column), 1, BLOCK) * (1.0 + _load_modulation(scale, scale_row, column, 1, BLOCK))
        g = unscaled(g, weight, load_weight(weight, column, BLOCK, False), offset)
        dxs = g * r - load(x, (row, column), 1, BLOCK) * slope
        ct.store(dx, (row, column), ct.astype(dxs, dx.dtype))


@ct.kernel(occupancy=4)
def _sums_long(
    dweight, dscale, dshift, dy, x, weight, scale, inverse_rms, groups, members, k1, k2, m1, m2, s0, s1, s2, offset,
    SCALE_ROWS: ConstInt, GROUP_ROWS: ConstInt, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    """A block of columns of all rows."""
    column = ct.bid(0)
    summed = given(dscale) or given(dweight)
    total = ct.zeros((GROUP_ROWS, BLOCK), ct.float32)
    for group in range(groups):
        start = _first_row(group, k1, k2, m1, m2)
        products = ct.zeros((ROWS, BLOCK), ct.float32)
        shifts = ct.zeros((ROWS, BLOCK), ct.float32)
        for member in range(members):
            row = start + _from_first(member, k1, k2, m1, m2)
            dys = load(dy, (row, column), ROWS, BLOCK)
            if summed:
                products += dys * (load(x, (row, column), ROWS, BLOCK) * load(inverse_rms, (row, 0), ROWS, 1))
            shifts += dys
        if summed:
            sums = _of_group(products, GROUP_ROWS)
            scale_row = _group_place(group, k1, k2, s0, s1, s2)
            total += _finish(
                dscale, dweight, sums, weight, scale, group, scale_row, column, offset, GROUP_ROWS, SCALE_ROWS, BLOCK
            )  # fmt: skip
        if given(dshift):
            sums = ct.astype(_of_group(shifts, GROUP_ROWS), dshift.dtype)
            ct.store(dshift, (group, column), sums, allow_tma=False)
    if given(dweight):
        ct.store(dweight, (column,), ct.astype(ct.sum(total, axis=0), dweight.dtype))


class _Tiling(NamedTuple):
    """Tiles of rows. The rows of a tile are neighbours in the third dimension of `Places`.

    Attributes:
        rows: rows of a tile.
        sizes: k1, k2, m1 and m2: sizes of the second and third dimensions, in tiles.
        group_rows: how many groups a tile has.
        groups, members: tiles of all groups, and tiles of one group.
    """

    rows: int
    sizes: tuple[int, int, int, int]
    group_rows: int
    groups: int
    members: int


@functools.lru_cache
def _tiling(kept: tuple[int, ...], shared: tuple[int, ...], steps: tuple[tuple[int, ...], ...], most: int) -> _Tiling:
    """Tiles of at most `most` rows, for tables with these steps."""
    before, size = kept[0] * shared[0] * kept[1] * shared[1], kept[2] * shared[2]
    rows = most
    while rows > 1 and not (
        rows < 2 * size and (before == 1 or size % rows == 0) and all(one_tile(each, rows) for each in steps)
    ):
        rows //= 2
    k2, m2 = (blocks(kept[2], rows), 1) if kept[2] > 1 else (1, blocks(shared[2], rows))
    groups, members = kept[0] * kept[1] * k2, shared[0] * shared[1] * m2
    return _Tiling(rows, (kept[1], k2, shared[1], m2), rows if kept[2] > 1 else 1, groups, members)


def _in_tiles(table: Table, rows: int) -> tuple[tuple[int, int, int], int]:
    """A table's steps, counted in its own tiles, and the rows of such a tile."""
    first, second, third = table.steps
    if third == 0 or rows == 1:
        return table.steps, 1
    return (first // rows, second // rows, third), rows


@opaque(writes=("y", "inverse_rms"))
def _launch_forward(
    y: Tensor,
    inverse_rms: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    kept: list[int],
    shared: list[int],
    scale_strides: list[int],
    shift_strides: list[int],
    eps: float,
    offset: float,
    casting_mode: str,
) -> None:
    y, x = as_rows(y), as_rows(x)
    rows, columns = x.shape
    inverse_rms = None if inverse_rms is None else inverse_rms.view(-1, 1)
    sizes = [k * m for k, m in zip(kept, shared, strict=True)]
    scales = table_of(scale, columns, sizes, scale_strides)
    shifts = scales if shift is None else table_of(shift, columns, sizes, shift_strides)
    tile_rows, block = whole_rows(columns)
    inside = columns == block > LONGEST_HELD
    kept_shared = tuple(kept), tuple(shared)
    tiling = _tiling(
        *kept_shared, (scales.steps, shifts.steps), 1 if columns > LONGEST_FORWARD or inside else tile_rows
    )
    scale_steps, scale_rows = _in_tiles(scales, tiling.rows)
    shift_steps, shift_rows = _in_tiles(shifts, tiling.rows)
    tensors = y, inverse_rms, x, weight, scales.rows, None if shift is None else shifts.rows
    numbers = columns, *tiling.sizes, *scale_steps, *shift_steps, float(eps), float(offset)
    modes = casting_mode != "gemma", casting_mode == "none"
    if columns > LONGEST_FORWARD:
        launch(_forward_long, (rows,), *tensors, *numbers, *modes, long_block(columns))
    elif inside:
        launch(packed(_forward_inside, block), (rows,), *tensors, *numbers, *modes, block)
    else:
        kernel, at_once = resident(_forward, tiling.rows * block, 2)
        grid = min(blocks(rows, tiling.rows), sm_count(x.device) * at_once)
        launch(kernel, (grid,), *tensors, *numbers, *modes, scale_rows, shift_rows, tiling.rows, block)


@functools.cache
def _persistent(elements: int) -> tuple[Any, int]:
    """As `_device.persistent`, for one more sum."""
    if elements <= 4096:
        return _backward.replace_hints(occupancy=2), 2
    return _backward.replace_hints(num_worker_warps=8), 1


@opaque(writes=("dx", "dweight", "dscale", "dshift"))
def _launch_backward(
    dx: Tensor | None,
    dweight: Tensor | None,
    dscale: Tensor | None,
    dshift: Tensor | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    inverse_rms: Tensor | None,
    kept: list[int],
    shared: list[int],
    strides: list[int],
    offset: float,
) -> None:
    dy, x = as_rows(dy), as_rows(x)
    dx, dscale, dshift = (None if t is None else as_rows(t) for t in (dx, dscale, dshift))
    inverse_rms = None if inverse_rms is None else inverse_rms.view(-1, 1)
    rows, columns = x.shape
    products, sums = dscale is not None or dweight is not None, not (dscale is dweight is dshift is None)
    table = table_of(scale, columns, [k * m for k, m in zip(kept, shared, strict=True)], strides)
    kept_shared = tuple(kept), tuple(shared)
    if columns > (LONGEST_BACKWARD if loads_in_bulk(x.device) else LONGEST_BACKWARD // 2):
        if dx is not None:
            tiling = _tiling(*kept_shared, (table.steps,), 1)
            launch(
                _dx_long, (rows,), dx, dy, x, weight, table.rows, inverse_rms, columns, *tiling.sizes, *table.steps,
                float(offset), DX_COLUMNS,
            )  # fmt: skip
        if sums:
            # 64 columns, a 128-byte line of bf16, give more than 128 blocks.
            tiling = _tiling(*kept_shared, (table.steps,), SUMMED_ROWS)
            steps, scale_rows = _in_tiles(table, tiling.rows)
            launch(
                _sums_long, (blocks(columns, 64),), dweight, dscale, dshift, dy, x, weight, table.rows, inverse_rms,
                tiling.groups, tiling.members, *tiling.sizes, *steps, float(offset), scale_rows, tiling.group_rows,
                tiling.rows, 64,
            )  # fmt: skip
        return
    tile_rows, block = whole_rows(columns)
    tiling = _tiling(*kept_shared, (table.steps,), tile_rows)
    steps, scale_rows = _in_tiles(table, tiling.rows)
    kernel, resident_blocks = _persistent(tiling.rows * block)
    programs = sm_count(x.device) * resident_blocks
    chunks = max(1, min(programs // tiling.groups, tiling.members)) if sums else tiling.members
    grid = min(programs, tiling.groups * chunks)
    groups, parts = tiling.groups * tiling.group_rows, []
    chunked = sums and chunks > 1
    for wanted in (products, dshift is not None):
        shape = (chunks, groups, columns) if chunked and wanted else None
        parts.append(None if shape is None else torch.empty(shape, dtype=torch.float32, device=x.device))
    dweights = None
    if dweight is not None and not chunked:
        dweights = torch.empty((grid, columns), dtype=torch.float32, device=x.device)
    launch(
        kernel, (grid,), dx, None if chunked else dscale, None if chunked else dshift,
        *(None if part is None else as_rows(part.view(-1, columns)) for part in parts), dweights,
        dy, x, weight, table.rows, inverse_rms, tiling.groups * chunks, chunks, tiling.members, columns,
        *tiling.sizes, *steps, float(offset),
        scale_rows, tiling.group_rows, tiling.rows, block,
    )  # fmt: skip
    if chunked:
        groups = kept[0] * kept[1] * kept[2]
        if dweight is not None:
            dweights = dweight.view(1, -1)
            if groups > 1:
                dweights = torch.empty((groups, columns), dtype=torch.float32, device=x.device)
        launch(
            _add_up, (blocks(columns, 32), groups), dweights, dscale, dshift, *parts, weight, table.rows, *kept[1:],
            *table.steps, float(offset), 64, 32,
        )  # fmt: skip
        if groups == 1:
            return
    if dweight is not None:
        assert dweights is not None
        launch_total(dweight, dweights)


class CuTileModulatedRMSNorm(ModulatedRMSNormKernels):
    def forward(
        self,
        y: Tensor,
        inverse_rms: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        modulation: Modulation,
        eps: float,
        offset: float,
        casting_mode: str,
    ) -> None:
        scale, shift, places = modulation
        lists = list(places.kept), list(places.shared), list(places.scale), list(places.shift)
        _launch_forward(y, inverse_rms, x, weight, scale, shift, *lists, eps, offset, casting_mode)

    def backward(
        self,
        dx: Tensor | None,
        dweight: Tensor | None,
        dscale: Tensor | None,
        dshift: Tensor | None,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        modulation: Modulation,
        inverse_rms: Tensor | None,
        offset: float,
    ) -> None:
        scale, _, places = modulation
        lists = list(places.kept), list(places.shared), list(places.scale)
        _launch_backward(dx, dweight, dscale, dshift, dy, x, weight, scale, inverse_rms, *lists, offset)


host = ModulatedRMSNorm(CuTileModulatedRMSNorm())
forward = implements(modulated_rms_norm)(host.forward)
backward = host.backward
