"""Attention residuals: forward reads each source once, with a running softmax. Backward reads it twice, the second time from L2.

The statistics of a row are a score and an inverse root mean square for each source.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import attn_res
from liger_core.contract import implements
from liger_core.host.attn_res import AttnRes, AttnResKernels
from liger_triton.ops._device import sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._partial_sums import total
from liger_triton.ops._rows import in_vectors, multiply, power_of_2, tile_of

# Longer rows are read in blocks. Elements that are loaded one by one need an address each, so their limit is half.
LONGEST = 8192
LONGEST_BY_ONES = 4096
LONG_BLOCK = 4096


@triton.jit
def _load_product(query, weight, column, inside):
    """query · weight."""
    ws = tl.load(query + column, inside, other=0.0).to(tl.float32)
    if weight is not None:
        ws *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
    return ws


@triton.jit
def _take(vs, ws, top, exp_sum, mean, statistics, at, rows, sources, columns, eps, inside, BLOCK: tl.constexpr):
    """Take one more source into the running softmax of each row."""
    r = tl.rsqrt(tl.sum(multiply(vs, vs, BLOCK), 1, keep_dims=True) / columns + tl.cast(eps, tl.float32))
    score = tl.sum(multiply(vs, ws, BLOCK), 1, keep_dims=True) * r
    if statistics is not None:
        tl.store(statistics + at, score, inside)
        tl.store(statistics + tl.cast(rows, tl.int64) * sources + at, r, inside)
    higher = tl.maximum(top, score)
    shrunk, e = tl.exp(top - higher), tl.exp(score - higher)
    return higher, exp_sum * shrunk + e, mean * shrunk + e * vs


@kernel(do_not_specialize=["rows", "count", "sources"])
def _forward(
    y, statistics, blocks, partial, query, weight, rows, columns, count, sources, block_stride, row_stride, partial_stride,
    eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    inside = exists & (column < columns)
    ws = _load_product(query, weight, column, column < columns)
    top = tl.full((ROWS, 1), float("-inf"), tl.float32)
    exp_sum = tl.zeros((ROWS, 1), tl.float32)
    mean = tl.zeros((ROWS, BLOCK), tl.float32)
    for source in tl.range(0, count, num_stages=STAGES):
        at = tl.cast(source, tl.int64) * block_stride + row * row_stride + column
        vs = tl.load(blocks + at, inside, other=0.0).to(tl.float32)
        top, exp_sum, mean = _take(
            vs, ws, top, exp_sum, mean, statistics, row * sources + source, rows, sources, columns, eps, exists, BLOCK
        )  # fmt: skip
    if partial is not None:
        vs = tl.load(partial + row * partial_stride + column, inside, other=0.0).to(tl.float32)
        top, exp_sum, mean = _take(
            vs, ws, top, exp_sum, mean, statistics, row * sources + count, rows, sources, columns, eps, exists, BLOCK
        )  # fmt: skip
    tl.store(y + row * columns + column, mean / exp_sum, inside)


@triton.jit
def _only(values, lane, source):
    """The value of one source, ``[ROWS, 1]``, of ``[ROWS, SOURCES]``."""
    return tl.sum(tl.where(lane == source, values, 0.0), 1, keep_dims=True)


@triton.jit
def _load_statistics(statistics, row, rows, lane, sources):
    """Scores, inverse root mean squares and the softmax of each row; 0 past the last source."""
    there = (row < rows) & (lane < sources)
    scores = tl.load(statistics + row * sources + lane, there, other=0.0)
    r = tl.load(statistics + tl.cast(rows, tl.int64) * sources + row * sources + lane, there, other=0.0)
    e = tl.where(lane < sources, scores, float("-inf"))
    e = tl.exp(e - tl.max(e, 1, keep_dims=True))
    return scores, r, e / tl.sum(e, 1, keep_dims=True)


@kernel(do_not_specialize=["rows", "count", "sources"])
def _backward(
    dblocks, dpartial, sums, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
    dy_stride, block_stride, row_stride, partial_stride,
    SOURCES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, SOURCES)[None, :]
    column = tl.arange(0, BLOCK)[None, :]
    ws = _load_product(query, weight, column, column < columns)
    total_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        products = tl.zeros((ROWS, SOURCES), tl.float32)
        for source in tl.range(0, count, num_stages=STAGES):
            at = tl.cast(source, tl.int64) * block_stride + row * row_stride + column
            vs = tl.load(blocks + at, inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            product = tl.sum(multiply(dys, vs, BLOCK), 1, keep_dims=True)
            products = tl.where(lane == source, product, products)
        if partial is not None:
            vs = tl.load(partial + row * partial_stride + column, inside, other=0.0).to(tl.float32)
            product = tl.sum(multiply(dys, vs, BLOCK), 1, keep_dims=True)
            products = tl.where(lane == count, product, products)
        scores, r, a = _load_statistics(statistics, row, rows, lane, sources)
        by_w = a * (products - tl.sum(a * products, 1, keep_dims=True)) * r
        by_v = by_w * scores * r / columns
        for source in tl.range(0, count, num_stages=STAGES):
            at = tl.cast(source, tl.int64) * block_stride + row * row_stride + column
            vs = tl.load(blocks + at, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            slope = _only(by_w, lane, source)
            if sums is not None:
                total_sums += slope * vs
            if dblocks is not None:
                dvs = _only(a, lane, source) * dys + slope * ws - _only(by_v, lane, source) * vs
                tl.store(dblocks + (source * tl.cast(rows, tl.int64) + row) * columns + column, dvs, inside)
        if partial is not None:
            vs = tl.load(partial + row * partial_stride + column, inside, other=0.0).to(tl.float32)
            slope = _only(by_w, lane, count)
            if sums is not None:
                total_sums += slope * vs
            if dpartial is not None:
                dvs = _only(a, lane, count) * dys + slope * ws - _only(by_v, lane, count) * vs
                tl.store(dpartial + row * columns + column, dvs, inside)
    if sums is not None:
        at = tl.program_id(0).to(tl.int64) * columns + column
        tl.store(sums + at, tl.sum(total_sums, 0, keep_dims=True), column < columns)


@triton.jit
def _load_source(blocks, partial, source, count, row, column, inside, block_stride, row_stride, partial_stride):
    """A part of a row of a source. The last source may be `partial`."""
    at = tl.cast(source, tl.int64) * block_stride + row * row_stride + column
    if partial is None:
        return tl.load(blocks + at, inside, other=0.0).to(tl.float32)
    else:
        vs = tl.load(blocks + at, inside & (source < count), other=0.0).to(tl.float32)
        return vs + tl.load(partial + row * partial_stride + column, inside & (source == count), other=0.0).to(
            tl.float32
        )


@kernel(do_not_specialize=["rows", "count", "sources"])
def _forward_long(
    y, statistics, blocks, partial, query, weight, rows, columns, count, sources, block_stride, row_stride, partial_stride,
    eps, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SOURCES)
    scores = tl.full((SOURCES,), float("-inf"), tl.float32)
    for source in range(0, sources):
        squares = tl.zeros((BLOCK,), tl.float32)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            vs = _load_source(
                blocks, partial, source, count, row, column, column < columns, block_stride, row_stride, partial_stride
            )
            squares += vs * vs
            products += vs * _load_product(query, weight, column, column < columns)
        r = tl.rsqrt(tl.sum(squares) / columns + tl.cast(eps, tl.float32))
        score = tl.sum(products) * r
        if statistics is not None:
            tl.store(statistics + row * sources + source, score)
            tl.store(statistics + (tl.cast(rows, tl.int64) + row) * sources + source, r)
        scores = tl.where(lane == source, score, scores)
    a = tl.exp(scores - tl.max(scores))
    a /= tl.sum(a)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mean = tl.zeros((BLOCK,), tl.float32)
        for source in range(0, sources):
            vs = _load_source(
                blocks, partial, source, count, row, column, column < columns, block_stride, row_stride, partial_stride
            )
            mean += tl.sum(tl.where(lane == source, a, 0.0)) * vs
        tl.store(y + row * columns + column, mean, column < columns)


@kernel(do_not_specialize=["rows", "count", "sources"])
def _backward_long(
    dblocks, dpartial, slopes, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
    dy_stride, block_stride, row_stride, partial_stride, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of a row's sources. `slopes` gets each source's factor in the gradient of query · weight."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SOURCES)[None, :]
    products = tl.zeros((1, SOURCES), tl.float32)
    for source in range(0, sources):
        product = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            vs = _load_source(
                blocks, partial, source, count, row, column, column < columns, block_stride, row_stride, partial_stride
            )
            product += vs * tl.load(dy + row * dy_stride + column, column < columns, other=0.0).to(tl.float32)
        products = tl.where(lane == source, tl.sum(product), products)
    scores, r, a = _load_statistics(statistics, row, rows, lane, sources)
    by_w = a * (products - tl.sum(a * products, 1, keep_dims=True)) * r
    by_v = by_w * scores * r / columns
    if slopes is not None:
        tl.store(slopes + row * sources + lane, by_w, lane < sources)
    for source in range(0, sources):
        share = tl.sum(tl.where(lane == source, a, 0.0))
        along_w = tl.sum(tl.where(lane == source, by_w, 0.0))
        along_v = tl.sum(tl.where(lane == source, by_v, 0.0))
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            vs = _load_source(
                blocks, partial, source, count, row, column, inside, block_stride, row_stride, partial_stride
            )
            dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
            dvs = share * dys + along_w * _load_product(query, weight, column, inside) - along_v * vs
            if dpartial is not None:
                tl.store(dpartial + row * columns + column, dvs, inside & (source == count))
            if dblocks is not None:
                at = (source * tl.cast(rows, tl.int64) + row) * columns + column
                tl.store(dblocks + at, dvs, inside & (source < count))


@kernel(do_not_specialize=["rows", "count", "sources"])
def _sums_long(
    sums, slopes, blocks, partial, rows, columns, count, sources, block_stride, row_stride, partial_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of the sum over all rows and all sources."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for source in range(0, sources):
        for start in range(0, rows, ROWS):
            row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)[:, None]
            inside = (row < rows) & (column < columns)
            slope = tl.load(slopes + row * sources + source, row < rows, other=0.0)
            total_sums += slope * _load_source(
                blocks, partial, source, count, row, column, inside, block_stride, row_stride, partial_stride
            )
    tl.store(sums + column, tl.sum(total_sums, 0, keep_dims=True), column < columns)


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
        count, rows, columns = blocks.shape
        sources = count if partial is None else count + 1
        strides = blocks.stride(0), blocks.stride(1), 0 if partial is None else partial.stride(0)
        vectors = in_vectors(columns, *strides)
        if columns <= (LONGEST if vectors else LONGEST_BY_ONES):
            tile_rows, block, warps = _tile(columns, vectors)
            _forward[((rows + tile_rows - 1) // tile_rows,)](
                y, statistics, blocks, partial, query, weight, rows, columns, count, sources, *strides, eps,
                ROWS=tile_rows, BLOCK=block, STAGES=2 if vectors else 1, num_warps=warps,
            )  # fmt: skip
        else:
            _forward_long[(rows,)](
                y, statistics, blocks, partial, query, weight, rows, columns, count, sources, *strides, eps,
                SOURCES=power_of_2(sources), BLOCK=LONG_BLOCK, num_warps=8,
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
        vectors = in_vectors(columns, dy.stride(0), *strides)
        device = blocks.device
        if columns <= (LONGEST if vectors else LONGEST_BY_ONES):
            tile_rows, block, warps = _tile(columns, vectors)
            programs, parts = (rows + tile_rows - 1) // tile_rows, None
            if sums:
                programs = min(programs, sm_count(device) * max(1, 16 // warps))
                parts = torch.empty((programs, columns), dtype=torch.float32, device=device)
            _backward[(programs,)](
                dblocks, dpartial, parts, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
                dy.stride(0), *strides, SOURCES=power_of_2(sources), ROWS=tile_rows, BLOCK=block,
                STAGES=2 if vectors else 1, num_warps=warps,
            )  # fmt: skip
            return None if parts is None else total(parts, parts[0])
        slopes = torch.empty((rows, sources), dtype=torch.float32, device=device) if sums else None
        _backward_long[(rows,)](
            dblocks, dpartial, slopes, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
            dy.stride(0), *strides, SOURCES=power_of_2(sources), BLOCK=LONG_BLOCK, num_warps=8,
        )  # fmt: skip
        if slopes is None:
            return None
        result = torch.empty(columns, dtype=torch.float32, device=device)
        _sums_long[((columns + 63) // 64,)](
            result, slopes, blocks, partial, rows, columns, count, sources, *strides, ROWS=32, BLOCK=64
        )
        return result


def _tile(columns: int, vectors: bool) -> tuple[int, int, int]:
    """Rows, columns and warps; twice as many warps if elements are loaded one by one."""
    tile_rows, block, warps = tile_of(columns)
    return tile_rows, block, warps if vectors else min(2 * warps, 16)


host = AttnRes(_Kernels())
forward = implements(attn_res)(host.forward)
backward = host.backward
