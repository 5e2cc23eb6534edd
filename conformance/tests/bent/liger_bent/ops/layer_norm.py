"""A row that fits."""

import torch
import triton
import triton.language as tl

from liger_bent.ops._row import load_and_store


@triton.jit
def _row(y, x, columns, BLOCK: tl.constexpr):
    load_and_store(y, x, columns, BLOCK)


def forward(needs, x, **others):
    y = torch.empty_like(x)
    _row[(1,)](y, x, x.shape[-1], BLOCK=1024, num_warps=4)
    return y, ()


def backward(needs, saved, *incoming, **options):
    return ()
