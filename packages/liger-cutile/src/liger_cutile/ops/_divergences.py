"""Code that `kl_div`, `tvd` and `jsd` share: two tensors of one shape are read tile by tile, and their terms added up.

Each block adds up the terms of its own tiles in float32, then one block adds up those sums. So the total is the same from run to
run, without atomics.
"""

import cuda.tile as ct
from torch import Tensor

from liger_core.custom_op import opaque
from liger_cutile.ops._device import sm_count
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._math import expm1_near
from liger_cutile.ops._rows import ZERO, as_one_row, blocks, power_of_2
from liger_cutile.ops._sums import add_up

# Bytes of a tile that is read by TMA, and blocks per multiprocessor: without that hint, the compiler gives one block all
# registers. On an H200 (tileiras 13.4), 4096 x 128256 in bfloat16 takes kl_div 0.471 ms, tvd 0.523 and jsd 0.815. With eight
# blocks that load into registers, they take 0.611, 0.623 and 1.054.
TILE_BYTES, OCCUPANCY = 8192, 4
# Blocks per multiprocessor if each adds up several tiles. On an H200, jsd takes 0.861 ms with only as many as run at once.
BLOCKS = 64
# Bytes of a tile, and blocks per multiprocessor, of a kernel that mostly writes, and loads into registers. On an H200, kl_div's
# backward takes 0.532 ms; with the sizes above 0.591.
WRITTEN_BYTES, WRITTEN_OCCUPANCY = 4096, 8


@ct.function
def place(array, tile, ROWS, BLOCK):
    """A tile's row and column, counted in tiles."""
    across = ct.num_tiles(array, axis=1, shape=(ROWS, BLOCK))
    return tile // across, tile % across


@ct.function
def tile_count(array, ROWS, BLOCK):
    return ct.num_tiles(array, axis=0, shape=(ROWS, BLOCK)) * ct.num_tiles(array, axis=1, shape=(ROWS, BLOCK))


@ct.function
def load(array, at, ROWS, BLOCK):
    """A tile in float32; 0 outside the array."""
    return ct.astype(ct.load(array, at, (ROWS, BLOCK), padding_mode=ZERO), ct.float32)


@ct.function
def store(array, at, value):
    ct.store(array, at, ct.astype(value, array.dtype))


@ct.function
def load_directly(array, at, ROWS, BLOCK):
    """`load` without TMA, into registers."""
    return ct.astype(ct.load(array, at, (ROWS, BLOCK), padding_mode=ZERO, allow_tma=False), ct.float32)


@ct.function
def store_directly(array, at, value):
    """`store` without TMA, from registers."""
    ct.store(array, at, ct.astype(value, array.dtype), allow_tma=False)


@ct.function
def load_counted(labels, row, ignore_index, ROWS):
    """Which rows of a tile count, ``[ROWS, 1]``."""
    return ct.reshape(ct.load(labels, (row,), (ROWS,), padding_mode=ZERO, allow_tma=False) != ignore_index, (ROWS, 1))


@ct.function
def store_beside_labels(array, at, value, labels, ROWS):
    """`store`, for a tile that may not have been read because labels leave out its rows.

    If such a tile has several rows, tileiras 13.4 compiles a bulk store with `OCCUPANCY` to an sm_90 program whose warps wait
    forever for more registers than it has.
    """
    if given(labels) and ROWS > 1:
        store_directly(array, at, value)
    else:
        store(array, at, value)


@ct.function
def any_of(conditions):
    return ct.max(ct.where(conditions, 1, 0)) > 0


@ct.function
def finite(logprob):
    """-1e30 for -inf: its exponential is 0 as well, and differences and products with it aren't NaN."""
    return ct.maximum(logprob, -1e30, propagate_nan=True)


@ct.function
def _log_mean(e):
    """log((1 + e) / 2) for e from 0 to 1; right to 6e-9, and to the rounding of float32."""
    t = 1.0 - e
    r = t * 0.003556931158527732 - 0.009804983623325825
    r = t * r + 0.015441100113093853
    r = t * r - 0.008441363461315632
    r = t * r + 0.01122882217168808
    r = t * r + 0.014332414604723454
    r = t * r + 0.04184461012482643
    r = t * r + 0.12498952448368073
    return -t * (t * r + 0.5000001192092896)


@ct.function
def above_mixture(difference, beta, rest, HALF, UNIT):
    """q − m and p − m, where exp m = beta exp p + rest exp q. HALF: both weights are one half.

    The difference q − p has to be finite. If it is 0, both results are 0. UNIT is 1 for natural logarithms, log2(e) for those of
    base 2.
    """
    distance = ct.abs(difference)
    e = ct.exp2(distance * (-1.4426950408889634 / UNIT), flush_to_zero=True)
    if HALF:
        # No e near 1: there a GPU's exponential is off by 1e-7, in the same direction for all elements.
        half = distance * (0.5 / UNIT)
        square = half * half
        log_cosh = square * (0.5 - square * (0.08333333 - square * (0.022222223 - square * 0.006746032)))
        above = ct.where(half < 0.25, half - log_cosh, -_log_mean(e)) * UNIT
        return ct.minimum(difference, 0.0) + above, ct.minimum(-difference, 0.0) + above
    else:
        # Only the smaller weight is used: the two rounded weights don't add up to 1. `heavy` is the part with the larger weight,
        # `light` the other. M is taken relative to heavy, by v = M / heavy − 1. If v is near 0, log M is nearly log heavy, and a
        # series of v gives the difference. If v is large, M is taken relative to light.
        weight = ct.minimum(beta, rest)
        light = ct.where(beta <= rest, -difference, difference)
        x = light * (1.0 / UNIT)
        v = ct.exp2(light * (1.4426950408889634 / UNIT), flush_to_zero=True) - 1.0
        v = weight * ct.where(ct.abs(x) < 0.25, expm1_near(x), v)
        series = v * (1.0 - v * (0.5 - v * (0.33333334 - v * (0.25 - v * (0.2 - v * 0.16666667)))))
        small = v < 16.0
        mixture = ct.where(small, 1.0 + v, e + weight * (1.0 - e))
        log_mixture = ct.log(ct.maximum(mixture, 1e-37, propagate_nan=True))
        log_mixture = ct.where(ct.abs(v) < 0.0625, series, log_mixture) * UNIT
        of_heavy = -log_mixture - ct.where(small, 0.0, light)
        of_light = ct.where(small, light, 0.0) - log_mixture
        return ct.where(beta <= rest, of_heavy, of_light), ct.where(beta <= rest, of_light, of_heavy)


@ct.kernel
def _count(count, labels, ignore_index: ct.ScalarInt64, BLOCK: ConstInt):
    counted = ct.zeros((BLOCK,), ct.float32)
    index = ct.arange(BLOCK, dtype=ct.int32)
    for tile in range(ct.num_tiles(labels, axis=0, shape=(BLOCK,))):
        label = ct.load(labels, (tile,), (BLOCK,), padding_mode=ZERO, allow_tma=False)
        inside = tile * BLOCK + index < labels.shape[0]
        counted += ct.where(inside & (label != ignore_index), 1.0, 0.0)
    ct.store(count, (0,), ct.maximum(ct.sum(counted), 1.0))


@ct.kernel
def _total(total, sums, count, divisor, BLOCK: ConstInt):
    lanes, lost = ct.zeros((BLOCK,), ct.float32), ct.zeros((BLOCK,), ct.float32)
    for tile in range(ct.num_tiles(sums, axis=0, shape=(BLOCK,))):
        lanes, lost = add_up(lanes, lost, ct.load(sums, (tile,), (BLOCK,), padding_mode=ZERO, allow_tma=False))
    if given(count):
        divisor = divisor * ct.load(count, (0,), ())
    ct.store(total, (0,), ct.sum(lanes) / divisor)


@ct.kernel(occupancy=WRITTEN_OCCUPANCY)
def _scale(x, factor, ROWS: ConstInt, BLOCK: ConstInt):
    by = ct.load(factor, (0,), ())
    if by != 1.0:
        for tile in range(ct.bid(0), tile_count(x, ROWS, BLOCK), ct.num_blocks(0)):
            at = place(x, tile, ROWS, BLOCK)
            store_directly(x, at, load_directly(x, at, ROWS, BLOCK) * by)


def tile_of(x: Tensor, tile_bytes: int = TILE_BYTES) -> tuple[int, int]:
    """Rows and columns of the tiles of a two-dimensional tensor."""
    size = tile_bytes // x.element_size()
    if x.shape[1] % 16:
        size //= 4  # registers are short if elements are loaded one by one
    block = min(power_of_2(x.shape[1]), size)
    return min(size // block, power_of_2(x.shape[0], 1)), block


def tiles_of(x: Tensor, rows: int, block: int) -> int:
    """How many tiles cover a tensor."""
    return blocks(x.shape[0], rows) * blocks(x.shape[1], block)


def persistent(x: Tensor, rows: int, block: int, most: int = BLOCKS) -> int:
    """Blocks of a grid that takes all tiles of a tensor, several per block: at most `most` per multiprocessor."""
    return min(tiles_of(x, rows, block), most * sm_count(x.device))


def launch_count(count: Tensor, labels: Tensor, ignore_index: int) -> None:
    """Write the number of rows that count, or 1 if none does, to ``float32[1]``."""
    launch(_count, (1,), count, labels, ignore_index, 1024)


def launch_total(total: Tensor, sums: Tensor, count: Tensor | None, divisor: float) -> None:
    """Write Σ sums / divisor, divided by `count` if there is one, to ``float32[1]``."""
    launch(_total, (1,), total, sums, count, float(divisor), 1024)


@opaque(writes=("x",))
def launch_scale(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous two-dimensional tensor by a scalar. If that is 1, the tensor isn't read."""
    (x,) = as_one_row(x)
    rows, block = tile_of(x, WRITTEN_BYTES)
    launch(_scale, (persistent(x, rows, block, WRITTEN_OCCUPANCY),), x, factor.view(1), rows, block)
