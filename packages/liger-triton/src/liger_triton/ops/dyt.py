"""Dynamic tanh: a program takes a block of columns, whose scale and shift it reads once, and several rows of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import dyt
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._device import sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, power_of_2
from liger_triton.ops._sums import totals

# Eight columns per thread, one 16-byte load of bf16. A program takes several rows, so that several such loads are in flight.
MOST_COLUMNS = 1024
COLUMNS_PER_WARP = 256
ROWS = 4
# Up to this many elements, forward takes one row and more columns, so that there are more programs. On an H200 (triton 3.6), in
# bfloat16, 2048 x 2048 takes 0.0092 ms instead of 0.0106 and 4096 x 2048 0.0137 instead of 0.0153. 8192 x 4096 would take 0.0420
# instead of 0.0393.
FEW = 1 << 23
FEW_COLUMNS = 2048
# The backward's warps per multiprocessor. Few are enough, because programs prefetch two tiles to shared memory. On an H200
# (triton 3.6), 16384 x 8192 in bfloat16 takes 0.200 ms; without prefetching 0.313.
WARPS = 8
STAGES = 3


@triton.jit
def _tanh(u, EXACT: tl.constexpr):
    """tanh(u), and a quarter of its derivative: to float32's precision if EXACT, else to a relative 1e-5."""
    q = tl.exp2(-2.8853900817779268 * tl.abs(u))  # e^(−2|u|)
    square = u * u
    # Near 0, 1 − q has no correct digit.
    if EXACT:
        r = 1.0 / (1.0 + q)
        tail = (1.0 - q) * r
        near = tl.abs(u) < 0.625
        series = 0.020639074966311455 - 0.005704974289983511 * square  # a minimax fit of (tanh(u) - u) / u³
        series = series * square - 0.05373971164226532
        series = series * square + 0.13331441581249237
        series = series * square - 0.3333328068256378
    else:
        r = tl.rsqrt(1.0 + q)
        r *= r  # two instructions, where a division takes five
        tail = 2.0 * r - 1.0
        near = tl.abs(u) < 0.05
        series = -0.3333333333333333
    tail = tl.where(u < 0.0, -tail, tail)
    return tl.where(near, series * square * u + u, tail), q * r * r


@triton.jit
def _load_alpha(alpha):
    """alpha in float32, within ±1e30: infinity times the zeros past the rows and columns would be NaN in the sums."""
    a = tl.load(alpha).to(tl.float32)
    return tl.where(tl.abs(a) > 1e30, tl.where(a > 0.0, 1e30, -1e30), a)


@kernel
def _forward(
    y, x, alpha, gamma, beta, rows, columns, blocks, x_stride,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    ys = _tanh(_load_alpha(alpha) * xs, EXACT)[0]
    ys *= tl.load(gamma + column, column < columns, other=0.0).to(tl.float32)
    if beta is not None:
        ys += tl.load(beta + column, column < columns, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, ys, inside)


@kernel
def _backward(
    dx, partial, dy, x, alpha, gamma, rows, columns, blocks, dy_stride, x_stride,
    ALPHA: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    strip, strips = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    a = _load_alpha(alpha)
    scale = 4.0 * tl.load(gamma + column, column < columns, other=0.0).to(tl.float32)
    dalpha = tl.zeros((BLOCK,), tl.float32)
    dgamma = tl.zeros((BLOCK,), tl.float32)
    dbeta = tl.zeros((BLOCK,), tl.float32)
    for tile in tl.range(strip, tl.cdiv(rows, ROWS), strips, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)[None, :]
        xs = tl.load(x + row * x_stride + column[None, :], inside, other=0.0).to(tl.float32)
        dys = tl.load(dy + row * dy_stride + column[None, :], inside, other=0.0).to(tl.float32)
        t, quarter = _tanh(a * xs, EXACT)
        slope = dys * scale[None, :] * quarter
        if dx is not None:
            tl.store(dx + row * columns + column[None, :], slope * a, inside)
        # All rows of a column are in one thread or one warp, so warps exchange nothing.
        if ALPHA:
            dalpha += tl.sum(slope * xs, 0)
        if GAMMA:
            dgamma += tl.sum(dys * t, 0)
        if BETA:
            dbeta += tl.sum(dys, 0)
    partial_row = strip.to(tl.int64) * (GAMMA + BETA)
    if GAMMA:
        tl.store(partial + partial_row * columns + column, dgamma, column < columns)
    if BETA:
        tl.store(partial + (partial_row + GAMMA) * columns + column, dbeta, column < columns)
    if ALPHA:
        scalars = partial + strips.to(tl.int64) * columns * (GAMMA + BETA)
        tl.store(scalars + tl.program_id(0), tl.sum(dalpha))


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
    few = rows * columns <= FEW
    block, tile_rows, blocks, tiles = _divide(rows, columns, 1 if few else ROWS, FEW_COLUMNS if few else MOST_COLUMNS)
    _forward[(tiles * blocks,)](
        y, x, alpha, gamma, beta, rows, columns, blocks, x_stride,
        EXACT=x.dtype is torch.float32, ROWS=tile_rows, BLOCK=block, num_warps=max(1, block // COLUMNS_PER_WARP),
    )  # fmt: skip
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_alpha, needs_gamma, needs_beta = needs
    x, alpha, gamma, beta = saved
    columns = x.shape[-1]
    rows = x.numel() // columns
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    exact = torch.float32 in (x.dtype, alpha.dtype, gamma.dtype)
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    block, tile_rows, blocks, strips = _divide(rows, columns, ROWS, MOST_COLUMNS)
    warps = max(1, block // COLUMNS_PER_WARP)
    partial, sums = None, needs_gamma + needs_beta
    if needs_alpha or sums:
        strips = max(1, min(strips, sm_count(x.device) * WARPS // warps // blocks))
        partial = torch.empty(strips * (sums * columns + blocks), dtype=torch.float32, device=x.device)
    _backward[(strips * blocks,)](
        dx, partial, dy, x, alpha, gamma.contiguous(), rows, columns, blocks, dy_stride, x_stride,
        ALPHA=needs_alpha, GAMMA=needs_gamma, BETA=needs_beta, EXACT=exact, ROWS=tile_rows, BLOCK=block,
        STAGES=STAGES, num_warps=warps,
    )  # fmt: skip
    if partial is None:
        return dx, None, None, None
    dgamma, dbeta, dalpha = totals(
        partial, strips, columns, gamma if needs_gamma else None, beta if needs_beta else None,
        alpha if needs_alpha else None, strips * blocks,
    )  # fmt: skip
    return dx, dalpha, dgamma, dbeta


def _divide(rows: int, columns: int, tile_rows: int, most_columns: int) -> tuple[int, int, int, int]:
    """Columns and rows of a tile, and how many tiles there are along each. With few columns a tile has more rows."""
    block = min(power_of_2(columns), most_columns)
    tile_rows *= max(1, COLUMNS_PER_WARP // 2 // block)
    return block, tile_rows, (columns + block - 1) // block, (rows + tile_rows - 1) // tile_rows
