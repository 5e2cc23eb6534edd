"""RMS norm: rows that fit the Unified Buffer are read once, longer ones twice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import rms_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._rms import inverse_rms_of, load_scale, rounded, square
from liger_triton_ascend.ops._rows import as_rows, row_tiles

# Float32 tiles alive at once, by the suite's estimate of the Unified Buffer, with two for each tile that is transferred.
FORWARD_TILES = 4
RESIDUAL_TILES = 1
"""Additional tiles with a residual."""
BACKWARD_TILES = 9
LONG_TILES = 5


@triton.jit
def _load(x, residual, x_at, residual_at, inside):
    """x, or x + residual rounded to x's dtype."""
    xs = tl.load(x + x_at, inside, other=0.0)
    if residual is not None:
        xs = (xs.to(tl.float32) + tl.load(residual + residual_at, inside, other=0.0).to(tl.float32)).to(xs.dtype)
    return xs


@triton.jit
def _forward(
    y, h, inverse_rms, x, residual, weight, rows, columns, x_stride, residual_stride, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    if weight is not None:
        scale = load_scale(weight, column, column < columns, offset, NATIVE)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        xs = _load(x, residual, row * x_stride + column, row * residual_stride + column, inside)
        if h is not None:
            tl.store(h + row * columns + column, xs, inside)
        r = inverse_rms_of(tl.sum(square(xs, NATIVE), 1), columns, eps, xs.dtype, NATIVE)
        if inverse_rms is not None:
            flat = first + tl.arange(0, ROWS)
            tl.store(inverse_rms + flat, r, flat < rows)
        ys = xs.to(tl.float32) * r[:, None]
        if weight is not None:
            ys = rounded(ys, xs.dtype, ROUND) * scale
        tl.store(y + row * columns + column, ys, inside)


@triton.jit
def _forward_long(
    y, h, inverse_rms, x, residual, weight, rows, columns, x_stride, residual_stride, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x_at, residual_at, at = row * x_stride, row * residual_stride, row * columns
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            squares += square(_load(x, residual, x_at + column, residual_at + column, column < columns), NATIVE)
        r = inverse_rms_of(tl.sum(squares, 0), columns, eps, x.dtype.element_ty, NATIVE)
        if inverse_rms is not None:
            tl.store(inverse_rms + row, r)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            xs = _load(x, residual, x_at + column, residual_at + column, inside)
            if h is not None:
                tl.store(h + at + column, xs, inside)
            ys = xs.to(tl.float32) * r
            if weight is not None:
                ys = rounded(ys, xs.dtype, ROUND) * load_scale(weight, column, inside, offset, NATIVE)
            tl.store(y + at + column, ys, inside)


@triton.jit
def _backward(
    dx, partial, dy, dh, x, weight, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    column = lane[None, :]
    if weight is not None:
        scale = load_scale(weight, column, column < columns, offset, False)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        flat = first + tl.arange(0, ROWS)
        r = tl.load(inverse_rms + flat, flat < rows, other=0.0)
        normed = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32) * r[:, None]
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        if partial is not None:
            dweight += tl.sum(dys * normed, 0)
        if dx is not None:
            if weight is not None:
                dys *= scale
            slope = tl.sum(dys * normed, 1) / columns
            dxs = (dys - normed * slope[:, None]) * r[:, None]
            if dh is not None:
                dxs += tl.load(dh + row * dh_stride + column, inside, other=0.0).to(tl.float32)
            tl.store(dx + row * columns + column, dxs, inside)
    if partial is not None:
        tl.store(partial + tl.program_id(0) * tl.cast(columns, tl.int64) + lane, dweight, lane < columns)


@triton.jit
def _dx_long(
    dx, dy, dh, x, weight, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset, BLOCK: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x_at, dy_at, dh_at, at = row * x_stride, row * dy_stride, row * dh_stride, row * columns
        r = tl.load(inverse_rms + row)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            g = tl.load(dy + dy_at + column, inside, other=0.0).to(tl.float32)
            if weight is not None:
                g *= load_scale(weight, column, inside, offset, False)
            products += g * tl.load(x + x_at + column, inside, other=0.0).to(tl.float32)
        slope = tl.sum(products, 0) / columns * r * r
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            g = tl.load(dy + dy_at + column, inside, other=0.0).to(tl.float32)
            if weight is not None:
                g *= load_scale(weight, column, inside, offset, False)
            dxs = (g - tl.load(x + x_at + column, inside, other=0.0).to(tl.float32) * slope) * r
            if dh is not None:
                dxs += tl.load(dh + dh_at + column, inside, other=0.0).to(tl.float32)
            tl.store(dx + at + column, dxs, inside)


@triton.jit
def _dweight_long(
    partial, dy, x, inverse_rms, rows, columns, dy_stride, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program adds up its own rows, one block of columns after another."""
    for start in range(0, columns, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        column = lane[None, :]
        sums = tl.zeros((BLOCK,), tl.float32)
        for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
            first = tl.cast(tile, tl.int64) * ROWS
            row = first + tl.arange(0, ROWS)[:, None]
            inside = (row < rows) & (column < columns)
            flat = first + tl.arange(0, ROWS)
            r = tl.load(inverse_rms + flat, flat < rows, other=0.0)
            normed = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32) * r[:, None]
            sums += tl.sum(tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32) * normed, 0)
        tl.store(partial + tl.program_id(0) * tl.cast(columns, tl.int64) + lane, sums, lane < columns)


def launch_forward(
    grad: bool, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, h = x + residual (None without a residual), and the inverse RMS of each row (None unless `grad`)."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h, residual_stride = None, 0
    if residual is not None:
        h = torch.empty_like(y)
        residual, residual_stride = as_rows(residual)
    inverse_rms = torch.empty(rows, dtype=torch.float32, device=x.device) if grad else None
    x, x_stride = as_rows(x)
    if weight is not None:
        weight = weight.contiguous()
    rounds, native = casting_mode != "gemma", casting_mode == "none"
    programs, tile_rows, block = row_tiles(
        x, rows, columns, FORWARD_TILES + (0 if residual is None else RESIDUAL_TILES)
    )
    if block < columns:
        programs, _, block = row_tiles(x, rows, columns, LONG_TILES)
        _forward_long[(programs,)](
            y, h, inverse_rms, x, residual, weight, rows, columns, x_stride, residual_stride, eps, offset,
            ROUND=rounds, NATIVE=native, BLOCK=block,
        )  # fmt: skip
    else:
        _forward[(programs,)](
            y, h, inverse_rms, x, residual, weight, rows, columns, x_stride, residual_stride, eps, offset,
            ROUND=rounds, NATIVE=native, ROWS=tile_rows, BLOCK=block,
        )  # fmt: skip
    return y, h, inverse_rms


def launch_backward(
    needs_x: bool,
    needs_weight: bool,
    dy: Tensor,
    dh: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    inverse_rms: Tensor,
    offset: float,
) -> tuple[Tensor | None, Tensor | None]:
    """dx, plus `dh` if there is one, and dweight; each if it is needed."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dh_stride = 0
    if dh is not None:
        dh, dh_stride = as_rows(dh)
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    scale = None if weight is None else weight.contiguous()
    programs, tile_rows, block = row_tiles(x, rows, columns, BACKWARD_TILES)
    partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device) if needs_weight else None
    if block >= columns:
        _backward[(programs,)](
            dx, partial, dy, dh, x, scale, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
            ROWS=tile_rows, BLOCK=block,
        )  # fmt: skip
    else:
        if needs_x:
            _dx_long[(programs,)](
                dx, dy, dh, x, scale, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset, BLOCK=block
            )
        if needs_weight:
            _dweight_long[(programs,)](
                partial, dy, x, inverse_rms, rows, columns, dy_stride, x_stride, ROWS=tile_rows, BLOCK=block
            )
    return dx, partial.sum(0).to(weight.dtype) if needs_weight else None


@implements(rms_norm)
def forward(
    needs: Needs,
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Saved]:
    grad = True in needs
    y, _, inverse_rms = launch_forward(grad, x, None, weight, eps, offset, casting_mode)
    return y, (x, weight, inverse_rms) if grad else ()


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    x, weight, inverse_rms = saved
    return launch_backward(*needs, dy, None, x, weight, inverse_rms, offset)
