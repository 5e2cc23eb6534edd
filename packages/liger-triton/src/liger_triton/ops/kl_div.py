"""KL divergence: both tensors are read once; backward needs the target alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import kl_div
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._divergences import exp, new_sums, place, tiles_of, total, weight_of
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows


@triton.jit
def _term(x, t, eps, LOG_TARGET: tl.constexpr, EXACT: tl.constexpr):
    if LOG_TARGET:
        y = exp(t, EXACT)
        log_y = t
    else:
        y = t
        log_y = tl.log(tl.maximum(t, eps))
    return tl.where(y == 0.0, 0.0, y * (log_y - x))


@kernel
def _forward(
    losses, sums, log_pred, target, rows, columns, blocks, log_pred_stride, target_stride, eps,
    LOG_TARGET: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)  # torch.compile passes floats as float64
    absent = float("-inf") if LOG_TARGET else 0.0
    sum_lanes = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, ROWS, BLOCK)
        x = tl.load(log_pred + row * log_pred_stride + column, inside, other=0.0).to(tl.float32)
        t = tl.load(target + row * target_stride + column, inside, other=absent).to(tl.float32)
        term = _term(x, t, eps, LOG_TARGET, EXACT)
        if losses is not None:
            tl.store(losses + row * columns + column, term, inside)
        else:
            sum_lanes += term
    if losses is None:
        tl.store(sums + tl.program_id(0), tl.sum(sum_lanes))


@kernel(do_not_specialize=["divisor"])
def _backward(
    dlog_pred, dloss, target, rows, columns, blocks, dloss_stride, target_stride, divisor,
    LOG_TARGET: tl.constexpr, PER_ELEMENT: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Backwards: what forward read last may be in the cache still.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column, inside = place(tile, rows, columns, blocks, ROWS, BLOCK)
    y = tl.load(target + row * target_stride + column, inside, other=0.0).to(tl.float32)
    if LOG_TARGET:
        y = exp(y, EXACT)
    if PER_ELEMENT:
        scale = tl.load(dloss + row * dloss_stride + column, inside, other=0.0).to(tl.float32)
    else:
        scale = tl.load(dloss) * weight_of(None, divisor)
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
    tiles = tiles_of(log_pred, log_pred.is_contiguous() and target.is_contiguous())
    losses = torch.empty_like(log_pred, memory_format=torch.contiguous_format) if reduction == "none" else None
    sums = new_sums(tiles, log_pred.device)
    xs, x_stride = as_rows(log_pred)
    ts, t_stride = as_rows(target)
    _forward[(sums.shape[0],)](
        losses, sums, xs, ts, tiles.rows, tiles.columns, tiles.blocks, x_stride, t_stride, eps,
        LOG_TARGET=log_target, EXACT=log_pred.dtype is torch.float32, ROWS=tiles.height, BLOCK=tiles.width, num_warps=4,
    )  # fmt: skip
    if losses is None:
        losses = total(sums, None, _divisor(rows, columns, reduction))
    # Of log_pred only the dtype is needed.
    return losses, (log_pred.new_empty(0), target) if needs[0] else ()


def backward(
    needs: Needs, saved: Saved, dloss: Tensor, *, reduction: str, log_target: bool, eps: float
) -> tuple[Tensor | None, ...]:
    like, target = saved
    rows, columns = target.shape
    dlog_pred = torch.empty((rows, columns), dtype=like.dtype, device=target.device)
    flat, per_element, dloss_stride = target.is_contiguous(), reduction == "none", 0
    if per_element:
        flat = flat and dloss.is_contiguous()
        dloss, dloss_stride = as_rows(dloss)
    tiles = tiles_of(dlog_pred, flat)
    target, target_stride = as_rows(target)
    _backward[(tiles.count,)](
        dlog_pred, dloss, target, tiles.rows, tiles.columns, tiles.blocks, dloss_stride, target_stride,
        _divisor(rows, columns, reduction), LOG_TARGET=log_target, PER_ELEMENT=per_element,
        EXACT=like.dtype is torch.float32, ROWS=tiles.height, BLOCK=tiles.width, num_warps=4,
    )  # fmt: skip
    return (dlog_pred,)
