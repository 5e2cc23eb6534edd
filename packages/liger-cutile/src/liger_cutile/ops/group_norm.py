"""Group norm: a group stays in registers if it fits; else it is read again, backwards, so that the caches have some of it.

Tensors are ``[samples, groups, channels of a group, positions]``.
"""

import functools

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import group_norm
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._device import persistent, sized, sm_count
from liger_cutile.ops._launch import MOST_DOWN, ConstBool, ConstInt, given, launch
from liger_cutile.ops._math import widen_again
from liger_cutile.ops._rows import LARGEST, blocks, gather, near, power_of_2
from liger_cutile.ops._sums import add_two, launch_totals

# Elements of a group, its sizes rounded up to powers of two, that a block keeps in registers.
LONGEST = 8192
# Elements of a tile: of several short groups, or of a part of a long one.
SHORT_TILE = 2048
LONG_TILE = 4096
# Most positions of a tile of a long group.
MOST_POSITIONS = 1024
# Blocks on a multiprocessor, and warps of each, of the kernels for long groups. On an H200, 4096 groups of 131072 elements
# in bfloat16 take 0.754 ms forward; with 8 warps 0.778, with one block of 4 warps 0.949, with three 0.894.
LONG_BLOCKS = 2
LONG_WARPS = 4
# Most elements of a long group in bfloat16 that a block holds, those of a tile forward and, at most, backward, and least
# positions of a tile. On an H200, 2048 groups of 32768 elements take 0.080 ms forward and 0.127 backward; read twice, 0.112
# and 0.166.
LONGEST_HELD = 32768
FORWARD_HELD, BACKWARD_HELD = 2048, 8192
LEAST_POSITIONS = 64


@ct.function
def _load(array, place, shape):
    return ct.astype(ct.load(array, place, shape, padding_mode=ct.PaddingMode.ZERO), ct.float32)


@ct.function
def _hold(array, place, shape):
    """A tile that crosses no edge, in its own dtype."""
    return ct.load(array, place, shape, check_bounds=False, allow_tma=False)


@ct.function
def _load_channels(values, group, channel, GROUPS, CHANNELS):
    """A weight or bias of the channels of some groups.

    Of several groups one by one: tileiras 13.4 loads some such tiles, of which it repeats each element for all positions, 8
    bytes at once from where they aren't aligned.
    """
    if GROUPS > 1:
        groups = ct.reshape(group * GROUPS + ct.arange(GROUPS, dtype=ct.int32), (1, GROUPS, 1, 1))
        channels = ct.reshape(channel * CHANNELS + ct.arange(CHANNELS, dtype=ct.int32), (1, 1, CHANNELS, 1))
        return gather(values, (groups, channels))
    else:
        tile = ct.load(values, (group, channel), (1, CHANNELS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        return ct.reshape(ct.astype(tile, ct.float32), (1, 1, CHANNELS, 1))


@ct.function
def _load_statistic(statistics, which, sample, group, GROUPS):
    return ct.reshape(_load(statistics, (which, sample, group), (1, 1, GROUPS)), (1, GROUPS, 1, 1))


@ct.function
def _store_statistics(statistics, sample, group, mean, rstd, GROUPS):
    if given(statistics):
        ct.store(statistics, (0, sample, group), ct.reshape(mean, (1, 1, GROUPS)))
        ct.store(statistics, (1, sample, group), ct.reshape(rstd, (1, 1, GROUPS)))


@ct.function
def _inside(array, channel, position, CHANNELS, BLOCK):
    """Which elements of a tile are a group's."""
    channels = ct.reshape(channel * CHANNELS + ct.arange(CHANNELS, dtype=ct.int32), (1, 1, CHANNELS, 1))
    positions = ct.reshape(position * BLOCK + ct.arange(BLOCK, dtype=ct.int32), (1, 1, 1, BLOCK))
    return (channels < array.shape[2]) & (positions < array.shape[3])


@ct.function
def _sum(tile):
    """Over the channels and positions of each group."""
    return ct.sum(ct.sum(tile, axis=3, keepdims=True), axis=2, keepdims=True)


@ct.function
def _store_scaled(y, place, centred, rstd, weight, bias, GROUPS, CHANNELS, INSIDE=False):
    scale = rstd
    if given(weight):
        scale = scale * _load_channels(weight, place[1], place[2], GROUPS, CHANNELS)
    ys = centred * scale
    if given(bias):
        ys = ys + _load_channels(bias, place[1], place[2], GROUPS, CHANNELS)
    ct.store(y, place, ct.astype(ys, y.dtype), check_bounds=not INSIDE, allow_tma=not INSIDE)


@ct.kernel
def _forward(y, statistics, x, weight, bias, size, eps, GROUPS: ConstInt, CHANNELS: ConstInt, BLOCK: ConstInt):
    group, sample = ct.bid(0), ct.bid(1)
    xs = _load(x, (sample, group, 0, 0), (1, GROUPS, CHANNELS, BLOCK))
    mean = _sum(xs) / size
    centred = ct.where(_inside(x, 0, 0, CHANNELS, BLOCK), xs - mean, 0.0)
    rstd = ct.rsqrt(_sum(centred * centred) / size + eps)
    _store_statistics(statistics, sample, group, mean, rstd, GROUPS)
    _store_scaled(y, (sample, group, 0, 0), centred, rstd, weight, bias, GROUPS, CHANNELS)


@ct.function
def _positions(array, CHANNELS, BLOCK):
    """The first and the last tile of positions that this block takes: its part of all."""
    tiles = ct.num_tiles(array, axis=3, shape=(1, 1, CHANNELS, BLOCK))
    return ct.bid(2) * tiles // ct.num_blocks(2), (ct.bid(2) + 1) * tiles // ct.num_blocks(2)


@ct.function
def _merge(counts, means, squares):
    """How many elements there are in all, their mean, and the sum of their squared distances from it.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """
    count = _sum(counts)
    mean = _sum(counts * means) / count
    mean += _sum(counts * (means - mean)) / count  # what rounding such large sums has lost
    return count, mean, _sum(squares + counts * (means - mean) * (means - mean))


@ct.function
def _moments(x, WHOLE, CHANNELS, BLOCK):
    """The results of `_merge` for this block's part of a group. Each place of a tile has a mean of its own before."""
    group, sample = ct.bid(0), ct.bid(1)
    shape = (1, 1, CHANNELS, BLOCK)
    first, last = _positions(x, CHANNELS, BLOCK)
    counts = ct.zeros((1, 1, 1, 1) if WHOLE else shape, ct.float32)
    means = ct.zeros(shape, ct.float32)
    squares = ct.zeros(shape, ct.float32)
    for channel in range(ct.num_tiles(x, axis=2, shape=shape)):
        for position in range(first, last):
            distance = _load(x, (sample, group, channel, position), shape) - means
            if WHOLE:
                counts += 1.0
                step = distance * (1.0 / counts)
            else:
                inside = _inside(x, channel, position, CHANNELS, BLOCK)
                counts += ct.where(inside, 1.0, 0.0)
                distance = ct.where(inside, distance, 0.0)
                step = ct.truediv(distance, ct.maximum(counts, 1.0), rounding_mode=ct.RoundingMode.APPROX)
            means += step
            squares += distance * (distance - step)
    return _merge(counts + ct.zeros(shape, ct.float32), means, squares)


@ct.kernel(occupancy=2, num_worker_warps=8)
def _forward_held(
    y, statistics, x, weight, bias, size, eps, TILES: ConstInt, ACROSS: ConstInt, CHANNELS: ConstInt, BLOCK: ConstInt
):
    group, sample = ct.bid(0), ct.bid(1)
    shape = (1, 1, CHANNELS, BLOCK)
    places = tuple((sample, group, i // ACROSS, i % ACROSS) for i in ct.static_iter(range(TILES)))
    tiles = tuple(_hold(x, place, shape) for place in ct.static_iter(places))
    means = ct.zeros(shape, ct.float32)
    squares = ct.zeros(shape, ct.float32)
    for i in ct.static_iter(range(TILES)):
        distance = ct.astype(tiles[i], ct.float32) - means
        step = distance * (1.0 / (i + 1))
        means += step
        squares += distance * (distance - step)
    _, mean, squares = _merge(ct.full(shape, TILES, ct.float32), means, squares)
    rstd = ct.rsqrt(squares / size + eps)
    _store_statistics(statistics, sample, group, mean, rstd, 1)
    for place, tile in ct.static_iter(zip(places, tiles, strict=True)):
        _store_scaled(y, place, widen_again(tile) - mean, rstd, weight, bias, 1, CHANNELS, True)


@ct.kernel(occupancy=LONG_BLOCKS, num_worker_warps=LONG_WARPS)
def _measure(moments, x, WHOLE: ConstBool, CHANNELS: ConstInt, BLOCK: ConstInt):
    count, mean, squares = _moments(x, WHOLE, CHANNELS, BLOCK)
    ct.store(moments, (0, ct.bid(1), ct.bid(0), ct.bid(2)), count)
    ct.store(moments, (1, ct.bid(1), ct.bid(0), ct.bid(2)), mean)
    ct.store(moments, (2, ct.bid(1), ct.bid(0), ct.bid(2)), squares)


@ct.function
def _load_parts(array, which, PARTS):
    """The results of the blocks that share a group."""
    return _load(array, (which, ct.bid(1), ct.bid(0), 0), (1, 1, 1, PARTS))


@ct.kernel(occupancy=LONG_BLOCKS, num_worker_warps=LONG_WARPS)
def _forward_long(
    y, statistics, moments, x, weight, bias, size, eps,
    WHOLE: ConstBool, PARTS: ConstInt, CHANNELS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    group, sample = ct.bid(0), ct.bid(1)
    shape = (1, 1, CHANNELS, BLOCK)
    if given(moments):
        _, mean, squares = _merge(
            _load_parts(moments, 0, PARTS), _load_parts(moments, 1, PARTS), _load_parts(moments, 2, PARTS)
        )
    else:
        _, mean, squares = _moments(x, WHOLE, CHANNELS, BLOCK)
    rstd = ct.rsqrt(squares / size + eps)
    if ct.bid(2) == 0:
        _store_statistics(statistics, sample, group, mean, rstd, 1)
    tiles = ct.num_tiles(x, axis=2, shape=shape)
    first, last = _positions(x, CHANNELS, BLOCK)
    for channel in range(tiles):
        for position in range(first, last):
            place = sample, group, tiles - 1 - channel, first + last - 1 - position
            _store_scaled(y, place, _load(x, place, shape) - mean, rstd, weight, bias, 1, CHANNELS)


@ct.function
def _store_partial(partial, which, row, group, channel, sums, GROUPS, CHANNELS, INSIDE=False):
    place, tile = (which, row, group, channel), ct.reshape(sums, (1, 1, GROUPS, CHANNELS))
    ct.store(partial, place, tile, check_bounds=not INSIDE, allow_tma=not INSIDE)


@ct.kernel
def _backward(
    dx, partial, dy, x, weight, statistics, size,
    WEIGHT: ConstBool, BIAS: ConstBool, SINGLE: ConstBool, GROUPS: ConstInt, CHANNELS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    group, sample = ct.bid(0), ct.bid(1)
    place, shape = (sample, group, 0, 0), (1, GROUPS, CHANNELS, BLOCK)
    rstd = _load_statistic(statistics, 1, sample, group, GROUPS)
    normed = (_load(x, place, shape) - _load_statistic(statistics, 0, sample, group, GROUPS)) * rstd
    g = _load(dy, place, shape)
    dbias = ct.sum(g, axis=3, keepdims=True)
    dweight = ct.sum(g * normed, axis=3, keepdims=True)
    if WEIGHT:
        _store_partial(partial, 0, sample, group, 0, dweight, GROUPS, CHANNELS)
    if BIAS:
        _store_partial(partial, int(WEIGHT), sample, group, 0, dbias, GROUPS, CHANNELS)
    if given(dx):
        if given(weight):
            scale = _load_channels(weight, group, 0, GROUPS, CHANNELS)
            g, dbias, dweight = g * scale, dbias * scale, dweight * scale
        shift = ct.sum(dbias, axis=2, keepdims=True) / size
        slope = ct.sum(dweight, axis=2, keepdims=True) / size
        dxs = (g - shift - normed * slope) * rstd
        if SINGLE:  # a rounding is left where the product in g is fused with the subtraction
            dxs = dxs * 0.0
        ct.store(dx, place, ct.astype(dxs, dx.dtype))


@ct.kernel(occupancy=1, num_worker_warps=8)
def _backward_held(
    dx, partial, dy, x, weight, statistics, size,
    WEIGHT: ConstBool, BIAS: ConstBool, TILES: ConstInt, CHANNELS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    group, sample = ct.bid(0), ct.bid(1)
    shape = (1, 1, CHANNELS, BLOCK)
    mean = _load_statistic(statistics, 0, sample, group, 1)
    rstd = _load_statistic(statistics, 1, sample, group, 1)
    places = tuple((sample, group, i, 0) for i in ct.static_iter(range(TILES)))
    tiles = tuple((_hold(x, place, shape), _hold(dy, place, shape)) for place in ct.static_iter(places))
    shift = ct.zeros((1, 1, CHANNELS, 1), ct.float32)
    slope = ct.zeros((1, 1, CHANNELS, 1), ct.float32)
    for i in ct.static_iter(range(TILES)):
        xs, dys = ct.astype(tiles[i][0], ct.float32), ct.astype(tiles[i][1], ct.float32)
        dbias, dweight = ct.reduce((dys, dys * (xs - mean)), 3, add_two, (0.0, 0.0), keepdims=True)
        dweight = dweight * rstd
        if WEIGHT:
            _store_partial(partial, 0, sample, group, i, dweight, 1, CHANNELS, True)
        if BIAS:
            _store_partial(partial, int(WEIGHT), sample, group, i, dbias, 1, CHANNELS, True)
        if given(weight):
            scale = _load_channels(weight, group, i, 1, CHANNELS)
            dbias, dweight = dbias * scale, dweight * scale
        shift += dbias
        slope += dweight
    if given(dx):
        shift, slope = _sum(shift) / size * rstd, _sum(slope) / size * rstd * rstd
        for i in ct.static_iter(range(TILES)):
            scale = rstd
            if given(weight):
                scale = scale * _load_channels(weight, group, i, 1, CHANNELS)
            dxs = widen_again(tiles[i][1]) * scale - shift - (widen_again(tiles[i][0]) - mean) * slope
            ct.store(dx, places[i], ct.astype(dxs, dx.dtype), check_bounds=False, allow_tma=False)


@ct.function
def _sum_positions(partial, dy, x, weight, mean, rstd, WEIGHT, BIAS, CHANNELS, BLOCK):
    """Write dweight and dbias of a group's channels, from this block's part of the positions, where they are wanted.

    Return the sums of dbias and dweight over the channels, scaled by the weight.
    """
    group, sample = ct.bid(0), ct.bid(1)
    shape = (1, 1, CHANNELS, BLOCK)
    first, last = _positions(x, CHANNELS, BLOCK)
    shift = ct.zeros((1, 1, CHANNELS, 1), ct.float32)
    slope = ct.zeros((1, 1, CHANNELS, 1), ct.float32)
    for channel in range(ct.num_tiles(x, axis=2, shape=shape)):
        sums = ct.zeros(shape, ct.float32)
        products = ct.zeros(shape, ct.float32)
        for position in range(first, last):
            place = sample, group, channel, position
            dys = _load(dy, place, shape)
            sums += dys
            products += dys * (_load(x, place, shape) - mean)
        dbias = ct.sum(sums, axis=3, keepdims=True)
        dweight = ct.sum(products, axis=3, keepdims=True) * rstd
        row = sample * ct.num_blocks(2) + ct.bid(2)
        if WEIGHT:
            _store_partial(partial, 0, row, group, channel, dweight, 1, CHANNELS)
        if BIAS:
            _store_partial(partial, int(WEIGHT), row, group, channel, dbias, 1, CHANNELS)
        if given(weight):
            scale = _load_channels(weight, group, channel, 1, CHANNELS)
            dbias, dweight = dbias * scale, dweight * scale
        shift += dbias
        slope += dweight
    return _sum(shift), _sum(slope)


@ct.kernel(occupancy=LONG_BLOCKS, num_worker_warps=LONG_WARPS)
def _sum_parts(
    sums, partial, dy, x, weight, statistics,
    WEIGHT: ConstBool, BIAS: ConstBool, CHANNELS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    mean = _load_statistic(statistics, 0, ct.bid(1), ct.bid(0), 1)
    rstd = _load_statistic(statistics, 1, ct.bid(1), ct.bid(0), 1)
    shift, slope = _sum_positions(partial, dy, x, weight, mean, rstd, WEIGHT, BIAS, CHANNELS, BLOCK)
    ct.store(sums, (0, ct.bid(1), ct.bid(0), ct.bid(2)), shift)
    ct.store(sums, (1, ct.bid(1), ct.bid(0), ct.bid(2)), slope)


@ct.kernel(occupancy=LONG_BLOCKS, num_worker_warps=LONG_WARPS)
def _backward_long(
    dx, sums, partial, dy, x, weight, statistics, size,
    WEIGHT: ConstBool, BIAS: ConstBool, PARTS: ConstInt, CHANNELS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    group, sample = ct.bid(0), ct.bid(1)
    shape = (1, 1, CHANNELS, BLOCK)
    mean = _load_statistic(statistics, 0, sample, group, 1)
    rstd = _load_statistic(statistics, 1, sample, group, 1)
    if given(sums):
        shift, slope = _sum(_load_parts(sums, 0, PARTS)), _sum(_load_parts(sums, 1, PARTS))
    else:
        shift, slope = _sum_positions(partial, dy, x, weight, mean, rstd, WEIGHT, BIAS, CHANNELS, BLOCK)
    if given(dx):
        shift, slope = shift / size, slope / size * rstd
        tiles = ct.num_tiles(x, axis=2, shape=shape)
        first, last = _positions(x, CHANNELS, BLOCK)
        for channel in range(tiles):
            for position in range(first, last):
                place = sample, group, tiles - 1 - channel, first + last - 1 - position
                g = _load(dy, place, shape)
                if given(weight):
                    g = g * _load_channels(weight, group, tiles - 1 - channel, 1, CHANNELS)
                dxs = (g - shift - (_load(x, place, shape) - mean) * slope) * rstd
                ct.store(dx, place, ct.astype(dxs, dx.dtype))


@opaque(writes=("y", "statistics"))
def _launch_forward(
    y: Tensor,
    statistics: Tensor | None,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    shape = samples, groups, channels, _ = _groups(x, num_groups)
    y, x = y.view(*shape), _as_groups(x, shape)
    if weight is not None:
        weight = weight.reshape(groups, channels)
    if bias is not None:
        bias = bias.reshape(groups, channels)
    if samples <= MOST_DOWN:
        _launch_forward_samples(y, statistics, x, weight, bias, eps)
        return
    for part in _evenly(samples):
        part_statistics = None if statistics is None else statistics[:, part]
        _launch_forward_samples(y[part], part_statistics, x[part], weight, bias, eps)


def _launch_forward_samples(
    y: Tensor, statistics: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    samples, groups, channels, length = x.shape
    size = float(channels * length)
    tile = _short_tile(groups, channels, length)
    if tile is not None:
        grid = (blocks(groups, tile[0]), samples)
        kernel = sized(_forward, tile[0] * tile[1] * tile[2])
        launch(kernel, grid, y, statistics, x, weight, bias, size, float(eps), *tile)
        return
    held = _held_tile(FORWARD_HELD, x)
    if held is not None:
        across = length // held[1]
        launch(
            _forward_held, (groups, samples), y, statistics, x, weight, bias, size, float(eps),
            channels // held[0] * across, across, *held,
        )  # fmt: skip
        return
    tile, parts = _long_tile(x)
    grid = (groups, samples, parts)
    whole = channels % tile[0] == 0 and length % tile[1] == 0
    moments = None
    if parts > 1:
        moments = torch.empty((3, samples, groups, parts), dtype=torch.float32, device=x.device)
        launch(_measure, grid, moments, x, whole, *tile)
    launch(
        _forward_long, grid, y, statistics, moments, x, weight, bias, size, float(eps),
        whole, power_of_2(parts, 1), *tile,
    )  # fmt: skip


@opaque(writes=("dx", "dweight", "dbias"))
def _launch_backward(
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    statistics: Tensor,
) -> None:
    shape = samples, groups, channels, length = _groups(x, num_groups)
    dy, x = _as_groups(dy, shape), _as_groups(x, shape)
    if dx is not None:
        dx = dx.view(*shape)
    if weight is not None:
        weight = weight.reshape(groups, channels)
    needed = dweight is not None, dbias is not None
    parts, partial = 1 if _short_tile(groups, channels, length) else _long_tile(x)[1], None
    if True in needed:
        partial = torch.empty((sum(needed), samples * parts, groups, channels), dtype=torch.float32, device=x.device)
    if samples <= MOST_DOWN:
        _launch_backward_samples(dx, partial, dy, x, weight, statistics, *needed)
    else:  # so many that no group is divided into parts
        for part in _evenly(samples):
            part_dx, part_sums = None if dx is None else dx[part], None if partial is None else partial[:, part]
            _launch_backward_samples(part_dx, part_sums, dy[part], x[part], weight, statistics[:, part], *needed)
    if partial is not None:
        launch_totals(dweight, dbias, partial.flatten(2))


def _launch_backward_samples(
    dx: Tensor | None,
    partial: Tensor | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    needs_weight: bool,
    needs_bias: bool,
) -> None:
    samples, groups, channels, length = x.shape
    size = float(channels * length)
    short = _short_tile(groups, channels, length)
    held = _held_tile(BACKWARD_HELD, x, dy) if short is None else None
    if short is not None:
        kernel, _ = persistent(_backward, short[0] * short[1] * short[2])
        launch(
            kernel, (blocks(groups, short[0]), samples), dx, partial, dy, x, weight, statistics, size,
            needs_weight, needs_bias, channels * length == 1, *short,
        )  # fmt: skip
    elif held is not None and held[1] == length:
        launch(
            _backward_held, (groups, samples), dx, partial, dy, x, weight, statistics, size,
            needs_weight, needs_bias, channels // held[0], *held,
        )  # fmt: skip
    else:
        tile, parts = _long_tile(x)
        grid, sums = (groups, samples, parts), None
        if parts > 1:
            sums = torch.empty((2, samples, groups, parts), dtype=torch.float32, device=x.device)
            launch(_sum_parts, grid, sums, partial, dy, x, weight, statistics, needs_weight, needs_bias, *tile)
        if sums is None or dx is not None:
            launch(
                _backward_long, grid, dx, sums, partial, dy, x, weight, statistics, size,
                needs_weight, needs_bias, power_of_2(parts, 1), *tile,
            )  # fmt: skip


def _groups(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Samples, groups, channels and positions."""
    samples, channels, *_ = x.shape
    return samples, groups, channels // groups, x.numel() // (samples * channels)


def _evenly(samples: int) -> list[slice]:
    """As many samples at a time as a grid takes, or fewer."""
    count = blocks(samples, blocks(samples, MOST_DOWN))
    return [slice(begin, begin + count) for begin in range(0, samples, count)]


def _as_groups(x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """A tensor in a shape of `_groups`, whose positions lie next to each other."""
    if x.is_contiguous():
        return near(x.view(*shape))
    x = x.reshape(*shape)
    return near(x if x.stride(3) == 1 or shape[3] == 1 else x.contiguous())


@functools.lru_cache
def _short_tile(groups: int, channels: int, length: int) -> tuple[int, int, int] | None:
    """Groups, channels and positions of a tile that holds whole groups, or None where they are too long for it."""
    tile_channels, block = power_of_2(channels, 1), power_of_2(length, 1)
    size = tile_channels * block
    if size > LONGEST:
        return None
    # Several groups whose elements are loaded one by one take more registers.
    elements = SHORT_TILE if length % 8 == 0 else SHORT_TILE // 4
    return min(power_of_2(groups, 1), max(1, elements // size)), tile_channels, block


def _held_tile(most: int, *tensors: Tensor) -> tuple[int, int] | None:
    """Channels and positions of the tiles of up to `most` elements that divide a long group; None if a block can't hold it.

    In float32 it would take twice the registers, and so it would in float16, which `widen_again` doesn't save. Elements
    that are loaded one by one, as those of some slices, pass through shared memory and take more registers too.
    """
    samples, groups, channels, length = tensors[0].shape
    block = min(length & -length, most)
    tile_channels = min(channels & -channels, most // block)
    held = (
        samples * groups >= sm_count(tensors[0].device)
        and channels * length <= LONGEST_HELD
        and tile_channels * block >= FORWARD_HELD
        and block >= LEAST_POSITIONS
        and all(x.dtype is torch.bfloat16 and x.is_contiguous() for x in tensors)
    )
    return (tile_channels, block) if held else None


def _long_tile(x: Tensor) -> tuple[tuple[int, int], int]:
    """Channels and positions of a tile of a long group, and how many blocks share the group.

    One block takes all, unless there are fewer groups than multiprocessors, which would be idle. Then a launch before
    sums up the parts.
    """
    samples, groups, channels, length = x.shape
    block = min(power_of_2(length, 1), MOST_POSITIONS)
    tile_channels = min(power_of_2(channels, 1), LONG_TILE // block)
    if samples * groups >= sm_count(x.device):
        return (tile_channels, block), 1
    parts = LONG_BLOCKS * sm_count(x.device) // (samples * groups)
    return (tile_channels, block), max(1, min(parts, blocks(length, block)))


@implements(group_norm)
def forward(
    needs: Needs, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if True not in needs:
        _launch_forward(y, None, x, num_groups, weight, bias, eps)
        return y, ()
    # The mean and 1 / √(variance + eps) of each group.
    statistics = torch.empty((2, x.shape[0], num_groups), dtype=torch.float32, device=x.device)
    _launch_forward(y, statistics, x, num_groups, weight, bias, eps)
    return y, (x, weight, bias, statistics)


def backward(needs: Needs, saved: Saved, dy: Tensor, *, num_groups: int, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, statistics = saved
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_bias else None
    _launch_backward(dx, dweight, dbias, dy, x, num_groups, weight, statistics)
    return dx, dweight, dbias


def refuses(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> str | None:
    size = x.numel() // x.shape[0]
    return f"x has samples of {size} elements; this kernel takes up to {LARGEST}" if size > LARGEST else None
