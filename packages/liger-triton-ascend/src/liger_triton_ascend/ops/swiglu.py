"""SwiGLU, element by element in float32. Backward computes the sigmoid again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import swiglu
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._rows import as_rows, element_tiles

# Float32 tiles by the estimate of the Unified Buffer, for elements of 2 and of 4 bytes.
FORWARD_TILES = {2: 4, 4: 5}
BACKWARD_TILES = {2: 6, 4: 7}


@triton.jit
def _forward(
    y, gate, up, rows, columns, gate_stride, up_stride, gate_multiplier, down_multiplier,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row = tl.cast(tile // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
        a = tl.load(gate + row * gate_stride + column, inside, other=0.0).to(tl.float32) * gate_multiplier
        us = tl.load(up + row * up_stride + column, inside, other=0.0).to(tl.float32)
        ys = a / (1.0 + tl.exp(-a)) * us * down_multiplier
        tl.store(y + row * columns + column, ys, inside)


@triton.jit
def _backward(
    dgate, dup, dy, gate, up, rows, columns, dy_stride, gate_stride, up_stride, gate_multiplier, down_multiplier,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row = tl.cast(tile // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.cast(tile % blocks, tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
        dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32) * down_multiplier
        a = tl.load(gate + row * gate_stride + column, inside, other=0.0).to(tl.float32) * gate_multiplier
        s = 1.0 / (1.0 + tl.exp(-a))
        silu = a * s
        if dup is not None:
            tl.store(dup + row * columns + column, dys * silu, inside)
        if dgate is not None:
            us = tl.load(up + row * up_stride + column, inside, other=0.0).to(tl.float32)
            dgates = dys * us * gate_multiplier * (s + silu * (1.0 - s))
            tl.store(dgate + row * columns + column, dgates, inside)


@implements(swiglu)
def forward(
    needs: Needs, gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> tuple[Tensor, Saved]:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    saved = (gate, up) if True in needs else ()
    # Contiguous tensors are one long row.
    columns = gate.numel() if gate.is_contiguous() and up.is_contiguous() else gate.shape[-1]
    rows = gate.numel() // columns
    (gate, gate_stride), (up, up_stride) = as_rows(gate), as_rows(up)
    programs, tile_rows, block = element_tiles(gate, rows, columns, FORWARD_TILES[gate.element_size()])
    _forward[(programs,)](
        y, gate, up, rows, columns, gate_stride, up_stride, gate_multiplier, down_multiplier,
        ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return y, saved


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, gate_multiplier: float, down_multiplier: float
) -> tuple[Tensor | None, ...]:
    gate, up = saved
    needs_gate, needs_up = needs
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs_gate else None
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if needs_up else None
    contiguous = dy.is_contiguous() and gate.is_contiguous() and up.is_contiguous()
    columns = gate.numel() if contiguous else gate.shape[-1]
    rows = gate.numel() // columns
    (dy, dy_stride), (gate, gate_stride), (up, up_stride) = as_rows(dy), as_rows(gate), as_rows(up)
    programs, tile_rows, block = element_tiles(gate, rows, columns, BACKWARD_TILES[gate.element_size()])
    _backward[(programs,)](
        dgate, dup, dy, gate, up, rows, columns, dy_stride, gate_stride, up_stride, gate_multiplier, down_multiplier,
        ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return dgate, dup
