"""Squared ReLU, element by element in float32. Backward rectifies again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import relu_squared
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._rows import as_rows, element_tiles

# Float32 tiles by the estimate of the Unified Buffer, for elements of 2 and of 4 bytes.
FORWARD_TILES = {2: 4, 4: 5}
BACKWARD_TILES = {2: 6, 4: 7}


@triton.jit
def _forward(y, x, up, rows, columns, x_stride, up_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row = tl.cast(tile // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        # No tl.maximum: it would lose a NaN.
        ys = tl.where(xs <= 0.0, 0.0, xs * xs)
        if up is not None:
            ys *= tl.load(up + row * up_stride + column, inside, other=0.0).to(tl.float32)
        tl.store(y + row * columns + column, ys, inside)


@triton.jit
def _backward(
    dx, dup, dy, x, up, rows, columns, dy_stride, x_stride, up_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row = tl.cast(tile // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        if dup is not None:
            tl.store(dup + row * columns + column, dys * tl.where(xs <= 0.0, 0.0, xs * xs), inside)
        if dx is not None:
            slope = dys
            if up is not None:
                slope *= tl.load(up + row * up_stride + column, inside, other=0.0).to(tl.float32)
            tl.store(dx + row * columns + column, tl.where(xs <= 0.0, 0.0, 2.0 * (xs * slope)), inside)


@implements(relu_squared)
def forward(needs: Needs, x: Tensor, up: Tensor | None = None) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    saved = (x, up) if True in needs else ()
    # Contiguous tensors are one long row.
    columns = x.numel() if x.is_contiguous() and (up is None or up.is_contiguous()) else x.shape[-1]
    rows = x.numel() // columns
    programs, tile_rows, block = element_tiles(x, rows, columns, FORWARD_TILES[x.element_size()])
    x, x_stride = as_rows(x)
    up, up_stride = (None, 0) if up is None else as_rows(up)
    _forward[(programs,)](y, x, up, rows, columns, x_stride, up_stride, ROWS=tile_rows, BLOCK=block)
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, up = saved
    needs_x, needs_up = needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dup = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_up else None
    contiguous = dy.is_contiguous() and x.is_contiguous() and (up is None or up.is_contiguous())
    columns = x.numel() if contiguous else x.shape[-1]
    rows = x.numel() // columns
    programs, tile_rows, block = element_tiles(x, rows, columns, BACKWARD_TILES[x.element_size()])
    (dy, dy_stride), (x, x_stride) = as_rows(dy), as_rows(x)
    up, up_stride = (None, 0) if up is None else as_rows(up)
    _backward[(programs,)](
        dx, dup, dy, x, up, rows, columns, dy_stride, x_stride, up_stride, ROWS=tile_rows, BLOCK=block
    )
    return dx, dup
