"""Total variation distance: both tensors are read once. Backward needs only the sign of each difference, kept in two bits."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import tvd
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._divergences import (
    OCCUPANCY,
    WRITTEN_BYTES,
    WRITTEN_OCCUPANCY,
    any_of,
    launch_count,
    launch_total,
    load,
    load_counted,
    load_directly,
    persistent,
    place,
    store_beside_labels,
    store_directly,
    tile_count,
    tile_of,
    tiles_of,
)
from liger_cutile.ops._launch import ConstBool, ConstInt, block_number, given, launch, one_each
from liger_cutile.ops._rows import as_rows

SIGNS = 16
"""Signs in an int32, two bits each: 1 for a positive difference, 2 for a negative one."""


@ct.function
def _shifts():
    return 2 * ct.arange(SIGNS, dtype=ct.int32)


@ct.function
def _difference(p, q, labels, at, ignore_index, ROWS, BLOCK):
    """p − q; 0 in rows that don't count. A tile is only read if it has a row that counts."""
    if given(labels):
        counted = load_counted(labels, at[0], ignore_index, ROWS)
        difference = ct.zeros((ROWS, BLOCK), ct.float32)
        if any_of(counted):
            difference = ct.where(counted, load(p, at, ROWS, BLOCK) - load(q, at, ROWS, BLOCK), 0.0)
    else:
        difference = load(p, at, ROWS, BLOCK) - load(q, at, ROWS, BLOCK)
    return difference


@ct.kernel(occupancy=OCCUPANCY)
def _forward(losses, signs, sums, p, q, labels, ignore_index: ct.ScalarInt64, ROWS: ConstInt, BLOCK: ConstInt):
    lanes = ct.zeros((ROWS, BLOCK), ct.float32)
    for tile in range(ct.bid(0), tile_count(p, ROWS, BLOCK), ct.num_blocks(0)):
        at = place(p, tile, ROWS, BLOCK)
        difference = _difference(p, q, labels, at, ignore_index, ROWS, BLOCK)
        if given(losses):
            store_beside_labels(losses, at, 0.5 * ct.abs(difference), labels, ROWS)
        else:
            lanes += ct.abs(difference)
        if given(signs):
            sign = ct.where(difference > 0.0, 1, ct.where(difference < 0.0, 2, 0))
            store_directly(signs, at, ct.sum(ct.reshape(sign, (ROWS, BLOCK // SIGNS, SIGNS)) << _shifts(), axis=2))
    if given(sums):
        ct.store(sums, (ct.bid(0),), ct.sum(lanes))


@ct.kernel(occupancy=WRITTEN_OCCUPANCY)
def _backward(dp, dloss, signs, count, divisor, PER_ELEMENT: ConstBool, ROWS: ConstInt, BLOCK: ConstInt):
    tile = block_number()
    if tile < tile_count(dp, ROWS, BLOCK):
        at = place(dp, tile, ROWS, BLOCK)
        # Loaded by gather: with ct.load, tileiras 13.4 loads a tile of few integers two at a time, even if they aren't adjacent.
        rows = at[0] * ROWS + ct.arange(ROWS, dtype=ct.int32)
        groups = at[1] * (BLOCK // SIGNS) + ct.arange(BLOCK // SIGNS, dtype=ct.int32)
        packed = ct.gather(signs, (ct.reshape(rows, (ROWS, 1)), ct.reshape(groups, (1, BLOCK // SIGNS))))
        if given(count):
            divisor = divisor * ct.load(count, (0,), ())
        scale = 0.5 * load_directly(dloss, at, ROWS, BLOCK) if PER_ELEMENT else ct.load(dloss, (0,), ()) / divisor
        packed = ct.expand_dims(packed, 2)
        positive = ct.reshape((packed & (1 << _shifts())) != 0, (ROWS, BLOCK))
        negative = ct.reshape((packed & (2 << _shifts())) != 0, (ROWS, BLOCK))
        store_directly(dp, at, ct.where(positive, scale, ct.where(negative, -scale, 0.0)))


@opaque(writes=("loss", "signs", "count"))
def _launch_forward(
    loss: Tensor,
    signs: Tensor | None,
    count: Tensor | None,
    p: Tensor,
    q: Tensor,
    labels: Tensor | None,
    reduction: str,
    ignore_index: int,
) -> None:
    p, q = as_rows(p), as_rows(q)
    labels = None if labels is None else labels.contiguous()
    rows, block = tile_of(p)
    grid = persistent(p, rows, block)
    if count is not None:
        launch_count(count, labels, ignore_index)
    if reduction == "none":
        losses, sums = loss, None
    else:
        losses, sums = None, torch.empty(grid, dtype=torch.float32, device=p.device)
    launch(_forward, (grid,), losses, signs, sums, p, q, labels, ignore_index, rows, block)
    if sums is not None:
        launch_total(loss.view(1), sums, count, _divisor(p, reduction, count))


@opaque(writes=("dp",))
def _launch_backward(dp: Tensor, dloss: Tensor, signs: Tensor, count: Tensor | None, reduction: str) -> None:
    dp, dloss = as_rows(dp), as_rows(dloss) if reduction == "none" else dloss.view(1)
    rows, block = tile_of(dp, 2 * WRITTEN_BYTES)  # on an H200, 4096 x 128256 bf16 takes 0.321 ms, with half of it 0.382
    launch(
        _backward, one_each(tiles_of(dp, rows, block)), dp, dloss, signs, count, _divisor(dp, reduction, count),
        reduction == "none", rows, block,
    )  # fmt: skip


def _divisor(p: Tensor, reduction: str, count: Tensor | None) -> float:
    """The divisor of Σ abs(p − q), besides the `count` of rows."""
    rows, columns = p.shape
    counted = 1 if count is not None else rows
    return 2.0 * {"batchmean": counted, "mean": counted * columns}.get(reduction, 1)


@implements(tvd)
def forward(
    needs: Needs,
    p: Tensor,
    q: Tensor,
    labels: Tensor | None = None,
    *,
    reduction: str = "batchmean",
    ignore_index: int = -100,
) -> tuple[Tensor, Saved]:
    rows, columns = p.shape
    if reduction == "none":
        loss = torch.empty_like(p, memory_format=torch.contiguous_format)
    else:
        loss = torch.empty((), dtype=torch.float32, device=p.device)
    groups = (columns + SIGNS - 1) // SIGNS
    signs = torch.empty((rows, groups), dtype=torch.int32, device=p.device) if needs[0] else None
    counts = labels is not None and reduction in ("batchmean", "mean")
    count = torch.empty(1, dtype=torch.float32, device=p.device) if counts else None
    _launch_forward(loss, signs, count, p, q, labels, reduction, ignore_index)
    # Backward needs only the dtype and the number of columns of p.
    return loss, (p.new_empty((0, columns)), signs, count) if needs[0] else ()


def backward(
    needs: Needs, saved: Saved, dloss: Tensor, *, reduction: str, ignore_index: int
) -> tuple[Tensor | None, ...]:
    like, signs, count = saved
    dp = torch.empty((signs.shape[0], like.shape[1]), dtype=like.dtype, device=like.device)
    _launch_backward(dp, dloss, signs, count, reduction)
    return (dp,)
