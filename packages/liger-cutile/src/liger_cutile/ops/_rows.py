"""Tensors as rows, for kernels that work along the last dimension: their tiles in kernels, and tile sizes.

Tiles are float32, whatever the array's dtype, with zeros past the array's end. A tensor with several dimensions of rows is a
`Table`: a step per dimension leads to a row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import cuda.tile as ct
from torch import Tensor

from liger_cutile.ops._launch import given

LARGEST = (1 << 31) - 1
"""The largest size of a dimension, and the longest stride, that a kernel takes."""

ZERO = ct.PaddingMode.ZERO


@ct.function
def load(array, place, ROWS, BLOCK, INSIDE=False):
    """The tile ``[ROWS, BLOCK]`` at `place`, its row and column counted in tiles.

    INSIDE: the tile crosses no edge, and is loaded by plain instructions.
    """
    if INSIDE:
        tile = ct.load(array, place, (ROWS, BLOCK), check_bounds=False, allow_tma=False)
    else:
        tile = ct.load(array, place, (ROWS, BLOCK), padding_mode=ZERO)
    return ct.astype(tile, ct.float32)


@ct.function
def load_vector(vector, column, BLOCK, INSIDE=False):
    """A tile of a 1-D array, as ``[1, BLOCK]``. INSIDE is as for `load`."""
    if INSIDE:
        tile = ct.load(vector, (column,), (BLOCK,), check_bounds=False, allow_tma=False)
    else:
        tile = ct.load(vector, (column,), (BLOCK,), padding_mode=ZERO)
    return ct.reshape(ct.astype(tile, ct.float32), (1, BLOCK))


@ct.function
def hold_vector(vector, BLOCK):
    """A whole 1-D array, as ``[1, BLOCK]``, for a block that takes row after row. An absent vector stays absent.

    It stays in its own dtype, so that it takes fewer registers. It is loaded without TMA, which would keep its buffers.
    """
    if given(vector):
        # Threads hold all of it. Of a bfloat16 tile that isn't gathered, tileiras 13.4 then takes every other element from
        # a register that has half of its address.
        if BLOCK == 16:
            return ct.reshape(ct.gather(vector, ct.arange(BLOCK, dtype=ct.int32)), (1, BLOCK))
        return ct.reshape(ct.load(vector, (0,), (BLOCK,), padding_mode=ZERO, allow_tma=False), (1, BLOCK))
    else:
        return vector


@ct.function
def load_column(array, row, column, ROWS):
    """A tile of the row `row` of a 2-D array, as ``[ROWS, 1]``."""
    values = ct.load(array, (row, column), (1, ROWS), padding_mode=ZERO, allow_tma=False)
    return ct.reshape(ct.astype(values, ct.float32), (ROWS, 1))


@ct.function
def places(ROWS, BLOCK):
    """Rows and columns of the elements of the tile in row ``ct.bid(1)`` and column ``ct.bid(0)``, for gather and scatter.

    Elements outside an array aren't stored. Beyond 2^31 a column becomes negative, so it is outside as well.
    """
    rows = ct.bid(1) * ROWS + ct.arange(ROWS, dtype=ct.int32)
    columns = ct.bid(0) * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
    return ct.reshape(rows, (ROWS, 1)), ct.reshape(columns, (1, BLOCK))


@ct.function
def gather(array, at):
    """The elements at some places.

    Without TMA, and if the array may end inside a tile, it is faster than `load`: tileiras 13.4 puts each such tile into a
    branch, and waits for it before it loads the next one.
    """
    return ct.astype(ct.gather(array, at), ct.float32)


def as_rows(x: Tensor) -> Tensor:
    """A tensor as ``[rows, columns]``, each row's elements adjacent.

    If x's strides allow, it is a view: x is contiguous, or sliced or expanded in any dimension but the last. Otherwise it is a
    copy. Rows of one element get a column stride of 2: with 1, tileiras 13.4 stores several rows 16 bytes at once, at unaligned
    addresses.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # a reshape takes the host 2 µs, whatever it does
    apart, adjacent = rows.stride()
    if rows.shape[1] == 1 and rows.shape[0] > 1 and apart <= LARGEST:
        return rows.as_strided(rows.shape, (apart, 2))
    if adjacent == 1 and apart <= LARGEST:
        return rows
    # A single row counts as contiguous, whatever its row stride is.
    return rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))


def near(x: Tensor) -> Tensor:
    """x with strides that a kernel takes: a copy if elements are too far apart, but never of a contiguous tensor.

    A dimension of size 1 may have any stride and still counts as contiguous. If that stride is too long, it becomes 0 here.
    """
    if max(x.stride()) <= LARGEST:
        return x
    strides = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides) if max(strides) <= LARGEST else x.contiguous()


def as_one_row(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one shape as ``[1, elements]`` if all are contiguous and that is not too long; otherwise as `as_rows`.

    For kernels that work element by element.
    """
    if all(x.is_contiguous() for x in tensors) and tensors[0].numel() <= LARGEST:
        return tuple(x.view(1, -1) for x in tensors)
    return tuple(as_rows(x) for x in tensors)


class Table(NamedTuple):
    """A tensor as ``[rows, columns]``, and each dimension's step in rows; 0 if the tensor is broadcast along it.

    Rows may overlap, if the strides have no larger common divisor. So a table is only read.
    """

    rows: Tensor
    steps: tuple[int, ...]


def table_of(tensor: Tensor, columns: int, sizes: Sequence[int], strides: Sequence[int]) -> Table:
    """A tensor's table. It is a view, or a copy if rows are too far apart.

    Args:
        tensor: a tensor whose last dimension's elements are adjacent.
        columns: its last dimension's size.
        sizes: the sizes of its other dimensions; none is 0.
        strides: their strides; 0 for a dimension that is broadcast or has size 1.
    """
    step = math.gcd(*strides) or columns
    last = sum((size - 1) * (stride // step) for size, stride in zip(sizes, strides, strict=True))
    if max(step, last) >= LARGEST:
        held = [size if stride else 1 for size, stride in zip(sizes, strides, strict=True)]
        tensor = tensor.as_strided((*held, columns), (*strides, 1)).contiguous()
        near = [between if stride else 0 for stride, between in zip(strides, tensor.stride()[:-1], strict=True)]
        return table_of(tensor, columns, sizes, near)
    rows = tensor.as_strided((last + 1, columns), (step, 1 if columns > 1 else 2))  # 2: see as_rows
    return Table(rows, tuple(stride // step for stride in strides))


def one_tile(steps: Sequence[int], rows: int) -> bool:
    """Whether each group of `rows` neighbours along the last dimension is one row of a table, or one tile of it."""
    *others, last = steps
    return rows == 1 or last == 0 or (last == 1 and all(step % rows == 0 for step in others))


def power_of_2(size: int, least: int = 16) -> int:
    """The least power of two that is at least `size` and `least`, which is one itself."""
    return max(least, 1 << (size - 1).bit_length())


def whole_rows(columns: int) -> tuple[int, int]:
    """Rows and columns of a tile that holds whole rows: 2048 elements, or one row."""
    block = power_of_2(columns)
    return max(1, 2048 // block), block


def tiles(rows: int, columns: int, elements: int, most_columns: int = 1024) -> tuple[int, int, int]:
    """Rows and columns of a tile of at most `elements` elements, and how many tiles cover a row."""
    block = min(power_of_2(columns), most_columns)
    return min(elements // block, power_of_2(rows, 1)), block, blocks(columns, block)


def long_block(columns: int) -> int:
    """Columns of the tiles of a row that is too long for one tile, with four blocks per multiprocessor.

    If a row's length is no multiple of 16, its elements are loaded one by one, and registers are short: with 4096 columns
    tileiras 13.4 spills up to 26 on sm_90.
    """
    return 4096 if columns % 16 == 0 else 2048


def blocks(size: int, block: int) -> int:
    """How many blocks cover `size` elements."""
    return (size + block - 1) // block
