"""Squared ReLU, element by element in float32. Backward rectifies again."""

import torch
import triton.language as tl
from torch import Tensor

from liger_core import relu_squared
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, divide, place


@kernel
def _forward(y, x, up, rows, columns, blocks, x_stride, up_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, first, column, inside = place(rows, columns, blocks, ROWS, BLOCK)
    xs = tl.load(x + (row * x_stride + first) + column, inside, other=0.0).to(tl.float32)
    # No tl.maximum: it would lose a NaN.
    ys = tl.where(xs <= 0.0, 0.0, xs * xs)
    if up is not None:
        ys *= tl.load(up + (row * up_stride + first) + column, inside, other=0.0).to(tl.float32)
    tl.store(y + (row * columns + first) + column, ys, inside)


@kernel
def _backward(
    dx, dup, dy, x, up, rows, columns, blocks, dy_stride, x_stride, up_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, first, column, inside = place(rows, columns, blocks, ROWS, BLOCK)
    at = (row * columns + first) + column
    # All loads come before the first store: after it, they would wait for it.
    dys = tl.load(dy + (row * dy_stride + first) + column, inside, other=0.0).to(tl.float32)
    xs = tl.load(x + (row * x_stride + first) + column, inside, other=0.0).to(tl.float32)
    if dx is not None:
        slope = dys
        if up is not None:
            slope *= tl.load(up + (row * up_stride + first) + column, inside, other=0.0).to(tl.float32)
    if dup is not None:
        tl.store(dup + at, dys * tl.where(xs <= 0.0, 0.0, xs * xs), inside)
    if dx is not None:
        tl.store(dx + at, tl.where(xs <= 0.0, 0.0, 2.0 * (xs * slope)), inside)


@implements(relu_squared)
def forward(needs: Needs, x: Tensor, up: Tensor | None = None) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    saved = (x, up) if True in needs else ()
    # Contiguous tensors are one long row.
    columns = x.numel() if x.is_contiguous() and (up is None or up.is_contiguous()) else x.shape[-1]
    rows = x.numel() // columns
    tile_rows, block, blocks, programs = divide(rows, columns)
    x, x_stride = as_rows(x)
    up, up_stride = (None, 0) if up is None else as_rows(up)
    _forward[(programs,)](y, x, up, rows, columns, blocks, x_stride, up_stride, ROWS=tile_rows, BLOCK=block)
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, up = saved
    needs_x, needs_up = needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dup = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_up else None
    contiguous = dy.is_contiguous() and x.is_contiguous() and (up is None or up.is_contiguous())
    columns = x.numel() if contiguous else x.shape[-1]
    rows = x.numel() // columns
    tile_rows, block, blocks, programs = divide(rows, columns)
    (dy, dy_stride), (x, x_stride) = as_rows(dy), as_rows(x)
    up, up_stride = (None, 0) if up is None else as_rows(up)
    _backward[(programs,)](
        dx, dup, dy, x, up, rows, columns, blocks, dy_stride, x_stride, up_stride, ROWS=tile_rows, BLOCK=block
    )  # fmt: skip
    return dx, dup
