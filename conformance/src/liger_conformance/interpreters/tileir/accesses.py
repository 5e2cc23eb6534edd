"""Operations that depend on the block or on memory. Each takes the running block, the operation, and its operands by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_conformance.interpreters.tileir import integers
from liger_conformance.interpreters.tileir.bytecode import Op
from liger_conformance.interpreters.tileir.checks import KernelBug, checks
from liger_conformance.interpreters.tileir.memory import Array, Pointer, TileView, Value, dtype_of

Operands = dict[str, Any]


@dataclasses.dataclass
class Run:
    """A launch, and the block of it that runs."""

    grid: tuple[int, int, int]
    arrays: list[Array]
    block: tuple[int, int, int] = (0, 0, 0)
    number: int = 1
    """The block's, from 1."""


_PADDING = {"zero": 0.0, "neg_zero": -0.0, "nan": math.nan, "pos_inf": math.inf, "neg_inf": -math.inf}


def _padding(name: str | None, dtype: torch.dtype) -> float | bool:
    """The value of a padding mode; where it is undetermined, one that shows."""
    if name is not None:
        return _PADDING[name] if dtype.is_floating_point else int(_PADDING[name])
    if not checks.poison:
        return 0
    if dtype.is_floating_point:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).min // 3


@dataclasses.dataclass
class _Tile:
    """Part of a tile that lies in its array."""

    array: Array
    offset: int
    sizes: list[int]
    strides: list[int]

    @property
    def elements(self) -> Tensor:
        return self.array.window(self.offset, self.sizes, self.strides)

    @property
    def part(self) -> tuple[slice, ...]:
        """The same as a part of the tile."""
        return tuple(slice(size) for size in self.sizes)

    def note(self, access: Any, run: Run, op: Op) -> None:
        self.array.note_window(self.offset, self.sizes, self.strides, access, run.number, op)


def _tile(op: Op, view: TileView, index: list[Tensor]) -> _Tile:
    tile, offset = view.type, view.offset
    sizes: list[int] = []
    strides: list[int] = []
    inbounds = op.attributes.get("inbounds") or (False,) * len(index)
    for size, step, axis, i, inside in zip(
        tile.shape, tile.strides or tile.shape, tile.axes, map(int, index), inbounds, strict=True
    ):
        left = view.shape[axis] - i * step
        if i < 0 or left <= 0:
            place = tuple(int(i) for i in index)
            raise KernelBug(
                "bounds",
                f"{view.array.name}: tile {place} of shape {tile.shape} is wholly outside of {tuple(view.shape)}",
                op,
            )
        if inside and left < size:
            raise KernelBug(
                "bounds", f"{view.array.name}: check_bounds=False, and the tile crosses the end of axis {axis}", op
            )
        offset += i * step * view.strides[axis]
        sizes.append(min(size, left))
        strides.append(view.strides[axis])
    return _Tile(view.array, offset, sizes, strides)


def _gathered(view: TileView, index: list[Tensor]) -> tuple[Pointer, Tensor]:
    """The elements of a gather view's tile, and which of them are inside."""
    shape, (gathered,) = view.type.shape, view.type.axes
    numbers, inside = torch.tensor(view.offset), torch.tensor(True)
    for axis, (size, i) in enumerate(zip(shape, index, strict=True)):
        places = i.long().flatten() if axis == gathered else int(i) + torch.arange(size)
        places = places.reshape([size if other == axis else 1 for other in range(len(shape))])
        inside = inside & (places >= 0) & (places < view.shape[axis])
        numbers = numbers + places * view.strides[axis]
    return Pointer(view.array, numbers.expand(shape)), inside.expand(shape)


def _load_view(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    view, dtype = operands["view"], dtype_of(op)
    padding = _padding(view.type.padding, dtype)
    if view.type.kind == "gather":
        pointer, inside = _gathered(view, operands["index"])
        return _read(run, op, pointer, inside, torch.tensor(padding, dtype=dtype)), None
    tile = _tile(op, view, operands["index"])
    tile.note("read", run, op)
    if tuple(tile.sizes) == view.type.shape:
        return tile.elements.clone(), None
    padded = torch.full(view.type.shape, padding, dtype=dtype)
    padded[tile.part] = tile.elements
    return padded, None


def _store_view(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    view, value = operands["view"], operands["val"]
    if view.type.kind == "gather":
        pointer, inside = _gathered(view, operands["index"])
        _write(run, op, pointer, value, inside)
        return (None,)
    tile = _tile(op, view, operands["index"])
    tile.note("atomic" if op.attributes["order"] else "write", run, op)  # a memory order other than weak
    tile.array.written = True
    tile.elements.copy_(value[tile.part])
    return (None,)


def _reduce_view(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    tile = _tile(op, operands["view"], operands["index"])
    tile.note("atomic", run, op)
    tile.array.written = True
    tile.elements.copy_(_update_of(op)(tile.elements.clone(), operands["val"][tile.part]))
    return (None,)


def _active(op: Op, pointer: Pointer, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The lanes that the mask leaves, and the numbers of their elements, which are the array's."""
    numbers = pointer.numbers.flatten()
    if mask is None:
        lanes = torch.arange(numbers.numel())
    else:
        lanes = mask.expand(pointer.numbers.shape).flatten().nonzero().flatten()
        numbers = numbers[lanes]
    outside = pointer.array.outside(numbers)
    if bool(outside.any()):
        raise KernelBug(
            "bounds",
            f"{pointer.array.name}: {int(outside.sum())} pointer(s) outside of the array, such as to element "
            f"{int(numbers[outside][0])} of {pointer.array.length}",
            op,
        )
    return lanes, numbers


def _read(run: Run, op: Op, pointer: Pointer, mask: Tensor | None, padding: Tensor | None) -> Tensor:
    lanes, numbers = _active(op, pointer, mask)
    pointer.array.note_elements(numbers, "read", run.number, op)
    shape, dtype = pointer.numbers.shape, pointer.array.dtype
    if padding is None:
        padding = torch.tensor(_padding(None, dtype), dtype=dtype)
    values = padding.expand(shape).flatten().clone()
    values[lanes] = pointer.array.elements[numbers]
    return values.reshape(shape)


def _write(run: Run, op: Op, pointer: Pointer, value: Tensor, mask: Tensor | None) -> None:
    lanes, numbers = _active(op, pointer, mask)
    pointer.array.note_elements(numbers, "write", run.number, op)
    if checks.race and numbers.unique().numel() != numbers.numel():
        raise KernelBug("race", f"{pointer.array.name}: one store writes to an element twice", op)
    pointer.array.written = True
    pointer.array.elements[numbers] = value.expand(pointer.numbers.shape).flatten()[lanes]


def _load(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    return _read(run, op, operands["ptr"], operands["mask"], operands["pad"]), None


def _store(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    _write(run, op, operands["ptr"], operands["val"], operands["mask"])
    return (None,)


_UPDATES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, torch.add, torch.add, torch.maximum, torch.minimum,
    integers.maximum, integers.minimum, lambda old, new: new,
)  # fmt: skip
"""By mode: and, or, xor, add of integers, add of floats, signed and unsigned maxima and minima, exchange."""


def _update_of(op: Op) -> Callable[[Tensor, Tensor], Tensor]:
    mode: int = op.attributes["mode"]
    return _UPDATES[mode]


def _update(run: Run, op: Op, operands: Operands, update: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, None]:
    """Values before the update. Lanes that share an element follow one another.

    Args:
        run: the block.
        op: the operation.
        operands: its operands.
        update: from the numbers of lanes and what is there to what shall be there.
    """
    pointer: Pointer = operands["ptr"]
    lanes, numbers = _active(op, pointer, operands["mask"])
    array = pointer.array
    array.note_elements(numbers, "atomic", run.number, op)
    array.written = True
    before = torch.zeros(pointer.numbers.numel(), dtype=array.dtype)
    together = len(lanes) if numbers.unique().numel() == numbers.numel() else 1
    for chunk, places in zip(torch.split(lanes, together), torch.split(numbers, together), strict=True):
        before[chunk] = array.elements[places]
        array.elements[places] = update(chunk, before[chunk])
    return before.reshape(pointer.numbers.shape), None


def _atomic_update(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    function = _update_of(op)
    argument = operands["arg"].expand(operands["ptr"].numbers.shape).flatten()
    return _update(run, op, operands, lambda lanes, old: function(old, argument[lanes]))


def _compare_and_swap(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    shape = operands["ptr"].numbers.shape
    expected, new = (operands[name].expand(shape).flatten() for name in ("cmp", "val"))
    return _update(run, op, operands, lambda lanes, old: torch.where(old == expected[lanes], new[lanes], old))


def _block_id(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    return tuple(torch.tensor(i, dtype=torch.int32) for i in run.block)


def _block_counts(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    return tuple(torch.tensor(n, dtype=torch.int32) for n in run.grid)


def _assert(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    if not bool(operands["cond"].all()):
        raise KernelBug("assertion", op.attributes["message"], op)
    return ()


def _print(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    print(f"block {run.block}: {op.attributes['fmt']!r}", *(value.tolist() for value in operands["args"]))
    return (None,)


def _integer_to_pointer(run: Run, op: Op, operands: Operands) -> tuple[Value, ...]:
    address = int(operands["x"])
    for array in run.arrays:
        if array.address == address:
            return (Pointer(array, torch.tensor(0)),)
    raise KernelBug("bounds", f"{address:#x} is the address of no argument", op)


OPERATIONS: dict[str, Callable[[Run, Op, Operands], tuple[Value, ...]]] = {
    "load_view": _load_view,
    "store_view": _store_view,
    "atomic_red_view": _reduce_view,
    "load_ptr": _load,
    "store_ptr": _store,
    "atomic_rmw": _atomic_update,
    "atomic_cas": _compare_and_swap,
    "get_tile_block_id": _block_id,
    "get_num_tile_blocks": _block_counts,
    "assert": _assert,
    "print": _print,
    "int_to_ptr": _integer_to_pointer,
}
"""From an operation to what it does, which returns its results; None stands for a token."""
