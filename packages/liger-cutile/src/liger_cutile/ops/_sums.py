"""Sums of many values, and gradients that are sums over all rows.

Each block adds up its own rows in float32, then the blocks' sums are added up. So the sums are the same from run to run and are
rounded once, without atomics. The sums of a scale and a shift take one launch. If rows are few and short, one launch does all:
some of its blocks add up columns, the others take rows.
"""

import math

import cuda.tile as ct
from torch import Tensor

from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import as_rows, blocks

MOST_ROWS_AT_ONCE, MOST_BYTES_AT_ONCE = 2048, 8192
"""Rows, and bytes per row, up to which one launch makes all gradients: inputs that are read twice are still in the cache. On an
H200 in bfloat16, in ms, in one launch and in two: rms_norm's backward at 1024 x 1024 0.0090 and 0.0120, 2048 x 2048 0.0153 and
0.0190, 2048 x 4096 0.0235 and 0.0268; layer_norm's 0.0133 and 0.0130, 0.0211 and 0.0180, 0.0285 and 0.0279. The second launch
costs the host another 15 to 20 µs."""


@ct.function
def add_two(a1, b1, a2, b2):
    """For `ct.reduce`, as the next ones: several sums in one, so that a block's threads wait for each other only once."""
    return a1 + a2, b1 + b2


@ct.function
def add_three(a1, b1, c1, a2, b2, c2):
    return a1 + a2, b1 + b2, c1 + c2


@ct.function
def add_four(a1, b1, c1, d1, a2, b2, c2, d2):
    return a1 + a2, b1 + b2, c1 + c2, d1 + d2


@ct.function
def add_up(total, lost, values):
    """Running totals with more values, and what rounding has added to them, to be subtracted from the next values.

    Where many values are equal, they are rounded alike, and the error would grow with their number. Source: Kahan, Further
    Remarks on Reducing Truncation Errors, 1965.
    """
    values = values - lost
    result = total + values
    return result, ct.where(ct.abs(result) < math.inf, (result - total) - values, 0.0)


@ct.function
def _store(total, column, sums):
    if given(total):
        ct.store(total, (column,), ct.astype(sums, total.dtype))


@ct.kernel(occupancy=4)
def _totals(first, second, partial, ROWS: ConstInt, BLOCK: ConstInt):
    column, which = ct.bid(0), ct.bid(1)
    sums, lost = ct.zeros((1, ROWS, BLOCK), ct.float32), ct.zeros((1, ROWS, BLOCK), ct.float32)
    for row in range(ct.num_tiles(partial, axis=1, shape=(1, ROWS, BLOCK))):
        sums_of_blocks = ct.load(partial, (which, row, column), (1, ROWS, BLOCK), padding_mode=ct.PaddingMode.ZERO)
        sums, lost = add_up(sums, lost, sums_of_blocks)
    total = ct.reshape(ct.sum(sums, axis=1), (BLOCK,))
    if which == 0:
        _store(first, column, total)
    if which == ct.num_blocks(1) - 1:
        _store(second, column, total)


def at_once(x: Tensor, dy: Tensor) -> bool:
    """Whether a backward adds up columns of x and dy, ``[rows, columns]``, in the same launch that takes their rows.

    Rows that TMA can't load take two launches: 2048 x 2047 takes 0.057 ms, and 0.141 in one.
    """
    rows, columns = x.shape
    size = x.element_size()
    if rows > MOST_ROWS_AT_ONCE or columns * size > MOST_BYTES_AT_ONCE:
        return False
    return not any(elements * size % 16 for elements in (columns, x.stride(0), dy.stride(0)))


def sum_tile(x: Tensor) -> tuple[int, int]:
    """Rows and columns that a block adds up at a time: 256 bytes of each column, and few columns, for many blocks."""
    return 256 // x.element_size(), 32


def launch_totals(first: Tensor | None, second: Tensor | None, partial: Tensor) -> None:
    """Write sums of partial sums to `first` and `second`, ``[H]`` each; one of them may be None.

    Args:
        first: its partial sums are the first of `partial`.
        second: its partial sums are the last of `partial`.
        partial: ``float32[1 or 2, P, H]``: P partial sums for each of the two that isn't None.
    """
    results, _, columns = partial.shape
    if columns == 1:
        partial = as_rows(partial).unflatten(0, partial.shape[:2])
    # 32 columns are one 128-byte line of each row: the narrowest block, which gives the most blocks.
    launch(_totals, (blocks(columns, 32), results), first, second, partial, 64, 32)


def launch_total(total: Tensor, partial: Tensor) -> None:
    """Write the sum of the rows of `partial`, ``float32[P, H]``, to `total`, ``[H]``."""
    launch_totals(total, None, partial[None])
