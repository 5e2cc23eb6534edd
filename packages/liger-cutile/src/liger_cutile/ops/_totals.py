"""Gradients that are sums over all rows: each block adds up its own rows in float32, then the blocks are added up.

So the sums are the same from run to run, and round once, without atomics. Those of a scale and a shift take one launch.
"""

import cuda.tile as ct
from torch import Tensor

from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import blocks


@ct.function
def _store(total, column, sums):
    if given(total):
        ct.store(total, (column,), ct.astype(sums, total.dtype))


@ct.kernel(occupancy=4)
def _totals(first, second, partial, ROWS: ConstInt, BLOCK: ConstInt):
    column, which = ct.bid(0), ct.bid(1)
    sums = ct.zeros((1, ROWS, BLOCK), ct.float32)
    for row in range(ct.num_tiles(partial, axis=1, shape=(1, ROWS, BLOCK))):
        sums += ct.load(partial, (which, row, column), (1, ROWS, BLOCK), padding_mode=ct.PaddingMode.ZERO)
    total = ct.reshape(ct.sum(sums, axis=1), (BLOCK,))
    if which == 0:
        _store(first, column, total)
    if which == ct.num_blocks(1) - 1:
        _store(second, column, total)


def launch_totals(first: Tensor | None, second: Tensor | None, partial: Tensor) -> None:
    """Write sums of partial sums to `first` and `second`, ``[H]`` each; one of them may be None.

    Args:
        first: its partial sums are the first of `partial`.
        second: its partial sums are the last of `partial`.
        partial: ``float32[1 or 2, P, H]``: of each that is given, P partial sums.
    """
    wanted, _, columns = partial.shape
    # 32 columns are one 128-byte line of each row: the narrowest block, for the most blocks.
    launch(_totals, (blocks(columns, 32), wanted), first, second, partial, 64, 32)


def launch_total(total: Tensor, partial: Tensor) -> None:
    """Write the sum of the rows of `partial`, ``float32[P, H]``, to `total`, ``[H]``."""
    launch_totals(total, None, partial[None])
