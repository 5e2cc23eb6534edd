"""GEGLU, element by element in float32. Backward computes the GELU again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import geglu
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, divide, place


@triton.jit
def gelu(xs):
    """gelu(x) = x·σ(z), and its derivative. Here z = √(8/π)·(x + 0.044715·x³), since 1 + tanh(z/2) = 2σ(z)."""
    square = xs * xs
    q = tl.exp2(-tl.abs(xs * (2.302208198144325 + 0.1029432395800235 * square)))  # e^−|z|: never infinite
    r = 1.0 / (1.0 + q)
    p = q * r
    sigmoid = tl.where(xs > 0.0, r, p)
    slope = 1.5957691216057308 + 0.21406444881780073 * square
    return xs * sigmoid, sigmoid + xs * (p * r) * slope


@kernel
def _forward(
    y, gate, up, rows, columns, blocks, gate_stride, up_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, first, column, inside = place(rows, columns, blocks, ROWS, BLOCK)
    xs = tl.load(gate + (row * gate_stride + first) + column, inside, other=0.0).to(tl.float32)
    us = tl.load(up + (row * up_stride + first) + column, inside, other=0.0).to(tl.float32)
    tl.store(y + (row * columns + first) + column, gelu(xs)[0] * us, inside)


@kernel
def _backward(
    dgate, dup, dy, gate, up, rows, columns, blocks, dy_stride, gate_stride, up_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first, column, inside = place(rows, columns, blocks, ROWS, BLOCK)
    at = (row * columns + first) + column
    # All loads come before the first store: after it, they would wait for it.
    dys = tl.load(dy + (row * dy_stride + first) + column, inside, other=0.0).to(tl.float32)
    xs = tl.load(gate + (row * gate_stride + first) + column, inside, other=0.0).to(tl.float32)
    if dgate is not None:
        us = tl.load(up + (row * up_stride + first) + column, inside, other=0.0).to(tl.float32)
    value, derivative = gelu(xs)
    if dup is not None:
        tl.store(dup + at, dys * value, inside)
    if dgate is not None:
        tl.store(dgate + at, dys * us * derivative, inside)


@implements(geglu)
def forward(needs: Needs, gate: Tensor, up: Tensor) -> tuple[Tensor, Saved]:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    saved = (gate, up) if True in needs else ()
    # Contiguous tensors are one long row.
    columns = gate.numel() if gate.is_contiguous() and up.is_contiguous() else gate.shape[-1]
    rows = gate.numel() // columns
    tile_rows, block, blocks, programs = divide(rows, columns)
    (gate, gate_stride), (up, up_stride) = as_rows(gate), as_rows(up)
    _forward[(programs,)](
        y, gate, up, rows, columns, blocks, gate_stride, up_stride,
        ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
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
        dgate, dup, dy, gate, up, rows, columns, blocks, dy_stride, gate_stride, up_stride,
        ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return dgate, dup
