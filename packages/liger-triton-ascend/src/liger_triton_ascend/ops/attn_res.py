"""Attention residuals: forward reads a row that fits once, with a running softmax over its sources. Backward reads it twice.

For longer rows, forward makes the scores, then the mean. Backward makes the products of dy with the sources, then the gradients.
PyTorch takes the step between, on one number for each source of a row: a core that read its own writes would wait for memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import attn_res
from liger_core.contract import implements
from liger_core.host.attn_res import AttnRes, AttnResKernels
from liger_triton_ascend.ops._device import get_npu_core_count
from liger_triton_ascend.ops._rows import element_tiles, row_tiles

# Float32 tiles alive at once, by the suite's estimate of the Unified Buffer, with two for each tile that is transferred. The
# backward has 8, or 10 in float32. 10 would be 160 of 192 KiB for a row of 4096. With 9 such a row is still taken as a whole.
FORWARD_TILES = 7
BACKWARD_TILES = 9
LONG_TILES = 9


@triton.jit
def _load_product(query, weight, column, inside):
    """query · weight."""
    ws = tl.load(query + column, inside, other=0.0).to(tl.float32)
    if weight is not None:
        ws *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
    return ws


@triton.jit
def _higher(top, exp_sum, score):
    """The new maximum, the sum of exponentials so far relative to it, and the exponential of the new score."""
    higher = tl.maximum(top, score)
    shrunk, e = tl.exp(top - higher), tl.exp(score - higher)
    return higher, shrunk, e, exp_sum * shrunk + e


@triton.jit
def _take(vs, ws, top, exp_sum, mean, statistics, row, rows, source, sources, columns, eps):
    """Take one more source into the running softmax of each row."""
    r = tl.rsqrt(tl.sum(vs * vs, 1) / columns + eps)
    score = tl.sum(vs * ws, 1) * r
    if statistics is not None:
        tl.store(statistics + source * rows + row, score, row < rows)
        tl.store(statistics + (sources + source) * rows + row, r, row < rows)
    top, shrunk, e, exp_sum = _higher(top, exp_sum, score)
    return top, exp_sum, mean * shrunk[:, None] + e[:, None] * vs


@triton.jit
def _forward(
    y, statistics, blocks, partial, query, weight, rows, columns, count, sources, block_stride, row_stride, partial_stride,
    eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    ws = _load_product(query, weight, column, column < columns)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)
        # The least float32 stands for -inf: the difference of two of them is 0, not NaN.
        top = tl.full((ROWS,), -3.4028234663852886e38, tl.float32)
        exp_sum = tl.zeros((ROWS,), tl.float32)
        mean = tl.zeros((ROWS, BLOCK), tl.float32)
        for index in range(0, count):
            source = tl.cast(index, tl.int64)
            at = source * block_stride + row[:, None] * row_stride + column
            vs = tl.load(blocks + at, inside, other=0.0).to(tl.float32)
            top, exp_sum, mean = _take(
                vs, ws, top, exp_sum, mean, statistics, row, rows, source, sources, columns, eps
            )  # fmt: skip
        if partial is not None:
            vs = tl.load(partial + row[:, None] * partial_stride + column, inside, other=0.0).to(tl.float32)
            last = tl.cast(count, tl.int64)
            top, exp_sum, mean = _take(
                vs, ws, top, exp_sum, mean, statistics, row, rows, last, sources, columns, eps
            )  # fmt: skip
        tl.store(y + row[:, None] * columns + column, mean * (1.0 / exp_sum)[:, None], inside)


@triton.jit
def _take_product(vs, dys, top, exp_sum, mean, statistics, row, rows, source):
    """Add one more source's dy · source to their mean, weighted by the softmax of the scores."""
    score = tl.load(statistics + source * rows + row, row < rows, other=0.0)
    top, shrunk, e, exp_sum = _higher(top, exp_sum, score)
    return top, exp_sum, mean * shrunk + e * tl.sum(dys * vs, 1)


@triton.jit
def _give(
    gradient, sums, total, vs, dys, ws, top, inverse, mean, statistics, row, rows, source, sources, columns, column, inside,
    first_row,
):  # fmt: skip
    """Write the gradient of one source, and return `total` plus its part of the gradient of query · weight."""
    score = tl.load(statistics + source * rows + row, row < rows, other=0.0)
    r = tl.load(statistics + (sources + source) * rows + row, row < rows, other=0.0)
    a = tl.exp(score - top) * inverse
    along_w = a * (tl.sum(dys * vs, 1) - mean) * r
    if gradient is not None:
        along_v = along_w * score * r / columns
        dvs = a[:, None] * dys + along_w[:, None] * ws - along_v[:, None] * vs
        tl.store(gradient + (first_row + row)[:, None] * columns + column, dvs, inside)
    if sums is not None:
        total += tl.sum(along_w[:, None] * vs, 0)
    return total


@triton.jit
def _backward(
    dblocks, dpartial, sums, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
    dy_stride, block_stride, row_stride, partial_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    column = lane[None, :]
    ws = _load_product(query, weight, column, column < columns)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)
        dys = tl.load(dy + row[:, None] * dy_stride + column, inside, other=0.0).to(tl.float32)
        last = tl.cast(count, tl.int64)
        top = tl.full((ROWS,), -3.4028234663852886e38, tl.float32)
        exp_sum = tl.zeros((ROWS,), tl.float32)
        mean = tl.zeros((ROWS,), tl.float32)
        for index in range(0, count):
            source = tl.cast(index, tl.int64)
            at = source * block_stride + row[:, None] * row_stride + column
            vs = tl.load(blocks + at, inside, other=0.0).to(tl.float32)
            top, exp_sum, mean = _take_product(vs, dys, top, exp_sum, mean, statistics, row, rows, source)
        if partial is not None:
            vs = tl.load(partial + row[:, None] * partial_stride + column, inside, other=0.0).to(tl.float32)
            top, exp_sum, mean = _take_product(vs, dys, top, exp_sum, mean, statistics, row, rows, last)
        inverse = 1.0 / exp_sum
        mean *= inverse
        for index in range(0, count):
            source = tl.cast(index, tl.int64)
            at = source * block_stride + row[:, None] * row_stride + column
            vs = tl.load(blocks + at, inside, other=0.0).to(tl.float32)
            total = _give(
                dblocks, sums, total, vs, dys, ws, top, inverse, mean, statistics, row, rows, source, sources, columns, column,
                inside, source * rows,
            )  # fmt: skip
        if partial is not None:
            vs = tl.load(partial + row[:, None] * partial_stride + column, inside, other=0.0).to(tl.float32)
            total = _give(
                dpartial, sums, total, vs, dys, ws, top, inverse, mean, statistics, row, rows, last, sources, columns, column,
                inside, 0,
            )  # fmt: skip
    if sums is not None:
        tl.store(sums + tl.program_id(0) * tl.cast(columns, tl.int64) + lane, total, lane < columns)


@triton.jit
def _scores_long(
    scores, inverse_rms, x, query, weight, items, rows, columns, block_stride, row_stride, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """The score and inverse root mean square of each row of each of some sources."""
    for index in range(tl.program_id(0), items, tl.num_programs(0)):
        item = tl.cast(index, tl.int64)
        at = item // rows * block_stride + item % rows * row_stride
        squares = tl.zeros((BLOCK,), tl.float32)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            vs = tl.load(x + at + column, column < columns, other=0.0).to(tl.float32)
            squares += vs * vs
            products += vs * _load_product(query, weight, column, column < columns)
        r = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
        tl.store(scores + item, tl.sum(products, 0) * r)
        tl.store(inverse_rms + item, r)


@triton.jit
def _mean_long(
    y, shares, blocks, partial, items, parts, rows, columns, count, block_stride, row_stride, partial_stride, BLOCK: tl.constexpr
):  # fmt: skip
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.cast(item // parts, tl.int64)
        column = item % parts * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        mean = tl.zeros((BLOCK,), tl.float32)
        for index in range(0, count):
            source = tl.cast(index, tl.int64)
            share = tl.load(shares + source * rows + row)
            at = source * block_stride + row * row_stride
            mean += share * tl.load(blocks + at + column, inside, other=0.0).to(tl.float32)
        if partial is not None:
            share = tl.load(shares + tl.cast(count, tl.int64) * rows + row)
            mean += share * tl.load(partial + row * partial_stride + column, inside, other=0.0).to(tl.float32)
        tl.store(y + row * columns + column, mean, inside)


@triton.jit
def _products_long(products, dy, x, items, rows, columns, dy_stride, block_stride, row_stride, BLOCK: tl.constexpr):
    """dy · source, for each row of each of some sources."""
    for index in range(tl.program_id(0), items, tl.num_programs(0)):
        item = tl.cast(index, tl.int64)
        row = item % rows
        at = item // rows * block_stride + row * row_stride
        product = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            dys = tl.load(dy + row * dy_stride + column, column < columns, other=0.0).to(tl.float32)
            product += dys * tl.load(x + at + column, column < columns, other=0.0).to(tl.float32)
        tl.store(products + item, tl.sum(product, 0))


@triton.jit
def _gradients_long(
    dx, dy, x, query, weight, shares, along_w, along_v, items, parts, rows, columns, count, dy_stride, block_stride, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of a part of a row of some sources."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.cast(item // parts, tl.int64)
        column = item % parts * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        ws = _load_product(query, weight, column, inside)
        for index in range(0, count):
            source = tl.cast(index, tl.int64)
            place = source * rows + row
            vs = tl.load(x + source * block_stride + row * row_stride + column, inside, other=0.0).to(tl.float32)
            dvs = tl.load(shares + place) * dys + tl.load(along_w + place) * ws - tl.load(along_v + place) * vs
            tl.store(dx + place * columns + column, dvs, inside)


@triton.jit
def _sums_long(
    sums, along_w, blocks, partial, rows, columns, count, block_stride, row_stride, partial_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program adds up its own rows, one block of columns after another."""
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        total = tl.zeros((BLOCK,), tl.float32)
        for item in range(tl.program_id(0), rows, tl.num_programs(0)):
            row = tl.cast(item, tl.int64)
            for index in range(0, count):
                source = tl.cast(index, tl.int64)
                at = source * block_stride + row * row_stride
                vs = tl.load(blocks + at + column, inside, other=0.0).to(tl.float32)
                total += tl.load(along_w + source * rows + row) * vs
            if partial is not None:
                vs = tl.load(partial + row * partial_stride + column, inside, other=0.0).to(tl.float32)
                total += tl.load(along_w + tl.cast(count, tl.int64) * rows + row) * vs
        tl.store(sums + tl.program_id(0) * tl.cast(columns, tl.int64) + column, total, inside)


class AscendAttnRes(AttnResKernels):
    """Statistics lie as ``[2, sources, rows]``, because a tile has adjacent rows."""

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
        count, rows, columns = blocks.shape
        sources = count if partial is None else count + 1
        strides = blocks.stride(0), blocks.stride(1), 0 if partial is None else partial.stride(0)
        programs, tile_rows, block = row_tiles(y, rows, columns, FORWARD_TILES)
        if block >= columns:
            _forward[(programs,)](
                y, statistics, blocks, partial, query, weight, rows, columns, count, sources, *strides, eps,
                ROWS=tile_rows, BLOCK=block,
            )  # fmt: skip
            return
        if statistics is None:
            statistics = torch.empty((2, sources, rows), dtype=torch.float32, device=y.device)
        scores, inverse_rms = statistics.view(2, sources, rows)
        cores = get_npu_core_count(y.device)
        _, _, block = row_tiles(y, rows, columns, LONG_TILES)
        for x, first in _stacks(blocks, partial):
            last, items = first + x.shape[0], x.shape[0] * rows
            _scores_long[(min(items, cores),)](
                scores[first:last], inverse_rms[first:last], x, query, weight, items, rows, columns, *x.stride()[:2], eps,
                BLOCK=block,
            )  # fmt: skip
        programs, _, block = element_tiles(y, rows, columns, LONG_TILES)
        parts = (columns + block - 1) // block
        _mean_long[(programs,)](
            y, torch.softmax(scores, 0), blocks, partial, rows * parts, parts, rows, columns, count, *strides, BLOCK=block,
        )  # fmt: skip

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
        count, rows, columns = blocks.shape
        sources = count if partial is None else count + 1
        strides = blocks.stride(0), blocks.stride(1), 0 if partial is None else partial.stride(0)
        programs, tile_rows, block = row_tiles(dy, rows, columns, BACKWARD_TILES)
        total = torch.empty((programs, columns), dtype=torch.float32, device=dy.device) if sums else None
        if block >= columns:
            _backward[(programs,)](
                dblocks, dpartial, total, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
                dy.stride(0), *strides, ROWS=tile_rows, BLOCK=block,
            )  # fmt: skip
            return None if total is None else total.sum(0)
        cores = get_npu_core_count(dy.device)
        scores, inverse_rms = statistics.view(2, sources, rows)
        products = torch.empty_like(scores)
        _, _, block = row_tiles(dy, rows, columns, LONG_TILES)
        for x, first in _stacks(blocks, partial):
            last, items = first + x.shape[0], x.shape[0] * rows
            _products_long[(min(items, cores),)](
                products[first:last], dy, x, items, rows, columns, dy.stride(0), *x.stride()[:2], BLOCK=block
            )
        shares = torch.softmax(scores, 0)
        along_w = shares * (products - (shares * products).sum(0)) * inverse_rms
        along_v = along_w * scores * inverse_rms / columns
        programs_of_parts, _, part = element_tiles(dy, rows, columns, LONG_TILES)
        parts = (columns + part - 1) // part
        for x, first in _stacks(blocks, partial):
            dx = dblocks if x is blocks else dpartial
            if dx is not None:
                last = first + x.shape[0]
                _gradients_long[(programs_of_parts,)](
                    dx, dy, x, query, weight, shares[first:last], along_w[first:last], along_v[first:last], rows * parts, parts,
                    rows, columns, x.shape[0], dy.stride(0), *x.stride()[:2], BLOCK=part,
                )  # fmt: skip
        if total is None:
            return None
        _sums_long[(programs,)](total, along_w, blocks, partial, rows, columns, count, *strides, BLOCK=block)
        return total.sum(0)


def _stacks(blocks: Tensor, partial: Tensor | None) -> list[tuple[Tensor, int]]:
    """Stacks of sources, each with the number of sources before it."""
    stacks = [(blocks, 0)] if blocks.shape[0] else []
    return stacks if partial is None else [*stacks, (partial[None], blocks.shape[0])]


host = AttnRes(AscendAttnRes())
forward = implements(attn_res)(host.forward)
backward = host.backward
