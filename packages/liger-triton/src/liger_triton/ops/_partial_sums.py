"""Gradients that are sums over all rows: each program adds up its own rows in float32, then the programs' sums are added up.

So the sums are the same from run to run and are rounded once, without atomics. If rows are few and short, one launch does both:
some of its programs add up columns, the others take rows.
"""

import torch
import triton.language as tl
from torch import Tensor

from liger_triton.ops._device import sm_count as sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import add_up

MOST_ROWS_AT_ONCE, MOST_BYTES_AT_ONCE = 2048, 8192
"""Rows, and bytes per row, up to which one launch makes all gradients: inputs that are read twice are still in the cache, and
each program has enough rows to read. On an H200 (triton 3.6), rms_norm's backward in bfloat16, in ms, in one launch and in two:
1024 x 1024 0.0087 and 0.0123, 2048 x 2048 0.0140 and 0.0171, 2048 x 2047 0.0264 and 0.0279, 2048 x 4096 0.0228 and 0.0226; but
4096 x 1024 0.0198 and 0.0171. The second launch costs the host another 15 to 20 µs."""

COLUMNS_AT_ONCE, BYTES_AT_ONCE, STAGES_AT_ONCE = 32, 256, 4
"""For a program that adds up columns: how many columns, how many bytes of each column it reads at a time, and how many such
tiles are in flight, including the one that is being added. In one launch 2048 x 2048 takes 0.0140 ms; with 64 columns at least
0.0159, with half the rows 0.0157, with one tile prefetched 0.0197."""


def at_once(x: Tensor, rows: int, columns: int) -> bool:
    """Whether a backward adds up columns in the same launch that takes its rows."""
    return rows <= MOST_ROWS_AT_ONCE and columns * x.element_size() <= MOST_BYTES_AT_ONCE


@kernel
def _total(total, partial, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    sums, lost = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        at = partial + row.to(tl.int64)[:, None] * columns + column[None, :]
        sums, lost = add_up(sums, lost, tl.load(at, (row < rows)[:, None] & inside[None, :], other=0.0))
    tl.store(total + column, tl.sum(sums, 0), inside)


def total(partial: Tensor, like: Tensor) -> Tensor:
    """The sum of the rows of `partial`, ``float32[P, H]``, in the dtype and shape of `like`, which has H elements."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    write_total(result, partial)
    return result


def write_total(result: Tensor, partial: Tensor) -> None:
    """Write the sum of the rows of `partial`, ``float32[P, H]``, to `result`, which is contiguous and has H elements."""
    rows, columns = partial.shape
    # 32 columns are one 128-byte line of each row: the narrowest block, which gives the most programs.
    _total[((columns + 31) // 32,)](result, partial, rows, columns, ROWS=128, BLOCK=32)
