"""Dynamic tanh: a core keeps the scale and shift of a block of columns, and goes down the rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import dyt
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._device import get_npu_core_count
from liger_triton_ascend.ops._rows import as_rows, element_tiles

# Float32 tiles by the estimate of the Unified Buffer, for elements of 2 and of 4 bytes.
FORWARD_TILES = {2: 7, 4: 10}
BACKWARD_TILES = {2: 11, 4: 14}


@triton.jit
def _tanh(u, EXACT: tl.constexpr):
    """tanh(u), and a quarter of its derivative: to float32's precision if EXACT, else to a relative 1e-5."""
    q = tl.exp(-2.0 * tl.abs(u))  # never infinite
    r = 1.0 / (1.0 + q)
    tail = (1.0 - q) * r
    tail = tl.where(u < 0.0, -tail, tail)
    square = u * u
    # Near 0, 1 − q has no correct digit.
    if EXACT:
        near = tl.abs(u) < 0.625
        series = 0.020639074966311455 - 0.005704974289983511 * square  # a minimax fit of (tanh(u) - u) / u³
        series = series * square - 0.05373971164226532
        series = series * square + 0.13331441581249237
        series = series * square - 0.3333328068256378
    else:
        near = tl.abs(u) < 0.05
        series = -0.3333333333333333
    return tl.where(near, series * square * u + u, tail), q * r * r


@triton.jit
def _load_alpha(alpha):
    """alpha in float32, within ±1e30: infinity times the zeros past the rows and columns would be NaN in the sums."""
    a = tl.load(alpha).to(tl.float32)
    return tl.where(tl.abs(a) > 1e30, tl.where(a > 0.0, 1e30, -1e30), a)


@triton.jit
def _forward(
    y, x, alpha, gamma, beta, rows, columns, strips, x_stride,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    a = _load_alpha(alpha)
    for part in range(tl.program_id(0), strips * blocks, tl.num_programs(0)):
        column = tl.cast(part % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        scale = tl.load(gamma + column, column < columns, other=0.0).to(tl.float32)
        if beta is not None:
            shift = tl.load(beta + column, column < columns, other=0.0).to(tl.float32)
        for tile in range(part // blocks, tl.cdiv(rows, ROWS), strips):
            row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
            inside = (row < rows) & (column < columns)
            xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
            ys = _tanh(a * xs, EXACT)[0] * scale
            if beta is not None:
                ys += shift
            tl.store(y + row * columns + column, ys, inside)


@triton.jit
def _backward(
    dx, partial_alpha, partial_gamma, partial_beta, dy, x, alpha, gamma, rows, columns, strips, dy_stride, x_stride,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    a = _load_alpha(alpha)
    for part in range(tl.program_id(0), strips * blocks, tl.num_programs(0)):
        lane = tl.cast(part % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        column = lane[None, :]
        scale = 4.0 * tl.load(gamma + column, column < columns, other=0.0).to(tl.float32)
        dalpha = tl.zeros((ROWS, BLOCK), tl.float32)
        dgamma = tl.zeros((ROWS, BLOCK), tl.float32)
        dbeta = tl.zeros((ROWS, BLOCK), tl.float32)
        for tile in range(part // blocks, tl.cdiv(rows, ROWS), strips):
            row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
            inside = (row < rows) & (column < columns)
            xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
            dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
            t, quarter = _tanh(a * xs, EXACT)
            slope = dys * scale * quarter
            if dx is not None:
                tl.store(dx + row * columns + column, slope * a, inside)
            if partial_alpha is not None:
                dalpha += slope * xs
            if partial_gamma is not None:
                dgamma += dys * t
            if partial_beta is not None:
                dbeta += dys
        at = tl.cast(part // blocks, tl.int64) * columns + lane
        if partial_alpha is not None:
            tl.store(partial_alpha + part, tl.sum(tl.sum(dalpha, 0), 0))
        if partial_gamma is not None:
            tl.store(partial_gamma + at, tl.sum(dgamma, 0), lane < columns)
        if partial_beta is not None:
            tl.store(partial_beta + at, tl.sum(dbeta, 0), lane < columns)


@implements(dyt)
def forward(needs: Needs, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> tuple[Tensor, Saved]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    saved = (x, alpha, gamma, beta) if True in needs else ()
    x, x_stride = as_rows(x)
    gamma = gamma.contiguous()
    if beta is not None:
        beta = beta.contiguous()
    programs, tile_rows, block = element_tiles(x, rows, columns, FORWARD_TILES[x.element_size()])
    strips, _ = _divide(x, rows, columns, tile_rows, block)
    _forward[(programs,)](
        y, x, alpha, gamma, beta, rows, columns, strips, x_stride,
        EXACT=x.dtype is torch.float32, ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_alpha, needs_gamma, needs_beta = needs
    x, alpha, gamma, beta = saved
    columns = x.shape[-1]
    rows = x.numel() // columns
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    programs, tile_rows, block = element_tiles(x, rows, columns, BACKWARD_TILES[x.element_size()])
    strips, parts = _divide(x, rows, columns, tile_rows, block)
    dalpha = x.new_empty(parts, dtype=torch.float32) if needs_alpha else None
    dgamma = x.new_empty((strips, columns), dtype=torch.float32) if needs_gamma else None
    dbeta = x.new_empty((strips, columns), dtype=torch.float32) if needs_beta else None
    _backward[(programs,)](
        dx, dalpha, dgamma, dbeta, dy, x, alpha, gamma.contiguous(), rows, columns, strips, dy_stride, x_stride,
        EXACT=torch.float32 in (x.dtype, alpha.dtype, gamma.dtype), ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return (
        dx,
        dalpha.sum(0, keepdim=True).to(alpha.dtype) if needs_alpha else None,
        dgamma.sum(0).to(gamma.dtype) if needs_gamma else None,
        dbeta.sum(0).to(beta.dtype) if needs_beta else None,
    )


def _divide(x: Tensor, rows: int, columns: int, tile_rows: int, block: int) -> tuple[int, int]:
    """Strips of rows that a block of columns is divided into, so that each core has a part; and the number of parts."""
    blocks, tiles = (columns + block - 1) // block, (rows + tile_rows - 1) // tile_rows
    strips = min(tiles, max(1, get_npu_core_count(x.device) // blocks))
    return strips, strips * blocks
