"""Widens a tile that is held in its own dtype to float32, a second time.

A second ct.astype would reuse the first one's result, and keep it in twice the registers.
"""

import cuda.tile as ct


@ct.function
def widen_again(tile):
    if tile.dtype == ct.bfloat16:
        bits = ct.astype(ct.bitcast(tile, ct.uint16), ct.uint32)
        return ct.bitcast(ct.bitwise_lshift(bits, ct.full(tile.shape, 16, ct.uint32)), ct.float32)
    else:
        return ct.astype(tile, ct.float32)
