"""Gradients that were made before the loss's own was known, scaled by it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_triton_ascend.ops._rows import element_tiles

TILES = 4
"""Alive, by the estimate: of float32 and of bfloat16, one that is read and one that is written, each of them twice."""


@triton.jit
def _scale(y, x, factor, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor)
    blocks = tl.cdiv(tl.cast(size, tl.int64), BLOCK)
    if IN_PLACE:
        blocks = tl.where(factor == 1.0, 0, blocks)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        offset = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + offset, tl.load(x + offset, offset < size).to(tl.float32) * factor, offset < size)


def scaled(x: Tensor | None, dtype: torch.dtype, factor: Tensor, own: bool) -> Tensor | None:
    """x, contiguous, times a float32 scalar; in `dtype`. Written to x if it is `own`, and not at all if that is 1."""
    if x is None:
        return None
    in_place = own and x.dtype is dtype
    y = x if in_place else torch.empty(x.shape, dtype=dtype, device=x.device)
    programs, _, block = element_tiles(x, 1, x.numel(), TILES)
    _scale[(programs,)](y, x, factor, x.numel(), IN_PLACE=in_place, BLOCK=block)
    return y
