"""Operations that move values and compute none: constants, shapes, pointers, views."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_conformance.interpreters.tileir.bytecode import DYNAMIC, Op
from liger_conformance.interpreters.tileir.checks import KernelBug
from liger_conformance.interpreters.tileir.memory import Pointer, TileView, Value, View, dtype_of

Function = Callable[..., Any]


def _on_tile(function: Callable[[Tensor], Tensor]) -> Function:
    """Shape a tile of pointers as one of numbers."""

    def apply(x: Value) -> Value:
        return Pointer(x.array, function(x.numbers)) if isinstance(x, Pointer) else function(x)

    return apply


def _constant(op: Op) -> Function:
    shape, element, data = op.types[0].shape, op.types[0].element, op.attributes["value"]
    count, dtype = math.prod(shape), dtype_of(op)
    if element == "i1":  # a byte for all of them, or a bit for each
        same = data in (b"\xff", b"\x00") or (len(data) == 1 and count != 8)
        values = [data[0] != 0] if same else [bool(data[i // 8] >> i % 8 & 1) for i in range(count)]
        value = torch.tensor(values)
    elif element == "tf32":  # three bytes each
        words = [int.from_bytes(data[i : i + 3], "little") << 13 for i in range(0, len(data), 3)]
        value = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)
    else:
        value = torch.frombuffer(bytearray(data), dtype=dtype)
    value = (value if value.numel() == count else value.expand(count)).reshape(shape)
    return lambda: value


def _iota(op: Op) -> Function:
    value = torch.arange(op.types[0].shape[0]).to(dtype_of(op))
    return lambda: value


def _reshape(op: Op) -> Function:
    return _on_tile(lambda x: x.reshape(op.types[0].shape))


def _broadcast(op: Op) -> Function:
    return _on_tile(lambda x: x.expand(op.types[0].shape))


def _permute(op: Op) -> Function:
    return _on_tile(lambda x: x.permute(op.attributes["perm"]))


def _concatenate(op: Op) -> Function:
    def concatenate(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], op.attributes["dim"])

    return concatenate


def _part(index: tuple[Tensor, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(int(i) * size, (int(i) + 1) * size) for i, size in zip(index, shape, strict=True))


def _extract(op: Op) -> Function:
    def extract(x: Tensor, *index: Tensor) -> Tensor:
        return x[_part(index, op.types[0].shape)]

    return extract


def _insert(op: Op) -> Function:
    def insert(part: Tensor, whole: Tensor, *index: Tensor) -> Tensor:
        whole = whole.clone()
        whole[_part(index, part.shape)] = part
        return whole

    return insert


def _bitcast(op: Op) -> Function:
    dtype = dtype_of(op)

    def bitcast(x: Tensor) -> Tensor:
        return x.to(dtype) if torch.bool in (dtype, x.dtype) else x.contiguous().view(dtype)

    return bitcast


def _select(op: Op) -> Function:
    def select(condition: Tensor, a: Value, b: Value) -> Value:
        if isinstance(a, Pointer):
            if a.array is not b.array:
                raise NotImplementedError(f"Tile IR operation select at {op.location}: pointers into two arrays")
            return Pointer(a.array, torch.where(condition, a.numbers, b.numbers))
        return torch.where(condition, a, b)

    return select


def _offset(op: Op) -> Function:
    def offset(pointer: Pointer, distance: Tensor) -> Pointer:
        return Pointer(pointer.array, pointer.numbers + distance.to(torch.int64))

    return offset


def _address(pointer: Pointer) -> Tensor:
    return pointer.array.address + pointer.numbers * pointer.array.itemsize


def _pointer_to_integer(op: Op) -> Function:
    return _address


def _assume(op: Op) -> Function:
    kind, *limits = op.attributes["pred"]

    def assume(x: Value) -> Value:
        value = _address(x) if isinstance(x, Pointer) else x
        if kind == "bounded":
            least, most = limits
            broken = (least is not None and bool((value < least).any())) or (
                most is not None and bool((value > most).any())
            )
        else:
            divisor, every, _ = limits
            broken = every is None and bool((value % divisor != 0).any())
        if broken:
            raise KernelBug("assumption", f"{kind} {limits} is not true of {value.flatten()[:4].tolist()}", op)
        return x

    return assume


def _token(op: Op) -> Function:
    return lambda *operands: None


def _tensor_view(op: Op) -> Function:
    view, count = op.types[0], len(op.named["shape"])

    def make(base: Pointer, *dynamic: Tensor) -> View:
        sizes, strides = iter(dynamic[:count]), iter(dynamic[count:])
        return View(
            base.array,
            int(base.numbers),
            [int(next(sizes)) if size == DYNAMIC else size for size in view.shape],
            [int(next(strides)) if stride == DYNAMIC else stride for stride in view.strides],
        )

    return make


def _tile_view(op: Op) -> Function:
    if not op.types[0].shape:
        raise TypeError(
            f"{op.name} at {op.location}: an array without dimensions is loaded or stored, and tileiras 13.4 refuses "
            "its tiles: pass the tensor as .view(1)"
        )

    def make(view: View) -> TileView:
        return TileView(view.array, view.offset, view.shape, view.strides, op.types[0])

    return make


def _tensor_shape(op: Op) -> Function:
    def shape(view: View) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(size, dtype=dtype_of(op)) for size in view.shape)

    return shape


def _tile_counts(op: Op) -> Function:
    def count(view: TileView) -> tuple[Tensor, ...]:
        steps = view.type.strides or view.type.shape
        sizes = (view.shape[axis] for axis in view.type.axes)
        return tuple(torch.tensor(-(-n // step), dtype=dtype_of(op)) for n, step in zip(sizes, steps, strict=True))

    return count


OPERATIONS: dict[str, Callable[[Op], Function]] = {
    "constant": _constant,
    "iota": _iota,
    "reshape": _reshape,
    "broadcast": _broadcast,
    "permute": _permute,
    "cat": _concatenate,
    "extract": _extract,
    "insert": _insert,
    "bitcast": _bitcast,
    "pack": _bitcast,
    "unpack": _bitcast,
    "select": _select,
    "offset": _offset,
    "ptr_to_int": _pointer_to_integer,
    "assume": _assume,
    "make_token": _token,
    "join_tokens": _token,
    "memory_fence_alias": _token,
    "gdc_wait": _token,
    "gdc_launch_dependents": _token,
    "make_tensor_view": _tensor_view,
    "make_partition_view": _tile_view,
    "make_strided_view": _tile_view,
    "make_gather_scatter_view": _tile_view,
    "get_tensor_shape": _tensor_shape,
    "get_index_space_shape": _tile_counts,
}
"""From an operation to the function of its operands."""
