"""A tensor as rows, for kernels that work along the last dimension."""

import triton
import triton.language as tl
from torch import Tensor

from liger_core.host.rows import adjacent as adjacent
from liger_core.host.rows import as_rows as as_rows
from liger_core.host.rows import without_gaps as without_gaps


@triton.jit
def multiply(a, b, BLOCK: tl.constexpr):
    """a · b, to be added up along rows of BLOCK columns, with the same result in each thread that has the row's sum.

    A thread that has one column of a row would otherwise fuse its own unrounded product with a neighbour's rounded one, and the
    neighbour would do the opposite.
    """
    return tl.fma(a, b, 0.0) if BLOCK <= 32 else a * b


@triton.jit
def add_two(a1, b1, a2, b2):
    """For `tl.reduce`, as the next ones: several sums in one, so that a program's threads wait for each other only once."""
    return a1 + a2, b1 + b2


@triton.jit
def add_three(a1, b1, c1, a2, b2, c2):
    return a1 + a2, b1 + b2, c1 + c2


@triton.jit
def add_four(a1, b1, c1, d1, a2, b2, c2, d2):
    return a1 + a2, b1 + b2, c1 + c2, d1 + d2


@triton.jit
def add_up(total, lost, values):
    """Running totals with more values, and what rounding has added to them, to be subtracted from the next values.

    Where many values are equal, they are rounded alike, and the error would grow with their number. Source: Kahan, Further
    Remarks on Reducing Truncation Errors, 1965.
    """
    values -= lost
    result = total + values
    return result, tl.where(tl.abs(result) < float("inf"), (result - total) - values, 0.0)


@triton.jit
def packed(xs):
    """Rows of 2-byte elements, ``[rows, columns]``, as uint32 of two neighbours each: float32 takes twice the registers."""
    first, second = tl.split(tl.reshape(xs, (xs.shape[0], xs.shape[1] // 2, 2)))
    low = first.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (second.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def unpacked(pairs, dtype: tl.constexpr):
    """The first and the second of each pair of `dtype`, in float32."""
    first = pairs.to(tl.uint16).to(dtype, bitcast=True)
    return first.to(tl.float32), (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def interleaved(first, second, dtype: tl.constexpr):
    """The rows whose `unpacked` pairs are these, in `dtype`."""
    return tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def again(pairs, result):
    """The same `pairs` once there is a `result` that isn't NaN. The compiler can't know that they are the same.

    So it computes what follows from them again, instead of keeping it in registers.
    """
    return pairs + (result != result).to(tl.uint32)


def in_pairs(x: Tensor, columns: int, stride: int) -> bool:
    """Whether threads load neighbours of a row of 2-byte elements: then no pair that `packed` makes is split between threads."""
    return x.element_size() == 2 and in_vectors(columns, stride)


def in_vectors(*lengths: int) -> bool:
    """Whether threads load 16 bytes of a row at once. Triton does so if it knows that length and strides are multiples of 16.

    If not, threads load one element after another, and each load has its own address and mask in registers.
    """
    return not any(length % 16 for length in lengths)


def power_of_2(size: int, least: int = 16) -> int:
    """The least power of two that is at least `size` and `least`, which is one itself.

    It uses comparisons, so that a dynamic size stays dynamic while torch.compile traces.
    """
    power = least
    while power < size:
        power *= 2
    return power


def tile_read_twice(columns: int) -> tuple[int, int, int]:
    """The rows, columns and warps of a program that reads its rows a second time, from the cache. See `tile_of`.

    Rows that aren't held take no registers, so more programs run while others wait for their sums. This holds only if the first
    read asks the cache to keep the row and the second to let it go (``evict_last``, ``evict_first``).
    """
    block = power_of_2(columns)
    return max(1, 4096 // block), block, 4 if block <= 4096 else 8


def tile_of(columns: int) -> tuple[int, int, int]:
    """The rows, columns and warps of a program that holds whole rows in registers. Rows and columns are powers of two.

    That is 2048 elements or one row, and 16 elements per thread, up to 16 warps. Each thread has two 16-byte loads of bf16 in
    flight, and uses few enough registers (32 to 40 in forward kernels) to fill a multiprocessor.
    """
    block = power_of_2(columns)
    return max(1, 2048 // block), block, min(max(4, block // 512), 16)
