"""Parts of a kernel's values: element types, arrays, pointers and views; and the checks of each access."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from liger_conformance.interpreters.tileir.bytecode import Op, Type
from liger_conformance.interpreters.tileir.checks import KernelBug, checks
from liger_conformance.interpreters.tileir.uninitialised import written_bytes

DTYPES = {
    "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32, "f64": torch.float64,
    "f8e4m3fn": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "f8e8m0fnu": torch.float8_e8m0fnu,
}  # fmt: skip
"""Dtypes that hold the elements of a type. Integers of Tile IR have no sign, and are held by signed ones."""

_SIGNED = {
    torch.uint8: torch.int8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

Access = Literal["read", "write", "atomic"]
SEVERAL = -1
"""In place of a block's number."""
_MOST_COMPARED = 1 << 24
"""Elements of an array; of larger ones that interleave, it counts as an overlap."""


def dtype_of(op: Op, result: int = 0) -> torch.dtype:
    """The dtype of a result of an operation."""
    return dtype_named(op.types[result].element, op)


def dtype_named(element: str, op: Op) -> torch.dtype:
    """The dtype of an element type."""
    if element not in DTYPES:
        raise NotImplementedError(f"Tile IR operation {op.name} at {op.location}: PyTorch has no {element}")
    return DTYPES[element]


class Shadow:
    """Per element of a storage, in a launch: the block that wrote it, the one that read it, and if writes were atomic.

    Blocks are numbered from 1; 0 is none.
    """

    def __init__(self, length: int) -> None:
        # numpy's zeros take no memory until they are written to: a storage can be larger than what is touched of it.
        self.writer = torch.from_numpy(np.zeros(length, np.int32))
        self.reader = torch.from_numpy(np.zeros(length, np.int32))
        self.atomic = torch.from_numpy(np.zeros(length, bool))


@dataclasses.dataclass
class _Window:
    """Elements of a storage at regular distances."""

    sizes: Sequence[int]
    strides: Sequence[int]
    offset: int

    def bytes(self, itemsize: int) -> _Window:
        strides = [stride * itemsize for stride in self.strides]
        return _Window([*self.sizes, itemsize], [*strides, 1], self.offset * itemsize)

    def get(self, state: Tensor) -> Tensor:
        return state.as_strided(self.sizes, self.strides, self.offset)

    def set(self, state: Tensor, value: Tensor | int) -> None:
        self.get(state)[...] = value


@dataclasses.dataclass
class _Elements:
    """Elements of a storage by number."""

    numbers: Tensor

    def bytes(self, itemsize: int) -> _Elements:
        return _Elements(self.numbers[..., None] * itemsize + torch.arange(itemsize))

    def get(self, state: Tensor) -> Tensor:
        return state[self.numbers]

    def set(self, state: Tensor, value: Tensor | int) -> None:
        state[self.numbers] = value


class Array:
    """An argument of a kernel: the elements of a storage that a tensor's sizes and strides reach.

    Args:
        tensor: on the CPU.
        name: for messages.
        shadows: those of the launch, by storage and size of an element.
    """

    def __init__(self, tensor: Tensor, name: str, shadows: dict[tuple[int, int], Shadow]) -> None:
        tensor = tensor.detach()
        if tensor.dtype in _SIGNED:
            tensor = tensor.view(_SIGNED[tensor.dtype])
        self.name, self.dtype, self.itemsize = name, tensor.dtype, tensor.element_size()
        self.address, self.offset = tensor.data_ptr(), int(tensor.storage_offset())
        axes = [
            (size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride
        ]
        self.axes = sorted(axes, key=lambda axis: -axis[1])
        """Size and stride of those that lead to other elements, the longest stride first."""
        self.length = 1 + sum((size - 1) * stride for size, stride in self.axes) if tensor.numel() else 0
        self.elements = tensor.as_strided((self.length,), (1,), self.offset)
        """From the first to the last, with those between that aren't the array's."""
        self.written = False
        storage = tensor.untyped_storage()
        self.initialised = written_bytes(tensor)
        self.shadow = None
        if checks.race:
            key = storage.data_ptr(), self.itemsize
            if key not in shadows:
                shadows[key] = Shadow(storage.nbytes() // self.itemsize)
            self.shadow = shadows[key]

    @property
    def end(self) -> int:
        """The address behind the last element."""
        return self.address + self.length * self.itemsize

    @property
    def count(self) -> int:
        """How many elements are the array's."""
        return math.prod(size for size, _ in self.axes) if self.length else 0

    def numbers_of(self, other: Array) -> Tensor:
        """The elements of another array as numbers of this one's."""
        return (other.address - self.address + _numbers(other.axes) * other.itemsize) // self.itemsize

    def window(self, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
        """A view of elements from `offset` on."""
        return self.elements.as_strided(sizes, strides, self.offset + offset)

    def outside(self, numbers: Tensor) -> Tensor:
        """Which element numbers are not the array's: before it, behind it, or between its rows."""
        bad = (numbers < 0) | (numbers >= self.length)
        if self.length <= self.count:
            return bad
        rest = numbers
        for size, stride in self.axes:
            bad |= rest // stride >= size
            rest = rest % stride
        return bad | (rest != 0)

    def note_window(
        self, offset: int, sizes: Sequence[int], strides: Sequence[int], access: Access, block: int, op: Op
    ) -> None:
        """Check an access to a window, and remember it."""
        if self.shadow is None and self.initialised is None:
            return
        axes = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1 and stride]
        if _overlap_themselves(axes):
            numbers = cast("Tensor", _numbers(axes).unique())
            self.note_elements(numbers + offset, access, block, op)
        else:
            sizes, strides = [size for size, _ in axes], [stride for _, stride in axes]
            self._note(_Window(sizes, strides, self.offset + offset), access, block, op)

    def note_elements(self, numbers: Tensor, access: Access, block: int, op: Op) -> None:
        """Check an access to elements, and remember it."""
        if self.shadow is not None or self.initialised is not None:
            self._note(_Elements(numbers + self.offset), access, block, op)

    def _note(self, place: _Window | _Elements, access: Access, block: int, op: Op) -> None:
        if self.initialised is not None:
            memory = place.bytes(self.itemsize)
            if access != "write" and not bool(memory.get(self.initialised).all()):
                raise KernelBug("uninitialised", f"{self.name}: a {access} of memory that nothing has written to", op)
            if access != "read":
                memory.set(self.initialised, True)
        if self.shadow is None:
            return
        writer, reader = place.get(self.shadow.writer), place.get(self.shadow.reader)
        atomic = place.get(self.shadow.atomic)
        written, read = (writer != 0) & (writer != block), (reader != 0) & (reader != block)
        conflict = {"read": written, "write": written | read, "atomic": (written & ~atomic) | read}[access]
        if bool(conflict.any()):
            other = torch.where(written, writer, reader)[conflict].flatten()[0].item()
            who = "several blocks" if other == SEVERAL else f"block number {other - 1}"
            raise KernelBug(
                "race",
                f"{self.name}: a {access} by block number {block - 1} of {int(conflict.sum())} element(s) that {who} "
                "touched too, in no order",
                op,
            )
        if access == "read":
            place.set(self.shadow.reader, torch.where(read, SEVERAL, block).to(torch.int32))
        else:
            both = access == "atomic" and atomic | (writer == 0)  # before the writer, perhaps a view, changes
            place.set(self.shadow.atomic, both)
            place.set(self.shadow.writer, torch.where(written, SEVERAL, block).to(torch.int32))


def _numbers(axes: Sequence[tuple[int, int]]) -> Tensor:
    """The elements that sizes and strides reach."""
    numbers = torch.zeros((), dtype=torch.int64)
    for size, stride in axes:
        numbers = numbers[..., None] + torch.arange(size) * stride
    return numbers.flatten()


def _overlap_themselves(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether sizes and strides reach an element twice."""
    reach = 0
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def find_overlap(arrays: Sequence[Array]) -> tuple[Array, Array] | None:
    """Two arrays that share an element, one of them written to."""
    for one, other in itertools.combinations(arrays, 2):
        if (one.written or other.written) and one.address < other.end and other.address < one.end:
            small, large = sorted((one, other), key=lambda array: array.count)
            if small.count > _MOST_COMPARED or not bool(large.outside(large.numbers_of(small)).all()):
                return one, other
    return None


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A tile of pointers into one array, as numbers of its elements."""

    array: Array
    numbers: Tensor


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor view."""

    array: Array
    offset: int
    shape: Sequence[int]
    strides: Sequence[int]


@dataclasses.dataclass(frozen=True)
class TileView(View):
    """A tensor view that is read and written by tile."""

    type: Type


Value = Any
"""A Tensor (a tile), a Pointer, a View, or None (a token)."""
