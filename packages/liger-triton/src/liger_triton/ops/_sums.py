"""Sums of many values, and gradients that are sums over all rows.

Each program adds up its own rows in float32, then the programs' sums are added up. So the sums are the same from run to run and
are rounded once, without atomics. One launch adds up the partial sums of a scale, a shift and a scalar. If rows are few and
short, one launch does all: some of its programs add up columns, the others take rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton.ops._launch import kernel

MOST_ROWS_AT_ONCE, MOST_BYTES_AT_ONCE = 2048, 8192
"""Rows, and bytes per row, up to which one launch makes all gradients: inputs that are read twice are still in the cache, and
each program has enough rows to read. On an H200 (triton 3.6), rms_norm's backward in bfloat16, in ms, in one launch and in two:
1024 x 1024 0.0087 and 0.0123, 2048 x 2048 0.0140 and 0.0171, 2048 x 2047 0.0264 and 0.0279, 2048 x 4096 0.0228 and 0.0226; but
4096 x 1024 0.0198 and 0.0171. The second launch costs the host another 15 to 20 µs."""

COLUMNS_AT_ONCE, BYTES_AT_ONCE, STAGES_AT_ONCE = 32, 256, 4
"""For a program that adds up columns: how many columns, how many bytes of each column it reads at a time, and how many such
tiles are in flight, including the one that is being added. In one launch 2048 x 2048 takes 0.0140 ms; with 64 columns at least
0.0159, with half the rows 0.0157, with one tile prefetched 0.0197."""


@triton.jit
def multiply(a, b, BLOCK: tl.constexpr):
    """a · b, to be added up along rows of BLOCK columns, with the same result in each thread that has the row's sum.

    A thread that has one column of a row would otherwise fuse its own unrounded product with a neighbour's rounded one, and the
    neighbour would do the opposite.
    """
    return tl.fma(a, b, 0.0) if BLOCK <= 32 else a * b


@triton.jit
def add_two(a1, b1, a2, b2):
    """For `tl.reduce`, as the next ones: several sums in one, so that a program's threads wait for each other only once."""
    return a1 + a2, b1 + b2


@triton.jit
def add_three(a1, b1, c1, a2, b2, c2):
    return a1 + a2, b1 + b2, c1 + c2


@triton.jit
def add_four(a1, b1, c1, d1, a2, b2, c2, d2):
    return a1 + a2, b1 + b2, c1 + c2, d1 + d2


@triton.jit
def add_up(total, lost, values):
    """Running totals with more values, and what rounding has added to them, to be subtracted from the next values.

    Where many values are equal, they are rounded alike, and the error would grow with their number. Source: Kahan, Further
    Remarks on Reducing Truncation Errors, 1965.
    """
    values -= lost
    result = total + values
    return result, tl.where(tl.abs(result) < float("inf"), (result - total) - values, 0.0)


@kernel
def _total(total, partial, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    sums, lost = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        at = partial + row.to(tl.int64)[:, None] * columns + column[None, :]
        sums, lost = add_up(sums, lost, tl.load(at, (row < rows)[:, None] & inside[None, :], other=0.0))
    tl.store(total + column, tl.sum(sums, 0), inside)


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


def at_once(x: Tensor, rows: int, columns: int) -> bool:
    """Whether a backward adds up columns in the same launch that takes its rows."""
    return rows <= MOST_ROWS_AT_ONCE and columns * x.element_size() <= MOST_BYTES_AT_ONCE


def total(partial: Tensor, like: Tensor) -> Tensor:
    """The sum of the rows of `partial`, ``float32[P, H]``, in the dtype and shape of `like`, which has H elements."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    write_total(result, partial)
    return result


def write_total(result: Tensor, partial: Tensor) -> None:
    """Write the sum of the rows of `partial`, ``float32[P, H]``, to `result`, which is contiguous and has H elements."""
    rows, columns = partial.shape
    # 32 columns are one 128-byte line of each row: the narrowest block, which gives the most programs.
    _total[((columns + 31) // 32,)](result, partial, rows, columns, ROWS=128, BLOCK=32)


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
