"""Operations on integers, and from and to them. An integer has no sign: operations say how they take it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from liger_conformance.interpreters.tileir.bytecode import Op
from liger_conformance.interpreters.tileir.checks import KernelBug
from liger_conformance.interpreters.tileir.memory import dtype_of

Function = Callable[..., Tensor]
Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Tensor, Tensor], Tensor]
Ternary = Callable[[Tensor, Tensor, Tensor], Tensor]

TOWARDS_ZERO, DOWN, UP = 1, 2, 3
"""Rounding of a division."""
COMPARISONS: tuple[Binary, ...] = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
"""By predicate."""


def bits_of(dtype: torch.dtype) -> int:
    """The width of an integer."""
    return 1 if dtype is torch.bool else torch.iinfo(dtype).bits


def unsigned(x: Tensor) -> Tensor:
    """The unsigned values of integers narrower than 64 bits, as int64."""
    return x.to(torch.int64) & ((1 << bits_of(x.dtype)) - 1)


def _ordered(x: Tensor) -> Tensor:
    """Map unsigned order to signed order, and back."""
    return x.to(torch.int8) if x.dtype is torch.bool else x ^ torch.iinfo(x.dtype).min


def _exactly(function: Callable[[int, int], int]) -> Binary:
    """An operation on unsigned 64-bit integers, by Python's."""
    mask = (1 << 64) - 1

    def apply(a: Tensor, b: Tensor) -> Tensor:
        broadcast = cast("Sequence[Tensor]", torch.broadcast_tensors(a, b))
        numbers: list[list[int]] = [x.flatten().tolist() for x in broadcast]
        values = [function(x & mask, y & mask) & mask for x, y in zip(*numbers, strict=True)]
        values = [v - (1 << 64) if v >> 63 else v for v in values]
        return torch.tensor(values, dtype=torch.int64).reshape(broadcast[0].shape)

    return apply


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Maximum of unsigned integers."""
    return _ordered(torch.maximum(_ordered(a), _ordered(b)))


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Minimum of unsigned integers."""
    return _ordered(torch.minimum(_ordered(a), _ordered(b)))


def _max(op: Op) -> Binary:
    return torch.maximum if op.attributes["signed"] else maximum


def _min(op: Op) -> Binary:
    return torch.minimum if op.attributes["signed"] else minimum


def _compare(op: Op) -> Binary:
    predicate: int = op.attributes["pred"]
    function = COMPARISONS[predicate]
    if op.attributes["signed"]:
        return function
    return lambda a, b: function(_ordered(a), _ordered(b))


def _refuse_zero(op: Op, divisor: Tensor) -> None:
    if bool((divisor == 0).any()):
        raise KernelBug("arithmetic", "an integer is divided by zero", op)


def _divide(op: Op) -> Binary:
    dtype, signed, rounding = dtype_of(op), op.attributes["signed"], op.attributes["rounding"]

    def divide(a: Tensor, b: Tensor) -> Tensor:
        _refuse_zero(op, b)
        if not signed and dtype is torch.int64:
            return _exactly(lambda x, y: -(-x // y) if rounding == UP else x // y)(a, b)
        if not signed:
            a, b = unsigned(a), unsigned(b)
        if rounding == UP:
            down = torch.div(a, b, rounding_mode="floor")
            return (down + (a != down * b)).to(dtype)
        return torch.div(a, b, rounding_mode="floor" if rounding == DOWN else "trunc").to(dtype)

    return divide


def _remainder(op: Op) -> Binary:
    dtype, signed = dtype_of(op), op.attributes["signed"]

    def remainder(a: Tensor, b: Tensor) -> Tensor:
        _refuse_zero(op, b)
        if signed:
            return torch.fmod(a, b)
        if dtype is torch.int64:
            return _exactly(lambda x, y: x % y)(a, b)
        return torch.fmod(unsigned(a), unsigned(b)).to(dtype)

    return remainder


def _refuse_wide_shift(op: Op, distance: Tensor, bits: int) -> None:
    if bool(((distance < 0) | (distance >= bits)).any()):
        raise KernelBug("arithmetic", f"a shift by {bits} or more", op)


def _shift_left(op: Op) -> Binary:
    def shift(a: Tensor, distance: Tensor) -> Tensor:
        _refuse_wide_shift(op, distance, bits_of(a.dtype))
        return a << distance

    return shift


def _shift_right(op: Op) -> Binary:
    dtype, signed = dtype_of(op), op.attributes["signed"]

    def shift(a: Tensor, distance: Tensor) -> Tensor:
        _refuse_wide_shift(op, distance, bits_of(a.dtype))
        if signed:
            return a >> distance
        if dtype is torch.int64:
            return _exactly(lambda x, y: x >> y)(a, distance)
        return (unsigned(a) >> distance.long()).to(dtype)

    return shift


def _multiply_high(op: Op) -> Binary:
    dtype = dtype_of(op)
    bits = bits_of(dtype)
    if bits == 64:
        return _exactly(lambda x, y: x * y >> 64)
    if bits == 32:
        product = _exactly(lambda x, y: x * y >> 32)
        return lambda a, b: product(unsigned(a), unsigned(b)).to(dtype)
    return lambda a, b: (unsigned(a) * unsigned(b) >> bits).to(dtype)


def _extend(op: Op) -> Unary:
    dtype = dtype_of(op)
    if not op.attributes["signed"]:
        return lambda x: unsigned(x).to(dtype)
    return lambda x: -x.to(dtype) if x.dtype is torch.bool else x.to(dtype)


def _truncate(op: Op) -> Unary:
    dtype = dtype_of(op)
    return (lambda x: (x & 1).bool()) if dtype is torch.bool else (lambda x: x.to(dtype))


def _from_integer(op: Op) -> Unary:
    dtype, signed = dtype_of(op), op.attributes["signed"]

    def convert(x: Tensor) -> Tensor:
        if not signed and x.dtype is torch.int64:
            x = x.double() + torch.where(x < 0, 2.0**64, 0.0)
        elif not signed:
            x = unsigned(x)
        elif x.dtype is torch.bool:
            x = -x.to(torch.int8)
        # PyTorch converts integers to 16 bits by way of float32, which rounds twice.
        return x.to(dtype) if dtype.itemsize >= 4 else x.double().to(dtype)

    return convert


def _to_integer(op: Op) -> Unary:
    """Rounds towards zero; what doesn't fit becomes the nearest integer that does, and NaN zero."""
    dtype, signed = dtype_of(op), op.attributes["signed"]
    bits = bits_of(dtype)
    least, end = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
    most = int(end) - 1
    most = most - (1 << 64) if most >> 63 else most  # its bits as an int64

    def convert(x: Tensor) -> Tensor:
        whole = torch.nan_to_num(torch.trunc(x.double()), 0.0, math.inf, -math.inf).clamp(min=least)
        fits = whole < end
        whole = torch.where(fits, whole, 0.0)
        above = whole >= 2.0**63
        value = torch.where(above, whole - 2.0**63, whole).to(torch.int64)
        value = torch.where(above, value ^ (-1 << 63), value)
        return torch.where(fits, value, most).to(dtype)

    return convert


def _simple(function: Function) -> Callable[[Op], Function]:
    return lambda op: function


OPERATIONS: dict[str, Callable[[Op], Function]] = {
    "addi": _simple(torch.add),
    "subi": _simple(torch.sub),
    "muli": _simple(torch.mul),
    "absi": _simple(torch.abs),
    "negi": _simple(torch.neg),
    "andi": _simple(torch.bitwise_and),
    "ori": _simple(torch.bitwise_or),
    "xori": _simple(torch.bitwise_xor),
    "maxi": _max,
    "mini": _min,
    "cmpi": _compare,
    "divi": _divide,
    "remi": _remainder,
    "shli": _shift_left,
    "shri": _shift_right,
    "mulhi": _multiply_high,
    "exti": _extend,
    "trunci": _truncate,
    "itof": _from_integer,
    "ftoi": _to_integer,
}
"""From an operation to the function of its operands."""
