"""Embedding: rows are gathered; backward sorts the indices and writes every row of the gradient once, without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import embedding
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, power_of_2

FORWARD_TILE, FORWARD_WARPS = 2048, 4
"""Elements a program gathers: it waits for an index first, so it takes more than a streaming kernel would."""
CHUNK = 64
"""Sorted positions that are summed ahead, by a program of their own, where all of them have the same index."""
AT_ONCE = 1
"""Rows of dy that a program has under way."""
BACKWARD_BLOCK, BACKWARD_WARPS = 2048, 4
FOUND = 1024
"""Rows of the weight whose positions one program finds."""


@kernel
def _look_up(
    y, indices, weight, rows, vocabulary, columns, blocks, row_stride, column_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    index = tl.load(indices + row, row < rows, other=0).to(tl.int64)[:, None]
    row = row[:, None]
    inside = (row < rows) & (column < columns)
    exists = inside & (index >= 0) & (index < vocabulary)
    found = tl.load(weight + index * row_stride + column * column_stride, exists, other=float("nan"))
    tl.store(y + row * columns + column, found, inside)


@triton.jit
def _sum_positions(dy, order, start, end, column, inside, dy_stride, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the rows of dy at the sorted positions from `start` to `end`."""
    sums = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in range(start, end, AT_ONCE):
        position = first + tl.arange(0, AT_ONCE)
        row = tl.load(order + position, position < end, other=0)[:, None]
        sums += tl.load(dy + row * dy_stride + column, (position < end)[:, None] & inside, other=0.0).to(tl.float32)
    return tl.sum(sums, 0, keep_dims=True)


@kernel
def _find_runs(
    starts, partial, dy, keys, order, rows, step, vocabulary, columns, blocks, finders, dy_stride,
    CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    """Write the first sorted position of every index, and of what follows the last; sum the chunks inside of a run."""
    program = tl.program_id(0)
    if program < finders:
        index = program.to(tl.int64) * FOUND + tl.arange(0, FOUND)
        start = tl.zeros((FOUND,), tl.int64)
        while step > 0:  # a binary search, by steps that are powers of two
            further = start + step
            below = tl.load(keys + further - 1, further <= rows, other=0).to(tl.int64) < index
            start = tl.where((further <= rows) & below, further, start)
            step //= 2
        tl.store(starts + index, start, index <= vocabulary)
    elif partial is not None:
        chunk = ((program - finders) // blocks).to(tl.int64)
        first = chunk * CHUNK
        if tl.load(keys + first) == tl.load(keys + first + CHUNK - 1):
            column = ((program - finders) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
            inside = column < columns
            sums = _sum_positions(dy, order, first, first + CHUNK, column, inside, dy_stride, AT_ONCE, BLOCK)
            tl.store(partial + chunk * columns + column, sums, inside)


@kernel
def _sum_runs(
    dweight, dy, partial, order, starts, columns, blocks, dy_stride, padding_idx,
    CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    start = tl.load(starts + index)
    end = tl.load(starts + index + 1)
    if padding_idx is not None:
        end = tl.where(index == padding_idx, start, end)
    sums = tl.zeros((1, BLOCK), tl.float32)
    if partial is not None:
        first_chunk, last_chunk = tl.cdiv(start, CHUNK), end // CHUNK
        if first_chunk < last_chunk:
            sums += _sum_positions(dy, order, start, first_chunk * CHUNK, column, inside, dy_stride, AT_ONCE, BLOCK)
            for first in range(first_chunk, last_chunk, AT_ONCE):
                chunk = first + tl.arange(0, AT_ONCE)[:, None]
                found = tl.load(partial + chunk * columns + column, (chunk < last_chunk) & inside, other=0.0)
                sums += tl.sum(found, 0, keep_dims=True)
            start = last_chunk * CHUNK
    sums += _sum_positions(dy, order, start, end, column, inside, dy_stride, AT_ONCE, BLOCK)
    tl.store(dweight + index * columns + column, sums, inside)


def _sort(indices: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sort(indices.reshape(-1), stable=True)


@implements(embedding)
def forward(needs: Needs, indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> tuple[Tensor, Saved]:
    vocabulary, columns = weight.shape
    rows = indices.numel()
    y = torch.empty((*indices.shape, columns), dtype=weight.dtype, device=weight.device)
    block = min(power_of_2(columns), FORWARD_TILE)
    tile_rows, blocks = FORWARD_TILE // block, (columns + block - 1) // block
    row_stride, column_stride = weight.stride()
    _look_up[((rows + tile_rows - 1) // tile_rows * blocks,)](
        y, indices.contiguous(), weight, rows, vocabulary, columns, blocks, row_stride, column_stride,
        ROWS=tile_rows, BLOCK=block, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    # The weight itself is not saved, so that it may change before backward: an empty tensor holds its rows and dtype.
    return y, (indices, weight.new_empty((vocabulary, 0))) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, padding_idx: int | None) -> tuple[Tensor | None, ...]:
    indices, like = saved
    vocabulary, columns, rows = like.shape[0], dy.shape[-1], indices.numel()
    dweight = like.new_empty((vocabulary, columns))
    keys, order = _sort(indices)
    dy, dy_stride = as_rows(dy)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += vocabulary
    block = min(power_of_2(columns), BACKWARD_BLOCK)
    blocks = (columns + block - 1) // block
    warps = max(block * BACKWARD_WARPS // BACKWARD_BLOCK, 1)
    # So that a frequent index, such as padding, doesn't keep its program for long, chunks that lie inside a run are
    # summed ahead, each by a program of its own: a run of n indices takes n / 256 + 32 steps and not n / 4.
    chunks = rows // CHUNK if rows > 2048 else 0
    partial = torch.empty((chunks, columns), dtype=torch.float32, device=dy.device) if chunks else None
    starts = torch.empty(vocabulary + 1, dtype=torch.int64, device=dy.device)
    finders = vocabulary // FOUND + 1
    step = power_of_2(rows, 2)  # not 1: Triton makes a constant of that, which a loop can't change
    _find_runs[(finders + chunks * blocks,)](
        starts, partial, dy, keys, order, rows, step, vocabulary, columns, blocks, finders, dy_stride,
        CHUNK=CHUNK, AT_ONCE=AT_ONCE, BLOCK=block, FOUND=FOUND, num_warps=warps,
    )  # fmt: skip
    _sum_runs[(vocabulary * blocks,)](
        dweight, dy, partial, order, starts, columns, blocks, dy_stride, padding_idx,
        CHUNK=CHUNK, AT_ONCE=AT_ONCE, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return (dweight,)
