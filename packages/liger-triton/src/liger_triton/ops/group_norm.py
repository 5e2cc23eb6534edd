"""Group norm: if a group fits, it stays in registers. Otherwise it is read again, backwards, so that the caches have most of it.

The channels of a group follow each other, so a group is one contiguous range of memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import group_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._device import sm_count, warp_size
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, power_of_2
from liger_triton.ops._sums import add_two, multiply, totals

LONGEST = 8192
"""Elements of a group, its sizes rounded up to powers of two, that a program keeps in registers."""

MOST_AT_ONCE = 1 << 22
"""Up to this many elements one launch makes all gradients: some programs add up a channel each, the others take groups. A
channel may have at most 1/128 of this limit. Inputs that are read twice are in the cache. On an H200 (triton 3.6), in bfloat16,
in ms, in one launch and in two: 32 x 128 x 1024 in 32 groups 0.0151 and 0.0157, 16 x 256 x 256 in 16 0.0079 and 0.0112; but 64 x
64 x 1024 in 16 0.0188 and 0.0157. The second launch costs the host another 15 to 20 µs."""

LEAST_AT_ONCE = 32
"""Positions of a channel below which a program that adds it up would use too little of each cache line."""

STAGES = 1
"""Blocks of a long group in flight, including the one that is being worked on."""

MANY = 65536
"""Elements of a group from which on a thread of the forward reads 64 at once, not 32: on an H200, 4096 groups of 131072 take
0.635 ms, and 0.691 with 32. Smaller groups have too few elements for 64. Holding a part of the group in registers, to read less
again, doesn't help: 0.638 ms at best with half of it held, and 1.27 in the backward with a quarter of x and dy held."""

THREADS = 1024
"""Threads of a program of the backward of long groups. Each has two 16-byte loads of x and of dy in flight. On an H200, 4096
groups of 131072 take 1.086 ms, and 1.303 with 512 threads."""


@triton.jit
def _mean(sums, size):
    """The mean, rounded to nearest: equal elements then have exactly that mean, and subtracting it leaves 0."""
    return tl.math.div_rn(sums, tl.cast(size, tl.float32))


@triton.jit
def _place(tile, rows, groups, channels, length, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """For each of a program's groups, ``[ROWS]``: its row among all, its sample, and its place in the sample.

    For each element of them: whether it is inside the group, and its offset there.
    """
    row = tile * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)[None, :, None]
    position = tl.arange(0, BLOCK)[None, None, :]
    in_group = (channel < channels) & (position < length)
    return row, (row // groups).to(tl.int64), (row % groups).to(tl.int64), in_group, channel * length + position


@triton.jit
def _sum_groups(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The sum of each group, ``[ROWS]``, of values ``[ROWS, CHANNELS, BLOCK]``.

    Several groups are not reshaped to rows: if a group's lanes in a warp don't follow each other, triton 3.5 and 3.6 then add up
    lanes of other groups. On an H200, 264 x 540 x 48 in 36 groups was all wrong.
    """
    if ROWS == 1:
        return tl.sum(tl.reshape(values, (1, SIZE)), 1)
    return tl.sum(tl.sum(values, 1), 1)


@triton.jit
def _load_channels(values, group, channels, CHANNELS: tl.constexpr):
    """The values of the channels of each group, ``[ROWS, CHANNELS, 1]``."""
    channel = tl.arange(0, CHANNELS)[None, :]
    channel_values = tl.load(values + group[:, None] * channels + channel, channel < channels, other=0.0)
    return channel_values.to(tl.float32)[:, :, None]


@kernel
def _forward(
    y, statistics, x, weight, bias, rows, groups, channels, length, x_stride, eps,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, sample, group, in_group, at = _place(tl.program_id(0), rows, groups, channels, length, ROWS, CHANNELS, BLOCK)
    inside = in_group & (row < rows)[:, None, None]
    size = channels * length
    xs = tl.load(x + (sample * x_stride + group * size)[:, None, None] + at, inside, other=0.0).to(tl.float32)
    mean = _mean(_sum_groups(xs, ROWS, CHANNELS * BLOCK), size)
    centred = tl.where(in_group, xs - mean[:, None, None], 0.0)
    variance = _sum_groups(multiply(centred, centred, CHANNELS * BLOCK), ROWS, CHANNELS * BLOCK) / size
    rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))  # torch.compile passes floats as float64
    if statistics is not None:
        tl.store(statistics + row, mean, row < rows)
        tl.store(statistics + rows + row, rstd, row < rows)
    ys = centred * rstd[:, None, None]
    if weight is not None:
        ys *= _load_channels(weight, group, channels, CHANNELS)
    if bias is not None:
        ys += _load_channels(bias, group, channels, CHANNELS)
    tl.store(y + (row.to(tl.int64) * size)[:, None, None] + at, ys, inside)


@triton.jit
def _merge(mean, squares, x, before, left, UNROLL: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr):
    """Merge UNROLL elements per lane, or one per lane of up to `left` in all, into each lane's mean and sum of squares.

    `before` is how many elements each lane had. Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances, 1979.
    """
    lane = tl.arange(0, LANES)
    at = tl.arange(0, UNROLL)[:, None] * LANES + lane[None, :]
    if WHOLE:
        xs = tl.load(x + at, eviction_policy="evict_last").to(tl.float32)
        count = UNROLL * 1.0
        block_mean = tl.sum(xs, 0) / UNROLL
        centred = xs - block_mean[None, :]
    else:
        xs = tl.load(x + at, at < left, other=0.0, eviction_policy="evict_last").to(tl.float32)
        count = (lane < left).to(tl.float32)
        block_mean = tl.sum(xs, 0)
        centred = tl.zeros((1, LANES), tl.float32)
    distance = block_mean - mean
    share = count / tl.maximum(before + count, 1.0)
    return mean + distance * share, squares + tl.sum(centred * centred, 0) + distance * distance * (share * before)


@triton.jit
def _moments(x, size, UNROLL: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr):
    """The mean of `size` adjacent elements, and the sum of their squared distances from it."""
    mean = tl.zeros((LANES,), tl.float32)
    squares = tl.zeros((LANES,), tl.float32)
    rest = size % (UNROLL * LANES)
    for start in tl.range(0, size - rest, UNROLL * LANES, num_stages=STAGES):
        mean, squares = _merge(mean, squares, x + start, (start // LANES).to(tl.float32), 0, UNROLL, LANES, True)
    for start in range(size - rest, size, LANES):
        before = (start // LANES).to(tl.float32)
        mean, squares = _merge(mean, squares, x + start, before, size - start, 1, LANES, False)
    count = ((size + (LANES - 1) - tl.arange(0, LANES)) // LANES).to(tl.float32)
    total_mean = _mean(tl.sum(mean * count), size)
    distance = mean - total_mean
    return total_mean, tl.sum(squares + distance * distance * count)


@triton.jit
def _tile(tile, channels, length, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Channels of a tile of a group, ``[CHANNELS]``, the offsets of its elements, and which of them are inside the group."""
    blocks = tl.cdiv(length, BLOCK)
    channel = tile // blocks * CHANNELS + tl.arange(0, CHANNELS)
    position = (tile % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    at = channel.to(tl.int64)[:, None] * length + position
    return channel, at, (channel < channels)[:, None] & (position < length)


@kernel
def _measure(
    moments,
    x,
    groups,
    channels,
    length,
    x_stride,
    parts,
    part_size,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    size = tl.cast(channels, tl.int64) * length
    start = part * tl.cast(part_size, tl.int64)
    x += (row // groups).to(tl.int64) * x_stride + row % groups * size + start
    mean, squares = _moments(x, tl.minimum(size - start, part_size), UNROLL, LANES, STAGES)
    tl.store(moments + tl.program_id(0), mean)
    tl.store(moments + tl.num_programs(0) + tl.program_id(0), squares)


@kernel
def _forward_long(
    y, statistics, moments, x, weight, bias, rows, groups, channels, length, x_stride, eps, parts, part_size,
    PARTS: tl.constexpr, UNROLL: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    size = tl.cast(channels, tl.int64) * length
    x += (row // groups).to(tl.int64) * x_stride + row % groups * size
    y += row * size
    if moments is None:
        mean, squares = _moments(x, size, UNROLL, LANES, STAGES)
    else:
        each = tl.arange(0, PARTS)
        moments += row * parts + each
        means = tl.load(moments, each < parts, other=0.0)
        count = tl.minimum(tl.maximum(size - each * tl.cast(part_size, tl.int64), 0), part_size).to(tl.float32)
        mean = _mean(tl.sum(means * count), size)
        squares = tl.load(moments + rows * parts, each < parts, other=0.0) + count * (means - mean) * (means - mean)
        squares = tl.sum(squares)
    # torch.compile passes floats as float64.
    rstd = tl.rsqrt(squares / size + tl.cast(eps, tl.float32))
    if statistics is not None:
        tl.store(statistics + row, mean, part == 0)
        tl.store(statistics + rows + row, rstd, part == 0)
    if weight is not None:
        weight += row % groups * channels
    if bias is not None:
        bias += row % groups * channels
    tiles = tl.cdiv(channels, CHANNELS) * tl.cdiv(length, BLOCK)
    first, last = part * tiles // parts, (part + 1) * tiles // parts
    for back in tl.range(first, last, num_stages=STAGES):
        channel, at, inside = _tile(first + last - 1 - back, channels, length, CHANNELS, BLOCK)
        ys = tl.load(x + at, inside, other=0.0, eviction_policy="evict_first").to(tl.float32) - mean
        scale = rstd
        if weight is not None:
            scale *= tl.load(weight + channel, channel < channels, other=0.0).to(tl.float32)[:, None]
        ys *= scale
        if bias is not None:
            ys += tl.load(bias + channel, channel < channels, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, ys, inside, eviction_policy="evict_first")


@triton.jit
def _rows_gradient(
    dx, partial, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride, tile,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, sample, group, in_group, at = _place(tile, rows, groups, channels, length, ROWS, CHANNELS, BLOCK)
    inside = in_group & (row < rows)[:, None, None]
    mean = tl.load(statistics + row, row < rows, other=0.0)[:, None, None]
    rstd = tl.load(statistics + rows + row, row < rows, other=0.0)[:, None, None]
    size = channels * length
    xs = tl.load(x + (sample * x_stride + group * size)[:, None, None] + at, inside, other=0.0).to(tl.float32)
    dys = tl.load(dy + (sample * dy_stride + group * size)[:, None, None] + at, inside, other=0.0).to(tl.float32)
    normed = (xs - mean) * rstd
    dbias, dweight = tl.reduce((dys, multiply(dys, normed, BLOCK)), 2, add_two)
    channel = tl.arange(0, CHANNELS)[None, :]
    own = (row < rows)[:, None] & (channel < channels)
    partial_at = (sample * ((WEIGHT + BIAS) * groups) + group)[:, None] * channels + channel
    if WEIGHT:
        tl.store(partial + partial_at, dweight, own)
    if BIAS:
        tl.store(partial + partial_at + WEIGHT * groups * channels, dbias, own)
    if dx is not None:
        if weight is not None:
            scale = _load_channels(weight, group, channels, CHANNELS)
            dys *= scale
            scale = tl.reshape(scale, (ROWS, CHANNELS))
            dbias = multiply(dbias, scale, CHANNELS)
            dweight = multiply(dweight, scale, CHANNELS)
        shift, slope = tl.reduce((dbias, dweight), 1, add_two)
        shift = (shift / size)[:, None, None]
        slope = (slope / size)[:, None, None]
        dxs = (dys - shift - normed * slope) * rstd
        if SINGLE:  # one product is fused with the subtraction and the other isn't, which leaves a rounding error
            dxs *= 0.0
        tl.store(dx + (row.to(tl.int64) * size)[:, None, None] + at, dxs, inside)


@kernel
def _backward(
    dx, partial, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    _rows_gradient(
        dx, partial, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride, tl.program_id(0),
        WEIGHT, BIAS, SINGLE, ROWS, CHANNELS, BLOCK,
    )  # fmt: skip


@triton.jit
def _sum_samples(
    dweight, dbias, dy, x, statistics, rows, groups, channels, length, dy_stride, x_stride, channel,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight and dbias of one channel, each unless it is None."""
    x += channel.to(tl.int64) * length
    dy += channel.to(tl.int64) * length
    sums = tl.zeros((SAMPLES, BLOCK), tl.float32)
    products = tl.zeros((SAMPLES, BLOCK), tl.float32)
    samples = rows // groups
    for first in range(0, samples, SAMPLES):
        sample = first + tl.arange(0, SAMPLES)
        row = sample * groups + channel // channels
        mean = tl.load(statistics + row, sample < samples, other=0.0)[:, None]
        rstd = tl.load(statistics + rows + row, sample < samples, other=0.0)[:, None]
        sample = sample[:, None]
        for start in range(0, length, BLOCK):
            position = (start + tl.arange(0, BLOCK))[None, :]
            inside = (sample < samples) & (position < length)
            xs = tl.load(x + sample.to(tl.int64) * x_stride + position, inside, other=0.0).to(tl.float32)
            dys = tl.load(dy + sample.to(tl.int64) * dy_stride + position, inside, other=0.0).to(tl.float32)
            sums += dys
            products += dys * ((xs - mean) * rstd)
    total, product = tl.reduce(
        (tl.reshape(sums, (SAMPLES * BLOCK,)), tl.reshape(products, (SAMPLES * BLOCK,))), 0, add_two
    )
    if dweight is not None:
        tl.store(dweight + channel, product)
    if dbias is not None:
        tl.store(dbias + channel, total)


@kernel
def _backward_at_once(
    dx, dweight, dbias, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride,
    SINGLE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, SAMPLES: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    all_channels = groups * channels
    if tl.program_id(0) < all_channels:
        _sum_samples(
            dweight, dbias, dy, x, statistics, rows, groups, channels, length, dy_stride, x_stride, tl.program_id(0),
            SAMPLES, POSITIONS,
        )  # fmt: skip
    else:
        _rows_gradient(
            dx, None, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride,
            tl.program_id(0) - all_channels, False, False, SINGLE, ROWS, CHANNELS, BLOCK,
        )  # fmt: skip


@triton.jit
def _sum_positions(
    partial, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride, row, partial_row, first, last,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dweight and dbias of the channels of a group, from the positions `first` to `last`, if they are wanted.

    Return the sums of dbias and dweight over the channels, scaled by the weight: of dy, and of dy times normalised x.
    """
    start_of_group = row % groups * (tl.cast(channels, tl.int64) * length)
    x += (row // groups).to(tl.int64) * x_stride + start_of_group
    dy += (row // groups).to(tl.int64) * dy_stride + start_of_group
    mean = tl.load(statistics + row)
    rstd = tl.load(statistics + rows + row)
    shift = tl.zeros((CHANNELS,), tl.float32)
    slope = tl.zeros((CHANNELS,), tl.float32)
    for first_channel in range(0, channels, CHANNELS):
        channel = first_channel + tl.arange(0, CHANNELS)
        sums = tl.zeros((CHANNELS, BLOCK), tl.float32)
        products = tl.zeros((CHANNELS, BLOCK), tl.float32)
        for start in tl.range(first, last, BLOCK, num_stages=STAGES):
            position = start + tl.arange(0, BLOCK)
            inside = (channel < channels)[:, None] & (position < last)[None, :]
            at = channel.to(tl.int64)[:, None] * length + position[None, :]
            xs = tl.load(x + at, inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dys = tl.load(dy + at, inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            sums += dys
            products += dys * (xs - mean)
        dbias, dweight = tl.reduce((sums, products * rstd), 1, add_two)
        own = channel < channels
        channel += row % groups * channels
        at = tl.cast(partial_row, tl.int64) * (WEIGHT + BIAS) * (groups * channels) + channel
        if WEIGHT:
            tl.store(partial + at, dweight, own)
        if BIAS:
            tl.store(partial + at + WEIGHT * (groups * channels), dbias, own)
        if weight is not None:
            scale = tl.load(weight + channel, own, other=0.0).to(tl.float32)
            dbias *= scale
            dweight *= scale
        shift += dbias
        slope += dweight
    return tl.sum(shift), tl.sum(slope)


@kernel
def _sum(
    sums, partial, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride, parts, part_size,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // parts
    first = tl.program_id(0) % parts * part_size
    shift, slope = _sum_positions(
        partial, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride,
        row, row // groups * parts + tl.program_id(0) % parts, first, tl.minimum(first + part_size, length),
        WEIGHT, BIAS, CHANNELS, BLOCK, STAGES,
    )  # fmt: skip
    tl.store(sums + tl.program_id(0), shift)
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), slope)


@kernel
def _backward_long(
    dx, sums, partial, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride, parts,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    if sums is None:
        shift, slope = _sum_positions(
            partial, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride,
            row, row // groups, 0, length, WEIGHT, BIAS, CHANNELS, BLOCK, STAGES,
        )  # fmt: skip
    else:
        each = tl.arange(0, PARTS)
        shift = tl.sum(tl.load(sums + row * parts + each, each < parts, other=0.0))
        slope = tl.sum(tl.load(sums + (rows + row) * parts + each, each < parts, other=0.0))
    if dx is not None:
        size = tl.cast(channels, tl.int64) * length
        x += (row // groups).to(tl.int64) * x_stride + row % groups * size
        dy += (row // groups).to(tl.int64) * dy_stride + row % groups * size
        dx += row * size
        mean = tl.load(statistics + row)
        rstd = tl.load(statistics + rows + row)
        shift *= rstd / size
        slope *= rstd * rstd / size
        if weight is not None:
            weight += row % groups * channels
        tiles = tl.cdiv(channels, CHANNELS) * tl.cdiv(length, BLOCK)
        first, last = part * tiles // parts, (part + 1) * tiles // parts
        for back in tl.range(first, last, num_stages=STAGES):
            channel, at, inside = _tile(first + last - 1 - back, channels, length, CHANNELS, BLOCK)
            xs = tl.load(x + at, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dys = tl.load(dy + at, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            scale = rstd
            if weight is not None:
                scale *= tl.load(weight + channel, channel < channels, other=0.0).to(tl.float32)[:, None]
            dxs = dys * scale - (xs - mean) * slope - shift
            tl.store(dx + at, dxs, inside, eviction_policy="evict_first")


@implements(group_norm)
def forward(
    needs: Needs, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, channels, length = _sizes(x, num_groups)
    statistics, saved = None, ()
    if True in needs:  # the mean and 1 / √(variance + eps) of each group
        statistics = torch.empty(2 * rows, dtype=torch.float32, device=x.device)
        saved = (x, weight, bias, statistics)
    x, x_stride = _as_samples(x)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    tile_channels, block = power_of_2(channels, 1), power_of_2(length, 1)
    tile = tile_channels * block
    if tile <= LONGEST:
        tile_rows = max(1, 2048 // tile)
        # Up to 32 elements per thread: on an H200 (triton 3.6), 256 x 256 x 1024 in 32 groups takes 0.0704 ms in bfloat16, with
        # 16 per thread 0.0796.
        _forward[((rows + tile_rows - 1) // tile_rows,)](
            y, statistics, x, weight, bias, rows, num_groups, channels, length, x_stride, eps,
            ROWS=tile_rows, CHANNELS=tile_channels, BLOCK=block, num_warps=max(4, tile // 1024),
        )  # fmt: skip
        return y, saved
    size = channels * length
    warps, unroll = 16, 8 if size >= MANY else 4
    lanes = warps * 256
    block = min(block, warps * 1024)
    tile_channels = min(tile_channels, warps * 1024 // block)
    parts, part_size = _divide(x, rows, size, unroll * lanes)
    moments = None
    if parts > 1:
        moments = torch.empty(2 * rows * parts, dtype=torch.float32, device=x.device)
        _measure[(rows * parts,)](
            moments, x, num_groups, channels, length, x_stride, parts, part_size,
            UNROLL=unroll, LANES=lanes, STAGES=STAGES, num_warps=warps,
        )  # fmt: skip
    _forward_long[(rows * parts,)](
        y, statistics, moments, x, weight, bias, rows, num_groups, channels, length, x_stride, eps, parts, part_size,
        PARTS=power_of_2(parts, 1), UNROLL=unroll, LANES=lanes, CHANNELS=tile_channels, BLOCK=block, STAGES=STAGES,
        num_warps=warps,
    )  # fmt: skip
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor, *, num_groups: int, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, statistics = saved
    samples, all_channels = x.shape[:2]
    rows, channels, length = _sizes(x, num_groups)
    parts = 1
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    x, x_stride = _as_samples(x)
    dy, dy_stride = _as_samples(dy)
    scale = None if weight is None else weight.contiguous()
    weight_grads, partial = needs_weight + needs_bias, None
    tile_channels, block = power_of_2(channels, 1), power_of_2(length, 1)
    tile = tile_channels * block
    if tile <= LONGEST:
        tile_rows, warps = max(1, 2048 // tile), max(4, tile // 1024)
        programs = (rows + tile_rows - 1) // tile_rows
        if needs_x and weight_grads and _at_once(x, length):
            dweight = torch.empty_like(scale) if needs_weight else None
            dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_bias else None
            positions, warps = min(block, 1024), min(8, max(4, tile // 512))
            _backward_at_once[(programs + all_channels,)](
                dx, dweight, dbias, dy, x, scale, statistics, rows, num_groups, channels, length, dy_stride, x_stride,
                SINGLE=channels * length == 1, ROWS=tile_rows, CHANNELS=tile_channels, BLOCK=block,
                SAMPLES=warps * 512 // positions, POSITIONS=positions, num_warps=warps,
            )  # fmt: skip
            return dx, dweight, dbias
        if weight_grads:
            partial = torch.empty(samples * weight_grads * all_channels, dtype=torch.float32, device=x.device)
        _backward[(programs,)](
            dx, partial, dy, x, scale, statistics, rows, num_groups, channels, length, dy_stride, x_stride,
            WEIGHT=needs_weight, BIAS=needs_bias, SINGLE=channels * length == 1, ROWS=tile_rows,
            CHANNELS=tile_channels, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    else:
        threads = THREADS if length % 16 == 0 else THREADS // 4  # loading one by one takes more than 64 registers
        warps, tile = threads // warp_size(x.device), threads * 32 // x.element_size()
        block = min(block, tile // min(tile_channels, 16))
        tile_channels = min(tile_channels, tile // block)
        parts, part_size = _divide(x, rows, length, block)
        if weight_grads:
            partial = torch.empty(samples * parts * weight_grads * all_channels, dtype=torch.float32, device=x.device)
        sums = None
        if parts > 1:
            sums = torch.empty((2, rows * parts), dtype=torch.float32, device=x.device)
            _sum[(rows * parts,)](
                sums, partial, dy, x, scale, statistics, rows, num_groups, channels, length, dy_stride, x_stride, parts,
                part_size, WEIGHT=needs_weight, BIAS=needs_bias, CHANNELS=tile_channels, BLOCK=block, STAGES=STAGES,
                num_warps=warps,
            )  # fmt: skip
        if sums is None or needs_x:
            _backward_long[(rows * parts,)](
                dx, sums, partial, dy, x, scale, statistics, rows, num_groups, channels, length, dy_stride, x_stride,
                parts, WEIGHT=needs_weight, BIAS=needs_bias, PARTS=power_of_2(parts, 1), CHANNELS=tile_channels,
                BLOCK=block, STAGES=STAGES, num_warps=warps,
            )  # fmt: skip
    if partial is None:
        return dx, None, None
    dweight, dbias, _ = totals(
        partial, samples * parts, all_channels, weight if needs_weight else None, bias if needs_bias else None
    )
    return dx, dweight, dbias


def _at_once(x: Tensor, length: int) -> bool:
    """Whether the backward adds up channels in the same launch that takes its groups."""
    return x.numel() <= MOST_AT_ONCE and x.shape[0] * length <= MOST_AT_ONCE // 128 and length >= LEAST_AT_ONCE


def _sizes(x: Tensor, num_groups: int) -> tuple[int, int, int]:
    """Groups of all samples together, channels of a group, and positions of a channel."""
    samples, channels = x.shape[:2]
    return samples * num_groups, channels // num_groups, x.numel() // (samples * channels)


def _divide(x: Tensor, rows: int, size: int, least: int) -> tuple[int, int]:
    """How many programs share a group, and how much of its `size` each takes, a multiple of `least`.

    One program takes a whole group, unless there are fewer groups than multiprocessors, some of which would be idle. If programs
    share a group, an earlier launch sums up the parts.
    """
    parts = min(4 * sm_count(x.device) // rows, size // least)
    if rows >= sm_count(x.device) or parts < 2:
        return 1, size
    part_size = (size // parts + least - 1) // least * least
    return (size + part_size - 1) // part_size, part_size


def _as_samples(x: Tensor) -> tuple[Tensor, int]:
    """A tensor whose samples are contiguous and lie at one distance from each other; and that distance, in elements."""
    return (x, x.numel() // x.shape[0]) if x.is_contiguous() else as_rows(x.flatten(1))
