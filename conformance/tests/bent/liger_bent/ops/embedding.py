"""A kernel that only the last stage, the assembler, doesn't take."""

import torch
import triton
import triton.language as tl


@triton.jit
def _row(y, x, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    xs = tl.load(x + column)
    tl.store(y + column, tl.inline_asm_elementwise("mistyped $0, $1;", "=r,r", [xs], tl.int32, True, 1))


def forward(needs, indices, weight, **options):
    y = torch.empty(indices.shape, dtype=torch.int32, device=weight.device)
    _row[(1,)](y, indices.int(), BLOCK=1024)
    return y, ()


def backward(needs, saved, dy, **options):
    return ()
