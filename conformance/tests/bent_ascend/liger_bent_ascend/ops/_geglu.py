"""GEGLU of a block, in sub-blocks."""

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(y, gate, up, columns, BLOCK: tl.constexpr, SUB_BLOCK: tl.constexpr):
    for start in range(0, BLOCK, SUB_BLOCK):
        column = tl.program_id(0) * BLOCK + start + tl.arange(0, SUB_BLOCK)
        inside = column < columns
        xs = tl.load(gate + column, inside, other=0.0).to(tl.float32)
        us = tl.load(up + column, inside, other=0.0).to(tl.float32)
        z = 1.5957691216057308 * (xs + 0.044715 * xs * xs * xs)
        tl.store(y + column, xs * (1.0 / (1.0 + tl.exp(-z))) * us, inside)


def launch(gate, up, sub_block, block=32768):
    y = torch.empty_like(gate)
    _forward[(48,)](y, gate, up, gate.numel(), BLOCK=block, SUB_BLOCK=sub_block)
    return y, ()
