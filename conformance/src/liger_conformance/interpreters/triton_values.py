"""Repairs of the values in Triton's interpreter: bf16, fp8, casts, tl.dot, and the types of arguments.

A value is a `TensorHandle`: a numpy array beside a Triton dtype. numpy has no bf16 and no fp8, so those are kept as their bits,
in uint16 and uint8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_BF16_NAN = 0x7FC0
FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
"""PyTorch's dtypes of Triton's, by name."""
_Convert = Callable[[np.ndarray], np.ndarray]


def to_fp32(bits: np.ndarray) -> np.ndarray:
    """The values of bf16 bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The bits of fp32 values in bf16, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), _BF16_NAN, rounded).astype(np.uint16)


def from_fp8(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of fp8 bits in fp32, exactly."""
    return torch.from_numpy(np.array(bits)).view(dtype).float().numpy()


def to_fp8(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bits of fp32 values in fp8, to nearest, ties to even. Larger ones become the largest, as on NVIDIA's devices."""
    most = torch.finfo(dtype).max
    nan = torch.full((1,), torch.nan).to(dtype).view(torch.uint8).item()
    bits = torch.from_numpy(np.clip(values, -most, most)).to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(values), nan, bits).astype(np.uint8)


def is_bf16(handle: Any) -> bool:
    """Whether this is a value whose data are bf16 bits."""
    return hasattr(handle, "dtype") and handle.dtype.scalar.name == "bf16" and handle.data.dtype == np.uint16


def widen(handle: Any) -> Any:
    """A bf16 value in fp32; any other as it is."""
    import triton.language as tl

    return type(handle)(to_fp32(handle.data), tl.float32) if is_bf16(handle) else handle


def narrow(handle: Any) -> Any:
    """An fp32 value in bf16; any other as it is."""
    import triton.language as tl

    return type(handle)(to_bf16(handle.data), tl.bfloat16) if handle.data.dtype == np.float32 else handle


def repair_bf16_arithmetic(interpreter: Any) -> None:
    """Arithmetic, comparisons, clamp and fma of bf16, and in triton-ascend rsqrt and erf, treat its bits as integers: 1.0 +
    1.0 is inf. All releases.

    Here they are done in fp32 and rounded once, as on a device.
    """
    builder = interpreter.InterpreterBuilder

    def in_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def compute(self: Any, *arguments: Any) -> Any:
            if not any(map(is_bf16, arguments)):
                return method(self, *arguments)
            return narrow(method(self, *map(widen, arguments)))

        return compute

    for name in ("binary_op", "unary_op", "create_clampf", "create_fma", "create_rsqrt", "create_erf"):
        setattr(builder, name, in_fp32(getattr(builder, name)))


def repair_bf16_dot(interpreter: Any) -> None:
    """tl.dot multiplies the bits of bf16 operands as integers, and widens subnormal fp8 ones wrongly. All releases."""
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def widened(handle: Any) -> Any:
        dtype = FP8.get(handle.dtype.scalar.name)
        return widen(handle) if dtype is None else type(handle)(from_fp8(handle.data, dtype), tl.float32)

    @functools.wraps(create_dot)
    def dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *arguments)

    builder.create_dot = dot


def repair_tf32_dot(interpreter: Any) -> None:
    """tl.dot of fp32 operands is exact whatever its `input_precision`, whose default on NVIDIA's devices is "tf32": 10
    bits of mantissa. A kernel that forgets to ask for "ieee" would pass here and fail there. All releases.
    """
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot
    tf32 = interpreter._ir.INPUT_PRECISION.TF32

    def rounded(handle: Any) -> Any:
        if handle.data.dtype != np.float32:
            return handle
        bits = np.ascontiguousarray(handle.data).view(np.uint32)
        bits = np.where(np.isfinite(handle.data), (bits + 0x1000) & 0xFFFFE000, bits)
        return type(handle)(bits.view(np.float32), handle.dtype)

    @functools.wraps(create_dot)
    def dot(self: Any, a: Any, b: Any, accumulator: Any, input_precision: Any, *arguments: Any) -> Any:
        if input_precision == tf32:
            a, b = rounded(a), rounded(b)
        return create_dot(self, a, b, accumulator, input_precision, *arguments)

    builder.create_dot = dot


def repair_comparisons(interpreter: Any) -> None:
    """A comparison says that it is of its operands' dtype. One of scalars becomes a block of that dtype, and a mask that it
    is part of a block of integers, which the bounds check and atomics take for indices. All releases.
    """
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    binary_op = builder.binary_op

    @functools.wraps(binary_op)
    def compute(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = binary_op(self, left, right, operation)
        return interpreter.TensorHandle(result.data, tl.int1) if result.data.dtype == bool else result

    builder.binary_op = compute


def repair_casts(interpreter: Any) -> None:
    """fp32 to bf16 truncates, which doubles the error, biases sums and makes some NaN inf. Casts between bf16 and int take
    the bits for the value, as does one of a comparison of fp32, whose result says that it is fp32. A cast to fp8 loses a carry,
    so that 1.97 becomes 1.0, and makes NaN a number. All releases.
    """
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    cast_impl = builder.cast_impl
    create_fp_to_fp = builder.create_fp_to_fp
    towards_zero = interpreter._ir.ROUNDING_MODE.RTZ

    def eight_bits(dtype: Any) -> torch.dtype | None:
        return FP8.get(dtype.scalar.name)

    @functools.wraps(cast_impl)
    def cast(self: Any, source: Any, dtype: Any) -> Any:
        if is_bf16(source):
            return source if dtype.scalar == tl.bfloat16 else cast(self, widen(source), dtype)
        if (narrowest := eight_bits(source.dtype)) is not None:
            return cast(self, type(source)(from_fp8(source.data, narrowest), tl.float32), dtype)
        if (narrowest := eight_bits(dtype)) is not None:
            return type(source)(to_fp8(source.data.astype(np.float32), narrowest), dtype.scalar)
        if dtype.scalar == tl.bfloat16:
            return narrow(type(source)(source.data.astype(np.float32), tl.float32))
        return cast_impl(self, source, dtype)

    @functools.wraps(create_fp_to_fp)
    def cast_with_rounding(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        if rounding != towards_zero and eight_bits(source.dtype) is not eight_bits(dtype):
            return cast(self, source, dtype)
        if rounding != towards_zero or dtype.scalar != tl.bfloat16:
            return create_fp_to_fp(self, source, dtype, rounding)
        values = source.data.astype(np.float32)
        truncated = np.where(np.isnan(values), _BF16_NAN, values.view(np.uint32) >> 16)
        return type(source)(truncated.astype(np.uint16), tl.bfloat16)

    builder.cast_impl = cast
    builder.create_fp_to_fp = cast_with_rounding


def repair_bf16_constants(interpreter: Any) -> None:
    """A constant in bf16 raises, in tl.full(...) or x * 0.5: there is no get_bf16. Until 3.8."""
    import triton.language as tl

    def get_bf16(self: Any, value: float) -> Any:
        return interpreter.TensorHandle(to_bf16(np.array([value], np.float32)), tl.bfloat16)

    interpreter.InterpreterBuilder.get_bf16 = get_bf16


def repair_narrow_atomics(interpreter: Any) -> None:
    """tl.atomic_add of bf16 raises "Unsupported data type". All releases; of fp16 triton-ascend's. (The other atomics of
    bf16 don't compile either.)
    """
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    create_atomic_rmw = builder.create_atomic_rmw
    add = interpreter._ir.ATOMIC_OP.FADD
    conversions: dict[Any, tuple[_Convert, _Convert]] = {
        tl.bfloat16: (to_fp32, to_bf16),
        tl.float16: (lambda values: values.astype(np.float32), lambda values: values.astype(np.float16)),
    }

    @functools.wraps(create_atomic_rmw)
    def atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *options: Any) -> Any:
        if operation != add or value.dtype.scalar not in conversions:
            return create_atomic_rmw(self, operation, pointer, value, mask, *options)
        to_wide, to_narrow = conversions[value.dtype.scalar]
        shape, dtype = value.data.shape, value.data.dtype
        active = np.broadcast_to(mask.data, shape)
        addresses, addends = np.broadcast_to(pointer.data, shape)[active], to_wide(value.data[active])
        before = np.zeros(addresses.shape, dtype)
        # Lanes that share an address take turns, in their order, and each rounds its own sum.
        turns = _earlier_equals(addresses)
        for turn in range(turns.max(initial=-1) + 1):
            lanes = turns == turn
            unmasked = np.ones(np.count_nonzero(lanes), bool)
            current = interpreter._interpreter.load(addresses[lanes], unmasked, before[lanes], dtype)
            interpreter._interpreter.store(addresses[lanes], to_narrow(to_wide(current) + addends[lanes]), unmasked)
            before[lanes] = current
        result = np.zeros(shape, dtype)
        result[active] = before
        return interpreter.TensorHandle(result, value.dtype.scalar)

    builder.create_atomic_rmw = atomic_rmw


def _earlier_equals(keys: np.ndarray) -> np.ndarray:
    """For each key, how many keys before it are equal to it."""
    order = np.argsort(keys, kind="stable")
    position = np.arange(keys.size)
    starts_a_run = np.diff(keys[order], prepend=0) != 0
    count = np.empty(keys.size, np.int64)
    count[order] = position - np.maximum.accumulate(np.where(starts_a_run, position, 0))
    return count


def repair_scalar_arguments(interpreter: Any) -> None:
    """A float argument stays a Python float: it has no `.to`, and bf16 times it is bf16, where on a device the argument
    is fp32 and so is the product. All releases. A bool argument raises, until 3.7.
    """
    import triton.language as tl

    convert = interpreter._implicit_cvt

    @functools.wraps(convert)
    def convert_argument(argument: Any) -> Any:
        if isinstance(argument, bool):
            return tl.tensor(interpreter.TensorHandle(np.array([argument]), tl.int1), tl.int1)
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = convert_argument
