"""Tiles of float32, whatever the array's dtype, with zeros where the array ends."""

import cuda.tile as ct

from liger_cutile.ops._launch import given

ZERO = ct.PaddingMode.ZERO


@ct.function
def load(array, place, ROWS, BLOCK, INSIDE=False):
    """The tile of ``[ROWS, BLOCK]`` at `place`, its row and column in tiles.

    INSIDE: it crosses no edge, and is loaded by plain instructions.
    """
    if INSIDE:
        tile = ct.load(array, place, (ROWS, BLOCK), check_bounds=False, allow_tma=False)
    else:
        tile = ct.load(array, place, (ROWS, BLOCK), padding_mode=ZERO)
    return ct.astype(tile, ct.float32)


@ct.function
def load_vector(vector, column, BLOCK, INSIDE=False):
    """A tile of a 1-D array, as ``[1, BLOCK]``. INSIDE: as that of `load`."""
    if INSIDE:
        tile = ct.load(vector, (column,), (BLOCK,), check_bounds=False, allow_tma=False)
    else:
        tile = ct.load(vector, (column,), (BLOCK,), padding_mode=ZERO)
    return ct.reshape(ct.astype(tile, ct.float32), (1, BLOCK))


@ct.function
def hold_vector(vector, BLOCK):
    """The whole of a 1-D array, as ``[1, BLOCK]``, for a block that takes row after row; or what stands for None.

    In its own dtype, so that it takes fewer registers, and without TMA, whose buffers it would keep.
    """
    if given(vector):
        return ct.reshape(ct.load(vector, (0,), (BLOCK,), padding_mode=ZERO, allow_tma=False), (1, BLOCK))
    else:
        return vector


@ct.function
def load_column(array, row, column, ROWS):
    """A tile of the row `row` of a 2-D array, as ``[ROWS, 1]``."""
    values = ct.load(array, (row, column), (1, ROWS), padding_mode=ZERO, allow_tma=False)
    return ct.reshape(ct.astype(values, ct.float32), (ROWS, 1))


@ct.function
def places(ROWS, BLOCK):
    """Rows and columns of the elements of the tile in row ``ct.bid(1)`` and column ``ct.bid(0)``, for gather and scatter.

    What lies outside of an array isn't stored. Beyond 2^31 a column is negative, so outside, too.
    """
    rows = ct.bid(1) * ROWS + ct.arange(ROWS, dtype=ct.int32)
    columns = ct.bid(0) * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
    return ct.reshape(rows, (ROWS, 1)), ct.reshape(columns, (1, BLOCK))


@ct.function
def gather(array, at):
    """The elements at some places.

    Where TMA isn't used, and the array may end inside a tile, it is faster than `load`: tileiras 13.4 puts each such tile
    into a branch, and waits for it before it loads the next.
    """
    return ct.astype(ct.gather(array, at), ct.float32)
