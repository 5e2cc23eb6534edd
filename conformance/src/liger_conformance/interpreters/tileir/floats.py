"""Operations on floating-point numbers. Results are rounded once, to nearest even unless the operation says otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from liger_conformance.interpreters.tileir.bytecode import Op
from liger_conformance.interpreters.tileir.integers import COMPARISONS, Binary, Function, Ternary, Unary, unsigned
from liger_conformance.interpreters.tileir.memory import dtype_of

NEAREST_EVEN, TOWARDS_ZERO, DOWN, UP, APPROXIMATE, FULL = range(6)
"""Rounding. The last two, of functions that a GPU approximates, are taken as nearest."""
_DIRECTED = (TOWARDS_ZERO, DOWN, UP)
_NOT_EQUAL = 1
_TF32_DROPPED = (1 << 13) - 1
"""The bits of a float32 that a tf32 lacks."""


def _rounding_of(op: Op) -> int:
    rounding = op.attributes["rounding"]
    if rounding > FULL:
        raise NotImplementedError(f"Tile IR operation {op.name} at {op.location}: rounding {rounding}")
    return rounding


def _neighbour(x: Tensor, upwards: bool) -> Tensor:
    """The next number of x's dtype."""
    if x.dtype in (torch.float32, torch.float64):
        return torch.nextafter(x, torch.full_like(x, torch.inf if upwards else -torch.inf))
    bits = x.view(torch.int16)
    return (bits + torch.where((x > 0) == upwards, 1, -1).to(torch.int16)).view(x.dtype)


def _round(wide: Tensor, dtype: torch.dtype, rounding: int) -> Tensor:
    """Float64 to `dtype`, rounded in a direction."""
    near = wide.to(dtype)
    if rounding not in _DIRECTED:
        return near
    lower = rounding == DOWN or (wide > 0) & (rounding == TOWARDS_ZERO)
    upper = rounding == UP or (wide < 0) & (rounding == TOWARDS_ZERO)
    near = torch.where((near.double() > wide) & lower, _neighbour(near, False), near)
    return torch.where((near.double() < wide) & upper, _neighbour(near, True), near)


def _flush(x: Tensor) -> Tensor:
    """Subnormal numbers as zero."""
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x).copysign(x), x)


def _unary(function: Unary) -> Callable[[Op], Unary]:
    def build(op: Op) -> Unary:
        dtype, flush = dtype_of(op), op.attributes.get("ftz")

        def apply(x: Tensor) -> Tensor:
            y = function(x if dtype.itemsize >= 4 else x.float()).to(dtype)
            return _flush(y) if flush else y

        if flush:
            return lambda x: apply(_flush(x))
        return function if dtype.itemsize >= 4 else apply

    return build


def _binary(function: Binary) -> Callable[[Op], Binary]:
    def build(op: Op) -> Binary:
        dtype, rounding, flush = dtype_of(op), _rounding_of(op), op.attributes["ftz"]

        def rounded(a: Tensor, b: Tensor) -> Tensor:
            return _round(function(a.double(), b.double()), dtype, rounding)

        apply = rounded if rounding in _DIRECTED else function
        return (lambda a, b: _flush(apply(_flush(a), _flush(b)))) if flush else apply

    return build


def _multiply_add(op: Op) -> Ternary:
    dtype = dtype_of(op)
    return lambda a, b, c: (a.double() * b.double() + c.double()).to(dtype)


def _max(op: Op) -> Binary:
    return torch.maximum if op.attributes["nan"] else torch.fmax


def _min(op: Op) -> Binary:
    return torch.minimum if op.attributes["nan"] else torch.fmin


def _compare(op: Op) -> Binary:
    predicate: int = op.attributes["pred"]
    ordered, function = bool(op.attributes["ordered"]), COMPARISONS[predicate]
    if ordered != (predicate == _NOT_EQUAL):  # as PyTorch compares
        return function
    if ordered:
        return lambda a, b: function(a, b) & ~(a.isnan() | b.isnan())
    return lambda a, b: function(a, b) | a.isnan() | b.isnan()


def _to_tf32(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    return ((bits + (_TF32_DROPPED >> 1) + (bits >> 13 & 1)) & ~_TF32_DROPPED).view(torch.float32)


def _convert(op: Op) -> Unary:
    dtype, rounding = dtype_of(op), _rounding_of(op)
    if op.types[0].element == "tf32":
        return lambda x: torch.where(x.isfinite(), _to_tf32(x.to(dtype)), x.to(dtype))

    def convert(x: Tensor) -> Tensor:
        if rounding in _DIRECTED and dtype.itemsize < x.element_size():
            return _round(x.double(), dtype, rounding)
        return x.to(dtype)

    return convert


def _integer_power(op: Op) -> Binary:
    return lambda x, exponent: torch.pow(x, exponent.to(x.dtype))


def _matmul(op: Op) -> Ternary:
    dtype = dtype_of(op)
    wide = torch.promote_types(dtype, torch.float32)
    return lambda a, b, c: (a.to(wide) @ b.to(wide) + c.to(wide)).to(dtype)


def _scaled_matmul(op: Op) -> Function:
    dtype = dtype_of(op)

    def apply(a: Tensor, b: Tensor, c: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        a, b, scale_a, scale_b = (x.to(dtype) for x in (a, b, scale_a, scale_b))
        a = a * scale_a.repeat_interleave(a.shape[-1] // scale_a.shape[-1], -1)
        b = b * scale_b.repeat_interleave(b.shape[-2] // scale_b.shape[-2], -2)
        return a @ b + c

    return apply


def _integer_matmul(op: Op) -> Ternary:
    signed_a, signed_b = op.attributes["signed_a"], op.attributes["signed_b"]

    def apply(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a = a.to(torch.int64) if signed_a else unsigned(a)
        b = b.to(torch.int64) if signed_b else unsigned(b)
        return (a @ b + c).to(torch.int32)

    return apply


OPERATIONS: dict[str, Callable[[Op], Function]] = {
    "absf": _unary(torch.abs),
    "negf": _unary(torch.neg),
    "ceil": _unary(torch.ceil),
    "floor": _unary(torch.floor),
    "sin": _unary(torch.sin),
    "cos": _unary(torch.cos),
    "tan": _unary(torch.tan),
    "sinh": _unary(torch.sinh),
    "cosh": _unary(torch.cosh),
    "tanh": _unary(torch.tanh),
    "exp": _unary(torch.exp),
    "exp2": _unary(torch.exp2),
    "log": _unary(torch.log),
    "log2": _unary(torch.log2),
    "sqrt": _unary(torch.sqrt),
    "rsqrt": _unary(torch.rsqrt),
    "addf": _binary(torch.add),
    "subf": _binary(torch.sub),
    "mulf": _binary(torch.mul),
    "divf": _binary(torch.div),
    "fma": _multiply_add,
    "maxf": _max,
    "minf": _min,
    "cmpf": _compare,
    "ftof": _convert,
    "powf": lambda op: torch.pow,
    "powi": _integer_power,
    "atan2": lambda op: torch.atan2,
    "remf": lambda op: torch.fmod,
    "mmaf": _matmul,
    "mmaf_scaled": _scaled_matmul,
    "mmai": _integer_matmul,
}
"""From an operation to the function of its operands."""
