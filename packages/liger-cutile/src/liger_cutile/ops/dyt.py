"""Dynamic tanh: a block takes some columns, whose scale and shift it reads once, and several rows of them."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import dyt
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._device import sm_count
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch, within_grid
from liger_cutile.ops._rows import as_rows, blocks, gather, load, places, tiles
from liger_cutile.ops._sums import launch_total, launch_totals

# Elements of a tile. On an H200, 16384 x 8192 in bfloat16 takes 0.135 ms; with half as many 0.153.
FORWARD_TILE = 8192
# Elements and columns of a tile of the backward, whose eight warps work while TMA loads: 0.222 ms. With half a tile and three
# blocks per multiprocessor it takes 0.320.
BACKWARD_TILE, BACKWARD_COLUMNS = 4096, 512


@ct.function
def _tanh(u, EXACT):
    """tanh(u), and a quarter of its derivative: to float32's precision if EXACT, else to a relative 1e-5."""
    q = ct.exp2(-2.8853900817779268 * u, flush_to_zero=True)  # e^(−2u)
    finite = ct.minimum(q, 1e36, propagate_nan=True)  # for products with r, which may be 0
    r = ct.truediv(1.0, 1.0 + (finite if EXACT else q), rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    square = u * u
    # Near 0, 1 − q has no correct digit.
    if EXACT:
        tail = (1.0 - finite) * r
        near = ct.abs(u) < 0.625
        series = 0.020639074966311455 - 0.005704974289983511 * square  # a minimax fit of (tanh(u) - u) / u³
        series = series * square - 0.05373971164226532
        series = series * square + 0.13331441581249237
        series = series * square - 0.3333328068256378
    else:
        tail = 2.0 * r - 1.0
        near = ct.abs(u) < 0.05
        series = -0.3333333333333333
    t = ct.where(near, series * square * u + u, tail)
    quarter = r * r * finite
    return t, ct.where(near, 0.25 - 0.25 * t * t, quarter) if EXACT else quarter


@ct.function
def _load_alpha(alpha):
    """alpha in float32, within ±1e30: infinity times the zeros past the rows and columns would be NaN in the sums."""
    a = ct.astype(ct.load(alpha, (0,), ()), ct.float32)
    return ct.where(ct.abs(a) > 1e30, ct.where(a > 0.0, 1e30, -1e30), a)


@ct.kernel
def _forward(y, x, alpha, gamma, beta, EXACT: ConstBool, ROWS: ConstInt, BLOCK: ConstInt):
    rows, columns = places(ROWS, BLOCK)
    ys, _ = _tanh(gather(x, (rows, columns)) * _load_alpha(alpha), EXACT)
    ys = ys * gather(gamma, (columns,))
    if given(beta):
        ys += gather(beta, (columns,))
    ct.scatter(y, (rows, columns), ct.astype(ys, y.dtype))


@ct.kernel(num_worker_warps=8)
def _backward(
    dx, partial, scalars, dy, x, alpha, gamma,
    GAMMA: ConstBool, BETA: ConstBool, EXACT: ConstBool, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    # A block loads or stores some things only once. TMA for those would add nine barriers (tileiras 13.4, sm_90).
    column, strip = ct.bid(0), ct.bid(1)
    _, columns = places(ROWS, BLOCK)
    a = _load_alpha(alpha)
    scale = 4.0 * gather(gamma, (columns,))
    outer = a * scale
    dalpha = ct.zeros((ROWS, BLOCK), ct.float32)
    dgamma = ct.zeros((ROWS, BLOCK), ct.float32)
    dbeta = ct.zeros((ROWS, BLOCK), ct.float32)
    for row in range(strip, ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(1)):
        xs = load(x, (row, column), ROWS, BLOCK)
        dys = load(dy, (row, column), ROWS, BLOCK)
        t, quarter = _tanh(a * xs, EXACT)
        slope = dys * quarter
        if given(dx):
            ct.store(dx, (row, column), ct.astype(slope * outer, dx.dtype))
        if given(scalars):
            dalpha += slope * xs
        if GAMMA:
            dgamma += dys * t
        if BETA:
            dbeta += dys
    if given(scalars):
        ct.store(scalars, (strip * ct.num_blocks(0) + column, 0), ct.reshape(ct.sum(dalpha * scale), (1, 1)))
    if GAMMA:
        ct.store(partial, (0, strip, column), ct.reshape(ct.sum(dgamma, axis=0), (1, 1, BLOCK)), allow_tma=False)
    if BETA:
        sums = ct.reshape(ct.sum(dbeta, axis=0), (1, 1, BLOCK))
        ct.store(partial, (int(GAMMA), strip, column), sums, allow_tma=False)


@opaque(writes=("y",))
def _launch_forward(y: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> None:
    y, x, gamma = as_rows(y), as_rows(x), gamma.contiguous()
    if beta is not None:
        beta = beta.contiguous()
    exact = x.dtype is torch.float32
    tile_rows, block, across = tiles(*x.shape, FORWARD_TILE)
    for tensors in within_grid(tile_rows, y, x):
        grid = across, blocks(tensors[0].shape[0], tile_rows)
        launch(_forward, grid, *tensors, alpha, gamma, beta, exact, tile_rows, block)


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
    tile_rows, block, across = tiles(*x.shape, BACKWARD_TILE, BACKWARD_COLUMNS)
    # More strips than these would only wait for the others, and each needs its own sums.
    strips = max(1, min(blocks(x.shape[0], tile_rows), sm_count(x.device) // across))
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
