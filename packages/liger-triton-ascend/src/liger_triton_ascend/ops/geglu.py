"""GEGLU, element by element in float32. Backward computes the GELU again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import geglu
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._rows import as_rows, element_tiles

# Float32 tiles alive at once, by the suite's estimate of the Unified Buffer, with two for each tile that is transferred.
FORWARD_TILES = 7
BACKWARD_TILES = 10


@triton.jit
def gelu(xs):
    """gelu(x) = x·σ(z), and its derivative. Here z = √(8/π)·(x + 0.044715·x³), since 1 + tanh(z/2) = 2σ(z)."""
    square = xs * xs
    q = tl.exp(-tl.abs(xs * (1.5957691216057308 + 0.07135481627260025 * square)))  # e^−|z|: never infinite
    r = 1.0 / (1.0 + q)
    p = q * r
    sigmoid = tl.where(xs > 0.0, r, p)
    slope = 1.5957691216057308 + 0.21406444881780076 * square
    return xs * sigmoid, sigmoid + xs * (p * r) * slope


@triton.jit
def _forward(y, gate, up, rows, columns, gate_stride, up_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row = tl.cast(tile // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
        xs = tl.load(gate + row * gate_stride + column, inside, other=0.0).to(tl.float32)
        us = tl.load(up + row * up_stride + column, inside, other=0.0).to(tl.float32)
        value, _ = gelu(xs)
        tl.store(y + row * columns + column, value * us, inside)


@triton.jit
def _backward(
    dgate, dup, dy, gate, up, rows, columns, dy_stride, gate_stride, up_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row = tl.cast(tile // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        value, derivative = gelu(tl.load(gate + row * gate_stride + column, inside, other=0.0).to(tl.float32))
        if dup is not None:
            tl.store(dup + row * columns + column, dys * value, inside)
        if dgate is not None:
            us = tl.load(up + row * up_stride + column, inside, other=0.0).to(tl.float32)
            tl.store(dgate + row * columns + column, dys * us * derivative, inside)


@implements(geglu)
def forward(needs: Needs, gate: Tensor, up: Tensor) -> tuple[Tensor, Saved]:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    saved = (gate, up) if True in needs else ()
    # Contiguous tensors are one long row.
    columns = gate.numel() if gate.is_contiguous() and up.is_contiguous() else gate.shape[-1]
    rows = gate.numel() // columns
    (gate, gate_stride), (up, up_stride) = as_rows(gate), as_rows(up)
    programs, tile_rows, block = element_tiles(gate, rows, columns, FORWARD_TILES)
    _forward[(programs,)](y, gate, up, rows, columns, gate_stride, up_stride, ROWS=tile_rows, BLOCK=block)
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = saved
    needs_gate, needs_up = needs
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs_gate else None
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if needs_up else None
    contiguous = dy.is_contiguous() and gate.is_contiguous() and up.is_contiguous()
    columns = gate.numel() if contiguous else gate.shape[-1]
    rows = gate.numel() // columns
    (dy, dy_stride), (gate, gate_stride), (up, up_stride) = as_rows(dy), as_rows(gate), as_rows(up)
    programs, tile_rows, block = element_tiles(gate, rows, columns, BACKWARD_TILES)
    _backward[(programs,)](
        dgate, dup, dy, gate, up, rows, columns, dy_stride, gate_stride, up_stride, ROWS=tile_rows, BLOCK=block
    )
    return dgate, dup
