"""Gradients of a scale and a shift: one launch adds up the partial sums of both, and of a scalar."""

import torch
import triton.language as tl
from torch import Tensor

from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import add_up


@kernel
def _totals(first, second, scalar, partial, rows, columns, scalars, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    width = columns * (first is not None) + columns * (second is not None)
    blocks = tl.cdiv(columns, BLOCK)
    start = tl.program_id(0) // blocks * columns
    if start < width:
        column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        sums, lost = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
        for first_row in range(0, rows, ROWS):
            row = first_row + tl.arange(0, ROWS)
            at = partial + row.to(tl.int64)[:, None] * width + (start + column)[None, :]
            sums, lost = add_up(sums, lost, tl.load(at, (row < rows)[:, None] & inside[None, :], other=0.0))
        result = tl.sum(sums, 0)
        if first is not None:
            tl.store(first + column, result, inside & (start + column < columns))
        if second is not None:
            tl.store(second + column, result, inside & (start + column >= width - columns))
    elif scalar is not None:
        values = tl.zeros((BLOCK * ROWS,), tl.float32)
        for first_value in range(0, scalars, BLOCK * ROWS):
            value = first_value + tl.arange(0, BLOCK * ROWS)
            values += tl.load(partial + tl.cast(rows, tl.int64) * width + value, value < scalars, other=0.0)
        tl.store(scalar + tl.arange(0, 1), tl.sum(values))


def totals(
    partial: Tensor,
    rows: int,
    columns: int,
    first: Tensor | None,
    second: Tensor | None,
    scalar: Tensor | None = None,
    scalars: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The sums of partial sums, in the dtypes and shapes of `first`, `second` and `scalar`; None for each that is None.

    Args:
        partial: float32, contiguous: `rows` rows of `columns` elements for `first` and as many for `second`, then
            `scalars` elements for `scalar`. It has none for an argument that is None.
        rows: partial sums of each element.
        columns: elements of `first`, and of `second`.
        first: the argument whose gradient is the first sum.
        second: the argument whose gradient is the second.
        scalar: the argument of one element whose gradient is the third.
        scalars: partial sums of `scalar`.
    """
    dfirst, dsecond, dscalar = (
        None if like is None else torch.empty_like(like, memory_format=torch.contiguous_format)
        for like in (first, second, scalar)
    )
    # 32 columns are one 128-byte line of each row: the narrowest block, which gives the most programs.
    blocks = (columns + 31) // 32
    programs = blocks * ((first is not None) + (second is not None))
    if scalar is not None:
        programs += 1  # not a bool: torch.compile's symbols can't add one
    _totals[(programs,)](dfirst, dsecond, dscalar, partial, rows, columns, scalars, ROWS=128, BLOCK=32)
    return dfirst, dsecond, dscalar
