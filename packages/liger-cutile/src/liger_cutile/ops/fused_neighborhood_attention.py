"""Neighborhood attention: blocks of queries meet the keys around them in small matrix products.

Positions of one residue modulo the dilation see each other and no others. So a block works on one residue, in which windows are
dense. If windows end within a short tile on either side of a block, the block needs one tile of each tensor from there. That
holds for backward too, where the scores of the block's positions among themselves serve dq, dk and dv.

With wider windows a block goes from tile to tile. Forward goes over the keys that its queries see, with an online softmax.
Backward goes over the keys that its positions see for dq, and over the queries that see them for dk and dv.

Kernels take tensors as ``[B, H, N, R, D]``: N positions of each of R lines, one for each residue.
"""

import functools
import math
from typing import Any, NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import fused_neighborhood_attention
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._device import multiplies_from_shared
from liger_cutile.ops._heads import far_apart, like, samples_of
from liger_cutile.ops._launch import MOST_BLOCKS, ConstInt, given, launch
from liger_cutile.ops._math import LEAST, exp_like
from liger_cutile.ops._rows import LARGEST, ZERO, blocks, power_of_2


@ct.function
def _place(x, tiles, PARTS):
    """This block's line, its tile of positions, and its part of the columns.

    A line is one residue of one head of a sample: (sample, head, residue, number of positions, number of the line).
    """
    number = ct.bid(0) // PARTS // tiles
    _, heads, count, residues, _ = x.shape
    line = number // residues // heads, number // residues % heads, number % residues, count, number
    return line, ct.bid(0) // PARTS % tiles, ct.bid(0) % PARTS


@ct.function
def _load(x, line, tile, part, BLOCK, WIDTH):
    """A tile of a line's positions, and a part of their columns; ``[BLOCK, WIDTH]``."""
    sample, head, residue, _, _ = line
    values = ct.load(x, (sample, head, tile, residue, part), (1, 1, BLOCK, 1, WIDTH), padding_mode=ZERO)
    return ct.reshape(values, (BLOCK, WIDTH))


@ct.function
def _store(x, line, tile, part, value, BLOCK, WIDTH):
    sample, head, residue, _, _ = line
    value = ct.reshape(ct.astype(value, x.dtype), (1, 1, BLOCK, 1, WIDTH))
    ct.store(x, (sample, head, tile, residue, part), value)


@ct.function
def _load_line(x, which, tile, line, ROWS, COLUMNS):
    """A number that is kept per query, for a tile of a line's queries: ``[ROWS, 1]`` or ``[1, COLUMNS]``."""
    values = ct.load(x, (line[4], which, tile), (1, 1, ROWS * COLUMNS), padding_mode=ZERO)
    return ct.reshape(values, (ROWS, COLUMNS))


@ct.function
def _store_line(x, which, tile, line, values, BLOCK):
    ct.store(x, (line[4], which, tile), ct.reshape(values, (1, 1, BLOCK)))


@ct.function
def _products(a_tile, a, a_at, b_tile, b, b_at, line, HEAD, CHUNK):
    """Products of rows of a with rows of b. The tiles are their first CHUNK columns."""
    A, B = a_tile.shape[0], b_tile.shape[0]
    sums = ct.mma(a_tile, ct.transpose(b_tile), ct.zeros((A, B), ct.float32))
    for part in range(1, (HEAD + CHUNK - 1) // CHUNK):
        b_next = _load(b, line, b_at, part, B, CHUNK)
        sums = ct.mma(_load(a, line, a_at, part, A, CHUNK), ct.transpose(b_next), sums)
    return sums


@ct.function
def _means_of(do_tile, do, o, at, line, HEAD, CHUNK):
    """For each query, the mean of its weights' gradients, weighted by the weights: the dot product of its output and do."""
    SIZE = do_tile.shape[0]
    sums = ct.astype(_load(o, line, at, 0, SIZE, CHUNK), ct.float32) * do_tile
    for part in range(1, (HEAD + CHUNK - 1) // CHUNK):
        o_next = ct.astype(_load(o, line, at, part, SIZE, CHUNK), ct.float32)
        sums += o_next * _load(do, line, at, part, SIZE, CHUNK)
    return ct.sum(sums, axis=1, keepdims=True)


@ct.function
def _part_of(tile, x, at, line, part, HEAD, CHUNK, WIDTH):
    """The columns of x that belong to a part of the output. `tile` is x's first CHUNK columns."""
    if HEAD <= CHUNK and CHUNK == WIDTH:
        return tile
    else:
        return _load(x, line, at, part, tile.shape[0], WIDTH)


@ct.function
def _sees(row, column, line, reach, ROWS, COLUMNS):
    """Which positions of a tile of ROWS see which positions of a tile of COLUMNS."""
    rows = row * ROWS + ct.reshape(ct.arange(ROWS, dtype=ct.int32), (ROWS, 1))
    columns = column * COLUMNS + ct.reshape(ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    return (ct.abs(rows - columns) <= reach) & (rows < line[3]) & (columns < line[3])


@ct.function
def _around(tile, line, reach, BLOCK, STEP):
    """The tiles of STEP positions that a tile of BLOCK positions sees: the first one, and the one after the last."""
    first = tile * BLOCK
    return ct.maximum(first - reach, 0) // STEP, ct.cdiv(ct.minimum(first + BLOCK + reach, line[3]), STEP)


@ct.function
def _near(tile, line, reach, BLOCK, SIDE):
    """A tile of BLOCK positions and the tiles of SIDE before and after it: number, reach and size of each.

    If there is no tile before or after, another tile stands in for it. Its reach of -1 makes it invisible.
    """
    before, after = tile * (BLOCK // SIDE) - 1, (tile + 1) * (BLOCK // SIDE)
    last = ct.cdiv(line[3], SIDE) - 1
    return (
        (tile, reach, BLOCK),
        (ct.maximum(before, 0), ct.where(before >= 0, reach, -1), SIDE),
        (ct.minimum(after, last), ct.where(after <= last, reach, -1), SIDE),
    )


@ct.function
def _weights_of(scores, maximum, inverse, seen, q):
    return ct.where(seen, exp_like(scores - maximum, q) * inverse, 0.0)


@ct.function
def _dscores_of(weights, dweights, mean, reach, q):
    # A position that sees only itself has no gradient, not even a rounding error.
    return ct.astype(ct.where(reach > 0, weights * (dweights - mean), 0.0), q.dtype)


@ct.function
def _store_output(o, statistics, line, own, part, sums, total, maximum, BLOCK, WIDTH):
    inverse = 1.0 / total
    _store(o, line, own, part, sums * inverse, BLOCK, WIDTH)
    if given(statistics) and part == 0:
        _store_line(statistics, 0, own, line, maximum, BLOCK)
        _store_line(statistics, 1, own, line, inverse, BLOCK)


@ct.kernel
def _forward(
    statistics, o, q, k, v, scale, tiles, reach,
    HEAD: ConstInt, CHUNK: ConstInt, WIDTH: ConstInt, PARTS: ConstInt, BLOCK: ConstInt, STEP: ConstInt,
):  # fmt: skip
    line, own, part = _place(q, tiles, PARTS)
    q_tile = _load(q, line, own, 0, BLOCK, CHUNK)
    maximum = ct.full((BLOCK, 1), LEAST, ct.float32)
    total = ct.zeros((BLOCK, 1), ct.float32)
    sums = ct.zeros((BLOCK, WIDTH), ct.float32)
    begin, end = _around(own, line, reach, BLOCK, STEP)
    for keys in range(begin, end):
        k_tile = _load(k, line, keys, 0, STEP, CHUNK)
        v_tile = _load(v, line, keys, part, STEP, WIDTH)
        scores = scale * _products(q_tile, q, own, k_tile, k, keys, line, HEAD, CHUNK)
        scores = ct.where(_sees(own, keys, line, reach, BLOCK, STEP), scores, -math.inf)
        higher = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True))
        weights = exp_like(scores - higher, q)
        shrink = exp_like(maximum - higher, q)
        maximum = higher
        total = total * shrink + ct.sum(weights, axis=1, keepdims=True)
        sums = ct.mma(ct.astype(weights, v.dtype), v_tile, sums * shrink)
    _store_output(o, statistics, line, own, part, sums, total, maximum, BLOCK, WIDTH)


@ct.kernel
def _forward_near(
    statistics, o, q, k, v, scale, tiles, reach,
    HEAD: ConstInt, CHUNK: ConstInt, WIDTH: ConstInt, PARTS: ConstInt, BLOCK: ConstInt, STEP: ConstInt,
):  # fmt: skip
    line, own, part = _place(q, tiles, PARTS)
    keys = _near(own, line, reach, BLOCK, STEP)
    q_tile = _load(q, line, own, 0, BLOCK, CHUNK)
    k_tiles = tuple(_load(k, line, at, 0, SIZE, CHUNK) for at, _, SIZE in ct.static_iter(keys))
    v_tiles = tuple(_load(v, line, at, part, SIZE, WIDTH) for at, _, SIZE in ct.static_iter(keys))
    scores = tuple(
        ct.where(
            _sees(own, at, line, far, BLOCK, SIZE),
            scale * _products(q_tile, q, own, k_tile, k, at, line, HEAD, CHUNK),
            -math.inf,
        )
        for (at, far, SIZE), k_tile in ct.static_iter(zip(keys, k_tiles, strict=True))
    )
    maximum = ct.full((BLOCK, 1), LEAST, ct.float32)
    for tile_scores in ct.static_iter(scores):
        maximum = ct.maximum(maximum, ct.max(tile_scores, axis=1, keepdims=True))
    weights = tuple(exp_like(tile_scores - maximum, q) for tile_scores in ct.static_iter(scores))
    total = ct.zeros((BLOCK, 1), ct.float32)
    sums = ct.zeros((BLOCK, WIDTH), ct.float32)
    for weight, v_tile in ct.static_iter(zip(weights, v_tiles, strict=True)):
        total += ct.sum(weight, axis=1, keepdims=True)
        sums = ct.mma(ct.astype(weight, v.dtype), v_tile, sums)
    _store_output(o, statistics, line, own, part, sums, total, maximum, BLOCK, WIDTH)


@ct.kernel
def _backward_queries(
    mean, statistics, dq, o, do, q, k, v, scale, tiles, reach,
    HEAD: ConstInt, CHUNK: ConstInt, WIDTH: ConstInt, PARTS: ConstInt, BLOCK: ConstInt, STEP: ConstInt,
):  # fmt: skip
    """dq, and for each query the mean of its weights' gradients, weighted by the weights."""
    line, own, part = _place(q, tiles, PARTS)
    q_tile = _load(q, line, own, 0, BLOCK, CHUNK)
    do_tile = _load(do, line, own, 0, BLOCK, CHUNK)
    maximum = _load_line(statistics, 0, own, line, BLOCK, 1)
    inverse = _load_line(statistics, 1, own, line, BLOCK, 1)
    begin, end = _around(own, line, reach, BLOCK, STEP)
    means = ct.zeros((BLOCK, 1), ct.float32)
    if given(o):
        means = _means_of(do_tile, do, o, own, line, HEAD, CHUNK)
    else:
        for keys in range(begin, end):
            k_tile = _load(k, line, keys, 0, STEP, CHUNK)
            v_tile = _load(v, line, keys, 0, STEP, CHUNK)
            scores = scale * _products(q_tile, q, own, k_tile, k, keys, line, HEAD, CHUNK)
            seen = _sees(own, keys, line, reach, BLOCK, STEP)
            weights = _weights_of(scores, maximum, inverse, seen, q)
            dweights = _products(do_tile, do, own, v_tile, v, keys, line, HEAD, CHUNK)
            means += ct.sum(weights * dweights, axis=1, keepdims=True)
    if given(mean) and part == 0:
        _store_line(mean, 0, own, line, means, BLOCK)
    if given(dq):
        sums = ct.zeros((BLOCK, WIDTH), ct.float32)
        for keys in range(begin, end):
            k_tile = _load(k, line, keys, 0, STEP, CHUNK)
            v_tile = _load(v, line, keys, 0, STEP, CHUNK)
            scores = scale * _products(q_tile, q, own, k_tile, k, keys, line, HEAD, CHUNK)
            seen = _sees(own, keys, line, reach, BLOCK, STEP)
            weights = _weights_of(scores, maximum, inverse, seen, q)
            dweights = _products(do_tile, do, own, v_tile, v, keys, line, HEAD, CHUNK)
            dscores = _dscores_of(weights, dweights, means, reach, q)
            sums = ct.mma(dscores, _part_of(k_tile, k, keys, line, part, HEAD, CHUNK, WIDTH), sums)
        _store(dq, line, own, part, scale * sums, BLOCK, WIDTH)


@ct.kernel
def _backward_keys(
    statistics, mean, dk, dv, do, q, k, v, scale, tiles, reach,
    HEAD: ConstInt, CHUNK: ConstInt, WIDTH: ConstInt, PARTS: ConstInt, BLOCK: ConstInt, STEP: ConstInt,
):  # fmt: skip
    line, own, part = _place(q, tiles, PARTS)
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
        inverse = _load_line(statistics, 1, queries, line, 1, STEP)
        weights = _weights_of(scores, maximum, inverse, _sees(own, queries, line, reach, BLOCK, STEP), q)
        if given(dv):
            do_part = _part_of(do_tile, do, queries, line, part, HEAD, CHUNK, WIDTH)
            dv_sums = ct.mma(ct.astype(weights, q.dtype), do_part, dv_sums)
        if given(dk):
            dweights = _products(v_tile, v, own, do_tile, do, queries, line, HEAD, CHUNK)
            dscores = _dscores_of(weights, dweights, _load_line(mean, 0, queries, line, 1, STEP), reach, q)
            q_part = _part_of(q_tile, q, queries, line, part, HEAD, CHUNK, WIDTH)
            dk_sums = ct.mma(dscores, q_part, dk_sums)
    if given(dk):
        _store(dk, line, own, part, scale * dk_sums, BLOCK, WIDTH)
    if given(dv):
        _store(dv, line, own, part, dv_sums, BLOCK, WIDTH)


@ct.kernel
def _backward_near(
    statistics, dq, dk, dv, o, do, q, k, v, scale, tiles, reach,
    HEAD: ConstInt, CHUNK: ConstInt, WIDTH: ConstInt, PARTS: ConstInt, BLOCK: ConstInt, STEP: ConstInt,
):  # fmt: skip
    """All gradients of a block: the weights of its positions among themselves serve dq, dk and dv."""
    line, own, _ = _place(q, tiles, PARTS)
    beside = _near(own, line, reach, BLOCK, STEP)
    q_tile = _load(q, line, own, 0, BLOCK, CHUNK)
    do_tile = _load(do, line, own, 0, BLOCK, CHUNK)
    k_tiles = tuple(_load(k, line, at, 0, SIZE, CHUNK) for at, _, SIZE in ct.static_iter(beside))
    v_tiles = tuple(_load(v, line, at, 0, SIZE, CHUNK) for at, _, SIZE in ct.static_iter(beside))
    maximum = _load_line(statistics, 0, own, line, BLOCK, 1)
    inverse = _load_line(statistics, 1, own, line, BLOCK, 1)
    weights = tuple(
        _weights_of(
            scale * _products(q_tile, q, own, k_tile, k, at, line, HEAD, CHUNK),
            maximum, inverse, _sees(own, at, line, far, BLOCK, SIZE), q,
        )
        for (at, far, SIZE), k_tile in ct.static_iter(zip(beside, k_tiles, strict=True))
    )  # fmt: skip
    dweights = tuple(
        _products(do_tile, do, own, v_tile, v, at, line, HEAD, CHUNK)
        for (at, _, _), v_tile in ct.static_iter(zip(beside, v_tiles, strict=True))
    )
    mean = ct.zeros((BLOCK, 1), ct.float32)
    for weight, dweight in ct.static_iter(zip(weights, dweights, strict=True)):
        mean += ct.sum(weight * dweight, axis=1, keepdims=True)
    dscores = tuple(
        _dscores_of(weight, dweight, mean, reach, q)
        for weight, dweight in ct.static_iter(zip(weights, dweights, strict=True))
    )
    if given(dq):
        dq_sums = ct.zeros((BLOCK, WIDTH), ct.float32)
        for dscore, k_tile in ct.static_iter(zip(dscores, k_tiles, strict=True)):
            dq_sums = ct.mma(dscore, k_tile, dq_sums)
        _store(dq, line, own, 0, scale * dq_sums, BLOCK, WIDTH)
    sides = beside[1:]
    q_sides = tuple(_load(q, line, at, 0, SIZE, CHUNK) for at, _, SIZE in ct.static_iter(sides))
    do_sides = tuple(_load(do, line, at, 0, SIZE, CHUNK) for at, _, SIZE in ct.static_iter(sides))
    side_weights = tuple(
        _weights_of(
            scale * _products(k_tiles[0], k, own, q_side, q, at, line, HEAD, CHUNK),
            _load_line(statistics, 0, at, line, 1, SIZE), _load_line(statistics, 1, at, line, 1, SIZE),
            _sees(own, at, line, far, BLOCK, SIZE), q,
        )
        for (at, far, SIZE), q_side in ct.static_iter(zip(sides, q_sides, strict=True))
    )  # fmt: skip
    if given(dv):
        zeros = ct.zeros((BLOCK, WIDTH), ct.float32)
        dv_sums = ct.mma(ct.transpose(ct.astype(weights[0], q.dtype)), do_tile, zeros)
        for weight, do_side in ct.static_iter(zip(side_weights, do_sides, strict=True)):
            dv_sums = ct.mma(ct.astype(weight, q.dtype), do_side, dv_sums)
        _store(dv, line, own, 0, dv_sums, BLOCK, WIDTH)
    if given(dk):
        dk_sums = ct.mma(ct.transpose(dscores[0]), q_tile, ct.zeros((BLOCK, WIDTH), ct.float32))
        for (at, _, SIZE), weight, q_side, do_side in ct.static_iter(
            zip(sides, side_weights, q_sides, do_sides, strict=True)
        ):
            dweight = _products(v_tiles[0], v, own, do_side, do, at, line, HEAD, CHUNK)
            side_mean = ct.reshape(_means_of(do_side, do, o, at, line, HEAD, CHUNK), (1, SIZE))
            dk_sums = ct.mma(_dscores_of(weight, dweight, side_mean, reach, q), q_side, dk_sums)
        _store(dk, line, own, 0, scale * dk_sums, BLOCK, WIDTH)


class Tiling(NamedTuple):
    """Sizes of tiles and windows.

    Attributes:
        dilation: the dilation, as small as the result allows.
        reach: how far a position sees, in steps of the dilation; as small as the result allows.
        chunk: columns at a time, of the products for the scores.
        width: columns of the output that a block makes.
        block: positions of a block.
        step: positions at a time, of those around the block.
        near: whether all that a block sees is in the tiles of `step` positions beside it, and fits registers.
    """

    dilation: int
    reach: int
    chunk: int
    width: int
    block: int
    step: int
    near: bool


@functools.lru_cache
def _choose_tiling(length: int, head: int, size: int, device: torch.device, kernel_size: int, dilation: int) -> Tiling:
    """The sizes that compile with no spills, or next to none (tileiras 13.4).

    On an H200, (1, 16, 8192, 128) and (2, 16, 2048, 64) in bfloat16, kernel_size 7: near takes 0.047 and 0.019 ms forward, 0.129
    and 0.037 backward; otherwise 0.071 and 0.036, 0.186 and 0.131.
    """
    width = power_of_2(head)
    window = dilation, reach = _window(length, kernel_size, dilation)
    if size == 4:  # no tensor cores: each thread holds the operands of its own elements of a product
        return Tiling(*window, 16, min(width, 32), 32, 16, near=False)
    block = 64 if multiplies_from_shared(device) else 32
    if width <= 128 and reach <= 16:
        return Tiling(*window, width, width, block, 16, near=True)
    return Tiling(*window, min(width, 256), min(width, 256), block, 32 if reach <= 32 else block, near=False)


def _tiling(q: Tensor, kernel_size: int, dilation: int) -> Tiling:
    _, _, length, head = q.shape
    return _choose_tiling(length, head, q.element_size(), q.device, kernel_size, dilation)


@functools.cache
def _hinted(kernel: Any, tiling: Tiling, size: int) -> Any:
    """The kernel, with as many registers per block as its products take."""
    if tiling.width > 128:
        return kernel.replace_hints(num_worker_warps=8)
    if size == 4:
        return kernel
    # On an H200, (2, 16, 2048, 64) takes 0.0185 ms forward with four blocks and 0.0220 with two, but backward 0.053 and 0.037.
    return kernel.replace_hints(occupancy=4 if kernel is _forward_near and tiling.width <= 64 else 2)


def _window(length: int, kernel_size: int, dilation: int) -> tuple[int, int]:
    """The dilation, and how far a position sees, in steps of it. Both are as small as the result allows."""
    reach = min(kernel_size // 2, (length - 1) // dilation)
    return (dilation, reach) if reach > 0 else (1, 0)


def _residues(length: int, dilation: int) -> list[range]:
    """Residues modulo the dilation: those of the longest lines; and those whose lines are shorter by one position, if any are."""
    longest = length % dilation
    return [range(longest), range(longest, dilation)] if longest else [range(dilation)]


def _split(x: Tensor, shape: tuple[int, ...], first: int, dilation: int) -> Tensor:
    """x as ``[B, H, N, R, D]``, with N positions of each of R residues, of which `first` is the first."""
    sample, head, position, _ = x.stride()
    return x.as_strided(shape, (sample, head, dilation * position, position, 1), x.storage_offset() + first * position)


def _launch(
    kernel: Any,
    tiling: Tiling,
    of_lines: tuple[Tensor | None, ...],
    of_positions: tuple[Tensor | None, ...],
    q: Tensor,
    scale: float | None,
) -> None:
    """Launch a kernel that takes tensors of `_new_of_lines` (`of_lines`), and tensors of q's shape (`of_positions`).

    All lines of a launch are equally long.
    """
    batch, heads, length, head = q.shape
    dilation = tiling.dilation
    hinted = _hinted(kernel, tiling, q.element_size())
    parts = blocks(head, tiling.width)
    apart = far_apart(*of_positions)
    line = 0
    for residues in _residues(length, dilation):
        steps = blocks(length - residues.start, dilation)
        tiles = blocks(steps, tiling.block)
        lines = heads * len(residues)
        of_sample = lines * tiles * parts
        most_samples = 1 if apart else max(1, MOST_BLOCKS // of_sample)
        for begin in range(0, batch, most_samples):
            count = min(most_samples, batch - begin)
            own_lines, positions = of_lines, of_positions
            some_samples = count < batch or apart
            if some_samples:
                positions = [samples_of(x, begin, count) for x in of_positions]
            if some_samples or len(residues) < dilation:
                own_lines = [None if x is None else x[line : line + count * lines] for x in of_lines]
                line += count * lines
            shape = count, heads, steps, len(residues), head
            positions = [None if x is None else _split(x, shape, residues.start, dilation) for x in positions]
            launch(
                hinted, (count * of_sample,), *own_lines, *positions,
                head**-0.5 if scale is None else float(scale), tiles, tiling.reach,
                head, tiling.chunk, tiling.width, parts, tiling.block, tiling.step,
            )  # fmt: skip


def _new_of_lines(q: Tensor, rows: int, kernel_size: int, dilation: int) -> Tensor:
    """Memory for `rows` float32 numbers per query. The queries of a line lie together; lines lie in the order of launches."""
    batch, heads, length, _ = q.shape
    dilation, _ = _window(length, kernel_size, dilation)
    shape = batch * heads * dilation, rows, blocks(length, dilation)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


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
    tiling = _tiling(q, kernel_size, dilation)
    _launch(_forward_near if tiling.near else _forward, tiling, (statistics,), (o, q, k, v), q, scale)


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
    tiling = _tiling(q, kernel_size, dilation)
    if tiling.near:
        _launch(_backward_near, tiling, (statistics,), (dq, dk, dv, o, do, q, k, v), q, scale)
        return
    mean = None if dk is None else _new_of_lines(q, 1, kernel_size, dilation)
    if dq is not None or mean is not None:
        _launch(_backward_queries, tiling, (mean, statistics), (dq, o, do, q, k, v), q, scale)
    if dk is not None or dv is not None:
        _launch(_backward_keys, tiling, (statistics, mean), (dk, dv, do, q, k, v), q, scale)


def _adjacent(x: Tensor, dilation: int) -> Tensor:
    """x with adjacent columns and with strides that a kernel takes, except that of samples."""
    _, heads, positions, columns = x.stride()
    return x if columns == 1 and max(heads, dilation * positions) <= LARGEST else x.contiguous()


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
    q, k, v = (_adjacent(x, dilation) for x in (q, k, v))
    o = like(q)
    if True not in needs:
        _launch_forward(None, o, q, k, v, kernel_size, dilation, scale)
        return o, ()
    statistics = _new_of_lines(q, 2, kernel_size, dilation)
    _launch_forward(statistics, o, q, k, v, kernel_size, dilation, scale)
    # In float32 the rounding of o would show in the gradients that are made from it, so o is not saved.
    return o, (q, k, v, None if o.dtype is torch.float32 else o, statistics)


def backward(
    needs: Needs, saved: Saved, do: Tensor, *, kernel_size: int, dilation: int, scale: float | None
) -> tuple[Tensor | None, ...]:
    q, k, v, o, statistics = saved
    dq, dk, dv = (like(q) if need else None for need in needs)
    _launch_backward(dq, dk, dv, statistics, o, _adjacent(do, dilation), q, k, v, kernel_size, dilation, scale)
    return dq, dk, dv
