"""A kernel that Triton takes, and the lowering to tiles doesn't: of pointers that are chosen one by one."""

import torch
import triton
import triton.language as tl


@triton.jit
def _choose(y, p, q, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    chosen = tl.where(tl.load(p + column) > 0, p + column, q + column)
    tl.store(y + column, tl.load(chosen))


def forward(needs, p, q, **others):
    y = torch.empty_like(p)
    _choose[(48,)](y, p, q, BLOCK=1024)
    return y, ()


def backward(needs, saved, *incoming, **options):
    return ()
