"""Triton's part of linear layers: it scales gradients that were made before the gradient of the loss was known, and says which
tile of a product a program makes.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_core.host.linear import Linear
from liger_triton.ops._launch import kernel

TILES_IN_TURN = 8
"""Blocks of rows whose programs run together on all blocks of columns, so that what they load is still in the L2 cache."""


@triton.jit
def tile_in_turn(number, tiles, columns, COLUMNS: tl.constexpr, TURN: tl.constexpr):
    """The block of rows and the block of columns of a tile, by its number."""
    blocks = tl.cdiv(columns, COLUMNS)
    turn = number // (TURN * blocks)
    rest = number % (TURN * blocks)
    size = tl.minimum(tiles - turn * TURN, TURN)
    return turn * TURN + rest % size, rest // size


@kernel
def _scale(y, x, dloss, totals, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(dloss)
    if totals is not None:
        factor /= tl.load(totals)
    tl.store(y + offset, tl.load(x + offset, offset < size).to(tl.float32) * factor, offset < size)


class TritonLinear(Linear):
    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        _scale[((x.numel() + 4095) // 4096,)](y, x, dloss, divisor, x.numel(), BLOCK=4096, num_warps=4)


LINEAR = TritonLinear()
