"""Attention tiles. Positions of one residue modulo the dilation are a line, in which windows are dense.

Tensors are ``[B, H, N, R, D]``: N positions of each of R lines.
"""

import cuda.tile as ct

from liger_cutile.ops._exp import exp_like
from liger_cutile.ops._tiles import ZERO


@ct.function
def place(x, tiles, PARTS):
    """This block's line, its tile of positions, and its part of the columns.

    A line is one residue of one head of a sample: (sample, head, residue, number of positions, number of the line).
    """
    number = ct.bid(0) // PARTS // tiles
    _, heads, count, residues, _ = x.shape
    line = number // residues // heads, number // residues % heads, number % residues, count, number
    return line, ct.bid(0) // PARTS % tiles, ct.bid(0) % PARTS


@ct.function
def load(x, line, tile, part, BLOCK, WIDTH):
    """A tile of a line's positions, and a part of their columns; ``[BLOCK, WIDTH]``."""
    sample, head, residue, _, _ = line
    found = ct.load(x, (sample, head, tile, residue, part), (1, 1, BLOCK, 1, WIDTH), padding_mode=ZERO)
    return ct.reshape(found, (BLOCK, WIDTH))


@ct.function
def store(x, line, tile, part, value, BLOCK, WIDTH):
    sample, head, residue, _, _ = line
    value = ct.reshape(ct.astype(value, x.dtype), (1, 1, BLOCK, 1, WIDTH))
    ct.store(x, (sample, head, tile, residue, part), value)


@ct.function
def load_line(x, which, tile, line, ROWS, COLUMNS):
    """One of the numbers kept per query, for a tile of queries of a line; ``[ROWS, COLUMNS]``, one of which is 1."""
    found = ct.load(x, (line[4], which, tile), (1, 1, ROWS * COLUMNS), padding_mode=ZERO)
    return ct.reshape(found, (ROWS, COLUMNS))


@ct.function
def store_line(x, which, tile, line, values, BLOCK):
    ct.store(x, (line[4], which, tile), ct.reshape(values, (1, 1, BLOCK)))


@ct.function
def products(a_tile, a, a_at, b_tile, b, b_at, line, HEAD, CHUNK):
    """Products of rows of a with rows of b. The tiles are their first CHUNK columns."""
    A, B = a_tile.shape[0], b_tile.shape[0]
    sums = ct.mma(a_tile, ct.transpose(b_tile), ct.zeros((A, B), ct.float32))
    for part in range(1, (HEAD + CHUNK - 1) // CHUNK):
        b_next = load(b, line, b_at, part, B, CHUNK)
        sums = ct.mma(load(a, line, a_at, part, A, CHUNK), ct.transpose(b_next), sums)
    return sums


@ct.function
def means_of(do_tile, do, o, at, line, HEAD, CHUNK):
    """For each query, the mean of its weights' gradients, weighted by the weights: the dot product of its output and do."""
    SIZE = do_tile.shape[0]
    sums = ct.astype(load(o, line, at, 0, SIZE, CHUNK), ct.float32) * do_tile
    for part in range(1, (HEAD + CHUNK - 1) // CHUNK):
        o_next = ct.astype(load(o, line, at, part, SIZE, CHUNK), ct.float32)
        sums += o_next * load(do, line, at, part, SIZE, CHUNK)
    return ct.sum(sums, axis=1, keepdims=True)


@ct.function
def part_of(tile, x, at, line, part, HEAD, CHUNK, WIDTH):
    """The columns of x that belong to a part of the output. `tile` is x's first CHUNK columns."""
    if HEAD <= CHUNK and CHUNK == WIDTH:
        return tile
    else:
        return load(x, line, at, part, tile.shape[0], WIDTH)


@ct.function
def sees(row, column, line, reach, ROWS, COLUMNS):
    """Which positions of a tile of ROWS see which positions of a tile of COLUMNS."""
    rows = row * ROWS + ct.reshape(ct.arange(ROWS, dtype=ct.int32), (ROWS, 1))
    columns = column * COLUMNS + ct.reshape(ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    return (ct.abs(rows - columns) <= reach) & (rows < line[3]) & (columns < line[3])


@ct.function
def around(tile, line, reach, BLOCK, STEP):
    """The tiles of STEP positions that a tile of BLOCK positions sees: the first one, and the one after the last."""
    first = tile * BLOCK
    return ct.maximum(first - reach, 0) // STEP, ct.cdiv(ct.minimum(first + BLOCK + reach, line[3]), STEP)


@ct.function
def near(tile, line, reach, BLOCK, SIDE):
    """A tile of BLOCK positions and the tiles of SIDE before and after it: number, reach and size of each.

    If there is no tile before or after, another tile stands in for it. Its reach of -1 makes it invisible.
    """
    before, after = tile * (BLOCK // SIDE) - 1, (tile + 1) * (BLOCK // SIDE)
    last = ct.cdiv(line[3], SIDE) - 1
    return (
        (tile, reach, BLOCK),
        (ct.maximum(before, 0), ct.where(before >= 0, reach, -1), SIDE),
        (ct.minimum(after, last), ct.where(after <= last, reach, -1), SIDE),
    )


@ct.function
def weights_of(scores, maximum, inverse, seen, q):
    return ct.where(seen, exp_like(scores - maximum, q) * inverse, 0.0)


@ct.function
def dscores_of(weights, dweights, mean, reach, q):
    # A position that sees only itself has no gradient, not even a rounding error.
    return ct.astype(ct.where(reach > 0, weights * (dweights - mean), 0.0), q.dtype)
