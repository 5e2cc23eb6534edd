"""The bounds check of Triton's interpreter: a kernel may read and write the tensors passed to its launch, nothing else.

The interpreter dereferences raw pointers, so a mask that is off by one reads or corrupts its neighbour's memory, or
ends the process. All of it happens in four functions of a C++ module, which `CheckedMemory` stands in front of. While a
kernel runs, the address ranges of its tensors are kept sorted and disjoint, so that a block of addresses is checked by
one binary search.

A tensor's range goes from its first to its last element. That is less than its storage: a kernel given a slice may not
leave it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np
import torch

enabled = True


class OutOfBounds(IndexError):
    """A kernel touched memory outside every tensor that was passed to its launch."""


@dataclasses.dataclass(frozen=True)
class Span:
    """The bytes from a tensor's first to its last element."""

    name: str
    start: int
    end: int
    tensor: torch.Tensor

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Span:
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        elements = steps + 1 if tensor.numel() else 0
        return cls(name, tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size(), tensor)

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        shape, strides = list(self.tensor.shape), list(self.tensor.stride())
        return f"{self.name}: {dtype}{shape}, strides {strides}, {self.end - self.start} bytes at {self.start:#x}"


class _Check:
    """The check of one launch."""

    def __init__(self, kernel: str, builder: Any) -> None:
        self.kernel = kernel
        self.builder = builder
        self.allow([])

    def allow(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        ranges: list[list[int]] = []
        for start, end in sorted((span.start, span.end) for span in spans if span.end > span.start):
            # Spans that overlap are views of one storage. Spans that only touch stay apart: nothing straddles them.
            if ranges and start < ranges[-1][1]:
                ranges[-1][1] = max(ranges[-1][1], end)
            else:
                ranges.append([start, end])
        # Signed: a user's addresses fit, and what a wild pointer wraps around to is negative.
        self.starts = np.array([start for start, _ in ranges], np.int64)
        self.ends = np.array([end for _, end in ranges], np.int64)

    def __call__(self, access: str, pointers: Any, mask: Any, size: int) -> None:
        addresses, active = np.asarray(pointers).view(np.int64), np.asarray(mask)
        if not active.all():
            addresses = addresses[np.broadcast_to(active, addresses.shape)]
        # Nearly always the lowest and the highest address are in one range, and then so are the others.
        if addresses.size and (len(self.starts) == 0 or not self._in_one_range(addresses, size)):
            outside = self._outside(addresses, size)
            if outside.any():
                raise OutOfBounds(self._message(access, addresses, outside, size))

    def _in_one_range(self, addresses: np.ndarray, size: int) -> bool:
        lowest, highest = addresses.min(), addresses.max()
        position = cast("int", np.searchsorted(self.starts, lowest, side="right")) - 1
        return position >= 0 and highest <= self.ends[position] - size

    def _outside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        if len(self.starts) == 0:
            return np.ones(addresses.shape, bool)
        position = np.searchsorted(self.starts, addresses, side="right") - 1
        return (position < 0) | (addresses > self.ends[position] - size)

    def _message(self, access: str, addresses: np.ndarray, outside: np.ndarray, size: int) -> str:
        wrong = int(outside.sum())
        lines = [
            f"{self.kernel}, program {self.builder.grid_idx}: {access} outside of every tensor passed to the launch"
        ]
        lines.append(f"in {wrong} of {addresses.size} lanes that are not masked off. Is a mask missing, or off by one?")
        if self.spans:
            address = int(addresses[outside][0])
            nearest = min(self.spans, key=lambda span: max(span.start - address, address + size - span.end))
            offset = address - nearest.start
            excess = (
                f"{-offset} bytes before its start"
                if offset < 0
                else f"{address + size - nearest.end} bytes past its end"
            )
            element = f"{offset / nearest.tensor.element_size():g}"
            lines.append(f"The first is nearest to {nearest.name!r}: element {element}, {excess}. The tensors:")
        return "\n".join([*lines, *(f"  {span}" for span in self.spans)])


_checks: list[_Check] = []


@contextlib.contextmanager
def checking(kernel: str, builder: Any) -> Generator[None, None, None]:
    """Check the accesses of a launch of `kernel`, whose tensors `allow` names meanwhile."""
    _checks.append(_Check(kernel, builder))
    try:
        yield
    finally:
        _checks.pop()


def allow(spans: Sequence[Span]) -> None:
    _checks[-1].allow(spans)


class CheckedMemory:
    """The interpreter's C++ module, with the four functions that dereference pointers checked."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: np.dtype) -> np.ndarray:
        _check("load", pointers, mask, dtype.itemsize)
        return self._memory.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> None:
        _check("store", pointers, mask, values.dtype.itemsize)
        self._memory.store(pointers, values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, semantic: Any) -> np.ndarray:
        _check("atomic", pointers, mask, values.dtype.itemsize)
        return self._memory.atomic_rmw(operation, pointers, values, mask, semantic)

    def atomic_cas(self, pointers: Any, expected: Any, values: Any, semantic: Any) -> np.ndarray:
        _check("atomic compare-and-swap", pointers, True, values.dtype.itemsize)
        return self._memory.atomic_cas(pointers, expected, values, semantic)


def _check(access: str, pointers: Any, mask: Any, size: int) -> None:
    if enabled and _checks:
        _checks[-1](access, pointers, mask, size)
