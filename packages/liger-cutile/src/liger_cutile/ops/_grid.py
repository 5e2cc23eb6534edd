"""Grids with one block per item, for kernels that don't loop over items.

A block that does one thing needs all its inputs at once. With a loop, the compiler would read the loop's invariants before it,
and a block that goes through it once would wait for memory twice.
"""

import cuda.tile as ct
from torch import Tensor

from liger_cutile.ops._launch import MOST_BLOCKS, MOST_DOWN
from liger_cutile.ops._rows import blocks


@ct.function
def block_number():
    """The number of the block's item. In a grid of several rows, the last blocks have no item."""
    return ct.bid(0) + ct.bid(1) * ct.num_blocks(0)


def one_each(items: int) -> tuple[int, int]:
    """A grid with a block for each item, in as few rows of blocks as possible."""
    return min(items, MOST_BLOCKS), blocks(items, MOST_BLOCKS)


def within_grid(tile_rows: int, *tensors: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """Tensors with one number of rows: as they are, or, if their tiles exceed a grid's second dimension, some rows at a time."""
    rows, most = next(x.shape[0] for x in tensors if x is not None), MOST_DOWN * tile_rows
    if rows <= most:
        return [tensors]
    return [tuple(None if x is None else x[begin : begin + most] for x in tensors) for begin in range(0, rows, most)]
