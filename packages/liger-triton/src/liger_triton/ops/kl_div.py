"""KL divergence: one pass over both tensors makes the loss and its gradient.

Forward makes the gradient, for a loss whose own gradient is 1. Backward reads and writes it once more only if that is another
number. Backward reads the target again and makes the gradient itself in three cases: the losses aren't reduced; in a trace; and
in float16, where the gradient could underflow before it is scaled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import kl_div
from liger_core.contract import Needs, Saved, SavedOnce, compiling, implements
from liger_triton.ops._divergences import (
    WRITTEN_TILE,
    leaves_first,
    new_sums,
    place,
    scale_,
    tiles_of,
    total,
    weight_of,
)
from liger_triton.ops._launch import kernel
from liger_triton.ops._math import exp
from liger_triton.ops._rows import as_rows


@triton.jit
def _term(x, t, eps, LOG_TARGET: tl.constexpr, EXACT: tl.constexpr):
    """The target's probability, and its term of the divergence."""
    if LOG_TARGET:
        y = exp(t, EXACT)
        log_y = t
    else:
        y = t
        log_y = tl.log(tl.maximum(t, eps))
    return y, tl.where(y == 0.0, 0.0, y * (log_y - x))


@kernel(do_not_specialize=["divisor"])
def _forward(
    losses, dlog_pred, sums, log_pred, target, rows, columns, blocks, log_pred_stride, target_stride, eps, divisor,
    LOG_TARGET: tl.constexpr, EXACT: tl.constexpr, LEAVES_FIRST: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    policy: tl.constexpr = "evict_first" if LEAVES_FIRST else ""
    eps = tl.cast(eps, tl.float32)  # torch.compile passes floats as float64
    absent = float("-inf") if LOG_TARGET else 0.0
    if dlog_pred is not None:
        scale = weight_of(None, divisor)
    sum_lanes = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, WHOLE, ROWS, BLOCK)
        x = tl.load(log_pred + row * log_pred_stride + column, inside, other=0.0, eviction_policy=policy).to(tl.float32)
        t = tl.load(target + row * target_stride + column, inside, other=absent, eviction_policy=policy).to(tl.float32)
        y, term = _term(x, t, eps, LOG_TARGET, EXACT)
        if losses is not None:
            tl.store(losses + row * columns + column, term, inside)
        else:
            sum_lanes += term
        if dlog_pred is not None:
            tl.store(dlog_pred + row * columns + column, -y * scale, inside)
    if losses is None:
        tl.store(sums + tl.program_id(0), tl.sum(sum_lanes))


@kernel(do_not_specialize=["divisor"])
def _backward(
    dlog_pred, dloss, target, rows, columns, blocks, dloss_stride, target_stride, divisor,
    LOG_TARGET: tl.constexpr, PER_ELEMENT: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Backwards: what forward read last may still be in the cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column, inside = place(tile, rows, columns, blocks, WHOLE, ROWS, BLOCK)
    y = tl.load(target + row * target_stride + column, inside, other=0.0).to(tl.float32)
    if LOG_TARGET:
        y = exp(y, EXACT)
    if PER_ELEMENT:
        scale = tl.load(dloss + row * dloss_stride + column, inside, other=0.0).to(tl.float32)
    else:
        scale = weight_of(None, divisor)
        if dloss is not None:
            scale *= tl.load(dloss)
    tl.store(dlog_pred + row * columns + column, -y * scale, inside)


def _divisor(rows: int, columns: int, reduction: str) -> int:
    return {"batchmean": rows, "mean": rows * columns}.get(reduction, 1)


@implements(kl_div)
def forward(
    needs: Needs,
    log_pred: Tensor,
    target: Tensor,
    *,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> tuple[Tensor, Saved]:
    rows, columns = log_pred.shape
    divisor = _divisor(rows, columns, reduction)
    now = needs[0] and reduction != "none" and log_pred.dtype is not torch.float16 and not compiling()
    losses = torch.empty_like(log_pred, memory_format=torch.contiguous_format) if reduction == "none" else None
    dlog_pred = torch.empty_like(log_pred, memory_format=torch.contiguous_format) if now else None
    tiles = tiles_of(log_pred, log_pred.is_contiguous() and target.is_contiguous())
    sums = new_sums(tiles, log_pred.device)
    xs, x_stride = as_rows(log_pred)
    ts, t_stride = as_rows(target)
    _forward[(sums.shape[0],)](
        losses, dlog_pred, sums, xs, ts, tiles.rows, tiles.columns, tiles.blocks, x_stride, t_stride, eps, divisor,
        LOG_TARGET=log_target, EXACT=log_pred.dtype is torch.float32,
        LEAVES_FIRST=leaves_first(log_pred, now or losses is not None), WHOLE=tiles.whole,
        ROWS=tiles.height, BLOCK=tiles.width, num_warps=4,
    )  # fmt: skip
    if losses is None:
        losses = total(sums, None, divisor)
    if not needs[0]:
        return losses, ()
    # Backward needs only the dtype of log_pred.
    like = log_pred.new_empty(0)
    return losses, (like, target, SavedOnce(dlog_pred)) if now else (like, target)


def backward(
    needs: Needs, saved: Saved, dloss: Tensor, *, reduction: str, log_target: bool, eps: float
) -> tuple[Tensor | None, ...]:
    like, target, *last = saved
    if not last:
        return (_gradient(like, target, dloss, reduction, log_target),)
    gradients = last[0].take()
    # If an earlier backward has taken the gradient, it is made again, with the same bits.
    dlog_pred = _gradient(like, target, None, reduction, log_target) if gradients is None else gradients[0]
    return (scale_(dlog_pred, dloss),)


def _gradient(like: Tensor, target: Tensor, dloss: Tensor | None, reduction: str, log_target: bool) -> Tensor:
    """The gradient of the loss times `dloss`; None for `dloss` is 1."""
    rows, columns = target.shape
    dlog_pred = torch.empty((rows, columns), dtype=like.dtype, device=target.device)
    flat, per_element, dloss_stride = target.is_contiguous(), reduction == "none", 0
    if per_element:
        flat = flat and dloss.is_contiguous()
        dloss, dloss_stride = as_rows(dloss)
    tiles = tiles_of(dlog_pred, flat, WRITTEN_TILE)
    target, target_stride = as_rows(target)
    _backward[(tiles.count,)](
        dlog_pred, dloss, target, tiles.rows, tiles.columns, tiles.blocks, dloss_stride, target_stride,
        _divisor(rows, columns, reduction), LOG_TARGET=log_target, PER_ELEMENT=per_element,
        EXACT=like.dtype is torch.float32, WHOLE=tiles.whole, ROWS=tiles.height, BLOCK=tiles.width, num_warps=4,
    )  # fmt: skip
    return dlog_pred
