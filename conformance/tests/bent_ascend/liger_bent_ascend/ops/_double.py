"""Twice each element, a block at a time."""

import torch
import triton
import triton.language as tl


@triton.jit
def _double(y, x, elements, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, at < elements, other=0.0) * 2.0, at < elements)


def launch(x, programs, block):
    y = torch.empty_like(x)
    _double[(programs,)](y, x, x.numel(), BLOCK=block)
    return y, ()
