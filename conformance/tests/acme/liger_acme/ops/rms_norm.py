"""RMS norm: one program per row, the row in one block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import rms_norm
from liger_core.contract import Needs, Saved, implements


@triton.jit
def _forward(y, inverse_rms, x, weight, stride, hidden, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    xs = tl.load(x + row * stride + columns, inside, other=0.0).to(tl.float32)
    ws = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(xs * xs, 0) / hidden + eps)
    tl.store(inverse_rms + row, r)
    tl.store(y + row * hidden + columns, xs * r * (offset + ws), inside)


@triton.jit
def _backward(dx, dweight_rows, dy, x, weight, inverse_rms, stride, hidden, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    r = tl.load(inverse_rms + row)
    normed = tl.load(x + row * stride + columns, inside, other=0.0).to(tl.float32) * r
    ds = tl.load(dy + row * hidden + columns, inside, other=0.0).to(tl.float32)
    g = ds * (offset + tl.load(weight + columns, inside, other=0.0).to(tl.float32))
    mean = tl.sum(g * normed, 0) / hidden
    tl.store(dx + row * hidden + columns, (g - normed * mean) * r, inside)
    tl.store(dweight_rows + row * hidden + columns, ds * normed, inside)


def _rows(x: Tensor) -> Tensor:
    """x as rows whose elements lie side by side; the rows may lie apart."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


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
    rows = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse_rms = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    weight = weight.contiguous()
    BLOCK = triton.next_power_of_2(x.shape[-1])
    _forward[(rows.shape[0],)](y, inverse_rms, rows, weight, rows.stride(0), x.shape[-1], eps, offset, BLOCK)
    return y, (x, weight, inverse_rms) if any(needs) else ()


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    x, weight, inverse_rms = saved
    rows = _rows(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    BLOCK = triton.next_power_of_2(x.shape[-1])
    _backward[(rows.shape[0],)](
        dx, parts, dy.contiguous(), rows, weight, inverse_rms, rows.stride(0), x.shape[-1], offset, BLOCK
    )
    dweight = parts.sum(0).to(weight.dtype)
    return dx if needs[0] else None, dweight if needs[1] else None


def refuses(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
) -> str | None:
    if weight is None:
        return "weight None is not written"
    return None if casting_mode == "llama" else f"casting_mode {casting_mode!r} is not written"
