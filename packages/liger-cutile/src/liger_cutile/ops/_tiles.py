"""Tiles of float32, whatever the array's dtype, with zeros where the array ends."""

import cuda.tile as ct

ZERO = ct.PaddingMode.ZERO


@ct.function
def load(array, place, ROWS, BLOCK):
    """The tile of ``[ROWS, BLOCK]`` at `place`, its row and column in tiles."""
    return ct.astype(ct.load(array, place, (ROWS, BLOCK), padding_mode=ZERO), ct.float32)


@ct.function
def load_vector(vector, column, BLOCK):
    """A tile of a 1-D array, as ``[1, BLOCK]``."""
    return ct.reshape(ct.astype(ct.load(vector, (column,), (BLOCK,), padding_mode=ZERO), ct.float32), (1, BLOCK))


@ct.function
def load_column(array, row, column, ROWS):
    """A tile of the row `row` of a 2-D array, as ``[ROWS, 1]``."""
    values = ct.load(array, (row, column), (1, ROWS), padding_mode=ZERO, allow_tma=False)
    return ct.reshape(ct.astype(values, ct.float32), (ROWS, 1))
