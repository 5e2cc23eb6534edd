"""Grids of one block for each of many items, for kernels without a loop over them.

A block that does one thing needs all that it reads at once. A loop's invariants the compiler reads before it: a block of
one turn then waits for memory twice.
"""

import cuda.tile as ct
from torch import Tensor

from liger_cutile.ops._launch import MOST_BLOCKS, MOST_DOWN
from liger_cutile.ops._rows import blocks


@ct.function
def block_number():
    """The block's item; of a grid of several rows, the last blocks have none."""
    return ct.bid(0) + ct.bid(1) * ct.num_blocks(0)


def one_each(items: int) -> tuple[int, int]:
    """A grid with a block for each item, in as few rows of blocks as there can be."""
    return min(items, MOST_BLOCKS), blocks(items, MOST_BLOCKS)


def within_grid(tile_rows: int, *tensors: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """Tensors of one number of rows as they are, or some rows of each at a time: the tiles that a grid takes downwards."""
    rows, most = next(x.shape[0] for x in tensors if x is not None), MOST_DOWN * tile_rows
    if rows <= most:
        return [tensors]
    return [tuple(None if x is None else x[begin : begin + most] for x in tensors) for begin in range(0, rows, most)]
