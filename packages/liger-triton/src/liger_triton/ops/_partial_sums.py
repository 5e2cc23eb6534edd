"""Gradients that are sums over all rows: each program adds up its own rows in float32, then the programs are added up.

So the sums are the same from run to run, and round once, without atomics.
"""

import torch
import triton.language as tl
from torch import Tensor

from liger_triton.ops._device import sm_count as sm_count
from liger_triton.ops._launch import kernel


@kernel
def _total(total, partial, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        at = partial + row.to(tl.int64)[:, None] * columns + column[None, :]
        sums += tl.load(at, (row < rows)[:, None] & inside[None, :], other=0.0)
    tl.store(total + column, tl.sum(sums, 0), inside)


def total(partial: Tensor, like: Tensor) -> Tensor:
    """The sum of the rows of `partial`, ``float32[P, H]``, in the dtype and shape of `like`, which has H elements."""
    rows, columns = partial.shape
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    # 32 columns are one 128-byte line of each row: the narrowest block, for the most programs.
    _total[((columns + 31) // 32,)](result, partial, rows, columns, ROWS=128, BLOCK=32)
    return result
