"""Gradients that are sums over all rows: each block adds up its own rows in float32, then the blocks are added up.

So the sums are the same from run to run, and round once, without atomics.
"""

import cuda.tile as ct
from torch import Tensor

from liger_cutile.ops._launch import ConstInt, launch
from liger_cutile.ops._rows import blocks


@ct.kernel(occupancy=4)
def _total(total, partial, ROWS: ConstInt, BLOCK: ConstInt):
    column = ct.bid(0)
    sums = ct.zeros((ROWS, BLOCK), ct.float32)
    for row in range(ct.num_tiles(partial, axis=0, shape=(ROWS, BLOCK))):
        sums += ct.load(partial, (row, column), (ROWS, BLOCK), padding_mode=ct.PaddingMode.ZERO)
    ct.store(total, (column,), ct.astype(ct.sum(sums, axis=0), total.dtype))


def launch_total(total: Tensor, partial: Tensor) -> None:
    """Write the sum of the rows of `partial`, ``float32[P, H]``, to `total`, ``[H]``."""
    # 32 columns are one 128-byte line of each row: the narrowest block, for the most blocks.
    launch(_total, (blocks(total.shape[0], 32),), total, partial, 64, 32)
