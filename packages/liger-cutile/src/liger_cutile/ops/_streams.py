"""Rows of residual streams: parts of one stream, and numbers of a row, one per stream or pair of streams."""

import cuda.tile as ct

from liger_cutile.ops._rows import gather, load
from liger_cutile.ops._sums import add_four


@ct.function
def load_part(array, row, column, BLOCK, INSIDE):
    """A part of one row, ``[1, BLOCK]``; 0 outside the array."""
    if INSIDE:
        return load(array, (row, column), 1, BLOCK, True)
    else:
        columns = column * BLOCK + ct.reshape(ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK))
        return gather(array, (row, columns))


@ct.function
def load_number(array, row, column):
    """A coefficient of a row, ``[1, 1]``."""
    return ct.astype(ct.load(array, (row, column), (1, 1), check_bounds=False, allow_tma=False), ct.float32)


@ct.function
def store_part(array, row, column, tile, INSIDE):
    ct.store(array, (row, column), ct.astype(tile, array.dtype), check_bounds=not INSIDE, allow_tma=False)


@ct.function
def by_lanes(tile, LANES):
    """The sum of each thread's neighbouring columns."""
    return ct.sum(ct.reshape(tile, (LANES, tile.shape[1] // LANES)), axis=1, keepdims=True)


@ct.function
def store_sums(array, row, first, sums):
    """Write the sums over lanes to neighbouring places of a row."""
    if len(sums) % 4 == 0:
        for i in ct.static_iter(range(0, len(sums), 4)):
            four = (sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
            totals = ct.reduce(four, axis=0, func=add_four, identity=(0.0, 0.0, 0.0, 0.0), keepdims=True)
            for j in ct.static_iter(range(4)):
                store_part(array, row, first + i + j, totals[j], True)
    else:
        for i in ct.static_iter(range(len(sums))):
            store_part(array, row, first + i, ct.sum(sums[i], axis=0, keepdims=True), True)
