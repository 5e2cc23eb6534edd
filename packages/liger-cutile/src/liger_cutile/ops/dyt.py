"""Dynamic tanh: a block takes some columns, whose scale and shift it reads once, and several rows of them."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import dyt
from liger_core.contract import Needs, Saved, implements
from liger_core.opaque import opaque
from liger_cutile.ops._device import sm_count
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._rows import as_rows, blocks, power_of_2
from liger_cutile.ops._tiles import load, load_vector
from liger_cutile.ops._totals import launch_total, launch_totals

# Elements of a tile, and its most columns.
FORWARD_TILE = 4096
BACKWARD_TILE = 2048
MOST_COLUMNS = 1024
# Blocks of the backward on a multiprocessor.
BACKWARD_BLOCKS = 3


@ct.function
def _tanh(u, EXACT):
    """tanh(u) and its derivative: to float32's precision if EXACT, else to a relative 1e-6."""
    q = ct.exp2(-2.8853900817779268 * ct.abs(u), flush_to_zero=True)  # e^(−2|u|)
    r = ct.truediv(1.0, 1.0 + q, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    square = u * u
    # Near 0, q has no correct digit left beside 1.
    if EXACT:
        near = ct.abs(u) < 0.625
        series = 0.020639074966311455 - 0.005704974289983511 * square  # a minimax fit of (tanh(u) - u) / u³
        series = series * square - 0.05373971164226532
        series = series * square + 0.13331441581249237
        series = series * square - 0.3333328068256378
    else:
        near = ct.abs(u) < 0.05
        series = -0.3333333333333333
    tail = (1.0 - q) * r
    t = ct.where(near, series * square * u + u, ct.where(u < 0.0, -tail, tail))
    slope = 4.0 * q * r * r
    return t, ct.where(near, 1.0 - t * t, slope) if EXACT else slope


@ct.kernel(occupancy=8)
def _forward(y, x, alpha, gamma, beta, EXACT: ConstBool, ROWS: ConstInt, BLOCK: ConstInt):
    across = ct.num_tiles(x, axis=1, shape=(ROWS, BLOCK))
    row, column = ct.bid(0) // across, ct.bid(0) % across
    ys, _ = _tanh(load(x, (row, column), ROWS, BLOCK) * load_vector(alpha, 0, 1), EXACT)
    ys = ys * load_vector(gamma, column, BLOCK)
    if given(beta):
        ys += load_vector(beta, column, BLOCK)
    ct.store(y, (row, column), ct.astype(ys, y.dtype))


@ct.kernel(occupancy=BACKWARD_BLOCKS)
def _backward(
    dx, partial, scalars, dy, x, alpha, gamma,
    GAMMA: ConstBool, BETA: ConstBool, EXACT: ConstBool, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    column, strip = ct.bid(0), ct.bid(1)
    a = load_vector(alpha, 0, 1)
    scale = load_vector(gamma, column, BLOCK)
    dalpha = ct.zeros((ROWS, BLOCK), ct.float32)
    dgamma = ct.zeros((ROWS, BLOCK), ct.float32)
    dbeta = ct.zeros((ROWS, BLOCK), ct.float32)
    for row in range(strip, ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(1)):
        xs = load(x, (row, column), ROWS, BLOCK)
        dys = load(dy, (row, column), ROWS, BLOCK)
        t, derivative = _tanh(a * xs, EXACT)
        slope = dys * scale * derivative
        if given(dx):
            ct.store(dx, (row, column), ct.astype(slope * a, dx.dtype))
        if given(scalars):
            dalpha += slope * xs
        if GAMMA:
            dgamma += dys * t
        if BETA:
            dbeta += dys
    if given(scalars):
        ct.store(scalars, (strip * ct.num_blocks(0) + column, 0), ct.reshape(ct.sum(dalpha), (1, 1)))
    if GAMMA:
        ct.store(partial, (0, strip, column), ct.reshape(ct.sum(dgamma, axis=0), (1, 1, BLOCK)))
    if BETA:
        ct.store(partial, (int(GAMMA), strip, column), ct.reshape(ct.sum(dbeta, axis=0), (1, 1, BLOCK)))


@opaque(writes=("y",))
def _launch_forward(y: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> None:
    y, x, gamma = as_rows(y), as_rows(x), gamma.contiguous()
    if beta is not None:
        beta = beta.contiguous()
    exact = x.dtype is torch.float32
    tile_rows, block, down, across = _tiles(*x.shape, FORWARD_TILE)
    launch(_forward, (down * across,), y, x, alpha, gamma, beta, exact, tile_rows, block)


@opaque(writes=("dx", "dalpha", "dgamma", "dbeta"))
def _launch_backward(
    dx: Tensor | None,
    dalpha: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
    dy: Tensor,
    x: Tensor,
    alpha: Tensor,
    gamma: Tensor,
) -> None:
    dy, x, gamma = as_rows(dy), as_rows(x), gamma.contiguous()
    if dx is not None:
        dx = as_rows(dx)
    exact = torch.float32 in (x.dtype, alpha.dtype, gamma.dtype)
    tile_rows, block, strips, across = _tiles(*x.shape, BACKWARD_TILE)
    # More strips than these would only wait for the others, and each has sums of its own.
    strips = max(1, min(strips, sm_count(x.device) * BACKWARD_BLOCKS // across))
    needs_gamma, needs_beta = dgamma is not None, dbeta is not None
    partial = scalars = None
    if needs_gamma or needs_beta:
        shape = (needs_gamma + needs_beta, strips, x.shape[1])
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    if dalpha is not None:
        scalars = torch.empty((strips * across, 1), dtype=torch.float32, device=x.device)
    launch(
        _backward, (across, strips), dx, partial, scalars, dy, x, alpha, gamma,
        needs_gamma, needs_beta, exact, tile_rows, block,
    )  # fmt: skip
    if partial is not None:
        launch_totals(dgamma, dbeta, partial)
    if scalars is not None:
        launch_total(dalpha, scalars)


def _tiles(rows: int, columns: int, elements: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile of so many elements, and how many tiles there are along each."""
    block = min(power_of_2(columns), MOST_COLUMNS)
    tile_rows = min(elements // block, power_of_2(rows, 1))
    return tile_rows, block, blocks(rows, tile_rows), blocks(columns, block)


@implements(dyt)
def forward(needs: Needs, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_forward(y, x, alpha, gamma, beta)
    return y, (x, alpha, gamma, beta) if True in needs else ()


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, alpha, gamma, beta = saved
    needs_x, needs_alpha, needs_gamma, needs_beta = needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dalpha = torch.empty_like(alpha, memory_format=torch.contiguous_format) if needs_alpha else None
    dgamma = torch.empty_like(gamma, memory_format=torch.contiguous_format) if needs_gamma else None
    dbeta = torch.empty_like(beta, memory_format=torch.contiguous_format) if needs_beta else None
    _launch_backward(dx, dalpha, dgamma, dbeta, dy, x, alpha, gamma)
    return dx, dalpha, dgamma, dbeta
