"""Embedding: rows are gathered; backward sorts the indices and writes every row of the gradient once, without atomics."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import embedding
from liger_core.contract import Needs, Saved, implements
from liger_core.opaque import opaque
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import as_rows, blocks, power_of_2

# Elements that a block of the forward gathers, and most columns of one of the backward.
FORWARD_TILE = 2048
BACKWARD_BLOCK = 2048
# Sorted positions that are summed ahead, by a block of their own, where all of them have the same index.
CHUNK = 64
# Rows of dy that a block has under way.
AT_ONCE = 1
# Rows of the weight whose positions one block finds.
FOUND = 1024


@ct.kernel
def _look_up(y, indices, weight, ROWS: ConstInt, BLOCK: ConstInt):
    row, column = ct.bid(0), ct.bid(1)
    index = ct.load(indices, (row,), (ROWS,), padding_mode=ct.PaddingMode.ZERO)
    at = ct.reshape(index, (ROWS, 1)), _columns(column, BLOCK)
    ct.store(y, (row, column), ct.gather(weight, at, padding_value=float("nan")))


@ct.function
def _columns(column, BLOCK):
    """The columns of the tile number `column`, ``[1, BLOCK]``."""
    return ct.reshape(column * BLOCK + ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))


@ct.function
def _sum_rows(rows_of, array, first, last, column, AT_ONCE, BLOCK):
    """The sum of the rows of an array, ``[1, BLOCK]``: from `first` to `last`, or those that `rows_of` has there."""
    sums = ct.zeros((AT_ONCE, BLOCK), ct.float32)
    for start in range(first, last, AT_ONCE):
        place = start + ct.arange(AT_ONCE, dtype=ct.int32)
        mask = ct.reshape(place < last, (AT_ONCE, 1))
        if given(rows_of):
            place = ct.gather(rows_of, place)
        at = ct.reshape(place, (AT_ONCE, 1)), _columns(column, BLOCK)
        sums += ct.astype(ct.gather(array, at, mask=mask), ct.float32)
    return ct.sum(sums, axis=0, keepdims=True)


@ct.kernel(occupancy=8)
def _find_runs(
    starts, partial, dy, keys, order, rows, step, finders,
    CHUNK: ConstInt, AT_ONCE: ConstInt, BLOCK: ConstInt, FOUND: ConstInt,
):  # fmt: skip
    """Write the first sorted position of every index, and of what follows the last; sum the chunks inside of a run."""
    block, column = ct.bid(0), ct.bid(1)
    if block < finders:
        if column == 0:
            index = block * FOUND + ct.arange(FOUND, dtype=ct.int32)
            start = ct.zeros((FOUND,), ct.int64)
            while step > 0:  # a binary search, by steps that are powers of two
                further = start + step
                below = ct.astype(ct.gather(keys, further - 1), ct.int64) < index
                start = ct.where((further <= rows) & below, further, start)
                step = step // 2
            ct.store(starts, (block,), ct.astype(start, ct.int32), allow_tma=False)
    elif given(partial):
        chunk = block - finders
        first = chunk * CHUNK
        if ct.load(keys, (first,), ()) == ct.load(keys, (first + CHUNK - 1,), ()):
            sums = _sum_rows(order, dy, first, first + CHUNK, column, AT_ONCE, BLOCK)
            ct.store(partial, (chunk, column), sums, allow_tma=False)


@ct.kernel(occupancy=8)
def _sum_runs(
    dweight, dy, partial, order, starts, padding, CHUNK: ConstInt, AT_ONCE: ConstInt, BLOCK: ConstInt
):  # fmt: skip
    index, column = ct.bid(0), ct.bid(1)
    start = ct.load(starts, (index,), ())
    end = ct.load(starts, (index + 1,), ())
    if index == padding:
        end = start
    sums = ct.zeros((1, BLOCK), ct.float32)
    if given(partial):
        first, last = ct.cdiv(start, CHUNK), end // CHUNK
        if first < last:
            sums = _sum_rows(order, dy, start, first * CHUNK, column, AT_ONCE, BLOCK)
            sums += _sum_rows((), partial, first, last, column, AT_ONCE, BLOCK)
            start = last * CHUNK
    sums += _sum_rows(order, dy, start, end, column, AT_ONCE, BLOCK)
    ct.store(dweight, (index, column), ct.astype(sums, dweight.dtype), allow_tma=False)


@opaque(writes=("y",))
def _launch_forward(y: Tensor, indices: Tensor, weight: Tensor) -> None:
    y, indices = as_rows(y), indices.reshape(-1)
    rows, columns = y.shape
    block = min(power_of_2(columns), FORWARD_TILE)
    tile_rows = FORWARD_TILE // block
    launch(_look_up, (blocks(rows, tile_rows), blocks(columns, block)), y, indices, weight, tile_rows, block)


@opaque(writes=("dweight",))
def _launch_backward(dweight: Tensor, dy: Tensor, indices: Tensor, padding: int) -> None:
    dy = as_rows(dy)
    rows, columns = dy.shape
    vocabulary = dweight.shape[0]
    keys, order = torch.sort(indices.reshape(-1), stable=True)
    block = min(power_of_2(columns), BACKWARD_BLOCK)
    across = blocks(columns, block)
    # So that a frequent index, such as padding, doesn't keep its block for long, chunks that lie inside a run are summed
    # ahead, each by a block of its own: a run of n indices takes n / 64 + 64 steps and not n.
    chunks = rows // CHUNK if rows > 2048 else 0
    partial = torch.empty((chunks, columns), dtype=torch.float32, device=dy.device) if chunks else None
    starts = torch.empty(vocabulary + 1, dtype=torch.int32, device=dy.device)
    finders = blocks(vocabulary + 1, FOUND)
    step = 1 << (rows.bit_length() - 1)
    launch(
        _find_runs, (finders + chunks, across), starts, partial, dy, keys, order, rows, step, finders,
        CHUNK, AT_ONCE, block, FOUND,
    )  # fmt: skip
    launch(_sum_runs, (vocabulary, across), dweight, dy, partial, order, starts, padding, CHUNK, AT_ONCE, block)


@implements(embedding)
def forward(needs: Needs, indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> tuple[Tensor, Saved]:
    y = torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    _launch_forward(y, indices, weight)
    # The weight itself is not saved, so that it may change before backward: an empty tensor holds its rows and dtype.
    return y, (indices, weight.new_empty((weight.shape[0], 0))) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, padding_idx: int | None) -> tuple[Tensor | None, ...]:
    indices, like = saved
    vocabulary = like.shape[0]
    dweight = like.new_empty((vocabulary, dy.shape[-1]))
    _launch_backward(dweight, dy, indices, -1 if padding_idx is None else padding_idx % vocabulary)
    return (dweight,)
