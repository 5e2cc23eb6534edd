"""A tensor as rows, for kernels that work along the last dimension."""

import triton
import triton.language as tl
from torch import Tensor

from liger_core.host.rows import adjacent as adjacent
from liger_core.host.rows import as_rows as as_rows
from liger_core.host.rows import without_gaps as without_gaps

# Elements of a program of a kernel that works element by element, eight per thread: one 16-byte load of bf16 from each tensor.
TILE = 1024
# If more than this share of a tile's columns would be outside the row, the tile is narrower. A tile of 1024 would use 75 % of
# its lanes for 768 columns. So a program takes 256 columns of four rows at a time, and uses all lanes.
MOST_OUTSIDE = 1 / 8


@triton.jit
def place(rows, columns, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's row or rows, ``[ROWS, 1]``; its first column; the columns from there on; and which of them are inside."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks).to(tl.int64) * BLOCK
    column = tl.arange(0, BLOCK)
    inside = column < columns - first
    if ROWS > 1:
        row = row * ROWS + tl.arange(0, ROWS)[:, None]
        column = column[None, :]
        inside = inside[None, :] & (row < rows)
    return row, first, column, inside


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


def block_of(columns: int, most: int) -> int:
    """The power of two, up to `most`, that columns fill. Comparisons keep a dynamic size dynamic in a trace."""
    block = 16
    while block < columns and block < most:
        block *= 2
    return block


def divide(rows: int, columns: int) -> tuple[int, int, int, int]:
    """For a kernel that works element by element: rows and columns of a tile, tiles along a row, and tiles in all."""
    block = TILE
    if rows > 1:
        while block > 16 and (-columns) % block > columns * MOST_OUTSIDE:
            block //= 2
    tile_rows, blocks = TILE // block, (columns + block - 1) // block
    return tile_rows, block, blocks, (rows + tile_rows - 1) // tile_rows * blocks
