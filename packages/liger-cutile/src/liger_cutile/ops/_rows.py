"""A tensor as rows, for kernels that work along the last dimension."""

from torch import Tensor

LARGEST = (1 << 31) - 1
"""The largest size of a dimension, and the longest stride, that a kernel takes."""


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
