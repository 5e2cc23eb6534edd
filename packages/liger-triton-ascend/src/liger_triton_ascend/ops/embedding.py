"""Embedding: forward gathers rows. Backward sorts the indices, and each core sums the rows of dy that share an index."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import embedding
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._device import get_npu_core_count
from liger_triton_ascend.ops._rows import as_rows, element_tiles, row_tiles

# Float32 tiles by the estimate of the Unified Buffer.
FORWARD_TILES = 3
BACKWARD_TILES = 5
LEAST_POSITIONS = 16
"""The fewest sorted positions that are worth a core of their own and the second launch that they then need."""
EXACT = 1 << 24
"""float32 represents all integers below this one exactly: the sort instruction takes only floats."""


@triton.jit
def _look_up(
    y, indices, weight, rows, vocabulary, columns, strips, row_stride, column_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Take one row after another: gathering several would compare each column's index with the bound, as an integer."""
    blocks = tl.cdiv(columns, BLOCK)
    for part in range(tl.program_id(0), strips * blocks, tl.num_programs(0)):
        strip = tl.cast(part // blocks, tl.int64)
        column = tl.cast(part % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        for row in range(strip * rows // strips, (strip + 1) * rows // strips):
            index = tl.load(indices + row)
            exists = (index >= 0) & (index < vocabulary)
            weight_row = weight + tl.where(exists, tl.cast(index, tl.int64), 0) * row_stride
            values = tl.load(weight_row + column * column_stride, inside, other=0.0)
            tl.store(y + row * columns + column, values, inside)
            if not exists:
                tl.store(y + row * columns + column, tl.full((BLOCK,), float("nan"), tl.float32), inside)


@triton.jit
def _add_to_weight(dweight, sums, key, vocabulary, columns, padding_idx, column, inside):
    exists = (key >= 0) & (key < vocabulary)
    if padding_idx is not None:
        exists = exists & (key != padding_idx)
    if exists:
        tl.store(dweight + tl.cast(key, tl.int64) * columns + column, sums, inside)


@triton.jit
def _sum_runs(
    dweight, edges, edge_keys, dy, keys, order, rows, vocabulary, columns, strips, dy_stride, padding_idx,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of each run of equal keys. With edges, a strip's first and last run go there."""
    blocks = tl.cdiv(columns, BLOCK)
    for part in range(tl.program_id(0), strips * blocks, tl.num_programs(0)):
        strip = tl.cast(part // blocks, tl.int64)
        column = tl.cast(part % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        first = strip * rows // strips
        first_key = tl.load(keys + first)
        key = first_key
        sums = tl.zeros((BLOCK,), tl.float32)
        for position in range(first, (strip + 1) * rows // strips):
            next_key = tl.load(keys + position)
            if next_key != key:
                if edges is None:
                    _add_to_weight(dweight, sums, key, vocabulary, columns, padding_idx, column, inside)
                elif key == first_key:
                    tl.store(edges + strip * 2 * columns + column, sums, inside)
                else:
                    _add_to_weight(dweight, sums, key, vocabulary, columns, padding_idx, column, inside)
                sums = tl.zeros((BLOCK,), tl.float32)
                key = next_key
            row = position
            if order is not None:
                row = tl.load(order + position)
            sums += tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        if edges is None:
            _add_to_weight(dweight, sums, key, vocabulary, columns, padding_idx, column, inside)
        else:
            tl.store(edges + (strip * 2 + 1) * columns + column, sums, inside)
            if part % blocks == 0:
                tl.store(edge_keys + strip * 2, first_key)
                tl.store(edge_keys + strip * 2 + 1, key)


@implements(embedding)
def forward(needs: Needs, indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> tuple[Tensor, Saved]:
    vocabulary, columns = weight.shape
    rows = indices.numel()
    y = torch.empty((*indices.shape, columns), dtype=weight.dtype, device=weight.device)
    cores = get_npu_core_count(y.device)
    programs, _, block = element_tiles(y, min(rows, cores), columns, FORWARD_TILES)
    strips = min(rows, max(1, cores // ((columns + block - 1) // block)))
    _look_up[(programs,)](
        y, indices.contiguous(), weight, rows, vocabulary, columns, strips, *weight.stride(), BLOCK=block
    )
    # The weight itself is not saved, so that it may change before backward. An empty tensor holds its row count and dtype.
    return y, (indices, weight.new_empty((vocabulary, 0))) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, padding_idx: int | None) -> tuple[Tensor | None, ...]:
    indices, like = saved
    vocabulary, columns, rows = like.shape[0], dy.shape[-1], indices.numel()
    dweight = like.new_zeros((vocabulary, columns))
    flat = indices.reshape(-1)
    keys, order = torch.sort(flat.to(torch.float32) if vocabulary <= EXACT else flat, stable=True)
    dy, dy_stride = as_rows(dy)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += vocabulary
    block = row_tiles(dy, 1, columns, BACKWARD_TILES)[2]
    blocks = (columns + block - 1) // block
    # All cores take equally many positions, however often an index occurs. A run may go on in the next strip, so a second launch
    # sums what is at the edges of strips.
    strips = min(get_npu_core_count(dy.device) // blocks, rows // LEAST_POSITIONS)
    if strips > 1:
        edges = dy.new_zeros((2 * strips, columns), dtype=torch.float32)
        edge_keys = keys.new_empty(2 * strips)
        _sum_runs[(strips * blocks,)](
            dweight, edges, edge_keys, dy, keys, order, rows, vocabulary, columns, strips, dy_stride, padding_idx,
            BLOCK=block,
        )  # fmt: skip
        dy, dy_stride, keys, order, rows = edges, columns, edge_keys, None, 2 * strips
    programs, _, block = element_tiles(dy, 1, columns, BACKWARD_TILES)
    _sum_runs[(programs,)](
        dweight, None, None, dy, keys, order, rows, vocabulary, columns, 1, dy_stride, padding_idx, BLOCK=block
    )
    return (dweight,)
