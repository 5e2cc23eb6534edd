"""Embedding: forward gathers rows. Backward sorts the indices and writes every row of the gradient once, without atomics."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import embedding
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import as_rows, blocks, near, power_of_2

# Elements and columns that a block of the forward gathers. The first columns of all rows come before the next columns, so that a
# row that is looked up twice is still in the cache.
FORWARD_TILE, FORWARD_COLUMNS = 4096, 128
# The most columns of a block of the backward.
BACKWARD_BLOCK = 2048
# Up to this many indices are sorted here. On an H200, 16384 take 0.010 ms and 65536 take 0.032; by torch.sort 0.082 and 0.075.
MOST_RANKED = 65536
# Up to FEW indices are sorted by comparing each with each. A block compares COUNTED of them with COMPARED at a time. On an H200,
# 2048 of 32000 rows of 2048 take 0.053 ms, and 0.060 if parts are merged.
FEW, COUNTED, COMPARED = 2048, 16, 512
# For more indices: those of a part that is sorted that way, the parts merged at a time, and the indices whose places a block
# finds.
PART, PARTS, MERGED = 64, 16, 32
# Greater than any index.
LARGEST = (1 << 31) - 1
# Sorted positions that one block sums ahead, if all of them have the same index.
CHUNK = 64
# Rows of dy that a block has in flight.
AT_ONCE = 1
# Rows of the weight whose positions one block finds, and whose gradients one block writes. Most of these gradients are 0: a
# block for each row would wait for two numbers and then store 4 KiB. On an H200, 16384 indices of 128256 rows take 0.345 ms by
# four rows per block, and 0.396 by one.
FOUND, SUMMED = 1024, 4


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
def _keys(indices, position, vocabulary):
    """The indices at `position`, and -1 for those out of range."""
    index = ct.gather(indices, position)
    return ct.astype(ct.where((index >= 0) & (index < vocabulary), index, -1), ct.int32)


@ct.kernel
def _sort_parts(keys, order, indices, vocabulary, size, COUNTED: ConstInt, COMPARED: ConstInt):
    """Sort each run of `size` indices by itself. An index's place is the number of lesser ones and of equal ones before it."""
    rows = indices.shape[0]
    counted = ct.bid(0) * COUNTED + ct.arange(COUNTED, dtype=ct.int32)
    key = _keys(indices, counted, vocabulary)
    value, at = ct.reshape(key, (COUNTED, 1)), ct.reshape(counted, (COUNTED, 1))
    start = ct.bid(0) * COUNTED // size * size
    count = ct.zeros((COUNTED, COMPARED), ct.int32)
    for first in range(start, ct.minimum(start + size, rows), COMPARED):
        position = first + ct.arange(COMPARED, dtype=ct.int32)
        other = ct.where(position < rows, _keys(indices, position, vocabulary), LARGEST)
        count += ct.where((other < value) | ((other == value) & (position < at)), 1, 0)
    place = start + ct.sum(count, axis=1)
    ct.scatter(keys, place, key, mask=counted < rows)
    ct.scatter(order, place, counted, mask=counted < rows)


@ct.kernel
def _merge_parts(keys, order, part_keys, part_order, size, PARTS: ConstInt, MERGED: ConstInt):
    """Merge each PARTS parts. An index's place is the number that come before it in each part, by binary search."""
    position = ct.bid(0) * MERGED + ct.arange(MERGED, dtype=ct.int32)
    exists = position < keys.shape[0]
    key = ct.gather(part_keys, position)
    own_part = ct.bid(0) * MERGED // size
    first = own_part // PARTS * PARTS
    part = first + ct.arange(PARTS, dtype=ct.int32)
    # The earlier part's index comes first of two that are equal.
    limit = ct.reshape(key, (MERGED, 1)) + ct.where(part < own_part, 1, 0)
    # Rows are indices: tileiras 13.4 deals rows out first. Transposed, neighbouring threads would search in different parts.
    count = ct.zeros((MERGED, PARTS), ct.int32)
    step = size // 2
    while step > 0:
        last = ct.gather(part_keys, part * size + count + (step - 1), padding_value=LARGEST)
        count += ct.where(last < limit, step, 0)
        step = step // 2
    last = ct.gather(part_keys, part * size + count, padding_value=LARGEST)
    count += ct.where(last < limit, 1, 0)
    count = ct.where(part == own_part, ct.reshape(position, (MERGED, 1)) - own_part * size, count)
    place = first * size + ct.sum(count, axis=1)
    ct.scatter(keys, place, key, mask=exists)
    ct.scatter(order, place, ct.gather(part_order, position), mask=exists)


@ct.function
def _sum_rows(rows_of, array, first, last, column, AT_ONCE, BLOCK):
    """The sum of an array's rows, ``[1, BLOCK]``, from `first` to `last`; with `rows_of`, of the rows that it names there."""
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
    """Write the first sorted position of each index, and where the last one ends. Sum each chunk that lies inside a run."""
    block, column = ct.bid(0), ct.bid(1)
    if block < finders:
        if column == 0:
            index = block * FOUND + ct.arange(FOUND, dtype=ct.int32)
            start = ct.zeros((FOUND,), ct.int64)
            while step > 0:  # a binary search, in steps that are powers of two
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
    dweight, dy, partial, order, starts, padding,
    CHUNK: ConstInt, AT_ONCE: ConstInt, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    first, column = ct.bid(0) * ROWS, ct.bid(1)
    vocabulary = dweight.shape[0]
    start = ct.load(starts, (first,), ())
    following = ct.load(starts, (first + 1,), ())
    for index in range(first, ct.minimum(first + ROWS, vocabulary)):
        end = following
        following = ct.load(starts, (ct.minimum(index + 2, vocabulary),), ())  # loaded before it is needed
        last = ct.where(index == padding, start, end)
        sums = ct.zeros((1, BLOCK), ct.float32)
        if given(partial):
            begin_chunk, end_chunk = ct.cdiv(start, CHUNK), last // CHUNK
            if begin_chunk < end_chunk:
                sums = _sum_rows(order, dy, start, begin_chunk * CHUNK, column, AT_ONCE, BLOCK)
                sums += _sum_rows((), partial, begin_chunk, end_chunk, column, AT_ONCE, BLOCK)
                start = end_chunk * CHUNK
        sums += _sum_rows(order, dy, start, last, column, AT_ONCE, BLOCK)
        ct.store(dweight, (index, column), ct.astype(sums, dweight.dtype), allow_tma=False)
        start = end


@opaque(writes=("y",))
def _launch_forward(y: Tensor, indices: Tensor, weight: Tensor) -> None:
    y, indices, weight = as_rows(y), near(indices.reshape(-1)), near(weight)
    rows, columns = y.shape
    block = min(power_of_2(columns), FORWARD_COLUMNS)
    tile_rows = FORWARD_TILE // block
    launch(_look_up, (blocks(rows, tile_rows), blocks(columns, block)), y, indices, weight, tile_rows, block)


@opaque(writes=("dweight",))
def _launch_backward(dweight: Tensor, dy: Tensor, indices: Tensor, padding: int) -> None:
    dy = as_rows(dy)
    rows, columns = dy.shape
    vocabulary = dweight.shape[0]
    keys, order = _sort(near(indices.reshape(-1)), vocabulary)
    block = min(power_of_2(columns), BACKWARD_BLOCK)
    across = blocks(columns, block)
    # Chunks that lie inside a run are summed ahead, each by its own block. So a frequent index, such as padding, doesn't keep
    # one block busy for long: a run of n indices takes about n / 64 + 64 steps instead of n.
    chunks = rows // CHUNK if rows > 2048 else 0
    partial = torch.empty((chunks, columns), dtype=torch.float32, device=dy.device) if chunks else None
    starts = torch.empty(vocabulary + 1, dtype=torch.int32, device=dy.device)
    finders = blocks(vocabulary + 1, FOUND)
    step = 1 << (rows.bit_length() - 1)
    launch(
        _find_runs, (finders + chunks, across), starts, partial, dy, keys, order, rows, step, finders,
        CHUNK, AT_ONCE, block, FOUND,
    )  # fmt: skip
    launch(
        _sum_runs, (blocks(vocabulary, SUMMED), across), dweight, dy, partial, order, starts, padding,
        CHUNK, AT_ONCE, SUMMED, block,
    )  # fmt: skip


def _sort(indices: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The sorted indices and their original positions. Indices out of range are at the ends."""
    rows = indices.shape[0]
    if rows > MOST_RANKED:
        return torch.sort(indices, stable=True)
    size, counted, compared = (FEW, COUNTED, COMPARED) if rows <= FEW else (PART, PART, PART)
    keys, order, *spare = (
        torch.empty(rows, dtype=torch.int32, device=indices.device) for _ in range(2 + 2 * (size < rows))
    )
    launch(_sort_parts, (blocks(rows, counted),), keys, order, indices, vocabulary, size, counted, compared)
    while size < rows:
        launch(_merge_parts, (blocks(rows, MERGED),), *spare, keys, order, size, PARTS, MERGED)
        (keys, order), spare, size = spare, (keys, order), size * PARTS
    return keys, order


@implements(embedding)
def forward(needs: Needs, indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> tuple[Tensor, Saved]:
    y = torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    _launch_forward(y, indices, weight)
    # The weight itself is not saved, so that it may change before backward. An empty tensor holds its row count and dtype.
    return y, (indices, weight.new_empty((weight.shape[0], 0))) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, padding_idx: int | None) -> tuple[Tensor | None, ...]:
    indices, like = saved
    vocabulary = like.shape[0]
    dweight = like.new_empty((vocabulary, dy.shape[-1]))
    _launch_backward(dweight, dy, indices, -1 if padding_idx is None else padding_idx % vocabulary)
    return (dweight,)
