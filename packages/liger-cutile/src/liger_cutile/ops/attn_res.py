"""Attention residuals: forward reads each source once, with a running softmax. Backward reads it twice, in two kernels.

The statistics of a row are a score and an inverse root mean square for each source. The first kernel of backward needs whole
rows, and finds three numbers for each source of a row. With these the second works element by element. On an H100 (tileiras
13.4), for nine blocks of 16384 x 7168 and `partial` in bfloat16, they take 0.85 and 1.78 ms; one kernel for both, which read a
row's sources a second time from L2, took 4.76: its loops were not fetched ahead.
"""

import functools
import math
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import attn_res
from liger_core.contract import implements
from liger_core.custom_op import opaque
from liger_core.host.attn_res import AttnRes, AttnResKernels
from liger_cutile.ops._device import loads_in_bulk, sm_count
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import (
    ZERO,
    Table,
    as_rows,
    load,
    load_vector,
    long_block,
    one_tile,
    power_of_2,
    table_of,
    whole_rows,
)
from liger_cutile.ops._rows import blocks as blocks_of
from liger_cutile.ops._sums import add_two, launch_total

# Longer rows are worked on in tiles of `long_block` columns.
LONGEST = 8192
# Blocks per multiprocessor. With eight warps, or more blocks, a row of 8192 spills registers on sm_90 (tileiras 13.4).
FORWARD_BLOCKS = 2

TILE, MOST_COLUMNS = 4096, 1024
"""Elements and columns of the tiles whose gradients are found at once. On an H100, 4 x 1024 take 1.78 ms, 8 x 512 1.88."""
BACKWARD_BLOCKS = 4


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
def _softmax(scores):
    e = ct.exp(scores - ct.max(scores, axis=1, keepdims=True))
    return e / ct.sum(e, axis=1, keepdims=True)


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
def _product(array, at, dy, row, ROWS, BLOCK):
    """dy · source, ``[ROWS, 1]``."""
    products = ct.zeros((ROWS, BLOCK), ct.float32)
    for column in range(ct.num_tiles(dy, axis=1, shape=(ROWS, BLOCK))):
        products += load(array, (at, column), ROWS, BLOCK) * load(dy, (row, column), ROWS, BLOCK)
    return ct.sum(products, axis=1, keepdims=True)


@ct.function
def _load_statistic(statistics, which, row, ROWS, SOURCES):
    tile = ct.load(statistics, (which, row, 0), (1, ROWS, SOURCES), padding_mode=ZERO, allow_tma=False)
    return ct.reshape(tile, (ROWS, SOURCES))


@ct.function
def _store_factor(factors, which, row, values, ROWS, SOURCES):
    ct.store(factors, (which, row, 0), ct.reshape(values, (1, ROWS, SOURCES)), allow_tma=False)


@ct.kernel(occupancy=BACKWARD_BLOCKS)
def _factors(
    factors, dy, blocks, partial, statistics, count, sources, block_step, row_step,
    ROWS: ConstInt, SOURCES: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    """Write what dy, query · weight and the source are multiplied by in the gradient of each source of a row."""
    row = ct.bid(0)
    products = ct.zeros((ROWS, SOURCES), ct.float32)
    for source in range(count):
        product = _product(blocks, source * block_step + row * row_step, dy, row, ROWS, BLOCK)
        products = _put(products, source, product, SOURCES)
    if given(partial):
        products = _put(products, count, _product(partial, row, dy, row, ROWS, BLOCK), SOURCES)
    scores = _load_statistic(statistics, 0, row, ROWS, SOURCES)
    r = _load_statistic(statistics, 1, row, ROWS, SOURCES)
    a = _softmax(ct.where(_lanes(SOURCES) < sources, scores, -math.inf))
    by_w = a * (products - ct.sum(a * products, axis=1, keepdims=True)) * r
    _store_factor(factors, 0, row, a, ROWS, SOURCES)
    _store_factor(factors, 1, row, by_w, ROWS, SOURCES)
    _store_factor(factors, 2, row, by_w * scores * r / dy.shape[1], ROWS, SOURCES)


@ct.function
def _factor(factors, which, row, source, ROWS):
    return ct.reshape(
        ct.load(factors, (which, row, source), (1, ROWS, 1), padding_mode=ZERO, allow_tma=False), (ROWS, 1)
    )


@ct.function
def _give(gradient, place, total, vs, dys, ws, factors, row, source, ROWS):
    """Write a part of the gradient of one source, and return `total` plus its part of the gradient of query · weight."""
    by_w = _factor(factors, 1, row, source, ROWS)
    if given(gradient):
        dvs = _factor(factors, 0, row, source, ROWS) * dys + by_w * ws - _factor(factors, 2, row, source, ROWS) * vs
        ct.store(gradient, place, ct.astype(dvs, gradient.dtype), allow_tma=False)
    return total + by_w * vs


@ct.kernel(occupancy=BACKWARD_BLOCKS)
def _gradients(
    dblocks, dpartial, sums, factors, dy, blocks, partial, query, weight, count, block_step, row_step,
    ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    column = ct.bid(0)
    rows = ct.num_tiles(dy, axis=0, shape=(ROWS, BLOCK))
    ws = _load_product(query, weight, column, BLOCK)
    total = ct.zeros((ROWS, BLOCK), ct.float32)
    for row in range(ct.bid(1), rows, ct.num_blocks(1)):
        dys = load(dy, (row, column), ROWS, BLOCK)
        for source in range(count):
            vs = load(blocks, (source * block_step + row * row_step, column), ROWS, BLOCK)
            to = source * rows + row, column
            total = _give(dblocks, to, total, vs, dys, ws, factors, row, source, ROWS)
        if given(partial):
            vs = load(partial, (row, column), ROWS, BLOCK)
            total = _give(dpartial, (row, column), total, vs, dys, ws, factors, row, count, ROWS)
    if given(sums):
        ct.store(sums, (ct.bid(1), column), ct.sum(total, axis=0, keepdims=True), allow_tma=False)


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


@functools.cache
def _with_more_registers() -> tuple[tuple[Any, Any], int]:
    """The kernels of backward, and blocks per multiprocessor, for devices whose data in flight takes registers."""
    return (_factors.replace_hints(occupancy=2), _gradients.replace_hints(occupancy=2)), 2


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
    factors = torch.empty((3, rows, sources), dtype=torch.float32, device=dy.device)

    kernels, occupancy = (_factors, _gradients), BACKWARD_BLOCKS
    if not loads_in_bulk(dy.device):
        kernels, occupancy = _with_more_registers()

    most, block = whole_rows(min(columns, long_block(columns)))
    tile_rows = _rows_of_tile(table, rows, most)
    launch(
        kernels[0], (blocks_of(rows, tile_rows),), factors, dy, table.rows, partial, statistics, count, sources,
        table.steps[0] // tile_rows, table.steps[1], tile_rows, power_of_2(sources), block,
    )  # fmt: skip

    block = min(power_of_2(columns), MOST_COLUMNS)
    tile_rows = _rows_of_tile(table, rows, TILE // block)
    across, down = blocks_of(columns, block), blocks_of(rows, tile_rows)
    down = min(down, max(1, sm_count(dy.device) * occupancy // across))
    parts = None if sums is None else torch.empty((down, columns), dtype=torch.float32, device=dy.device)
    launch(
        kernels[1], (across, down), dblocks, dpartial, parts, factors, dy, table.rows, partial, query, weight, count,
        table.steps[0] // tile_rows, table.steps[1], tile_rows, block,
    )  # fmt: skip
    if parts is not None:
        assert sums is not None
        launch_total(sums, parts)


class CuTileAttnRes(AttnResKernels):
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


host = AttnRes(CuTileAttnRes())
forward = implements(attn_res)(host.forward)
backward = host.backward
