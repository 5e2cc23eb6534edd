"""Float32 tiles, whatever the array's dtype, with zeros past the array's end."""

import cuda.tile as ct

from liger_cutile.ops._launch import given

ZERO = ct.PaddingMode.ZERO


@ct.function
def load(array, place, ROWS, BLOCK, INSIDE=False):
    """The tile ``[ROWS, BLOCK]`` at `place`, its row and column counted in tiles.

    INSIDE: the tile crosses no edge, and is loaded by plain instructions.
    """
    if INSIDE:
        tile = ct.load(array, place, (ROWS, BLOCK), check_bounds=False, allow_tma=False)
    else:
        tile = ct.load(array, place, (ROWS, BLOCK), padding_mode=ZERO)
    return ct.astype(tile, ct.float32)


@ct.function
def load_vector(vector, column, BLOCK, INSIDE=False):
    """A tile of a 1-D array, as ``[1, BLOCK]``. INSIDE is as for `load`."""
    if INSIDE:
        tile = ct.load(vector, (column,), (BLOCK,), check_bounds=False, allow_tma=False)
    else:
        tile = ct.load(vector, (column,), (BLOCK,), padding_mode=ZERO)
    return ct.reshape(ct.astype(tile, ct.float32), (1, BLOCK))


@ct.function
def hold_vector(vector, BLOCK):
    """A whole 1-D array, as ``[1, BLOCK]``, for a block that takes row after row. An absent vector stays absent.

    It stays in its own dtype, so that it takes fewer registers. It is loaded without TMA, which would keep its buffers.
    """
    if given(vector):
        # Threads hold all of it. Of a bfloat16 tile that isn't gathered, tileiras 13.4 then takes every other element from
        # a register that has half of its address.
        if BLOCK == 16:
            return ct.reshape(ct.gather(vector, ct.arange(BLOCK, dtype=ct.int32)), (1, BLOCK))
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

    Elements outside an array aren't stored. Beyond 2^31 a column becomes negative, so it is outside as well.
    """
    rows = ct.bid(1) * ROWS + ct.arange(ROWS, dtype=ct.int32)
    columns = ct.bid(0) * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
    return ct.reshape(rows, (ROWS, 1)), ct.reshape(columns, (1, BLOCK))


@ct.function
def gather(array, at):
    """The elements at some places.

    Without TMA, and if the array may end inside a tile, it is faster than `load`: tileiras 13.4 puts each such tile into a
    branch, and waits for it before it loads the next one.
    """
    return ct.astype(ct.gather(array, at), ct.float32)
