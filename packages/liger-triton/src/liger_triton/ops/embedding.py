"""Embedding: forward gathers rows. Backward sorts the indices and writes every row of the gradient once, without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import embedding
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, power_of_2

FORWARD_TILE, FORWARD_COLUMNS, FORWARD_WARPS = 4096, 128, 4
"""Elements and columns that a program gathers. The first columns of all rows come before the next columns, so that a row that is
looked up twice is still in the cache. On an H200, 65536 of 128256 rows of 4096 bf16 take 0.253 ms; by whole rows 0.263."""
MOST_RANKED = 65536
"""Up to this many indices are sorted here, and more by torch.sort. On an H200, 16384 take 0.015 ms and 65536 take 0.051; by
torch.sort 0.088 and 0.092. The work here grows with their square."""
MOST_COUNTED, COUNTED = 2048, 16
"""Up to MOST_COUNTED indices, one launch finds their order and runs, by comparing each with each. COUNTED is how many of their
places one of its programs finds. On an H200 (triton 3.6), 2048 of 32000 rows of 2048 take 0.053 ms and the host 27 µs. Sorting
and then searching takes three launches, 0.061 ms and 52 µs."""
SORTED, MOST_MERGED = 1024, 64
"""Indices that one program sorts, and whose final places one program finds."""
FOUND, SUMMED = 1024, 4
"""Rows of the weight whose positions one program finds, and whose gradients one program writes."""
CHUNK = 64
"""Sorted positions that one program sums ahead, if all of them have the same index."""
BACKWARD_BLOCK, BACKWARD_WARPS = 2048, 4


@kernel
def _look_up(
    y, indices, weight, rows, vocabulary, columns, row_stride, column_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    index = tl.load(indices + row, row < rows, other=0).to(tl.int64)[:, None]
    row = row[:, None]
    inside = (row < rows) & (column < columns)
    exists = inside & (index >= 0) & (index < vocabulary)
    values = tl.load(weight + index * row_stride + column * column_stride, exists, other=float("nan"))
    tl.store(y + row * columns + column, values, inside)


@triton.jit
def _load_indices(indices, position, rows, vocabulary):
    """The indices at `position`. An index that is out of range or past the end becomes `vocabulary`."""
    index = tl.load(indices + position, position < rows, other=-1).to(tl.int64)
    return tl.where((index >= 0) & (index < vocabulary), index, vocabulary)


@kernel
def _order_few(
    starts, order, indices, rows, vocabulary, finders, ALL: tl.constexpr, FOUND: tl.constexpr, COUNTED: tl.constexpr
):  # fmt: skip
    """Write the first sorted position of each index, where the last one ends, and each sorted index's original position."""
    program = tl.program_id(0)
    position = tl.arange(0, ALL)
    index = _load_indices(indices, position, rows, vocabulary)
    if program < finders:
        first = program.to(tl.int64) * FOUND
        lane = tl.arange(0, FOUND)
        here = (index >= first) & (index < first + FOUND)
        counts = tl.histogram(tl.where(here, index - first, 0).to(tl.int32), FOUND, mask=here)
        start = tl.sum((index < first).to(tl.int32)) + tl.cumsum(counts) - counts
        tl.store(starts + first + lane, start.to(tl.int64), first + lane <= vocabulary)
    else:
        ordered = (program - finders) * COUNTED + tl.arange(0, COUNTED)
        value = _load_indices(indices, ordered, rows, vocabulary)[:, None]
        before = (index[None, :] < value) | ((index[None, :] == value) & (position[None, :] < ordered[:, None]))
        tl.store(order + tl.sum(before.to(tl.int32), 1), ordered.to(tl.int64), ordered < rows)


@kernel(do_not_specialize=["shift"])
def _sort_blocks(packed, indices, rows, vocabulary, shift, BLOCK: tl.constexpr):
    """Sort each block of indices, packed with their positions."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = _load_indices(indices, position, rows, vocabulary)
    tl.store(packed + position, tl.sort(((index << shift) + position).to(packed.dtype.element_ty)))


@kernel(do_not_specialize=["shift"])
def _merge_blocks(
    keys, order, packed, rows, shift, BLOCKS: tl.constexpr, STEPS: tl.constexpr, MERGED: tl.constexpr
):  # fmt: skip
    """Write the index and position of each element at its place: the number of lesser ones, by binary search in each block."""
    BLOCK: tl.constexpr = 1 << STEPS
    value = tl.load(packed + tl.program_id(0) * MERGED + tl.arange(0, MERGED))
    block = packed + tl.arange(0, BLOCKS)[None, :] * BLOCK
    less = tl.zeros((MERGED, BLOCKS), tl.int32)
    for i in tl.static_range(1, STEPS + 1):
        further = less + (BLOCK >> i)
        less = tl.where(tl.load(block + further - 1) < value[:, None], further, less)
    less += (tl.load(block + less) < value[:, None]).to(tl.int32)
    place = tl.sum(less, 1)
    tl.store(keys + place, value >> shift, place < rows)
    tl.store(order + place, value & ((1 << shift) - 1), place < rows)


@triton.jit
def _sum_rows(order, x, x_stride, first, last, column, inside, BLOCK: tl.constexpr):
    """The sum of the rows of x from `first` to `last`; with `order`, of the rows that it names there."""
    sums = tl.zeros((1, BLOCK), tl.float32)
    for place in range(first, last):
        row = place
        if order is not None:
            row = tl.load(order + place)
        sums += tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    return sums


@kernel
def _find_runs(
    starts, partial, dy, keys, order, rows, step, vocabulary, columns, blocks, finders, dy_stride,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    """Write the first sorted position of each index, and where the last one ends. Sum each chunk that lies inside a run."""
    program = tl.program_id(0)
    if program < finders:
        index = program.to(tl.int64) * FOUND + tl.arange(0, FOUND)
        start = tl.zeros((FOUND,), tl.int64)
        while step > 0:  # a binary search, in steps that are powers of two
            further = start + step
            below = tl.load(keys + further - 1, further <= rows, other=0).to(tl.int64) < index
            start = tl.where((further <= rows) & below, further, start)
            step //= 2
        tl.store(starts + index, start, index <= vocabulary)
    else:
        chunk = ((program - finders) // blocks).to(tl.int64)
        first = chunk * CHUNK
        if tl.load(keys + first) == tl.load(keys + first + CHUNK - 1):
            column = ((program - finders) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
            inside = column < columns
            sums = _sum_rows(order, dy, dy_stride, first, first + CHUNK, column, inside, BLOCK)
            tl.store(partial + chunk * columns + column, sums, inside)


@kernel
def _sum_runs(
    dweight, dy, partial, order, starts, vocabulary, columns, blocks, dy_stride, padding_idx,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    start = tl.load(starts + first)
    following = tl.load(starts + first + 1)  # the last row has a following one too: `starts` has an entry for the end
    # Unrolled: if a variable that a loop carries only bounds an inner loop, triton 3.6 takes it for dead
    # (tritongpu-remove-layout-conversions). `start` and `following` would then never change.
    for i in tl.static_range(ROWS):
        index = first + i
        end = following
        following = tl.load(starts + tl.minimum(index + 2, vocabulary))  # loaded before it is needed
        last = end
        if padding_idx is not None:
            last = tl.where(index == padding_idx, start, end)
        # If a run has no whole chunks, its first part is all of it. That avoids branches, which triton 3.5 fails to compile
        # here.
        rest = last
        if partial is not None:
            first_chunk, last_chunk = tl.cdiv(start, CHUNK), last // CHUNK
            whole = first_chunk < last_chunk
            rest = tl.where(whole, first_chunk * CHUNK, last)
        sums = _sum_rows(order, dy, dy_stride, start, rest, column, inside, BLOCK)
        if partial is not None:
            last_chunk = tl.where(whole, last_chunk, first_chunk)
            sums += _sum_rows(None, partial, columns, first_chunk, last_chunk, column, inside, BLOCK)
            rest = tl.where(whole, last_chunk * CHUNK, last)
            sums += _sum_rows(order, dy, dy_stride, rest, last, column, inside, BLOCK)
        tl.store(dweight + index * columns + column, sums, inside & (index < vocabulary))
        start = end


def _sort(indices: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The sorted indices and their original positions. Indices out of range are at the ends."""
    indices = indices.contiguous().view(-1)
    rows = indices.shape[0]
    if rows > MOST_RANKED:
        return torch.sort(indices, stable=True)
    filled = (rows + SORTED - 1) // SORTED
    blocks = power_of_2(filled, 1)
    positions = blocks * SORTED
    dtype = torch.int32 if (vocabulary + 1) * positions <= 1 << 31 else torch.int64
    packed = torch.empty(positions, dtype=dtype, device=indices.device)
    keys = torch.empty(rows, dtype=torch.int64, device=indices.device)
    order = torch.empty_like(keys)
    shift, merged = positions.bit_length() - 1, min(MOST_MERGED, 2048 // blocks)
    _sort_blocks[(blocks,)](packed, indices, rows, vocabulary, shift, BLOCK=SORTED, num_warps=4)
    _merge_blocks[(filled * SORTED // merged,)](
        keys, order, packed, rows, shift, BLOCKS=blocks, STEPS=SORTED.bit_length() - 1, MERGED=merged, num_warps=4
    )
    return keys, order


@implements(embedding)
def forward(needs: Needs, indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> tuple[Tensor, Saved]:
    vocabulary, columns = weight.shape
    rows = indices.numel()
    y = torch.empty((*indices.shape, columns), dtype=weight.dtype, device=weight.device)
    block = min(power_of_2(columns), FORWARD_COLUMNS)
    tile_rows, blocks = FORWARD_TILE // block, (columns + block - 1) // block
    row_stride, column_stride = weight.stride()
    _look_up[((rows + tile_rows - 1) // tile_rows * blocks,)](
        y, indices.contiguous(), weight, rows, vocabulary, columns, row_stride, column_stride,
        ROWS=tile_rows, BLOCK=block, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    # The weight itself is not saved, so that it may change before backward. An empty tensor holds its row count and dtype.
    return y, (indices, weight.new_empty((vocabulary, 0))) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, padding_idx: int | None) -> tuple[Tensor | None, ...]:
    indices, like = saved
    vocabulary, columns, rows = like.shape[0], dy.shape[-1], indices.numel()
    dweight = like.new_empty((vocabulary, columns))
    dy, dy_stride = as_rows(dy)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += vocabulary
    block = min(power_of_2(columns), BACKWARD_BLOCK)
    blocks = (columns + block - 1) // block
    warps = max(block * BACKWARD_WARPS // BACKWARD_BLOCK, 1)
    starts = torch.empty(vocabulary + 1, dtype=torch.int64, device=dy.device)
    finders = vocabulary // FOUND + 1
    if rows <= MOST_COUNTED:
        partial, indices = None, indices.contiguous()
        order = torch.empty(rows, dtype=torch.int64, device=dy.device)
        _order_few[(finders + (rows + COUNTED - 1) // COUNTED,)](
            starts, order, indices, rows, vocabulary, finders,
            ALL=power_of_2(rows), FOUND=FOUND, COUNTED=COUNTED, num_warps=4,
        )  # fmt: skip
    else:
        # Chunks that lie inside a run are summed ahead, each by its own program. So a frequent index, such as padding, doesn't
        # keep one program busy for long: a run of n indices takes about n / 64 + 64 steps instead of n.
        keys, order = _sort(indices, vocabulary)
        chunks = rows // CHUNK
        partial = torch.empty((chunks, columns), dtype=torch.float32, device=dy.device)
        _find_runs[(finders + chunks * blocks,)](
            starts, partial, dy, keys, order, rows, power_of_2(rows), vocabulary, columns, blocks, finders, dy_stride,
            CHUNK=CHUNK, BLOCK=block, FOUND=FOUND, num_warps=warps,
        )  # fmt: skip
    _sum_runs[((vocabulary + SUMMED - 1) // SUMMED * blocks,)](
        dweight, dy, partial, order, starts, vocabulary, columns, blocks, dy_stride, padding_idx,
        CHUNK=CHUNK, ROWS=SUMMED, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return (dweight,)
