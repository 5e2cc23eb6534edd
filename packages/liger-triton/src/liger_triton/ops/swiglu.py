"""SwiGLU, element by element in float32. Backward computes the sigmoid again."""

import torch
import triton.language as tl
from torch import Tensor

from liger_core import swiglu
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, divide, place


@kernel
def _forward(
    y, gate, up, rows, columns, blocks, gate_stride, up_stride, gate_multiplier, down_multiplier,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    gate_multiplier = tl.cast(gate_multiplier, tl.float32)
    down_multiplier = tl.cast(down_multiplier, tl.float32)
    row, first, column, inside = place(rows, columns, blocks, ROWS, BLOCK)
    a = tl.load(gate + (row * gate_stride + first) + column, inside, other=0.0).to(tl.float32) * gate_multiplier
    us = tl.load(up + (row * up_stride + first) + column, inside, other=0.0).to(tl.float32)
    tl.store(y + (row * columns + first) + column, a * tl.sigmoid(a) * us * down_multiplier, inside)


@kernel
def _backward(
    dgate, dup, dy, gate, up, rows, columns, blocks, dy_stride, gate_stride, up_stride, gate_multiplier, down_multiplier,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # torch.compile passes floats as float64.
    gate_multiplier = tl.cast(gate_multiplier, tl.float32)
    down_multiplier = tl.cast(down_multiplier, tl.float32)
    row, first, column, inside = place(rows, columns, blocks, ROWS, BLOCK)
    at = (row * columns + first) + column
    dys = tl.load(dy + (row * dy_stride + first) + column, inside, other=0.0).to(tl.float32) * down_multiplier
    a = tl.load(gate + (row * gate_stride + first) + column, inside, other=0.0).to(tl.float32) * gate_multiplier
    s = tl.sigmoid(a)
    if dup is not None:
        tl.store(dup + at, dys * (a * s), inside)
    if dgate is not None:
        us = tl.load(up + (row * up_stride + first) + column, inside, other=0.0).to(tl.float32)
        tl.store(dgate + at, dys * us * gate_multiplier * (s * (1.0 + a * (1.0 - s))), inside)


@implements(swiglu)
def forward(
    needs: Needs, gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> tuple[Tensor, Saved]:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    saved = (gate, up) if True in needs else ()
    # Contiguous tensors are one long row.
    columns = gate.numel() if gate.is_contiguous() and up.is_contiguous() else gate.shape[-1]
    rows = gate.numel() // columns
    tile_rows, block, blocks, programs = divide(rows, columns)
    (gate, gate_stride), (up, up_stride) = as_rows(gate), as_rows(up)
    _forward[(programs,)](
        y, gate, up, rows, columns, blocks, gate_stride, up_stride, gate_multiplier, down_multiplier,
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
    tile_rows, block, blocks, programs = divide(rows, columns)
    (dy, dy_stride), (gate, gate_stride), (up, up_stride) = as_rows(dy), as_rows(gate), as_rows(up)
    _backward[(programs,)](
        dgate, dup, dy, gate, up, rows, columns, blocks, dy_stride, gate_stride, up_stride, gate_multiplier, down_multiplier,
        ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return dgate, dup
