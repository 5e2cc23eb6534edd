"""Tensors whose rows lie in several dimensions, as rows and columns: a row is found by steps in each dimension."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from liger_cutile.ops._rows import LARGEST


class Table(NamedTuple):
    """A tensor as ``[rows, columns]``, and how many rows each dimension goes on with: 0 where it is broadcast.

    Rows may overlap, where strides have no larger common divisor: a table is only read.
    """

    rows: Tensor
    steps: tuple[int, ...]


def table_of(tensor: Tensor, columns: int, sizes: Sequence[int], strides: Sequence[int]) -> Table:
    """A tensor's table. It is a view, but for a copy where rows are too far apart.

    Args:
        tensor: its last dimension's elements are adjacent.
        columns: of them.
        sizes: of the dimensions before; none is 0.
        strides: of those, 0 where it is broadcast or its size is 1.
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
    """Whether so many neighbours in the last dimension, from a multiple of it on, are one row of a table, or one tile."""
    *others, last = steps
    return rows == 1 or last == 0 or (last == 1 and all(step % rows == 0 for step in others))
