"""Group norm: if groups fit the Unified Buffer, tiles have whole ones. A longer group is measured, then normalised.

The channels of a group follow each other, so a group is one contiguous range of memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import group_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._device import compute_default_tiling_strategy, get_npu_core_count
from liger_triton_ascend.ops._math import ones_below
from liger_triton_ascend.ops._rows import MARGIN, as_rows
from liger_triton_ascend.ops.layer_norm import measure

# Float32 tiles by the estimate of the Unified Buffer: 7 to measure a long group, at most 6 for the rest.
FORWARD_TILES = 7
BACKWARD_TILES = 7


@triton.jit
def _forward(
    y, statistics, x, weight, bias, samples, groups, channels, length, x_stride, eps,
    PADDED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    size = channels * length
    channel = tl.arange(0, CHANNELS)
    position = tl.arange(0, BLOCK)
    if PADDED:
        ones = ones_below(channel, channels)[None, :, None] * ones_below(position, length)[None, None, :]
    tiles = tl.cdiv(groups, ROWS)
    for tile in range(tl.program_id(0), samples * tiles, tl.num_programs(0)):
        sample = tl.cast(tile // tiles, tl.int64)
        group = tl.cast(tile % tiles, tl.int64) * ROWS + tl.arange(0, ROWS)
        in_group = (channel < channels)[None, :, None] & (position < length)[None, None, :]
        inside = (group < groups)[:, None, None] & in_group
        at = group[:, None, None] * size + channel[None, :, None] * length + position[None, None, :]
        xs = tl.load(x + sample * x_stride + at, inside, other=0.0).to(tl.float32)
        mean = tl.sum(tl.sum(xs, 2), 1) / size
        centred = xs - mean[:, None, None]
        if PADDED:
            centred *= ones
        rstd = tl.rsqrt(tl.sum(tl.sum(centred * centred, 2), 1) / size + eps)
        if statistics is not None:
            tl.store(statistics + sample * groups + group, mean, group < groups)
            tl.store(statistics + (samples + sample) * groups + group, rstd, group < groups)
        own = (group < groups)[:, None] & (channel < channels)[None, :]
        place = group[:, None] * channels + channel[None, :]
        scale = tl.zeros((ROWS, CHANNELS), tl.float32) + rstd[:, None]
        if weight is not None:
            scale *= tl.load(weight + place, own, other=0.0).to(tl.float32)
        ys = centred * scale[:, :, None]
        if bias is not None:
            ys += tl.load(bias + place, own, other=0.0).to(tl.float32)[:, :, None]
        tl.store(y + sample * groups * size + at, ys, inside)


@triton.jit
def _measure(moments, x, rows, groups, size, x_stride, parts, part_size, BLOCK: tl.constexpr):
    """Write the mean of each part of each group, and the sum of the squared distances from it."""
    for item in range(tl.program_id(0), rows * parts, tl.num_programs(0)):
        row = tl.cast(item // parts, tl.int64)
        start = tl.cast(item % parts, tl.int64) * part_size
        at = row // groups * x_stride + row % groups * size + start
        mean, squares = measure(x + at, tl.minimum(size - start, part_size), BLOCK)
        tl.store(moments + item, mean)
        tl.store(moments + rows * parts + item, squares)


@triton.jit
def _merge(moments, row, rows, size, eps, parts, part_size, PARTS: tl.constexpr):
    """The mean of a group and 1 / √(variance + eps), from the moments of its parts. Its source is that of `measure`."""
    part = tl.arange(0, PARTS)
    means = tl.load(moments + row * parts + part, part < parts, other=0.0)
    squares = tl.load(moments + (rows + row) * parts + part, part < parts, other=0.0)
    count = tl.minimum(tl.maximum(size - part * tl.cast(part_size, tl.int64), 0), part_size).to(tl.float32)
    mean = tl.sum(means * count, 0) / size
    distance = means - mean
    return mean, tl.rsqrt(tl.sum(squares + distance * distance * count, 0) / size + eps)


@triton.jit
def _normalise(
    y, statistics, moments, x, weight, bias, rows, groups, channels, length, x_stride, eps, parts, part_size,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    size = tl.cast(channels, tl.int64) * length
    blocks = tl.cdiv(length, BLOCK)
    tiles = tl.cdiv(channels, CHANNELS) * blocks
    for item in range(tl.program_id(0), rows * parts, tl.num_programs(0)):
        row = tl.cast(item // parts, tl.int64)
        part = item % parts
        mean, rstd = _merge(moments, row, rows, size, eps, parts, part_size, PARTS)
        if statistics is not None:
            tl.store(statistics + row, mean, part == 0)
            tl.store(statistics + rows + row, rstd, part == 0)
        x_row = x + row // groups * x_stride + row % groups * size
        for tile in range(part * tiles // parts, (part + 1) * tiles // parts):
            channel = tl.cast(tile // blocks, tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
            position = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            own = channel < channels
            inside = own[:, None] & (position < length)[None, :]
            at = channel[:, None] * length + position[None, :]
            ys = tl.load(x_row + at, inside, other=0.0).to(tl.float32) - mean
            if weight is None:
                ys *= rstd
            else:
                scale = tl.load(weight + row % groups * channels + channel, own, other=0.0).to(tl.float32)
                ys *= (scale * rstd)[:, None]
            if bias is not None:
                ys += tl.load(bias + row % groups * channels + channel, own, other=0.0).to(tl.float32)[:, None]
            tl.store(y + row * size + at, ys, inside)


@triton.jit
def _backward(
    dx, partial_weight, partial_bias, dy, x, weight, statistics, samples, groups, channels, length, dy_stride, x_stride,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    size = channels * length
    channel = tl.arange(0, CHANNELS)
    position = tl.arange(0, BLOCK)
    tiles = tl.cdiv(groups, ROWS)
    for tile in range(tl.program_id(0), samples * tiles, tl.num_programs(0)):
        sample = tl.cast(tile // tiles, tl.int64)
        group = tl.cast(tile % tiles, tl.int64) * ROWS + tl.arange(0, ROWS)
        in_group = (channel < channels)[None, :, None] & (position < length)[None, None, :]
        inside = (group < groups)[:, None, None] & in_group
        at = group[:, None, None] * size + channel[None, :, None] * length + position[None, None, :]
        mean = tl.load(statistics + sample * groups + group, group < groups, other=0.0)
        rstd = tl.load(statistics + (samples + sample) * groups + group, group < groups, other=0.0)
        xs = tl.load(x + sample * x_stride + at, inside, other=0.0).to(tl.float32)
        normed = (xs - mean[:, None, None]) * rstd[:, None, None]
        dys = tl.load(dy + sample * dy_stride + at, inside, other=0.0).to(tl.float32)
        dbias = tl.sum(dys, 2)
        dweight = tl.sum(dys * normed, 2)
        own = (group < groups)[:, None] & (channel < channels)[None, :]
        place = group[:, None] * channels + channel[None, :]
        if partial_weight is not None:
            tl.store(partial_weight + sample * groups * channels + place, dweight, own)
        if partial_bias is not None:
            tl.store(partial_bias + sample * groups * channels + place, dbias, own)
        if dx is not None:
            if weight is not None:
                scale = tl.load(weight + place, own, other=0.0).to(tl.float32)
                dbias *= scale
                dweight *= scale
                dys *= scale[:, :, None]
            shift = tl.sum(dbias, 1) / size
            slope = tl.sum(dweight, 1) / size
            dxs = (dys - shift[:, None, None] - normed * slope[:, None, None]) * rstd[:, None, None]
            tl.store(dx + sample * groups * size + at, dxs, inside)


@triton.jit
def _sum(
    sums, partial_weight, partial_bias, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride,
    parts, part_size, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dweight and dbias of each channel in each sample, and two sums over the channels of a group, scaled by the weight.

    The sums are of dy and of dy times normalised x. All are over one part of the positions.
    """
    size = tl.cast(channels, tl.int64) * length
    for item in range(tl.program_id(0), rows * parts, tl.num_programs(0)):
        row = tl.cast(item // parts, tl.int64)
        first = item % parts * part_size
        last = tl.minimum(first + part_size, length)
        x_row = x + row // groups * x_stride + row % groups * size
        dy_row = dy + row // groups * dy_stride + row % groups * size
        mean, rstd = tl.load(statistics + row), tl.load(statistics + rows + row)
        shift = tl.zeros((CHANNELS,), tl.float32)
        slope = tl.zeros((CHANNELS,), tl.float32)
        for first_channel in range(0, channels, CHANNELS):
            channel = tl.cast(first_channel, tl.int64) + tl.arange(0, CHANNELS)
            own = channel < channels
            totals = tl.zeros((CHANNELS, BLOCK), tl.float32)
            products = tl.zeros((CHANNELS, BLOCK), tl.float32)
            for start in range(first, last, BLOCK):
                position = start + tl.arange(0, BLOCK)
                inside = own[:, None] & (position < last)[None, :]
                at = channel[:, None] * length + position[None, :]
                dys = tl.load(dy_row + at, inside, other=0.0).to(tl.float32)
                totals += dys
                products += dys * (tl.load(x_row + at, inside, other=0.0).to(tl.float32) - mean)
            dbias = tl.sum(totals, 1)
            dweight = tl.sum(products, 1) * rstd
            partial_at = (row // groups * parts + item % parts) * groups * channels + row % groups * channels + channel
            if partial_weight is not None:
                tl.store(partial_weight + partial_at, dweight, own)
            if partial_bias is not None:
                tl.store(partial_bias + partial_at, dbias, own)
            if weight is not None:
                scale = tl.load(weight + row % groups * channels + channel, own, other=0.0).to(tl.float32)
                dbias *= scale
                dweight *= scale
            shift += dbias
            slope += dweight
        tl.store(sums + item, tl.sum(shift, 0))
        tl.store(sums + rows * parts + item, tl.sum(slope, 0))


@triton.jit
def _dx(
    dx, sums, dy, x, weight, statistics, rows, groups, channels, length, dy_stride, x_stride, parts,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    size = tl.cast(channels, tl.int64) * length
    blocks = tl.cdiv(length, BLOCK)
    tiles = tl.cdiv(channels, CHANNELS) * blocks
    each = tl.arange(0, PARTS)
    for item in range(tl.program_id(0), rows * parts, tl.num_programs(0)):
        row = tl.cast(item // parts, tl.int64)
        part = item % parts
        mean, rstd = tl.load(statistics + row), tl.load(statistics + rows + row)
        shift = tl.sum(tl.load(sums + row * parts + each, each < parts, other=0.0), 0) / size
        slope = tl.sum(tl.load(sums + (rows + row) * parts + each, each < parts, other=0.0), 0) / size * rstd
        x_row = x + row // groups * x_stride + row % groups * size
        dy_row = dy + row // groups * dy_stride + row % groups * size
        for tile in range(part * tiles // parts, (part + 1) * tiles // parts):
            channel = tl.cast(tile // blocks, tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
            position = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            own = channel < channels
            inside = own[:, None] & (position < length)[None, :]
            at = channel[:, None] * length + position[None, :]
            dys = tl.load(dy_row + at, inside, other=0.0).to(tl.float32)
            if weight is not None:
                dys *= tl.load(weight + row % groups * channels + channel, own, other=0.0).to(tl.float32)[:, None]
            centred = tl.load(x_row + at, inside, other=0.0).to(tl.float32) - mean
            tl.store(dx + row * size + at, (dys - shift - centred * slope) * rstd, inside)


@implements(group_norm)
def forward(
    needs: Needs, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    samples = x.shape[0]
    rows, channels, length = _sizes(x, num_groups)
    statistics, saved = None, ()
    if True in needs:  # the mean and 1 / √(variance + eps) of each group
        statistics = torch.empty((2, rows), dtype=torch.float32, device=x.device)
        saved = (x, weight, bias, statistics)
    x, x_stride = _as_samples(x)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    cores = get_npu_core_count(x.device)
    tile_rows, tile_channels, block = _tile(rows // cores, num_groups, channels, length, FORWARD_TILES)
    if tile_channels >= channels and block >= length:
        _forward[(min(samples * _ceil_div(num_groups, tile_rows), cores),)](
            y, statistics, x, weight, bias, samples, num_groups, channels, length, x_stride, eps,
            PADDED=tile_channels > channels or block > length, ROWS=tile_rows, CHANNELS=tile_channels, BLOCK=block,
        )  # fmt: skip
        return y, saved
    lanes = tile_channels * block
    parts, part_size = _divide(cores // rows, channels * length, lanes)
    moments = torch.empty((2, rows * parts), dtype=torch.float32, device=x.device)
    programs = min(rows * parts, cores)
    _measure[(programs,)](
        moments, x, rows, num_groups, channels * length, x_stride, parts, part_size, BLOCK=lanes
    )  # fmt: skip
    _normalise[(programs,)](
        y, statistics, moments, x, weight, bias, rows, num_groups, channels, length, x_stride, eps, parts, part_size,
        PARTS=triton.next_power_of_2(cores), CHANNELS=tile_channels, BLOCK=block,
    )  # fmt: skip
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor, *, num_groups: int, eps: float) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias = needs
    x, weight, bias, statistics = saved
    samples, all_channels = x.shape[:2]
    rows, channels, length = _sizes(x, num_groups)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    x, x_stride = _as_samples(x)
    dy, dy_stride = _as_samples(dy)
    scale = None if weight is None else weight.contiguous()
    cores = get_npu_core_count(x.device)
    tile_rows, tile_channels, block = _tile(rows // cores, num_groups, channels, length, BACKWARD_TILES)
    fits = tile_channels >= channels and block >= length
    parts, part_size = (1, length) if fits else _divide(cores // rows, length, block)
    partial = (samples * parts, all_channels)
    dweight = torch.empty(partial, dtype=torch.float32, device=x.device) if needs_weight else None
    dbias = torch.empty(partial, dtype=torch.float32, device=x.device) if needs_bias else None
    if fits:
        _backward[(min(samples * _ceil_div(num_groups, tile_rows), cores),)](
            dx, dweight, dbias, dy, x, scale, statistics, samples, num_groups, channels, length, dy_stride, x_stride,
            ROWS=tile_rows, CHANNELS=tile_channels, BLOCK=block,
        )  # fmt: skip
    else:
        sums = torch.empty((2, rows * parts), dtype=torch.float32, device=x.device)
        programs = min(rows * parts, cores)
        _sum[(programs,)](
            sums, dweight, dbias, dy, x, scale, statistics, rows, num_groups, channels, length, dy_stride, x_stride,
            parts, part_size, CHANNELS=tile_channels, BLOCK=block,
        )  # fmt: skip
        if needs_x:
            _dx[(programs,)](
                dx, sums, dy, x, scale, statistics, rows, num_groups, channels, length, dy_stride, x_stride, parts,
                PARTS=triton.next_power_of_2(cores), CHANNELS=tile_channels, BLOCK=block,
            )  # fmt: skip
    return (
        dx,
        dweight.sum(0).to(weight.dtype) if needs_weight else None,
        dbias.sum(0).to(bias.dtype) if needs_bias else None,
    )


def _sizes(x: Tensor, num_groups: int) -> tuple[int, int, int]:
    """Groups of all samples together, channels of a group, and positions of a channel."""
    samples, channels = x.shape[:2]
    return samples * num_groups, channels // num_groups, x.numel() // (samples * channels)


def _tile(most: int, groups: int, channels: int, length: int, alive: float) -> tuple[int, int, int]:
    """Groups of a sample, channels and positions of a tile, of which `alive` fit in float32: the last grows first."""
    shape = (max(1, min(most, groups)), channels, length)
    return compute_default_tiling_strategy(MARGIN, 4, alive, [shape], [(0, 1, 2)])[0]


def _divide(most: int, size: int, least: int) -> tuple[int, int]:
    """How many cores share a group, at most `most`, and how much of its `size` each takes, a multiple of `least`."""
    part_size = _ceil_div(_ceil_div(size, max(1, most)), least) * least
    return _ceil_div(size, part_size), part_size


def _as_samples(x: Tensor) -> tuple[Tensor, int]:
    """A tensor whose samples are contiguous and lie at one distance from each other; and that distance, in elements."""
    return (x, x.numel() // x.shape[0]) if x.is_contiguous() else as_rows(x.flatten(1))


def _ceil_div(size: int, part: int) -> int:
    return (size + part - 1) // part
