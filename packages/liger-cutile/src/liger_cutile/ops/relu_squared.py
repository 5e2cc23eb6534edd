"""Squared ReLU, element by element in float32. Backward rectifies again."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import relu_squared
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._launch import ConstInt, given, launch, within_grid
from liger_cutile.ops._rows import as_one_row, blocks, gather, places, tiles

# Elements of a tile: eight per thread of four warps, one 16-byte load of bf16 from each tensor, as in swiglu.
TILE = 1024


@ct.kernel
def _forward(y, x, up, ROWS: ConstInt, BLOCK: ConstInt):
    at = places(ROWS, BLOCK)
    xs = gather(x, at)
    # No ct.maximum: it would lose a NaN.
    ys = ct.where(xs <= 0.0, 0.0, xs * xs)
    if given(up):
        ys = ys * gather(up, at)
    ct.scatter(y, at, ct.astype(ys, y.dtype))


@ct.kernel
def _backward(dx, dup, dy, x, up, ROWS: ConstInt, BLOCK: ConstInt):
    at = places(ROWS, BLOCK)
    dys = gather(dy, at)
    xs = gather(x, at)
    slope = dys
    if given(dx) and given(up):
        slope = dys * gather(up, at)
    if given(dup):
        ct.scatter(dup, at, ct.astype(dys * ct.where(xs <= 0.0, 0.0, xs * xs), dup.dtype))
    if given(dx):
        ct.scatter(dx, at, ct.astype(ct.where(xs <= 0.0, 0.0, 2.0 * (xs * slope)), dx.dtype))


@opaque(writes=("y",))
def _launch_forward(y: Tensor, x: Tensor, up: Tensor | None) -> None:
    y, x, *rest = as_one_row(*(t for t in (y, x, up) if t is not None))
    up = rest[0] if rest else None
    tile_rows, block, across = tiles(*y.shape, TILE)
    for tensors in within_grid(tile_rows, y, x, up):
        grid = across, blocks(tensors[0].shape[0], tile_rows)
        launch(_forward, grid, *tensors, tile_rows, block)


@opaque(writes=("dx", "dup"))
def _launch_backward(dx: Tensor | None, dup: Tensor | None, dy: Tensor, x: Tensor, up: Tensor | None) -> None:
    dy, x, *rest = as_one_row(*(t for t in (dy, x, up) if t is not None))
    up = rest[0] if rest else None
    dx, dup = (None if t is None else t.view_as(dy) for t in (dx, dup))
    tile_rows, block, across = tiles(*dy.shape, TILE)
    for tensors in within_grid(tile_rows, dx, dup, dy, x, up):
        grid = across, blocks(tensors[2].shape[0], tile_rows)
        launch(_backward, grid, *tensors, tile_rows, block)


@implements(relu_squared)
def forward(needs: Needs, x: Tensor, up: Tensor | None = None) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_forward(y, x, up)
    return y, (x, up) if True in needs else ()


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, up = saved
    needs_x, needs_up = needs
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dup = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_up else None
    _launch_backward(dx, dup, dy, x, up)
    return dx, dup
