"""Embedding: rows are gathered; backward sorts the indices and sums each run of equal ones, without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import embedding
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._rows import as_rows, power_of_2

CHUNK = 64
"""Indices that are summed ahead, by a program of their own, where all of them are equal."""


@triton.jit
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
def _sum_positions(dy, order, start, end, column, inside, dy_stride, POSITIONS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the rows of dy at the sorted positions from `start` to `end`."""
    sums = tl.zeros((POSITIONS, BLOCK), tl.float32)
    for first in range(start, end, POSITIONS):
        position = first + tl.arange(0, POSITIONS)
        row = tl.load(order + position, position < end, other=0)[:, None]
        sums += tl.load(dy + row * dy_stride + column, (position < end)[:, None] & inside, other=0.0).to(tl.float32)
    return tl.sum(sums, 0, keep_dims=True)


@triton.jit
def _sum_chunks(
    partial, dy, keys, order, columns, blocks, dy_stride,
    CHUNK: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    start = chunk * CHUNK
    if tl.load(keys + start) == tl.load(keys + start + CHUNK - 1):
        column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = column < columns
        sums = _sum_positions(dy, order, start, start + CHUNK, column, inside, dy_stride, POSITIONS, BLOCK)
        tl.store(partial + chunk * columns + column, sums, inside)


@triton.jit
def _sum_rest(
    dy, partial, keys, order, key, start, rows, step, columns, column, inside, dy_stride,
    CHUNK: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of dy's rows from the sorted position `start` to the end of key's run; whole chunks are in `partial`."""
    end = start
    while step > 0:  # a binary search, by steps that are powers of two
        further = end + step <= rows
        further &= tl.load(keys + end + step - 1, further, other=0) == key
        end = tl.where(further, end + step, end)
        step //= 2
    head_end, tail_start = end, end
    sums = tl.zeros((POSITIONS, BLOCK), tl.float32)
    if partial is not None:
        first_chunk, last_chunk = tl.cdiv(start, CHUNK), end // CHUNK
        head_end = tl.minimum(first_chunk * CHUNK, end)
        tail_start = tl.maximum(last_chunk * CHUNK, head_end)
        for first in range(first_chunk, last_chunk, POSITIONS):
            chunk = first + tl.arange(0, POSITIONS)[:, None]
            sums += tl.load(partial + chunk * columns + column, (chunk < last_chunk) & inside, other=0.0)
    return (
        tl.sum(sums, 0, keep_dims=True)
        + _sum_positions(dy, order, start, head_end, column, inside, dy_stride, POSITIONS, BLOCK)
        + _sum_positions(dy, order, tail_start, end, column, inside, dy_stride, POSITIONS, BLOCK)
    )


@triton.jit
def _sum_runs(
    dweight, dy, partial, keys, order, rows, step, vocabulary, columns, blocks, dy_stride, padding_idx,
    CHUNK: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = (tl.program_id(0) // blocks).to(tl.int64) * POSITIONS
    position = first + tl.arange(0, POSITIONS)
    key = tl.load(keys + position, position < rows, other=-1).to(tl.int64)
    before = tl.load(keys + position - 1, (position > 0) & (position < rows), other=-1).to(tl.int64)
    starts = (key != before) & (key >= 0) & (key < vocabulary) & (key != padding_idx)
    if tl.max(starts.to(tl.int32)) > 0:
        column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = column < columns
        after = first + POSITIONS
        last = tl.load(keys + tl.minimum(after, rows) - 1).to(tl.int64)
        goes_on = tl.load(keys + after, after < rows, other=-1) == last
        rest = tl.zeros((1, BLOCK), tl.float32)
        if goes_on & (tl.max((starts & (key == last)).to(tl.int32)) > 0):
            rest = _sum_rest(
                dy, partial, keys, order, last, after, rows, step, columns, column, inside, dy_stride,
                CHUNK, POSITIONS, BLOCK,
            )  # fmt: skip
        run = key[:, None]
        sums = tl.where(run == last, rest, 0.0)
        for i in tl.static_range(POSITIONS):
            # Past the last position this adds row 0 of dy to sums that aren't stored.
            row = tl.load(order + first + i, first + i < rows, other=0)
            dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
            sums += tl.where(run == tl.load(keys + first + i, first + i < rows, other=-1), dys, 0.0)
        tl.store(dweight + run * columns + column, sums, starts[:, None] & inside)


@implements(embedding)
def forward(needs: Needs, indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> tuple[Tensor, Saved]:
    vocabulary, columns = weight.shape
    rows = indices.numel()
    y = torch.empty((*indices.shape, columns), dtype=weight.dtype, device=weight.device)
    # 4096 elements a program: its gather waits for an index first, so it takes more than a streaming kernel would.
    block = min(power_of_2(columns), 4096)
    tile_rows, blocks = 4096 // block, (columns + block - 1) // block
    row_stride, column_stride = weight.stride()
    _look_up[((rows + tile_rows - 1) // tile_rows * blocks,)](
        y, indices.contiguous(), weight, rows, vocabulary, columns, blocks, row_stride, column_stride,
        ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    # The weight itself is not saved, so that it may change before backward: an empty tensor holds its rows and dtype.
    return y, (indices, weight.new_empty((vocabulary, 0))) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, padding_idx: int | None) -> tuple[Tensor | None, ...]:
    indices, like = saved
    vocabulary, columns, rows = like.shape[0], dy.shape[-1], indices.numel()
    dweight = like.new_zeros((vocabulary, columns))
    keys, order = torch.sort(indices.reshape(-1), stable=True)
    dy, dy_stride = as_rows(dy)
    if padding_idx is None:
        padding_idx = -1
    elif padding_idx < 0:
        padding_idx += vocabulary
    # Eight sorted positions a program, and 16 bytes a thread of each of their rows, all in flight at once.
    positions, block = 8, min(power_of_2(columns), 2048 // dy.element_size())
    blocks = (columns + block - 1) // block
    partial = None
    # A run of equal indices belongs to the program where it starts (one for each block of columns). So that a frequent
    # index, such as padding, doesn't keep it for long, chunks that lie inside a run are summed ahead, each by a program
    # of its own: a run of n indices takes n / 512 + 16 steps and not n / 8. Few indices aren't worth the launch.
    if rows > 2048:
        chunks = rows // CHUNK
        partial = torch.empty((chunks, columns), dtype=torch.float32, device=dy.device)
        _sum_chunks[(chunks * blocks,)](
            partial, dy, keys, order, columns, blocks, dy_stride, CHUNK=CHUNK, POSITIONS=positions, BLOCK=block
        )
    step = power_of_2(rows, 2)  # not 1: Triton makes a constant of that, which a loop can't change
    _sum_runs[((rows + positions - 1) // positions * blocks,)](
        dweight, dy, partial, keys, order, rows, step, vocabulary, columns, blocks, dy_stride, padding_idx,
        CHUNK=CHUNK, POSITIONS=positions, BLOCK=block,
    )  # fmt: skip
    return (dweight,)
