"""Code that `kl_div`, `tvd` and `jsd` share: two tensors of one shape are read tile by tile, and their terms added up.

Each program adds up the terms of its own tiles in float32, then one program adds up those sums. So the total is the same from
run to run, without atomics.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton.ops._device import sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._math import expm1_near
from liger_triton.ops._sums import add_up

TILE = 1024
"""Elements of a tile; half as many if they are loaded one by one."""
WRITTEN_TILE = 4096
"""The same if more is written than read: on an H200, tvd's backward of 4096 rows of 128256 bf16 takes 6 % less time."""
PROGRAMS = 64
"""Programs per multiprocessor if each adds up several tiles. On an H200, jsd of 4096 rows of 128256 bf16 takes 0.541 ms, or
0.789 with the gradient; with 12 programs 0.590 and 0.831."""

FEW = 1 << 26
"""Elements up to which `leaves_first` is true. On an H200 (triton 3.6), after a kernel that wrote to all of the cache, kl_div of
1024 rows of 32000 bf16 takes 0.0416 ms instead of 0.0456, and of 2048 rows 0.0738 instead of 0.0749. Of 4096 rows it would take
0.138 instead of 0.133."""


@triton.jit
def place(tile, rows, columns, blocks, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows and columns of a tile, and which of its elements exist. With WHOLE, tiles divide one row, and all do."""
    if WHOLE:
        row, column = 0, tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = tl.full((ROWS, BLOCK), True, tl.int1)
    else:
        row = (tile // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = (tile % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
    return row, column, inside


@triton.jit
def finite(logprob):
    """-1e30 for -inf: its exponential is 0 as well, and differences and products with it aren't NaN."""
    return tl.maximum(logprob, -1e30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log_mean(e):
    """log((1 + e) / 2) for e from 0 to 1; right to 6e-9, and to the rounding of float32."""
    t = 1.0 - e
    r = tl.fma(t, 0.003556931158527732, -0.009804983623325825)
    r = tl.fma(t, r, 0.015441100113093853)
    r = tl.fma(t, r, -0.008441363461315632)
    r = tl.fma(t, r, 0.01122882217168808)
    r = tl.fma(t, r, 0.014332414604723454)
    r = tl.fma(t, r, 0.04184461012482643)
    r = tl.fma(t, r, 0.12498952448368073)
    return -t * tl.fma(t, r, 0.5000001192092896)


@triton.jit
def above_mixture(difference, beta, rest, HALF: tl.constexpr, UNIT: tl.constexpr):
    """q − m and p − m, where exp m = beta exp p + rest exp q. HALF: both weights are one half.

    The difference q − p has to be finite. If it is 0, both results are 0. UNIT is 1 for natural logarithms, log2(e) for those of
    base 2.
    """
    e = tl.exp2(tl.abs(difference) * (-1.4426950408889634 / UNIT))
    if HALF:
        # No e near 1: there a GPU's exponential is off by 1e-7, in the same direction for all elements.
        half = tl.abs(difference) * (0.5 / UNIT)
        square = half * half
        log_cosh = square * (0.5 - square * (0.08333333 - square * (0.022222223 - square * 0.006746032)))
        above = tl.where(half < 0.25, half - log_cosh, -log_mean(e)) * UNIT
        return tl.minimum(difference, 0.0) + above, tl.minimum(-difference, 0.0) + above
    else:
        # Only the smaller weight is used: the two rounded weights don't add up to 1. `heavy` is the part with the larger weight,
        # `light` the other. M is taken relative to heavy, by v = M / heavy − 1. If v is near 0, log M is nearly log heavy, and a
        # series of v gives the difference. If v is large, M is taken relative to light.
        weight = tl.minimum(beta, rest)
        light = tl.where(beta <= rest, -difference, difference)
        x = light * (1.0 / UNIT)
        v = weight * tl.where(tl.abs(x) < 0.25, expm1_near(x), tl.exp2(light * (1.4426950408889634 / UNIT)) - 1.0)
        series = v * (1.0 - v * (0.5 - v * (0.33333334 - v * (0.25 - v * (0.2 - v * 0.16666667)))))
        small = v < 16.0
        mixture = tl.where(small, 1.0 + v, e + weight * (1.0 - e))
        log_mixture = tl.log(tl.maximum(mixture, 1e-37, propagate_nan=tl.PropagateNan.ALL))
        log_mixture = tl.where(tl.abs(v) < 0.0625, series, log_mixture) * UNIT
        of_heavy = -log_mixture - tl.where(small, 0.0, light)
        of_light = tl.where(small, light, 0.0) - log_mixture
        return tl.where(beta <= rest, of_heavy, of_light), tl.where(beta <= rest, of_light, of_heavy)


@triton.jit
def weight_of(count, divisor):
    """1 / (divisor · count), right to a unit of rounding. `count` may be None."""
    divisor = tl.cast(divisor, tl.float32)
    if count is not None:
        divisor *= tl.load(count)
    inverse = 1.0 / divisor
    return tl.fma(inverse, tl.fma(-divisor, inverse, 1.0), inverse)


@kernel(do_not_specialize=["rows"])
def _count(count, labels, rows, ignore_index, BLOCK: tl.constexpr):
    counted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        label = tl.load(labels + row, row < rows, other=ignore_index)
        counted += tl.where(label != ignore_index, 1.0, 0.0)
    tl.store(count, tl.maximum(tl.sum(counted), 1.0))


@kernel(do_not_specialize=["size", "divisor"])
def _total(total, sums, count, size, divisor, BLOCK: tl.constexpr):
    # A single program adds up everything, so the order of the sums is always the same.
    lanes, lost = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        lanes, lost = add_up(lanes, lost, tl.load(sums + index, index < size, other=0.0))
    divisor = tl.cast(divisor, tl.float32)
    if count is not None:
        divisor *= tl.load(count)
    tl.store(total, tl.math.div_rn(tl.sum(lanes), divisor))


@kernel
def _scale(x, factor, size, BLOCK: tl.constexpr):
    factor = tl.load(factor)
    if factor != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(tl.cast(size, tl.int64), BLOCK), tl.num_programs(0)):
            offset = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(x + offset, tl.load(x + offset, offset < size).to(tl.float32) * factor, offset < size)


class Tiles(NamedTuple):
    """How a tensor is divided into `count` tiles of `height` rows by `width` columns, `blocks` of them side by side.

    `rows` and `columns` are the tensor's, or 1 and the number of its elements. `whole`: they are the latter, and the tiles
    divide them.
    """

    rows: int
    columns: int
    blocks: int
    height: int
    width: int
    count: int
    whole: bool


def tiles_of(x: Tensor, flat: bool = False, size: int = TILE) -> Tiles:
    """The tiles of a two-dimensional tensor. A `flat` one, whose elements are all adjacent, is one long row."""
    rows, columns = x.shape
    if flat:
        rows, columns = 1, rows * columns
    if columns % 16:
        size //= 2  # registers are short if elements are loaded one by one
    # Comparisons, so that a dynamic size stays dynamic while torch.compile traces.
    width = 16
    while width < columns and width < size:
        width *= 2
    height = 1 if flat else size // width
    blocks = (columns + width - 1) // width
    count = (rows + height - 1) // height * blocks
    return Tiles(rows, columns, blocks, height, width, count, flat and columns % width == 0)


def new_sums(tiles: Tiles, device: torch.device) -> Tensor:
    """Memory for the sum of each program, for a grid whose programs add up several tiles each."""
    return torch.empty(min(tiles.count, PROGRAMS * sm_count(device)), dtype=torch.float32, device=device)


def leaves_first(x: Tensor, written: bool) -> bool:
    """Whether inputs leave the cache first: then data that others wrote there needn't be evicted to make room for them.

    That is slower for large tensors, and if as much is `written` as read.
    """
    return not written and x.numel() <= FEW


def count_of(labels: Tensor, ignore_index: int) -> Tensor:
    """The number of rows that count, or 1 if none does; a float32 scalar. `labels` are contiguous."""
    count = torch.empty((), dtype=torch.float32, device=labels.device)
    _count[(1,)](count, labels, labels.shape[0], ignore_index, BLOCK=1024, num_warps=4)
    return count


def total(sums: Tensor, count: Tensor | None, divisor: int) -> Tensor:
    """Σ sums / divisor, divided by `count` if there is one; a float32 scalar."""
    result = sums.new_empty(())
    # A large block: one or two iterations instead of nine, which saves 2 of 48 µs for 1024 rows of 32000 on an H200 (triton 3.6).
    _total[(1,)](result, sums, count, sums.shape[0], divisor, BLOCK=8192, num_warps=16)
    return result


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x, multiplied in place by a float32 scalar. If that is 1, nothing is read or written. `x` is contiguous."""
    programs = min(
        (x.numel() + 2047) // 2048, 16 * sm_count(x.device)
    )  # as many as run at once: usually none has anything to do
    _scale[(programs,)](x, factor, x.numel(), BLOCK=2048, num_warps=4)
    return x
