"""Neighborhood attention: blocks of queries meet the keys around them in small matrix products.

Positions of one residue modulo the dilation see each other and no others, so a block works on one residue, where windows
are dense. Forward it goes over the keys that its queries see, with an online softmax; backward over the keys that its
positions see, for dq, and over the queries that see them, for dk and dv.
"""

import functools
import math
from typing import Any, NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import fused_neighborhood_attention
from liger_core.contract import Needs, Saved, implements
from liger_core.opaque import opaque
from liger_cutile.ops._exp import exp_like
from liger_cutile.ops._launch import MOST_BLOCKS, ConstInt, given, launch
from liger_cutile.ops._rows import LARGEST, blocks, power_of_2

# Stands for -inf where differences are taken: that of two is 0.
LEAST = -3.4028234663852886e38

ZERO = ct.PaddingMode.ZERO


@ct.function
def _place(heads, length, dilation, tiles, PARTS):
    """This block's line, which is a residue of a sample's head; its tile of positions; its part of the columns.

    A line is its sample, head and residue, the dilation, and how many positions it has; and its number among all.
    """
    number = ct.bid(0) // PARTS // tiles
    residue = number % dilation
    count = ct.cdiv(length - residue, dilation)
    line = number // dilation // heads, number // dilation % heads, residue, dilation, count, number
    return line, ct.bid(0) // PARTS % tiles, ct.bid(0) % PARTS


@ct.function
def _index(line, tile, part, BLOCK, WIDTH):
    """Elements of a tensor whose positions are not split by residue; of positions from `count` on, outside of it."""
    batch, head, residue, dilation, count, _ = line
    rows = residue + dilation * ct.minimum(tile * BLOCK + ct.arange(BLOCK, dtype=ct.int32), count)
    return ct.Slice(batch, 1), ct.Slice(head, 1), rows, ct.Slice(part * WIDTH, WIDTH)


@ct.function
def _load(x, line, tile, part, BLOCK, WIDTH):
    """A tile of a line's positions, and of their columns; ``[BLOCK, WIDTH]``."""
    if x.ndim == 5:
        index = line[0], line[1], tile, line[2], part
        found = ct.load(x, index, (1, 1, BLOCK, 1, WIDTH), padding_mode=ZERO)
    else:
        found = ct.load_advanced_indexing(x, _index(line, tile, part, BLOCK, WIDTH), padding_mode=ZERO)
    return ct.reshape(found, (BLOCK, WIDTH))


@ct.function
def _store(x, line, tile, part, value, BLOCK, WIDTH):
    value = ct.astype(value, x.dtype)
    if x.ndim == 5:
        ct.store(x, (line[0], line[1], tile, line[2], part), ct.reshape(value, (1, 1, BLOCK, 1, WIDTH)))
    else:
        index = _index(line, tile, part, BLOCK, WIDTH)
        ct.store_advanced_indexing(x, index, ct.reshape(value, (1, 1, BLOCK, WIDTH)))


@ct.function
def _load_line(x, which, tile, line, ROWS, COLUMNS):
    """A row of what is kept of each line, of a tile of queries; ``[ROWS, COLUMNS]``, one of which is 1."""
    found = ct.load(x, (line[5], which, tile), (1, 1, ROWS * COLUMNS), padding_mode=ZERO)
    return ct.reshape(found, (ROWS, COLUMNS))


@ct.function
def _products(a_tile, a, a_at, b_tile, b, b_at, line, HEAD, CHUNK):
    """Products of rows of a with rows of b. The tiles are their first CHUNK columns."""
    A, B = a_tile.shape[0], b_tile.shape[0]
    products = ct.mma(a_tile, ct.transpose(b_tile), ct.zeros((A, B), ct.float32))
    for part in range(1, (HEAD + CHUNK - 1) // CHUNK):
        b_next = _load(b, line, b_at, part, B, CHUNK)
        products = ct.mma(_load(a, line, a_at, part, A, CHUNK), ct.transpose(b_next), products)
    return products


@ct.function
def _part(tile, x, at, line, part, HEAD, CHUNK, WIDTH):
    """The columns of x that belong to a part of the output. `tile` is x's first CHUNK columns."""
    if HEAD <= CHUNK and CHUNK == WIDTH:
        return tile
    else:
        return _load(x, line, at, part, tile.shape[0], WIDTH)


@ct.function
def _seen(row, column, line, reach, ROWS, COLUMNS):
    """Which of a tile of ROWS positions see which of one of COLUMNS."""
    rows = row * ROWS + ct.reshape(ct.arange(ROWS, dtype=ct.int32), (ROWS, 1))
    columns = column * COLUMNS + ct.reshape(ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    return (ct.abs(rows - columns) <= reach) & (rows < line[4]) & (columns < line[4])


@ct.function
def _around(tile, line, reach, BLOCK, STEP):
    """The tiles of STEP positions that a tile of BLOCK positions sees: the first, and the one after the last."""
    first = tile * BLOCK
    return ct.maximum(first - reach, 0) // STEP, ct.cdiv(ct.minimum(first + BLOCK + reach, line[4]), STEP)


@ct.kernel
def _forward(
    statistics, o, q, k, v, scale, heads, length, dilation, tiles, reach,
    HEAD: ConstInt, CHUNK: ConstInt, WIDTH: ConstInt, PARTS: ConstInt, BLOCK: ConstInt, STEP: ConstInt,
):  # fmt: skip
    line, own, part = _place(heads, length, dilation, tiles, PARTS)
    if own * BLOCK < line[4]:
        q_tile = _load(q, line, own, 0, BLOCK, CHUNK)
        maximum = ct.full((BLOCK, 1), LEAST, ct.float32)
        total = ct.zeros((BLOCK, 1), ct.float32)
        sums = ct.zeros((BLOCK, WIDTH), ct.float32)
        begin, end = _around(own, line, reach, BLOCK, STEP)
        for keys in range(begin, end):
            k_tile = _load(k, line, keys, 0, STEP, CHUNK)
            v_tile = _load(v, line, keys, part, STEP, WIDTH)
            scores = scale * _products(q_tile, q, own, k_tile, k, keys, line, HEAD, CHUNK)
            scores = ct.where(_seen(own, keys, line, reach, BLOCK, STEP), scores, -math.inf)
            higher = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True))
            weights = exp_like(scores - higher, q)
            shrink = exp_like(maximum - higher, q)
            maximum = higher
            total = total * shrink + ct.sum(weights, axis=1, keepdims=True)
            sums = ct.mma(ct.astype(weights, v.dtype), v_tile, sums * shrink)
        _store(o, line, own, part, sums / total, BLOCK, WIDTH)
        if given(statistics) and part == 0:
            ct.store(statistics, (line[5], 0, own), ct.reshape(maximum, (1, 1, BLOCK)))
            ct.store(statistics, (line[5], 1, own), ct.reshape(total, (1, 1, BLOCK)))


@ct.function
def _weights(scores, maximum, total, seen, q):
    return ct.where(seen, exp_like(scores - maximum, q) / total, 0.0)


@ct.function
def _dscores(weights, dweights, mean, reach):
    # What sees itself alone has no gradient, not even of rounding.
    return ct.where(reach > 0, weights * (dweights - mean), 0.0)


@ct.kernel
def _backward_queries(
    mean, statistics, dq, o, do, q, k, v, scale, heads, length, dilation, tiles, reach,
    HEAD: ConstInt, CHUNK: ConstInt, WIDTH: ConstInt, PARTS: ConstInt, BLOCK: ConstInt, STEP: ConstInt,
):  # fmt: skip
    """dq, and of the gradients of each query's weights the mean, weighted by them."""
    line, own, part = _place(heads, length, dilation, tiles, PARTS)
    if own * BLOCK < line[4]:
        q_tile = _load(q, line, own, 0, BLOCK, CHUNK)
        do_tile = _load(do, line, own, 0, BLOCK, CHUNK)
        maximum = _load_line(statistics, 0, own, line, BLOCK, 1)
        total = _load_line(statistics, 1, own, line, BLOCK, 1)
        begin, end = _around(own, line, reach, BLOCK, STEP)
        means = ct.zeros((BLOCK, 1), ct.float32)
        if given(o):
            products = ct.astype(_load(o, line, own, 0, BLOCK, CHUNK), ct.float32) * do_tile
            for chunk in range(1, (HEAD + CHUNK - 1) // CHUNK):
                o_next = ct.astype(_load(o, line, own, chunk, BLOCK, CHUNK), ct.float32)
                products += o_next * _load(do, line, own, chunk, BLOCK, CHUNK)
            means = ct.sum(products, axis=1, keepdims=True)
        else:
            for keys in range(begin, end):
                k_tile = _load(k, line, keys, 0, STEP, CHUNK)
                v_tile = _load(v, line, keys, 0, STEP, CHUNK)
                scores = scale * _products(q_tile, q, own, k_tile, k, keys, line, HEAD, CHUNK)
                seen = _seen(own, keys, line, reach, BLOCK, STEP)
                weights = _weights(scores, maximum, total, seen, q)
                dweights = _products(do_tile, do, own, v_tile, v, keys, line, HEAD, CHUNK)
                means += ct.sum(weights * dweights, axis=1, keepdims=True)
        if given(mean) and part == 0:
            ct.store(mean, (line[5], 0, own), ct.reshape(means, (1, 1, BLOCK)))
        if given(dq):
            sums = ct.zeros((BLOCK, WIDTH), ct.float32)
            for keys in range(begin, end):
                k_tile = _load(k, line, keys, 0, STEP, CHUNK)
                v_tile = _load(v, line, keys, 0, STEP, CHUNK)
                scores = scale * _products(q_tile, q, own, k_tile, k, keys, line, HEAD, CHUNK)
                seen = _seen(own, keys, line, reach, BLOCK, STEP)
                weights = _weights(scores, maximum, total, seen, q)
                dweights = _products(do_tile, do, own, v_tile, v, keys, line, HEAD, CHUNK)
                dscores = ct.astype(_dscores(weights, dweights, means, reach), q.dtype)
                sums = ct.mma(dscores, _part(k_tile, k, keys, line, part, HEAD, CHUNK, WIDTH), sums)
            _store(dq, line, own, part, scale * sums, BLOCK, WIDTH)


@ct.kernel
def _backward_keys(
    statistics, mean, dk, dv, do, q, k, v, scale, heads, length, dilation, tiles, reach,
    HEAD: ConstInt, CHUNK: ConstInt, WIDTH: ConstInt, PARTS: ConstInt, BLOCK: ConstInt, STEP: ConstInt,
):  # fmt: skip
    line, own, part = _place(heads, length, dilation, tiles, PARTS)
    if own * BLOCK < line[4]:
        k_tile = _load(k, line, own, 0, BLOCK, CHUNK)
        v_tile = _load(v, line, own, 0, BLOCK, CHUNK)
        dk_sums = ct.zeros((BLOCK, WIDTH), ct.float32)
        dv_sums = ct.zeros((BLOCK, WIDTH), ct.float32)
        begin, end = _around(own, line, reach, BLOCK, STEP)
        for queries in range(begin, end):
            q_tile = _load(q, line, queries, 0, STEP, CHUNK)
            do_tile = _load(do, line, queries, 0, STEP, CHUNK)
            scores = scale * _products(k_tile, k, own, q_tile, q, queries, line, HEAD, CHUNK)
            maximum = _load_line(statistics, 0, queries, line, 1, STEP)
            total = _load_line(statistics, 1, queries, line, 1, STEP)
            weights = _weights(scores, maximum, total, _seen(own, queries, line, reach, BLOCK, STEP), q)
            if given(dv):
                do_part = _part(do_tile, do, queries, line, part, HEAD, CHUNK, WIDTH)
                dv_sums = ct.mma(ct.astype(weights, q.dtype), do_part, dv_sums)
            if given(dk):
                dweights = _products(v_tile, v, own, do_tile, do, queries, line, HEAD, CHUNK)
                dscores = _dscores(weights, dweights, _load_line(mean, 0, queries, line, 1, STEP), reach)
                q_part = _part(q_tile, q, queries, line, part, HEAD, CHUNK, WIDTH)
                dk_sums = ct.mma(ct.astype(dscores, q.dtype), q_part, dk_sums)
        if given(dk):
            _store(dk, line, own, part, scale * dk_sums, BLOCK, WIDTH)
        if given(dv):
            _store(dv, line, own, part, dv_sums, BLOCK, WIDTH)


class Tiling(NamedTuple):
    """Sizes of tiles.

    Attributes:
        chunk: columns at a time, of the products that make the scores.
        width: columns of the output that a block makes.
        block: positions of a block.
        step: positions at a time, of those around them.
    """

    chunk: int
    width: int
    block: int
    step: int


def _tiling(head: int, size: int, reach: int) -> Tiling:
    """Chosen by what compiles without spills for sm_90 (tileiras 13.4)."""
    width = power_of_2(head)
    if size == 4:  # no tensor cores: each thread holds what its elements of a product are made of
        return Tiling(16, min(width, 32), 32, 16)
    return Tiling(min(width, 256), min(width, 256), 64, 32 if reach <= 32 else 64)


@functools.cache
def _hinted(kernel: Any, tiling: Tiling, size: int) -> Any:
    """The kernel, with as many registers for a block as its products take."""
    if tiling.width > 128:
        return kernel.replace_hints(num_worker_warps=8)
    return kernel.replace_hints(occupancy=2) if size == 2 else kernel


def _window(length: int, kernel_size: int, dilation: int) -> tuple[int, int]:
    """The dilation, and how far a position sees in steps of it; both as small as they may be without a difference."""
    reach = min(kernel_size // 2, (length - 1) // dilation)
    return (dilation, reach) if reach > 0 else (1, 0)


def _launch(
    kernel: Any,
    of_lines: tuple[Tensor | None, ...],
    of_positions: tuple[Tensor | None, ...],
    q: Tensor,
    kernel_size: int,
    dilation: int,
    scale: float | None,
) -> None:
    """Launch a kernel that takes tensors of `_new_of_lines` and some of q's shape."""
    batch, heads, length, head = q.shape
    dilation, reach = _window(length, kernel_size, dilation)
    tiling = _tiling(head, q.element_size(), reach)
    hinted = _hinted(kernel, tiling, q.element_size())
    tiles, parts = blocks(blocks(length, dilation), tiling.block), blocks(head, tiling.width)
    of_sample = heads * dilation * tiles * parts
    far_apart = any(x is not None and x.stride(0) > LARGEST for x in of_positions)
    some = 1 if far_apart else max(1, MOST_BLOCKS // of_sample)
    for begin in range(0, batch, some):
        samples = slice(begin, min(begin + some, batch))
        launch(
            hinted, ((samples.stop - begin) * of_sample,),
            *[None if x is None else x[samples].flatten(0, 1) for x in of_lines],
            *[None if x is None else _residues(x[samples], dilation) for x in of_positions],
            head**-0.5 if scale is None else float(scale), heads, length, dilation, tiles, reach,
            head, tiling.chunk, tiling.width, parts, tiling.block, tiling.step,
        )  # fmt: skip


def _new_of_lines(q: Tensor, rows: int, kernel_size: int, dilation: int) -> Tensor:
    """Memory for some float32 numbers per query, those of a residue of a sample's head together."""
    batch, heads, length, _ = q.shape
    dilation, _ = _window(length, kernel_size, dilation)
    shape = batch, heads * dilation, rows, blocks(length, dilation)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _residues(x: Tensor, dilation: int) -> Tensor:
    """Samples of x, their positions split by residue where that is a view: where the dilation divides the length."""
    if x.stride(0) > LARGEST:  # of one sample, which a kernel takes for a stride all the same
        x = x[0].expand(x.shape)
    return x.unflatten(2, (-1, dilation)) if x.shape[2] % dilation == 0 else x


@opaque(writes=("statistics", "o"))
def _launch_forward(
    statistics: Tensor | None,
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: int,
    dilation: int,
    scale: float | None,
) -> None:
    _launch(_forward, (statistics,), (o, q, k, v), q, kernel_size, dilation, scale)


@opaque(writes=("dq", "dk", "dv"))
def _launch_backward(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    statistics: Tensor,
    o: Tensor | None,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: int,
    dilation: int,
    scale: float | None,
) -> None:
    mean = None if dk is None else _new_of_lines(q, 1, kernel_size, dilation)
    if dq is not None or mean is not None:
        _launch(_backward_queries, (mean, statistics), (dq, o, do, q, k, v), q, kernel_size, dilation, scale)
    if dk is not None or dv is not None:
        _launch(_backward_keys, (statistics, mean), (dk, dv, do, q, k, v), q, kernel_size, dilation, scale)


def _new(q: Tensor) -> Tensor:
    """A tensor without gaps, laid out like q: the heads of a token together, as in a transposed view, or apart."""
    if q.stride(1) >= q.stride(2):
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    _, heads, length, head = q.shape
    return q.new_empty_strided(q.shape, (length * heads * head, head, heads * head, 1))


def _adjacent(x: Tensor) -> Tensor:
    """x with adjacent columns, and with strides that a kernel takes, but for that of samples."""
    return x if x.stride(3) == 1 and max(x.stride(1), x.stride(2)) <= LARGEST else x.contiguous()


@implements(fused_neighborhood_attention)
def forward(
    needs: Needs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> tuple[Tensor, Saved]:
    q, k, v = _adjacent(q), _adjacent(k), _adjacent(v)
    o = _new(q)
    if True not in needs:
        _launch_forward(None, o, q, k, v, kernel_size, dilation, scale)
        return o, ()
    statistics = _new_of_lines(q, 2, kernel_size, dilation)
    _launch_forward(statistics, o, q, k, v, kernel_size, dilation, scale)
    # In float32, what o was rounded by matters to the gradients that are made of it.
    return o, (q, k, v, None if o.dtype is torch.float32 else o, statistics)


def backward(
    needs: Needs, saved: Saved, do: Tensor, *, kernel_size: int, dilation: int, scale: float | None
) -> tuple[Tensor | None, ...]:
    q, k, v, o, statistics = saved
    dq, dk, dv = (_new(q) if need else None for need in needs)
    _launch_backward(dq, dk, dv, statistics, o, _adjacent(do), q, k, v, kernel_size, dilation, scale)
    return dq, dk, dv
