"""KL divergence: forward reads both tensors once. Backward needs only the target."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import kl_div
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._divergences import place
from liger_triton_ascend.ops._rows import as_rows, element_tiles

# Float32 tiles alive, by the estimate.
FORWARD_TILES = 6
BACKWARD_TILES = 4


@triton.jit
def _forward(
    losses, sums, log_pred, target, rows, columns, log_pred_stride, target_stride, eps,
    LOG_TARGET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    absent = float("-inf") if LOG_TARGET else 0.0
    lanes = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, ROWS, BLOCK)
        x = tl.load(log_pred + row * log_pred_stride + column, inside, other=0.0).to(tl.float32)
        t = tl.load(target + row * target_stride + column, inside, other=absent).to(tl.float32)
        if LOG_TARGET:
            y = tl.exp(t)
            log_y = t
        else:
            y = t
            log_y = tl.log(tl.maximum(t, eps))
        term = tl.where(y == 0.0, 0.0, y * (log_y - x))
        if losses is not None:
            tl.store(losses + row * columns + column, term, inside)
        else:
            lanes += term
    if losses is None:
        tl.store(sums + tl.program_id(0), tl.sum(tl.sum(lanes, 1), 0))


@triton.jit
def _backward(
    dlog_pred, dloss, target, rows, columns, dloss_stride, target_stride,
    LOG_TARGET: tl.constexpr, PER_ELEMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    if not PER_ELEMENT:
        scale = tl.load(dloss)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, ROWS, BLOCK)
        y = tl.load(target + row * target_stride + column, inside, other=0.0).to(tl.float32)
        if LOG_TARGET:
            y = tl.exp(y)
        if PER_ELEMENT:
            scale = tl.load(dloss + row * dloss_stride + column, inside, other=0.0).to(tl.float32)
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
    height, width = log_pred.shape
    # Contiguous tensors are one long row.
    columns = log_pred.numel() if log_pred.is_contiguous() and target.is_contiguous() else width
    rows = log_pred.numel() // columns
    losses = torch.empty_like(log_pred, memory_format=torch.contiguous_format) if reduction == "none" else None
    (xs, x_stride), (ts, t_stride) = as_rows(log_pred), as_rows(target)
    programs, tile_rows, block = element_tiles(log_pred, rows, columns, FORWARD_TILES)
    sums = torch.empty(programs, dtype=torch.float32, device=log_pred.device)
    _forward[(programs,)](
        losses, sums, xs, ts, rows, columns, x_stride, t_stride, eps,
        LOG_TARGET=log_target, ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    if losses is None:
        losses = sums.sum() / _divisor(height, width, reduction)
    # Backward needs only the dtype of log_pred.
    return losses, (log_pred.new_empty(0), target) if needs[0] else ()


def backward(
    needs: Needs, saved: Saved, dloss: Tensor, *, reduction: str, log_target: bool, eps: float
) -> tuple[Tensor | None, ...]:
    like, target = saved
    height, width = target.shape
    dlog_pred = torch.empty((height, width), dtype=like.dtype, device=target.device)
    contiguous, per_element, dloss_stride = target.is_contiguous(), reduction == "none", 0
    if per_element:
        contiguous = contiguous and dloss.is_contiguous()
        dloss, dloss_stride = as_rows(dloss)
    else:
        dloss = dloss / _divisor(height, width, reduction)
    columns = target.numel() if contiguous else width
    rows = target.numel() // columns
    target, target_stride = as_rows(target)
    programs, tile_rows, block = element_tiles(dlog_pred, rows, columns, BACKWARD_TILES)
    _backward[(programs,)](
        dlog_pred, dloss, target, rows, columns, dloss_stride, target_stride,
        LOG_TARGET=log_target, PER_ELEMENT=per_element, ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return (dlog_pred,)
