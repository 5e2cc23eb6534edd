"""Tensors with several dimensions of rows, as rows and columns: a step per dimension leads to a row."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from liger_cutile.ops._rows import LARGEST


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
