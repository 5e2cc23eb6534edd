"""A tensor as rows, for kernels that work along the last dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Logits(NamedTuple):
    """Rows of logits, or of their gradient: the first columns of what lies in memory.

    A kernel may read the columns behind them, and write any values there.

    Attributes:
        memory: ``[N, V]``, or wider. The elements of a row are adjacent if it is wider.
        columns: V.
    """

    # A kernel gets `memory`, and not a view of the columns. If torch.compile has a kernel write to rows of a view, and sizes are
    # dynamic, the kernel gets other rows (torch 2.11); and torch.compile copies views before and after a Triton kernel writes
    # to them.
    memory: Tensor
    columns: int

    @classmethod
    def of(cls, logits: Tensor) -> Logits:
        """Logits of a tensor ``[N, V]``, without columns behind them."""
        return cls(logits, logits.shape[1])

    # These two are no properties: Dynamo of torch 2.9 doesn't trace those of a NamedTuple.
    def padded(self) -> bool:
        """Whether there are columns behind those of the logits."""
        return self.memory.shape[1] != self.columns

    def tensor(self) -> Tensor:
        """The logits alone, ``[N, V]``, to be read."""
        return self.memory[:, : self.columns] if self.padded() else self.memory

    def empty_like(self, dtype: torch.dtype) -> Logits:
        """Memory for as many logits, or their gradient, in `dtype`."""
        return Logits(self.memory.new_empty(self.memory.shape, dtype=dtype), self.columns)

    def rows(self, first: int, last: int) -> Logits:
        """Some of the rows."""
        return Logits(self.memory[first:last], self.columns)

    def part(self, first: int, last: int) -> Logits:
        """Some of the columns, to be read."""
        return Logits(self.memory[:, first:last], last - first)


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """A tensor whose rows lie at one distance from each other, each row's elements adjacent; and that distance.

    It is `x`, or a view of it, if x's strides allow: x is contiguous, or sliced or expanded in any dimension but the last.
    Otherwise it is a copy.

    Args:
        x: ``[..., H]``.

    Returns:
        The tensor, with as many rows of H elements as x, in x's order; and the distance of its rows, in elements.
    """
    columns = x.shape[-1]
    if x.is_contiguous():
        return x, columns
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if rows.is_contiguous():
        return rows, columns
    if rows.stride(1) != 1:
        return rows.contiguous(), columns
    return rows, rows.stride(0)


def without_gaps(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    They aren't read of a copy that a trace has made, nor is its shape: with dynamic sizes, Dynamo of torch 2.11 fails at those
    that are constant.
    """
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def adjacent(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """x, or a copy of it, with the elements of each row adjacent; and its strides."""
    strides = x.stride()
    return (x, strides) if strides[-1] == 1 else (x.contiguous(), without_gaps(x.shape))
