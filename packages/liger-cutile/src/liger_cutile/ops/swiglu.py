"""SwiGLU: one element after another, in float32; backward computes the sigmoid again."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import swiglu
from liger_core.contract import Needs, Saved, implements
from liger_core.opaque import opaque
from liger_cutile.ops._exp import exp_like
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import as_one_row, blocks, power_of_2
from liger_cutile.ops._tiles import load

# Elements of a tile: eight per thread of four warps, one 16-byte load of bf16 from each tensor.
TILE = 1024


@ct.function
def _place(array, ROWS, BLOCK):
    """The tile that this block takes: its row and column, in tiles."""
    across = ct.num_tiles(array, axis=1, shape=(ROWS, BLOCK))
    return ct.bid(0) // across, ct.bid(0) % across


@ct.function
def _silu(a, array):
    """a · sigmoid(a), and its derivative, for an array of a dtype."""
    q = exp_like(-ct.abs(a), array)  # never infinite
    r = ct.truediv(1.0, 1.0 + q, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    p = q * r
    sigmoid = ct.where(a > 0.0, r, p)
    return a * sigmoid, sigmoid + a * (p * r)


@ct.kernel
def _forward(y, gate, up, gate_multiplier, down_multiplier, ROWS: ConstInt, BLOCK: ConstInt):
    place = _place(y, ROWS, BLOCK)
    a = load(gate, place, ROWS, BLOCK) * gate_multiplier
    us = load(up, place, ROWS, BLOCK)
    silu, _ = _silu(a, gate)
    ct.store(y, place, ct.astype(silu * us * down_multiplier, y.dtype))


@ct.kernel
def _backward(dgate, dup, dy, gate, up, gate_multiplier, down_multiplier, ROWS: ConstInt, BLOCK: ConstInt):
    place = _place(dy, ROWS, BLOCK)
    dys = load(dy, place, ROWS, BLOCK) * down_multiplier
    a = load(gate, place, ROWS, BLOCK) * gate_multiplier
    silu, derivative = _silu(a, gate)
    if given(dup):
        ct.store(dup, place, ct.astype(dys * silu, dup.dtype))
    if given(dgate):
        us = load(up, place, ROWS, BLOCK)
        ct.store(dgate, place, ct.astype(dys * us * gate_multiplier * derivative, dgate.dtype))


@opaque(writes=("y",))
def _launch_forward(y: Tensor, gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> None:
    y, gate, up = as_one_row(y, gate, up)
    rows, block, grid = _tiles(*y.shape)
    launch(_forward, grid, y, gate, up, float(gate_multiplier), float(down_multiplier), rows, block)


@opaque(writes=("dgate", "dup"))
def _launch_backward(
    dgate: Tensor | None,
    dup: Tensor | None,
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_multiplier: float,
    down_multiplier: float,
) -> None:
    dy, gate, up = as_one_row(dy, gate, up)
    dgate, dup = (None if x is None else x.view(dy.shape) for x in (dgate, dup))
    rows, block, grid = _tiles(*dy.shape)
    launch(_backward, grid, dgate, dup, dy, gate, up, float(gate_multiplier), float(down_multiplier), rows, block)


def _tiles(rows: int, columns: int) -> tuple[int, int, tuple[int]]:
    """Rows and columns of a tile, and the grid that covers all of them."""
    block = min(power_of_2(columns), TILE)
    tile_rows = TILE // block if rows > 1 else 1
    return tile_rows, block, (blocks(rows, tile_rows) * blocks(columns, block),)


@implements(swiglu)
def forward(
    needs: Needs, gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> tuple[Tensor, Saved]:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch_forward(y, gate, up, gate_multiplier, down_multiplier)
    return y, (gate, up) if True in needs else ()


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, gate_multiplier: float, down_multiplier: float
) -> tuple[Tensor | None, ...]:
    gate, up = saved
    needs_gate, needs_up = needs
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs_gate else None
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if needs_up else None
    _launch_backward(dgate, dup, dy, gate, up, gate_multiplier, down_multiplier)
    return dgate, dup
