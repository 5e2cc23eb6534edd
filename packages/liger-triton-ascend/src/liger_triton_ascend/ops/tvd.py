"""Total variation distance: forward and backward read both tensors once each. Backward needs the sign of each difference.

Reading both again takes 4 bytes per bfloat16 element, and no memory. Keeping signs would take work on bits, for which the vector
unit has to change dtypes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import tvd
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._divergences import count_of, counted_rows, place
from liger_triton_ascend.ops._rows import as_rows, element_tiles

# Float32 tiles alive, by the estimate.
FORWARD_TILES = 5
BACKWARD_TILES = 6


@triton.jit
def _difference(
    p, q, labels, tile, row, column, inside, rows, blocks, p_stride, q_stride, ignore_index, ROWS: tl.constexpr
):
    """p − q of a tile; 0 in rows that don't count."""
    ps = tl.load(p + row * p_stride + column, inside, other=0.0).to(tl.float32)
    difference = ps - tl.load(q + row * q_stride + column, inside, other=0.0).to(tl.float32)
    if labels is not None:
        difference = tl.where(counted_rows(labels, tile, rows, blocks, ignore_index, ROWS), difference, 0.0)
    return difference


@triton.jit
def _forward(
    losses, sums, p, q, labels, rows, columns, p_stride, q_stride, ignore_index, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    lanes = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, ROWS, BLOCK)
        distance = tl.abs(
            _difference(p, q, labels, tile, row, column, inside, rows, blocks, p_stride, q_stride, ignore_index, ROWS)
        )
        if losses is not None:
            tl.store(losses + row * columns + column, 0.5 * distance, inside)
        else:
            lanes += distance
    if losses is None:
        tl.store(sums + tl.program_id(0), tl.sum(tl.sum(lanes, 1), 0))


@triton.jit
def _backward(
    dp, dloss, p, q, labels, rows, columns, dloss_stride, p_stride, q_stride, ignore_index,
    PER_ELEMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    if not PER_ELEMENT:
        scale = tl.load(dloss)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        row, column, inside = place(tile, rows, columns, blocks, ROWS, BLOCK)
        difference = _difference(
            p, q, labels, tile, row, column, inside, rows, blocks, p_stride, q_stride, ignore_index, ROWS
        )
        if PER_ELEMENT:
            scale = 0.5 * tl.load(dloss + row * dloss_stride + column, inside, other=0.0).to(tl.float32)
        dps = tl.where(difference > 0.0, scale, tl.where(difference < 0.0, -scale, 0.0))
        tl.store(dp + row * columns + column, dps, inside)


def _shape(tensors: tuple[Tensor, ...], labels: Tensor | None) -> tuple[int, int]:
    """Rows and columns of the tensors. Contiguous tensors without labels are one long row."""
    rows, columns = tensors[0].shape
    flat = labels is None and all(x.is_contiguous() for x in tensors)
    return (1, rows * columns) if flat else (rows, columns)


def _divisor(p: Tensor, labels: Tensor | None, reduction: str, ignore_index: int) -> Tensor | int:
    """The divisor of Σ abs(p − q)."""
    if reduction == "sum":
        return 2
    return count_of(p, labels, ignore_index) * (2 * p.shape[1] if reduction == "mean" else 2)


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
    losses = torch.empty_like(p, memory_format=torch.contiguous_format) if reduction == "none" else None
    rows, columns = _shape((p, q), labels)
    labels = None if labels is None else labels.contiguous()
    (ps, p_stride), (qs, q_stride) = as_rows(p), as_rows(q)
    programs, tile_rows, block = element_tiles(p, rows, columns, FORWARD_TILES)
    sums = torch.empty(programs, dtype=torch.float32, device=p.device)
    _forward[(programs,)](
        losses, sums, ps, qs, labels, rows, columns, p_stride, q_stride, ignore_index, ROWS=tile_rows, BLOCK=block
    )
    if losses is None:
        losses = sums.sum() / _divisor(p, labels, reduction, ignore_index)
    return losses, (p, q, labels) if needs[0] else ()


def backward(
    needs: Needs, saved: Saved, dloss: Tensor, *, reduction: str, ignore_index: int
) -> tuple[Tensor | None, ...]:
    p, q, labels = saved
    dp = torch.empty_like(p, memory_format=torch.contiguous_format)
    per_element, dloss_stride = reduction == "none", 0
    rows, columns = _shape((p, q, dloss) if per_element else (p, q), labels)
    if per_element:
        dloss, dloss_stride = as_rows(dloss)
    else:
        dloss = dloss / _divisor(p, labels, reduction, ignore_index)
    (p, p_stride), (q, q_stride) = as_rows(p), as_rows(q)
    programs, tile_rows, block = element_tiles(dp, rows, columns, BACKWARD_TILES)
    _backward[(programs,)](
        dp, dloss, p, q, labels, rows, columns, dloss_stride, p_stride, q_stride, ignore_index,
        PER_ELEMENT=per_element, ROWS=tile_rows, BLOCK=block,
    )  # fmt: skip
    return (dp,)
