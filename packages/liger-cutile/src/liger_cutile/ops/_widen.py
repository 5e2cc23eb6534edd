"""float32 from a tile that is kept in its own dtype, a second time.

A second ct.astype would be the first one's result, kept in twice the registers.
"""

import cuda.tile as ct


@ct.function
def widen_again(tile):
    if tile.dtype == ct.bfloat16:
        bits = ct.astype(ct.bitcast(tile, ct.uint16), ct.uint32)
        return ct.bitcast(ct.bitwise_lshift(bits, ct.full(tile.shape, 16, ct.uint32)), ct.float32)
    else:
        return ct.astype(tile, ct.float32)
