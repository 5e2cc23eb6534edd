"""Grids of one block for each of many items, for kernels without a loop over them.

A block that does one thing needs all that it reads at once. A loop's invariants the compiler reads before it: a block of
one turn then waits for memory twice.
"""

import cuda.tile as ct

from liger_cutile.ops._launch import MOST_BLOCKS
from liger_cutile.ops._rows import blocks


@ct.function
def block_number():
    """The block's item; of a grid of several rows, the last blocks have none."""
    return ct.bid(0) + ct.bid(1) * ct.num_blocks(0)


def one_each(items: int) -> tuple[int, int]:
    """A grid with a block for each item, in as few rows of blocks as there can be."""
    return min(items, MOST_BLOCKS), blocks(items, MOST_BLOCKS)
