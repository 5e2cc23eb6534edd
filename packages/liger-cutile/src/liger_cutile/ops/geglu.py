"""GEGLU, element by element in float32. Backward computes the GELU again."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import geglu
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._launch import ConstInt, given, launch, within_grid
from liger_cutile.ops._rows import as_one_row, blocks, gather, places, tiles
from liger_cutile.ops.swiglu import TILE


@ct.function
def gelu(xs):
    """gelu(x) = x·σ(z), and its derivative. Here z = √(8/π)·(x + 0.044715·x³), since 1 + tanh(z/2) = 2σ(z)."""
    square = xs * xs
    # e^−|z|: never infinite
    q = ct.exp2(-ct.abs(xs * (2.302208198144325 + 0.1029432395800235 * square)), flush_to_zero=True)
    r = ct.truediv(1.0, 1.0 + q, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    p = q * r
    sigmoid = ct.where(xs > 0.0, r, p)
    slope = 1.5957691216057308 + 0.21406444881780073 * square
    return xs * sigmoid, sigmoid + xs * (p * r) * slope


@ct.kernel
def _forward(y, gate, up, ROWS: ConstInt, BLOCK: ConstInt):
    at = places(ROWS, BLOCK)
    xs = gather(gate, at)
    us = gather(up, at)
    value, _ = gelu(xs)
    ct.scatter(y, at, ct.astype(value * us, y.dtype))


@ct.kernel
def _backward(dgate, dup, dy, gate, up, ROWS: ConstInt, BLOCK: ConstInt):
    at = places(ROWS, BLOCK)
    dys = gather(dy, at)
    xs = gather(gate, at)
    us = gather(up, at)
    value, derivative = gelu(xs)
    if given(dup):
        ct.scatter(dup, at, ct.astype(dys * value, dup.dtype))
    if given(dgate):
        ct.scatter(dgate, at, ct.astype(dys * us * derivative, dgate.dtype))


@opaque(writes=("y",))
def _launch_forward(y: Tensor, gate: Tensor, up: Tensor) -> None:
    y, gate, up = as_one_row(y, gate, up)
    tile_rows, block, across = tiles(*y.shape, TILE)
    for tensors in within_grid(tile_rows, y, gate, up):
        launch(_forward, (across, blocks(tensors[0].shape[0], tile_rows)), *tensors, tile_rows, block)


@opaque(writes=("dgate", "dup"))
def _launch_backward(dgate: Tensor | None, dup: Tensor | None, dy: Tensor, gate: Tensor, up: Tensor) -> None:
    dy, gate, up = as_one_row(dy, gate, up)
    dgate, dup = (None if x is None else x.view_as(dy) for x in (dgate, dup))
    tile_rows, block, across = tiles(*dy.shape, TILE)
    for tensors in within_grid(tile_rows, dgate, dup, dy, gate, up):
        launch(_backward, (across, blocks(tensors[2].shape[0], tile_rows)), *tensors, tile_rows, block)


@implements(geglu)
def forward(needs: Needs, gate: Tensor, up: Tensor) -> tuple[Tensor, Saved]:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch_forward(y, gate, up)
    return y, (gate, up) if True in needs else ()


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = saved
    needs_gate, needs_up = needs
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs_gate else None
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if needs_up else None
    _launch_backward(dgate, dup, dy, gate, up)
    return dgate, dup
