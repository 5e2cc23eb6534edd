"""Rows fetched ahead, into more shared memory than some chips have."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rows(y, gate, up, rows, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    for row in tl.range(0, rows, num_stages=3):
        product = tl.load(gate + row * BLOCK + column) * tl.load(up + row * BLOCK + column)
        tl.store(y + row * BLOCK + column, product)


def forward(needs, gate, up, **options):
    y = torch.empty_like(gate)
    _rows[(1,)](y, gate, up, gate.shape[0], BLOCK=32768 // gate.element_size(), num_warps=16)
    return y, ()


def backward(needs, saved, dy, **options):
    return ()
