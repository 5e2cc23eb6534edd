"""Repairs of the operations in Triton's interpreter: minimum and maximum, fma, erf, libdevice, histograms, reductions, scans."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from liger_conformance.interpreters import triton_libdevice
from liger_conformance.interpreters.triton_values import narrow, widen


def repair_nan_in_min_max(interpreter: Any) -> None:
    """tl.maximum, tl.minimum and tl.clamp return NaN when one operand is. A device returns the other operand, unless it
    is told to propagate NaN. Until 3.7.
    """
    builder = interpreter.InterpreterBuilder
    create_clampf = builder.create_clampf
    ignore_nan = interpreter._ir.PROPAGATE_NAN.NONE

    def maximum(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmax)

    def minimum(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmin)

    @functools.wraps(create_clampf)
    def clamp(self: Any, value: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan == ignore_nan:
            return minimum(self, maximum(self, value, low), high)
        return create_clampf(self, value, low, high, propagate_nan)

    builder.create_maxnumf = maximum
    builder.create_minnumf = minimum
    builder.create_clampf = clamp


def repair_fma(interpreter: Any) -> None:
    """tl.fma rounds twice: its product, then its sum. Until 3.8."""

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(triton_libdevice.fma(x.data, y.data, z.data), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma


def repair_erf(interpreter: Any) -> None:
    """tl.erf calls Python's math.erf for each element: a hundred times slower than this. All releases."""

    def erf(self: Any, x: Any) -> Any:
        return interpreter.TensorHandle(triton_libdevice.erf(x.data), x.dtype.scalar)

    interpreter.InterpreterBuilder.create_erf = erf


def repair_extern_elementwise(interpreter: Any) -> None:
    """Functions of a device's library raise. All releases."""

    def extern_elementwise(
        self: Any, library: str, path: str, symbol: str, arguments: list[Any], dtype: Any, is_pure: bool
    ) -> Any:
        result = triton_libdevice.function_of(symbol)(*(widen(argument).data for argument in arguments))
        if dtype.scalar.name == "bf16":
            return narrow(interpreter.TensorHandle(result.astype(np.float32), dtype.scalar))
        return interpreter.TensorHandle(result.astype(interpreter._get_np_dtype(dtype.scalar)), dtype.scalar)

    interpreter.InterpreterBuilder.create_extern_elementwise = extern_elementwise


def repair_libdevice(interpreter: Any) -> None:
    """The functions of `triton.language.extra.libdevice` are stubs, for which the compiler puts a device's, and return
    None here. Those of `...extra.cuda.libdevice` raise. All releases.
    """
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice

    def missing(name: str) -> Callable[..., Any]:
        def raise_missing(*arguments: Any) -> Any:
            raise NotImplementedError(f"libdevice.{name} doesn't exist on CUDA")

        return raise_missing

    for name, stub in inspect.getmembers(libdevice, inspect.isfunction):
        if stub.__module__ == libdevice.__name__:
            function = getattr(cuda_libdevice, name, None)
            function = bind_builtin(interpreter, function) if function else missing(name)
            setattr(libdevice, name, function)
            setattr(cuda_libdevice, name, function)


def bind_builtin(interpreter: Any, builtin: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin that gets the interpreter's semantic, or until 3.3 its builder, as the compiler would give its own."""
    if "_builder" in inspect.signature(builtin).parameters:
        hidden = {"_builder": interpreter.interpreter_builder}
    else:
        hidden = {"_semantic": interpreter.interpreter_semantic}

    def bound(*arguments: Any, **keywords: Any) -> Any:
        return builtin(*arguments, **(keywords | hidden))

    bound.__name__ = bound.__qualname__ = builtin.__name__
    return bound


def repair_histogram(interpreter: Any) -> None:
    """tl.histogram counts in int32, but the elements have 8 bytes, and a store of them writes past its end. Until 3.5. Later
    ones are of the input's dtype, in which counts may overflow. All releases.
    """

    def histogram(self: Any, values: Any, bins: int, mask: Any) -> Any:
        counted = values.data if mask is None else values.data[mask.data]
        counts = np.histogram(counted, bins=bins, range=(0, bins))[0]
        return interpreter.TensorHandle(counts.astype(np.int32), interpreter.tl.int32)

    interpreter.InterpreterBuilder.create_histogram = histogram


def repair_reductions(interpreter: Any) -> None:
    """tl.reduce calls its combine function once per element, unless it knows it: a second for 10,000 elements. All
    releases; for tl.argmax(tie_break_left=False) until 3.7. tl.argmax of a row of NaN raises, from 3.8 on. bf16 is
    reduced as its bits, and fp16 in fp32. All releases.
    """
    # In these dtypes numpy does what a device does, up to the order of a sum, which no device promises either.
    same_as_numpy = {np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint32", "uint64")}
    elementwise = _combine_functions(
        _sum_combine=np.add,
        _elementwise_max=np.fmax,
        _elementwise_max_default=np.fmax,
        _elementwise_max_propagate_nan=np.maximum,
        _elementwise_min=np.fmin,
    )
    with_index = _combine_functions(_argmax_combine_tie_break_left=np.max, _argmin_combine_tie_break_left=np.min)

    def reduce_rows(combine: Any, rows: list[np.ndarray], dtypes: list[Any]) -> list[np.ndarray]:
        if combine in elementwise and rows[0].dtype in same_as_numpy:
            return [elementwise[combine].reduce(rows[0], axis=1, dtype=rows[0].dtype)]
        if combine in with_index and rows[0].dtype in same_as_numpy and not np.isnan(rows[0]).any():
            values, indices = rows
            best = with_index[combine](values, axis=1, keepdims=True)
            last = np.iinfo(indices.dtype).max
            return [best[:, 0], np.where(values == best, indices, last).min(axis=1)]
        # Neighbours are combined until one is left: few calls, with the operands in their order.
        while rows[0].shape[1] > 1:
            left, right = [row[:, 0::2] for row in rows], [row[:, 1::2] for row in rows]
            rows = _combine(interpreter, combine, left, right, dtypes)
        return [row[:, 0] for row in rows]

    def apply(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
        shape = inputs[0].handle.data.shape
        axes = tuple(range(len(shape))) if self.axis is None else (self.axis % len(shape),)
        reduced_shape = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        rows = [np.moveaxis(tensor.handle.data, axes, range(-len(axes), 0)) for tensor in inputs]
        rows = [row.reshape(int(np.prod(reduced_shape)), -1) for row in rows]
        dtypes = [tensor.dtype for tensor in inputs]
        if self.keep_dims:
            reduced_shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
        results = reduce_rows(self.combine_fn, rows, dtypes)
        return [_tensor(interpreter, r.reshape(reduced_shape), dtype) for r, dtype in zip(results, dtypes, strict=True)]

    interpreter.ReduceOps.apply_impl = apply


def _combine_functions(**meanings: Any) -> dict[Any, Any]:
    """Meanings of Triton's own combine functions. triton-ascend has some of them twice, or divided in two."""
    import triton.language as tl

    modules = (tl.standard, inspect.getmodule(cast("Any", tl.max).fn))
    functions = ((getattr(module, name, None), meaning) for module in modules for name, meaning in meanings.items())
    return {function: meaning for function, meaning in functions if function is not None}


def repair_scans(interpreter: Any) -> None:
    """tl.associative_scan calls its combine function once per element, unless it knows it: then bf16 is scanned as its
    bits. All releases. A reversed scan returns a view with negative strides, which others misread, until 3.8.
    """

    def apply(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
        dtypes = [tensor.dtype for tensor in inputs]
        direction = -1 if self.reverse else 1
        rows = [np.moveaxis(tensor.handle.data, self.axis, -1)[..., ::direction] for tensor in inputs]
        length, distance = int(rows[0].shape[-1]), 1
        while distance < length:
            # An element with nothing so far to its left got one from the right end, and is left as it was.
            shifted = [np.roll(row, distance, -1) for row in rows]
            combined = _combine(interpreter, self.combine_fn, shifted, rows, dtypes)
            reached = np.arange(length) >= distance
            rows = [np.where(reached, new, old) for new, old in zip(combined, rows, strict=True)]
            distance *= 2
        rows = [np.ascontiguousarray(np.moveaxis(row[..., ::direction], -1, self.axis)) for row in rows]
        return [_tensor(interpreter, row, dtype) for row, dtype in zip(rows, dtypes, strict=True)]

    interpreter.ScanOps.apply_impl = apply


def _combine(
    interpreter: Any, combine: Any, left: list[np.ndarray], right: list[np.ndarray], dtypes: list[Any]
) -> list[np.ndarray]:
    """A combine function, which is written for scalars, on arrays."""
    semantic = interpreter.interpreter_semantic
    shape, size = left[0].shape, left[0].size
    operands = [
        _tensor(interpreter, operand.reshape(size), dtype)
        for operand, dtype in zip(left + right, dtypes * 2, strict=True)
    ]
    combined = combine(*operands)
    results: list[Any] = [*combined] if isinstance(combined, tuple) else [combined]
    handles = [semantic.cast(semantic.to_tensor(r), dtype).handle for r, dtype in zip(results, dtypes, strict=True)]
    return [np.broadcast_to(handle.data, size).reshape(shape) for handle in handles]


def _tensor(interpreter: Any, data: np.ndarray, dtype: Any) -> Any:
    import triton.language as tl

    tensor_type = tl.block_type(dtype, list(data.shape)) if data.ndim else dtype
    return tl.tensor(interpreter.TensorHandle(data if data.ndim else data.reshape(1), dtype), tensor_type)
