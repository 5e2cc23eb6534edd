"""Attention residuals: forward reads each source once, with a running softmax. Backward reads it twice, the second time from L2.

The statistics of a row are a score and an inverse root mean square for each source.
"""

import functools
import math
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import attn_res
from liger_core.contract import implements
from liger_core.host.attn_res import AttnRes, AttnResKernels
from liger_core.opaque import opaque
from liger_cutile.ops._device import multiplies_from_shared, sm_count
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import as_rows, long_block, power_of_2, whole_rows
from liger_cutile.ops._rows import blocks as blocks_of
from liger_cutile.ops._sums import add_three, add_two
from liger_cutile.ops._tables import Table, one_tile, table_of
from liger_cutile.ops._tiles import ZERO, load, load_vector
from liger_cutile.ops._totals import launch_total

# Longer rows are worked on in tiles of `long_block` columns. On sm_80 and sm_120, backward spills: there its limit is half.
LONGEST = 8192
# Blocks per multiprocessor. With eight warps, or more blocks, a row of 8192 spills registers on sm_90 (tileiras 13.4).
FORWARD_BLOCKS = 2


@ct.function
def _load_product(query, weight, column, BLOCK):
    """query · weight."""
    ws = load_vector(query, column, BLOCK)
    return ws * load_vector(weight, column, BLOCK) if given(weight) else ws


@ct.function
def _score(statistics, squares, products, row, source, columns, eps, ROWS):
    """Write one source's score and inverse root mean square for each row, and return the score."""
    r = ct.rsqrt(squares / columns + eps)
    score = products * r
    if given(statistics):
        ct.store(statistics, (0, row, source), ct.reshape(score, (1, ROWS, 1)), check_bounds=False, allow_tma=False)
        ct.store(statistics, (1, row, source), ct.reshape(r, (1, ROWS, 1)), check_bounds=False, allow_tma=False)
    return score


@ct.function
def _take(vs, ws, top, exp_sum, mean, statistics, row, source, columns, eps, ROWS):
    """Take one more source into the running softmax of each row."""
    squares, products = ct.reduce((vs * vs, vs * ws), axis=1, func=add_two, identity=(0.0, 0.0), keepdims=True)
    score = _score(statistics, squares, products, row, source, columns, eps, ROWS)
    higher = ct.maximum(top, score)
    shrunk, e = ct.exp(top - higher), ct.exp(score - higher)
    return higher, exp_sum * shrunk + e, mean * shrunk + e * vs


@ct.kernel(occupancy=FORWARD_BLOCKS)
def _forward(
    y, statistics, blocks, partial, query, weight, count, columns, block_step, row_step, eps,
    ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    ws = _load_product(query, weight, 0, BLOCK)
    for row in range(ct.bid(0), ct.num_tiles(y, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        top = ct.full((ROWS, 1), -math.inf, ct.float32)
        exp_sum = ct.zeros((ROWS, 1), ct.float32)
        mean = ct.zeros((ROWS, BLOCK), ct.float32)
        for source in range(count):
            vs = load(blocks, (source * block_step + row * row_step, 0), ROWS, BLOCK)
            top, exp_sum, mean = _take(vs, ws, top, exp_sum, mean, statistics, row, source, columns, eps, ROWS)
        if given(partial):
            vs = load(partial, (row, 0), ROWS, BLOCK)
            top, exp_sum, mean = _take(vs, ws, top, exp_sum, mean, statistics, row, count, columns, eps, ROWS)
        ct.store(y, (row, 0), ct.astype(mean / exp_sum, y.dtype))


@ct.function
def _load_statistic(statistics, which, row, source, ROWS):
    tile = ct.load(statistics, (which, row, source), (1, ROWS, 1), check_bounds=False, allow_tma=False)
    return ct.reshape(tile, (ROWS, 1))


@ct.function
def _dot(dys, vs):
    return ct.sum(dys * vs, axis=1, keepdims=True)


@ct.function
def _take_product(vs, dys, top, exp_sum, mean, statistics, row, source, ROWS):
    """Add one more source's dy · source to their mean, weighted by the softmax of the scores."""
    score = _load_statistic(statistics, 0, row, source, ROWS)
    higher = ct.maximum(top, score)
    shrunk, e = ct.exp(top - higher), ct.exp(score - higher)
    return higher, exp_sum * shrunk + e, mean * shrunk + e * _dot(dys, vs)


@ct.function
def _give(gradient, place, total, vs, dys, ws, top, exp_sum, mean, statistics, row, source, columns, ROWS):
    """Write the gradient of one source, and return `total` plus its part of the gradient of query · weight."""
    score, r = _load_statistic(statistics, 0, row, source, ROWS), _load_statistic(statistics, 1, row, source, ROWS)
    a = ct.exp(score - top) / exp_sum
    along_w = a * (_dot(dys, vs) - mean) * r
    if given(gradient):
        dvs = a * dys + along_w * ws - along_w * score * r / columns * vs
        ct.store(gradient, place, ct.astype(dvs, gradient.dtype), allow_tma=False)
    return total + along_w * vs


@ct.kernel
def _backward(
    dblocks, dpartial, sums, dy, blocks, partial, query, weight, statistics, count, columns, block_step, row_step,
    EACH: ConstInt, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    """A block takes EACH tiles of rows.

    That loop is unrolled: inside another loop, the loops over sources spill registers (tileiras 13.4).
    """
    rows = ct.num_tiles(dy, axis=0, shape=(ROWS, BLOCK))
    ws = _load_product(query, weight, 0, BLOCK)
    total = ct.zeros((ROWS, BLOCK), ct.float32)
    for each in ct.static_iter(range(EACH)):
        row = ct.bid(0) * EACH + each
        dys = load(dy, (row, 0), ROWS, BLOCK)
        top = ct.full((ROWS, 1), -math.inf, ct.float32)
        exp_sum = ct.zeros((ROWS, 1), ct.float32)
        mean = ct.zeros((ROWS, 1), ct.float32)
        for source in range(count):
            vs = load(blocks, (source * block_step + row * row_step, 0), ROWS, BLOCK)
            top, exp_sum, mean = _take_product(vs, dys, top, exp_sum, mean, statistics, row, source, ROWS)
        if given(partial):
            vs = load(partial, (row, 0), ROWS, BLOCK)
            top, exp_sum, mean = _take_product(vs, dys, top, exp_sum, mean, statistics, row, count, ROWS)
        mean = mean / exp_sum
        for source in range(count):
            vs = load(blocks, (source * block_step + row * row_step, 0), ROWS, BLOCK)
            total = _give(
                dblocks, (source * rows + row, 0), total, vs, dys, ws, top, exp_sum, mean, statistics, row, source, columns, ROWS
            )  # fmt: skip
        if given(partial):
            vs = load(partial, (row, 0), ROWS, BLOCK)
            total = _give(
                dpartial, (row, 0), total, vs, dys, ws, top, exp_sum, mean, statistics, row, count, columns, ROWS
            )  # fmt: skip
    if given(sums):
        ct.store(sums, (ct.bid(0), 0), ct.sum(total, axis=0, keepdims=True), allow_tma=False)


@ct.function
def _lanes(SOURCES):
    return ct.reshape(ct.arange(SOURCES, dtype=ct.int32), (1, SOURCES))


@ct.function
def _put(values, source, value, SOURCES):
    """The values of all sources, with one of them replaced."""
    return ct.where(_lanes(SOURCES) == source, value, values)


@ct.function
def _only(values, source, SOURCES):
    """The value of one source."""
    return ct.sum(ct.where(_lanes(SOURCES) == source, values, 0.0), axis=1, keepdims=True)


@ct.function
def _only_three(first, second, third, source, SOURCES):
    here = _lanes(SOURCES) == source
    each = ct.where(here, first, 0.0), ct.where(here, second, 0.0), ct.where(here, third, 0.0)
    return ct.reduce(each, axis=1, func=add_three, identity=(0.0, 0.0, 0.0), keepdims=True)


@ct.function
def _softmax(scores):
    e = ct.exp(scores - ct.max(scores, axis=1, keepdims=True))
    return e / ct.sum(e, axis=1, keepdims=True)


@ct.function
def _shares(statistics, products, row, sources, columns, SOURCES):
    """From dy · source: what dy, query · weight and the source are multiplied by in the gradient of each source of a row."""
    shape = (1, 1, SOURCES)
    scores = ct.reshape(ct.load(statistics, (0, row, 0), shape, padding_mode=ZERO, allow_tma=False), (1, SOURCES))
    r = ct.reshape(ct.load(statistics, (1, row, 0), shape, padding_mode=ZERO, allow_tma=False), (1, SOURCES))
    a = _softmax(ct.where(_lanes(SOURCES) < sources, scores, -math.inf))
    along_w = a * (products - ct.sum(a * products, axis=1, keepdims=True)) * r
    return a, along_w, along_w * scores * r / columns


@ct.function
def _measure(statistics, array, at, query, weight, row, source, eps, BLOCK):
    """The score of a source of a row, ``[1, 1]``."""
    squares = ct.zeros((1, BLOCK), ct.float32)
    products = ct.zeros((1, BLOCK), ct.float32)
    for column in range(ct.num_tiles(array, axis=1, shape=(1, BLOCK))):
        vs = load(array, (at, column), 1, BLOCK)
        squares += vs * vs
        products += vs * _load_product(query, weight, column, BLOCK)
    squares, products = ct.reduce((squares, products), axis=1, func=add_two, identity=(0.0, 0.0), keepdims=True)
    return _score(statistics, squares, products, row, source, array.shape[1], eps, 1)


@ct.kernel(occupancy=4)
def _forward_long(
    y, statistics, blocks, partial, query, weight, count, block_step, row_step, eps, SOURCES: ConstInt, BLOCK: ConstInt
):  # fmt: skip
    row = ct.bid(0)
    scores = ct.full((1, SOURCES), -math.inf, ct.float32)
    for source in range(count):
        at = source * block_step + row * row_step
        score = _measure(statistics, blocks, at, query, weight, row, source, eps, BLOCK)
        scores = _put(scores, source, score, SOURCES)
    if given(partial):
        score = _measure(statistics, partial, row, query, weight, row, count, eps, BLOCK)
        scores = _put(scores, count, score, SOURCES)
    a = _softmax(scores)
    for column in range(ct.num_tiles(y, axis=1, shape=(1, BLOCK))):
        mean = ct.zeros((1, BLOCK), ct.float32)
        for source in range(count):
            vs = load(blocks, (source * block_step + row * row_step, column), 1, BLOCK)
            mean += _only(a, source, SOURCES) * vs
        if given(partial):
            mean += _only(a, count, SOURCES) * load(partial, (row, column), 1, BLOCK)
        ct.store(y, (row, column), ct.astype(mean, y.dtype))


@ct.function
def _product(array, at, dy, row, BLOCK):
    """dy · source of a row, ``[1, 1]``."""
    products = ct.zeros((1, BLOCK), ct.float32)
    for column in range(ct.num_tiles(dy, axis=1, shape=(1, BLOCK))):
        products += load(array, (at, column), 1, BLOCK) * load(dy, (row, column), 1, BLOCK)
    return ct.sum(products, axis=1, keepdims=True)


@ct.function
def _give_long(gradient, to, array, at, dy, query, weight, row, shares, source, SOURCES, BLOCK):
    a, along_w, along_v = _only_three(*shares, source, SOURCES)
    for column in range(ct.num_tiles(dy, axis=1, shape=(1, BLOCK))):
        dvs = a * load(dy, (row, column), 1, BLOCK) + along_w * _load_product(query, weight, column, BLOCK)
        dvs -= along_v * load(array, (at, column), 1, BLOCK)
        ct.store(gradient, (to, column), ct.astype(dvs, gradient.dtype), allow_tma=False)


@ct.kernel(occupancy=4)
def _backward_long(
    dblocks, dpartial, slopes, dy, blocks, partial, query, weight, statistics, count, sources, block_step, row_step,
    SOURCES: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    """The gradients of a row's sources. `slopes` gets each source's factor in the gradient of query · weight."""
    row = ct.bid(0)
    products = ct.zeros((1, SOURCES), ct.float32)
    for source in range(count):
        product = _product(blocks, source * block_step + row * row_step, dy, row, BLOCK)
        products = _put(products, source, product, SOURCES)
    if given(partial):
        products = _put(products, count, _product(partial, row, dy, row, BLOCK), SOURCES)
    shares = _shares(statistics, products, row, sources, dy.shape[1], SOURCES)
    if given(slopes):
        ct.store(slopes, (row, 0), shares[1], allow_tma=False)
    if given(dblocks):
        for source in range(count):
            at, to = source * block_step + row * row_step, source * dy.shape[0] + row
            _give_long(dblocks, to, blocks, at, dy, query, weight, row, shares, source, SOURCES, BLOCK)
    if given(dpartial):
        _give_long(dpartial, row, partial, row, dy, query, weight, row, shares, count, SOURCES, BLOCK)


@ct.kernel(occupancy=4)
def _sums_long(
    sums, slopes, blocks, partial, count, block_step, row_step, ROWS: ConstInt, BLOCK: ConstInt
):  # fmt: skip
    """A block of columns of the sum over all rows and all sources."""
    column = ct.bid(0)
    total = ct.zeros((ROWS, BLOCK), ct.float32)
    for row in range(ct.num_tiles(slopes, axis=0, shape=(ROWS, 1))):
        for source in range(count):
            vs = load(blocks, (source * block_step + row * row_step, column), ROWS, BLOCK)
            total += load(slopes, (row, source), ROWS, 1) * vs
        if given(partial):
            total += load(slopes, (row, count), ROWS, 1) * load(partial, (row, column), ROWS, BLOCK)
    ct.store(sums, (column,), ct.sum(total, axis=0))


def _sources(blocks: Tensor, partial: Tensor | None) -> tuple[Table, Tensor | None]:
    """The table of the blocks, and partial as rows."""
    count, rows, columns = blocks.shape
    if partial is not None:
        partial = as_rows(partial)
    strides = [0 if size == 1 else stride for size, stride in zip((count, rows), blocks.stride(), strict=False)]
    return table_of(blocks, columns, (count, rows), strides), partial


def _rows_of_tile(table: Table, rows: int, most: int) -> int:
    """The most rows of a tile for which each source's tiles are tiles of the table, and of a tensor of all sources' rows."""
    while most > 1 and not (most < 2 * rows and rows % most == 0 and one_tile(table.steps, most)):
        most //= 2
    return most


def _each(tiles: int, wide: bool) -> int:
    """How many tiles of rows a block takes in backward: the more, the fewer partial sums. With four, wide tiles spill."""
    return next(each for each in ((2, 1) if wide else (4, 2, 1)) if tiles % each == 0)


@functools.cache
def _sized(kernel: Any, elements: int) -> Any:
    """`_backward` for a tile of `elements`."""
    return kernel.replace_hints(occupancy=2) if elements <= 4096 else kernel.replace_hints(num_worker_warps=8)


@opaque(writes=("y", "statistics"))
def _launch_forward(
    y: Tensor,
    statistics: Tensor | None,
    blocks: Tensor,
    partial: Tensor | None,
    query: Tensor,
    weight: Tensor | None,
    eps: float,
) -> None:
    count, rows, columns = blocks.shape
    table, partial = _sources(blocks, partial)
    tensors = y, statistics, table.rows, partial, query, weight, count
    if columns > LONGEST:
        sources = power_of_2(count + (partial is not None))
        launch(_forward_long, (rows,), *tensors, *table.steps, float(eps), sources, long_block(columns))
        return
    most, block = whole_rows(columns)
    tile_rows = _rows_of_tile(table, rows, most)
    grid = min(blocks_of(rows, tile_rows), sm_count(y.device) * FORWARD_BLOCKS)
    steps = table.steps[0] // tile_rows, table.steps[1]
    launch(_forward, (grid,), *tensors, columns, *steps, float(eps), tile_rows, block)


@opaque(writes=("dblocks", "dpartial", "sums"))
def _launch_backward(
    dblocks: Tensor | None,
    dpartial: Tensor | None,
    sums: Tensor | None,
    dy: Tensor,
    blocks: Tensor,
    partial: Tensor | None,
    query: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
) -> None:
    count, rows, columns = blocks.shape
    table, partial = _sources(blocks, partial)
    dy = as_rows(dy)
    dblocks, dpartial = (None if t is None else as_rows(t.view(-1, columns)) for t in (dblocks, dpartial))
    sources = count + (partial is not None)
    tensors = dy, table.rows, partial, query, weight, statistics, count
    if columns > (LONGEST if multiplies_from_shared(dy.device) else LONGEST // 2):
        slopes = None
        if sums is not None:
            slopes = torch.empty((rows, sources), dtype=torch.float32, device=dy.device)
        launch(
            _backward_long, (rows,), dblocks, dpartial, slopes, *tensors, sources, *table.steps, power_of_2(sources),
            long_block(columns),
        )  # fmt: skip
        if sums is not None:
            tile_rows = _rows_of_tile(table, rows, 64)
            steps = table.steps[0] // tile_rows, table.steps[1]
            launch(
                _sums_long, (blocks_of(columns, 64),), sums, slopes, table.rows, partial, count, *steps, tile_rows, 64
            )
        return
    most, block = whole_rows(columns)
    tile_rows = _rows_of_tile(table, rows, most)
    tiles = blocks_of(rows, tile_rows)
    each = _each(tiles, block * dy.element_size() > 16384)
    grid = tiles // each
    parts = None if sums is None else torch.empty((grid, columns), dtype=torch.float32, device=dy.device)
    steps = table.steps[0] // tile_rows, table.steps[1]
    kernel = _sized(_backward, tile_rows * block)
    launch(kernel, (grid,), dblocks, dpartial, parts, *tensors, columns, *steps, each, tile_rows, block)
    if parts is not None:
        assert sums is not None
        launch_total(sums, parts)


class _Kernels(AttnResKernels):
    def forward(
        self,
        y: Tensor,
        statistics: Tensor | None,
        blocks: Tensor,
        partial: Tensor | None,
        query: Tensor,
        weight: Tensor | None,
        eps: float,
    ) -> None:
        _launch_forward(y, statistics, blocks, partial, query, weight, eps)

    def backward(
        self,
        dblocks: Tensor | None,
        dpartial: Tensor | None,
        sums: bool,
        dy: Tensor,
        blocks: Tensor,
        partial: Tensor | None,
        query: Tensor,
        weight: Tensor | None,
        statistics: Tensor,
    ) -> Tensor | None:
        total = torch.empty(blocks.shape[2], dtype=torch.float32, device=blocks.device) if sums else None
        _launch_backward(dblocks, dpartial, total, dy, blocks, partial, query, weight, statistics)
        return total


host = AttnRes(_Kernels())
forward = implements(attn_res)(host.forward)
backward = host.backward
