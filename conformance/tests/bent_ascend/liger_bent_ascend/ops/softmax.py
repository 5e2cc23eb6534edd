"""A call that the interpreter takes, and the compiler doesn't: of a type."""

import torch
import triton
import triton.language as tl


@triton.jit
def _maximum(y, x, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    lowest = tl.float32(float("-inf"))
    tl.store(y, tl.max(tl.load(x + column, column < columns, other=lowest), 0))


def forward(needs, x):
    y = torch.empty_like(x)
    _maximum[(48,)](y, x, x.shape[-1], BLOCK=1024)
    return y, ()


def backward(needs, saved, *incoming, **options):
    return ()
