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
from liger_triton.ops._device import shared_memory, sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import in_vectors, power_of_2, tile_of
from liger_triton.ops._sums import add_three, add_two, multiply, total

# Longer rows are read in blocks. Elements that are loaded one by one need an address each, so their limit is half.
LONGEST = 8192
LONGEST_BY_ONES = 4096
LONG_BLOCK = 4096

FORWARD_STAGES = 3
"""Sources on their way, including the one that is taken. On an H200 (triton 3.6), nine blocks of 16384 x 7168 and `partial` in
bfloat16 take 0.673 ms with 3, 0.685 with 4 and 0.885 with 2. With 16 elements per thread instead of 32 they took 1.667."""

BACKWARD_STAGES = 4
"""Pairs of sources on their way in backward, with the one that is taken. On an H200 (triton 3.6), with 4, 3 and 2, 16384 x 7168
takes 1.486, 1.536 and 1.792 ms. With 3, less shared memory lets more programs run of short rows: 2048 x 2048 takes 0.041 ms,
not 0.049."""

ELEMENTS = 8192
"""Elements of the tiles that a multiprocessor takes at a time in backward."""


@triton.jit
def _load_product(query, weight, column, inside):
    """query · weight."""
    ws = tl.load(query + column, inside, other=0.0).to(tl.float32)
    if weight is not None:
        ws *= tl.load(weight + column, inside, other=0.0).to(tl.float32)
    return ws


@triton.jit
def _load_source(
    blocks, partial, source, count, row, column, inside, block_stride, row_stride, partial_stride,
    CHOOSE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A part of some rows of a source, in float32. The last source may be `partial`.

    CHOOSE: a pointer to either is chosen, which takes one load instead of two. KEEP: the loads' eviction policy, or "".
    """
    block = blocks + tl.cast(source, tl.int64) * block_stride
    if partial is None:
        vs = tl.load(block + row * row_stride + column, inside, other=0.0, eviction_policy=KEEP)
    elif CHOOSE:
        place = tl.where(source < count, block, partial)
        stride = tl.where(source < count, row_stride, partial_stride)
        vs = tl.load(place + row * stride + column, inside, other=0.0, eviction_policy=KEEP)
    else:
        vs = tl.load(block + row * row_stride + column, inside & (source < count), other=0.0, eviction_policy=KEEP)
        last = partial + row * partial_stride + column
        vs += tl.load(last, inside & (source == count), other=0.0, eviction_policy=KEEP)
    return vs.to(tl.float32)


@kernel(do_not_specialize=["rows", "count", "sources"])
def _forward(
    y, statistics, blocks, partial, query, weight, rows, columns, count, sources, block_stride, row_stride, partial_stride,
    eps, CHOOSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    inside = exists & (column < columns)
    ws = _load_product(query, weight, column, column < columns)
    top = tl.full((ROWS, 1), float("-inf"), tl.float32)
    exp_sum = tl.zeros((ROWS, 1), tl.float32)
    mean = tl.zeros((ROWS, BLOCK), tl.float32)
    for source in tl.range(0, sources, num_stages=STAGES):
        vs = _load_source(
            blocks, partial, source, count, row, column, inside, block_stride, row_stride, partial_stride,
            CHOOSE, "",
        )  # fmt: skip
        # A single reduction: the threads wait for each other only once.
        products = multiply(vs, vs, BLOCK), multiply(vs, ws, BLOCK)
        squares, score = tl.reduce(products, 1, add_two, keep_dims=True)
        r = tl.rsqrt(squares / columns + tl.cast(eps, tl.float32))
        score *= r
        if statistics is not None:
            at = row * sources + source
            tl.store(statistics + at, score, exists)
            tl.store(statistics + tl.cast(rows, tl.int64) * sources + at, r, exists)
        higher = tl.maximum(top, score)
        shrunk, e = tl.exp(top - higher), tl.exp(score - higher)
        top, exp_sum, mean = higher, exp_sum * shrunk + e, mean * shrunk + e * vs
    tl.store(y + row * columns + column, mean / exp_sum, inside)


@triton.jit
def _load_statistics(statistics, row, rows, lane, sources):
    """Scores, inverse root mean squares and the softmax of each row; 0 past the last source."""
    there = (row < rows) & (lane < sources)
    scores = tl.load(statistics + row * sources + lane, there, other=0.0)
    r = tl.load(statistics + tl.cast(rows, tl.int64) * sources + row * sources + lane, there, other=0.0)
    e = tl.where(lane < sources, scores, float("-inf"))
    e = tl.exp(e - tl.max(e, 1, keep_dims=True))
    return scores, r, e / tl.sum(e, 1, keep_dims=True)


@triton.jit
def _factors(products, scores, r, a, lane, sources, columns):
    """From dy · source: what query · weight and the source are multiplied by in the gradient of each source."""
    by_w = a * (products - tl.sum(a * products, 1, keep_dims=True)) * r
    by_w = tl.where(lane < sources, by_w, 0.0)
    return by_w, by_w * scores * r / columns


@triton.jit
def _give(
    total, dblocks, dpartial, vs, dys, ws, a, by_w, by_v, lane, source, count, row, rows, column, columns, inside,
    CHOOSE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one source, and return `total` plus its part of the gradient of query · weight."""
    here = lane == source
    each = tl.where(here, a, 0.0), tl.where(here, by_w, 0.0), tl.where(here, by_v, 0.0)
    a, by_w, by_v = tl.reduce(each, 1, add_three, keep_dims=True)
    if SUMS:
        total += by_w * vs
    dvs = a * dys + by_w * ws - by_v * vs
    to = dpartial
    if dblocks is not None:
        to = dblocks + tl.cast(source, tl.int64) * rows * columns
        if dpartial is None:
            inside &= source < count
        elif CHOOSE:
            to = tl.where(source < count, to, dpartial)
        else:
            last = inside & (source == count)
            tl.store(dpartial + row * columns + column, dvs, last, eviction_policy="evict_first")
            inside &= source < count
    else:
        inside &= source == count
    if to is not None:
        tl.store(to + row * columns + column, dvs, inside, eviction_policy="evict_first")
    return total


@triton.jit
def _load_two(
    blocks, partial, source, count, sources, row, column, inside, block_stride, row_stride, partial_stride,
    CHOOSE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """As `_load_source`, of a source and of the next one; and which elements of the next one there are."""
    both = inside & (source + 1 < sources)
    first = _load_source(
        blocks, partial, source, count, row, column, inside, block_stride, row_stride, partial_stride, CHOOSE, KEEP
    )  # fmt: skip
    second = _load_source(
        blocks, partial, source + 1, count, row, column, both, block_stride, row_stride, partial_stride, CHOOSE, KEEP
    )  # fmt: skip
    return first, second, both


@kernel(do_not_specialize=["rows", "count", "sources"])
def _backward(
    dblocks, dpartial, sums, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
    dy_stride, block_stride, row_stride, partial_stride,
    CHOOSE: tl.constexpr, SOURCES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """It takes two sources at a time: more is on its way at once, and the threads wait for each other half as often."""
    lane = tl.arange(0, SOURCES)[None, :]
    column = tl.arange(0, BLOCK)[None, :]
    ws = _load_product(query, weight, column, column < columns)
    total_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        scores, r, a = _load_statistics(statistics, row, rows, lane, sources)
        products = tl.zeros((ROWS, SOURCES), tl.float32)
        for source in tl.range(0, sources, 2, num_stages=STAGES):
            first, second, _ = _load_two(
                blocks, partial, source, count, sources, row, column, inside, block_stride, row_stride, partial_stride,
                CHOOSE, "evict_last",
            )  # fmt: skip
            each = multiply(dys, first, BLOCK), multiply(dys, second, BLOCK)
            one, two = tl.reduce(each, 1, add_two, keep_dims=True)
            products = tl.where(lane == source, one, tl.where(lane == source + 1, two, products))
        by_w, by_v = _factors(products, scores, r, a, lane, sources, columns)
        for source in range(0, sources, 2):
            first, second, both = _load_two(
                blocks, partial, source, count, sources, row, column, inside, block_stride, row_stride, partial_stride,
                CHOOSE, "evict_first",
            )  # fmt: skip
            total_sums = _give(
                total_sums, dblocks, dpartial, first, dys, ws, a, by_w, by_v, lane, source, count, row, rows, column, columns,
                inside, CHOOSE, sums is not None,
            )  # fmt: skip
            total_sums = _give(
                total_sums, dblocks, dpartial, second, dys, ws, a, by_w, by_v, lane, source + 1, count, row, rows, column,
                columns, both, CHOOSE, sums is not None,
            )  # fmt: skip
    if sums is not None:
        at = tl.program_id(0).to(tl.int64) * columns + column
        tl.store(sums + at, tl.sum(total_sums, 0, keep_dims=True), column < columns)


@kernel(do_not_specialize=["rows", "count", "sources"])
def _forward_long(
    y, statistics, blocks, partial, query, weight, rows, columns, count, sources, block_stride, row_stride, partial_stride,
    eps, CHOOSE: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
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
                blocks, partial, source, count, row, column, column < columns, block_stride, row_stride, partial_stride,
                CHOOSE, "",
            )  # fmt: skip
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
                blocks, partial, source, count, row, column, column < columns, block_stride, row_stride, partial_stride,
                CHOOSE, "",
            )  # fmt: skip
            mean += tl.sum(tl.where(lane == source, a, 0.0)) * vs
        tl.store(y + row * columns + column, mean, column < columns)


@kernel(do_not_specialize=["rows", "count", "sources"])
def _backward_long(
    dblocks, dpartial, slopes, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
    dy_stride, block_stride, row_stride, partial_stride,
    CHOOSE: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
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
                blocks, partial, source, count, row, column, column < columns, block_stride, row_stride, partial_stride,
                CHOOSE, "",
            )  # fmt: skip
            product += vs * tl.load(dy + row * dy_stride + column, column < columns, other=0.0).to(tl.float32)
        products = tl.where(lane == source, tl.sum(product), products)
    scores, r, a = _load_statistics(statistics, row, rows, lane, sources)
    by_w, by_v = _factors(products, scores, r, a, lane, sources, columns)
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
                blocks, partial, source, count, row, column, inside, block_stride, row_stride, partial_stride,
                CHOOSE, "",
            )  # fmt: skip
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
    CHOOSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
                blocks, partial, source, count, row, column, inside, block_stride, row_stride, partial_stride,
                CHOOSE, "",
            )  # fmt: skip
    tl.store(sums + column, tl.sum(total_sums, 0, keep_dims=True), column < columns)


class TritonAttnRes(AttnResKernels):
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
            tile_rows, block, warps = _tile(columns, vectors, blocks.element_size())
            _forward[((rows + tile_rows - 1) // tile_rows,)](
                y, statistics, blocks, partial, query, weight, rows, columns, count, sources, *strides, eps,
                CHOOSE=_chooses(), ROWS=tile_rows, BLOCK=block,
                STAGES=FORWARD_STAGES if vectors else 1, num_warps=warps,
            )  # fmt: skip
        else:
            _forward_long[(rows,)](
                y, statistics, blocks, partial, query, weight, rows, columns, count, sources, *strides, eps,
                CHOOSE=_chooses(), SOURCES=power_of_2(sources), BLOCK=LONG_BLOCK, num_warps=8,
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
            tile_rows, block, warps = _tile(columns, vectors, blocks.element_size())
            programs, parts = (rows + tile_rows - 1) // tile_rows, None
            if sums:
                programs = min(programs, sm_count(device) * max(1, ELEMENTS // (tile_rows * block)))
                parts = torch.empty((programs, columns), dtype=torch.float32, device=device)
            _backward[(programs,)](
                dblocks, dpartial, parts, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
                dy.stride(0), *strides, CHOOSE=_chooses(), SOURCES=power_of_2(sources), ROWS=tile_rows, BLOCK=block,
                STAGES=_backward_stages(tile_rows * block * blocks.element_size(), device) if vectors else 1, num_warps=warps,
            )  # fmt: skip
            return None if parts is None else total(parts, parts[0])
        slopes = torch.empty((rows, sources), dtype=torch.float32, device=device) if sums else None
        _backward_long[(rows,)](
            dblocks, dpartial, slopes, dy, blocks, partial, query, weight, statistics, rows, columns, count, sources,
            dy.stride(0), *strides, CHOOSE=_chooses(), SOURCES=power_of_2(sources), BLOCK=LONG_BLOCK, num_warps=8,
        )  # fmt: skip
        if slopes is None:
            return None
        result = torch.empty(columns, dtype=torch.float32, device=device)
        _sums_long[((columns + 63) // 64,)](
            result, slopes, blocks, partial, rows, columns, count, sources, *strides,
            CHOOSE=_chooses(), ROWS=32, BLOCK=64,
        )  # fmt: skip
        return result


def _chooses() -> bool:
    """Whether a kernel may choose a pointer. Triton 3.7 for AMD can't, if one tensor has less than 2 GB and the other more."""
    return torch.version.hip is None


def _tile(columns: int, vectors: bool, size: int) -> tuple[int, int, int]:
    """Rows, columns and warps, for elements of `size` bytes. A thread has 64 bytes of a tile, or eight elements, one by one."""
    tile_rows, block, warps = tile_of(columns)
    if vectors:
        return tile_rows, block, max(4, warps // 2) if size == 2 else warps
    return tile_rows, block, min(2 * warps, 16)


def _backward_stages(tile: int, device: torch.device) -> int:
    """How many pairs of tiles of `tile` bytes are on their way in backward."""
    stages = BACKWARD_STAGES if tile >= 8192 else 3
    # AMD's compiler has registers for no more stages than 64 KiB hold, whatever shared memory a chip has.
    room = shared_memory(device) if torch.version.hip is None else min(shared_memory(device), 64 << 10)
    while stages > 1 and 2 * (stages - 1) * tile >= room:
        stages -= 1
    return stages


host = AttnRes(TritonAttnRes())
forward = implements(attn_res)(host.forward)
backward = host.backward
