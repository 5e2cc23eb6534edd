"""Total variation distance: both tensors are read once. Backward needs only the sign of each difference, kept in two bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import tvd
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._divergences import (
    WRITTEN_TILE,
    count_of,
    leaves_first,
    new_sums,
    place,
    tiles_of,
    total,
    weight_of,
)
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows


@triton.jit
def _groups(tile, rows, columns, blocks, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The places of a tile's groups of eight columns, and which of them exist."""
    groups = (columns + 7) // 8
    row, group, inside = place(tile, rows, groups, blocks, WHOLE, ROWS, BLOCK // 8)
    return row * groups + group, inside


@kernel
def _forward(
    losses, signs, sums, p, q, labels, rows, columns, blocks, p_stride, q_stride, ignore_index,
    LEAVES_FIRST: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    policy: tl.constexpr = "evict_first" if LEAVES_FIRST else ""
    sum_lanes = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, WHOLE, ROWS, BLOCK)
        counted = inside
        if labels is not None:
            counted &= tl.load(labels + row, row < rows, other=ignore_index) != ignore_index
        ps = tl.load(p + row * p_stride + column, counted, other=0.0, eviction_policy=policy).to(tl.float32)
        qs = tl.load(q + row * q_stride + column, counted, other=0.0, eviction_policy=policy).to(tl.float32)
        difference = ps - qs
        if losses is not None:
            tl.store(losses + row * columns + column, 0.5 * tl.abs(difference), inside)
        else:
            sum_lanes += tl.abs(difference)
        if signs is not None:
            # The signs of eight elements are one int16, two bits each: 1 for a positive difference, 2 for a negative one.
            sign = tl.where(difference > 0.0, 1, tl.where(difference < 0.0, 2, 0))
            sign = tl.reshape(sign << (2 * tl.arange(0, BLOCK) % 16)[None, :], (ROWS, BLOCK // 8, 8))
            group, group_inside = _groups(tile, rows, columns, blocks, WHOLE, ROWS, BLOCK)
            tl.store(signs + group, tl.sum(sign, 2), group_inside)
    if losses is None:
        tl.store(sums + tl.program_id(0), tl.sum(sum_lanes))


@kernel(do_not_specialize=["divisor"])
def _backward(
    dp, dloss, signs, count, rows, columns, blocks, dloss_stride, divisor,
    PER_ELEMENT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row, column, inside = place(tile, rows, columns, blocks, WHOLE, ROWS, BLOCK)
    group, group_inside = _groups(tile, rows, columns, blocks, WHOLE, ROWS, BLOCK)
    sign = tl.load(signs + group, group_inside, other=0).to(tl.int32)
    sign = tl.broadcast_to(sign[:, :, None], (ROWS, BLOCK // 8, 8))
    sign = tl.reshape(sign, (ROWS, BLOCK)) >> (2 * tl.arange(0, BLOCK) % 16)[None, :]
    if PER_ELEMENT:
        scale = 0.5 * tl.load(dloss + row * dloss_stride + column, inside, other=0.0).to(tl.float32)
    else:
        scale = tl.load(dloss) * weight_of(count, divisor)
    dps = tl.where(sign & 1 != 0, scale, tl.where(sign & 2 != 0, -scale, 0.0))
    tl.store(dp + row * columns + column, dps, inside)


def _divisor(rows: int, columns: int, reduction: str, count: Tensor | None) -> int:
    """The divisor of Σ abs(p − q), besides the `count` of rows."""
    counted = 1 if count is not None else rows
    return 2 * {"batchmean": counted, "mean": counted * columns}.get(reduction, 1)


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
    tiles = tiles_of(p, labels is None and columns % 8 == 0 and p.is_contiguous() and q.is_contiguous())
    losses = torch.empty_like(p, memory_format=torch.contiguous_format) if reduction == "none" else None
    signs = torch.empty((rows, (columns + 7) // 8), dtype=torch.int16, device=p.device) if needs[0] else None
    sums = new_sums(tiles, p.device)
    labels = None if labels is None else labels.contiguous()
    ps, p_stride = as_rows(p)
    qs, q_stride = as_rows(q)
    _forward[(sums.shape[0],)](
        losses, signs, sums, ps, qs, labels, tiles.rows, tiles.columns, tiles.blocks, p_stride, q_stride, ignore_index,
        LEAVES_FIRST=leaves_first(p, losses is not None), WHOLE=tiles.whole, ROWS=tiles.height, BLOCK=tiles.width, num_warps=4,
    )  # fmt: skip
    count = count_of(labels, ignore_index) if labels is not None and reduction in ("batchmean", "mean") else None
    if losses is None:
        losses = total(sums, count, _divisor(rows, columns, reduction, count))
    # Backward needs only the dtype and the number of columns of p.
    return losses, (p.new_empty((0, columns)), signs, count) if needs[0] else ()


def backward(
    needs: Needs, saved: Saved, dloss: Tensor, *, reduction: str, ignore_index: int
) -> tuple[Tensor | None, ...]:
    like, signs, count = saved
    rows, columns = signs.shape[0], like.shape[1]
    dp = torch.empty((rows, columns), dtype=like.dtype, device=like.device)
    per_element = reduction == "none"
    tiles = tiles_of(dp, columns % 8 == 0 and (not per_element or dloss.is_contiguous()), WRITTEN_TILE)
    dloss, dloss_stride = as_rows(dloss) if per_element else (dloss, 0)
    _backward[(tiles.count,)](
        dp, dloss, signs, count, tiles.rows, tiles.columns, tiles.blocks, dloss_stride,
        _divisor(rows, columns, reduction, count),
        PER_ELEMENT=per_element, WHOLE=tiles.whole, ROWS=tiles.height, BLOCK=tiles.width, num_warps=4,
    )  # fmt: skip
    return (dp,)
