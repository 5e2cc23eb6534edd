"""A kernel that lowers to an operation of Ascend's own, which MLIR's tools don't know."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sort(y, x, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(y + column, tl.sort(tl.load(x + column, column < columns, other=0.0)), column < columns)


def forward(needs, x, **options):
    y = torch.empty_like(x)
    _sort[(48,)](y, x, x.shape[-1], BLOCK=1024)
    return y, ()


def backward(needs, saved, *incoming, **options):
    return (None,)
