"""KL divergence: one pass over both tensors makes the loss and its gradient. The gradient needs only the target.

Forward makes the gradient, for a loss whose own gradient is 1. If that is another number, as for a loss that is multiplied by a
weight, backward scales the gradient, in a pass more that reads and writes it. Backward makes the gradient itself in three cases:
a loss for each element; in a trace; and in float16, where the gradient could underflow before it is scaled.
"""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import kl_div
from liger_core.contract import Needs, Saved, SavedOnce, compiling, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._divergences import (
    OCCUPANCY,
    WRITTEN_BYTES,
    WRITTEN_OCCUPANCY,
    launch_scale,
    launch_total,
    load,
    load_directly,
    persistent,
    place,
    store,
    store_directly,
    tile_count,
    tile_of,
    tiles_of,
)
from liger_cutile.ops._launch import ConstBool, ConstInt, block_number, given, launch, one_each
from liger_cutile.ops._math import exp
from liger_cutile.ops._rows import as_one_row


@ct.function
def _term(x, t, eps, LOG_TARGET, EXACT):
    """A term of the divergence, and the probability of the target."""
    if LOG_TARGET:
        y = exp(t, EXACT)
        log_y = t
    else:
        y = t
        log_y = ct.log(ct.maximum(t, eps, propagate_nan=True))
    return ct.where(y == 0.0, 0.0, y * (log_y - x)), y


@ct.kernel(occupancy=OCCUPANCY)
def _forward(
    losses, sums, dlog_pred, log_pred, target, eps, factor,
    LOG_TARGET: ConstBool, EXACT: ConstBool, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    lanes = ct.zeros((ROWS, BLOCK), ct.float32)
    for tile in range(ct.bid(0), tile_count(target, ROWS, BLOCK), ct.num_blocks(0)):
        at = place(target, tile, ROWS, BLOCK)
        term, y = _term(load(log_pred, at, ROWS, BLOCK), load(target, at, ROWS, BLOCK), eps, LOG_TARGET, EXACT)
        if given(losses):
            store(losses, at, term)
        else:
            lanes += term
        if given(dlog_pred):
            store(dlog_pred, at, -y * factor)
    if given(sums):
        ct.store(sums, (ct.bid(0),), ct.sum(lanes))


@ct.kernel(occupancy=WRITTEN_OCCUPANCY)
def _backward(
    dlog_pred, dloss, target, factor,
    LOG_TARGET: ConstBool, PER_ELEMENT: ConstBool, EXACT: ConstBool, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    # Backwards: what forward read last may still be in the cache.
    tile = tile_count(target, ROWS, BLOCK) - 1 - block_number()
    if tile >= 0:
        at = place(target, tile, ROWS, BLOCK)
        y = load_directly(target, at, ROWS, BLOCK)
        if LOG_TARGET:
            y = exp(y, EXACT)
        if PER_ELEMENT:
            factor = load_directly(dloss, at, ROWS, BLOCK)
        elif given(dloss):
            factor = ct.load(dloss, (0,), ()) * factor
        store_directly(dlog_pred, at, -y * factor)


@opaque(writes=("loss", "dlog_pred"))
def _launch_forward(
    loss: Tensor,
    dlog_pred: Tensor | None,
    log_pred: Tensor,
    target: Tensor,
    reduction: str,
    log_target: bool,
    eps: float,
) -> None:
    divisor, exact = _divisor(log_pred, reduction), log_pred.dtype is torch.float32
    losses = sums = None
    if reduction == "none":
        losses, log_pred, target = as_one_row(loss, log_pred, target)
    else:
        log_pred, target = as_one_row(log_pred, target)
    if dlog_pred is not None:
        dlog_pred = dlog_pred.view_as(log_pred)
    rows, block = tile_of(log_pred)
    grid = persistent(log_pred, rows, block)
    if losses is None:
        sums = torch.empty(grid, dtype=torch.float32, device=loss.device)
    launch(
        _forward, (grid,), losses, sums, dlog_pred, log_pred, target, float(eps), 1.0 / divisor,
        log_target, exact, rows, block,
    )  # fmt: skip
    if sums is not None:
        launch_total(loss.view(1), sums, None, divisor)


@opaque(writes=("dlog_pred",))
def _launch_backward(dlog_pred: Tensor, dloss: Tensor | None, target: Tensor, reduction: str, log_target: bool) -> None:
    """Write the gradient of the loss times `dloss`, which is 1 if None."""
    divisor, exact = _divisor(dlog_pred, reduction), dlog_pred.dtype is torch.float32
    if reduction == "none":
        dlog_pred, dloss, target = as_one_row(dlog_pred, dloss, target)
    else:
        dlog_pred, target = as_one_row(dlog_pred, target)
        dloss = None if dloss is None else dloss.view(1)
    rows, block = tile_of(dlog_pred, WRITTEN_BYTES)
    launch(
        _backward, one_each(tiles_of(target, rows, block)), dlog_pred, dloss, target, 1.0 / divisor,
        log_target, reduction == "none", exact, rows, block,
    )  # fmt: skip


def _divisor(x: Tensor, reduction: str) -> float:
    return float({"batchmean": x.shape[0], "mean": x.numel()}.get(reduction, 1))


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
    if reduction == "none":
        loss = torch.empty_like(log_pred, memory_format=torch.contiguous_format)
    else:
        loss = torch.empty((), dtype=torch.float32, device=log_pred.device)
    scales = reduction != "none" and log_pred.dtype is not torch.float16
    now = needs[0] and scales and not compiling()
    dlog_pred = torch.empty_like(log_pred, memory_format=torch.contiguous_format) if now else None
    _launch_forward(loss, dlog_pred, log_pred, target, reduction, log_target, eps)
    if not needs[0]:
        return loss, ()
    # Backward needs only the dtype of log_pred.
    saved = log_pred.new_empty(0), target
    return loss, (*saved, SavedOnce(dlog_pred)) if now else saved


def backward(
    needs: Needs, saved: Saved, dloss: Tensor, *, reduction: str, log_target: bool, eps: float
) -> tuple[Tensor | None, ...]:
    like, target, *last = saved
    gradients = last[0].take() if last else None
    if gradients is not None:
        (dlog_pred,) = gradients
    else:
        dlog_pred = torch.empty(*target.shape, dtype=like.dtype, device=target.device)
        # An earlier backward has taken the gradient: it is made again, with the same bits.
        _launch_backward(dlog_pred, None if last else dloss, target, reduction, log_target)
    if last:
        launch_scale(dlog_pred, dloss)
    return (dlog_pred,)
