"""Code that `kl_div`, `tvd` and the Jensen-Shannon divergences share: two tensors of one shape are read tile by tile.

Each program adds up the terms of its own tiles in float32, lane by lane, and stores one sum. PyTorch adds up those sums. So the
total is the same from run to run, without atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton_ascend.ops._math import expm1_near


@triton.jit
def place(tile, rows, columns, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows and columns of a tile, and which of its elements exist."""
    row = tl.cast(tile // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def counted_rows(labels, tile, rows, blocks, ignore_index, ROWS: tl.constexpr):
    """Which rows of a tile count, as a column."""
    row = tl.cast(tile // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)
    return (tl.load(labels + row, row < rows, other=ignore_index) != ignore_index)[:, None]


@triton.jit
def finite(logprob):
    """-1e30 for -inf: its exponential is 0 as well, and differences and products with it aren't NaN."""
    return tl.maximum(logprob, -1e30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
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


@triton.jit
def above_mixture(difference, beta, rest, HALF: tl.constexpr):
    """q − m and p − m, where exp m = beta exp p + rest exp q. HALF: both weights are one half.

    The difference q − p has to be finite. If it is 0, both results are 0.
    """
    e = tl.exp(-tl.abs(difference))
    if HALF:
        # No e near 1: its rounding there is the same for all elements, and larger than the differences of log M.
        half = tl.abs(difference) * 0.5
        square = half * half
        log_cosh = square * (0.5 - square * (0.08333333 - square * (0.022222223 - square * 0.006746032)))
        above = tl.where(half < 0.25, half - log_cosh, -_log_mean(e))
        return tl.minimum(difference, 0.0) + above, tl.minimum(-difference, 0.0) + above
    else:
        # Only the smaller weight is used: the two rounded weights don't add up to 1. `heavy` is the part with the larger weight,
        # `light` the other. M is taken relative to heavy, by v = M / heavy − 1. If v is near 0, log M is nearly log heavy, and a
        # series of v gives the difference. If v is large, M is taken relative to light.
        weight = tl.minimum(beta, rest)
        light = tl.where(beta <= rest, -difference, difference)
        v = weight * tl.where(tl.abs(light) < 0.25, expm1_near(light), tl.exp(tl.minimum(light, 80.0)) - 1.0)
        series = v * (1.0 - v * (0.5 - v * (0.33333334 - v * (0.25 - v * (0.2 - v * 0.16666667)))))
        small = v < 16.0
        mixture = tl.where(small, 1.0 + v, e + weight * (1.0 - e))
        log_mixture = tl.log(tl.maximum(mixture, 1e-37, propagate_nan=tl.PropagateNan.ALL))
        log_mixture = tl.where(tl.abs(v) < 0.0625, series, log_mixture)
        of_heavy = -log_mixture - tl.where(small, 0.0, light)
        of_light = tl.where(small, light, 0.0) - log_mixture
        return tl.where(beta <= rest, of_heavy, of_light), tl.where(beta <= rest, of_light, of_heavy)


def count_of(x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
    """The number of rows of x that count, or 1 if none does; a float32 scalar."""
    if labels is None:
        return torch.full((), x.shape[0], dtype=torch.float32, device=x.device)
    return (labels != ignore_index).sum(dtype=torch.float32).clamp(min=1.0)
