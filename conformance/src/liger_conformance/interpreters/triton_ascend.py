"""Repairs of triton-ascend's interpreter beside those of Triton's: it is Triton 3.2's, and Ascend adds to the language.

`provide_interface` comes before Triton's repairs, which are written for later releases; the others, after them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from typing import Any, cast

import numpy as np

from liger_conformance.interpreters.triton_operations import bind_builtin

UNIFIED_BUFFER_BITS = 192 * 1024 * 8
"""Unified Buffer of an Ascend 910B, which kernels size their tiles for if there is no NPU."""


def _of_ascend(module: str) -> Any:
    """A module that only triton-ascend's Triton has."""
    return importlib.import_module(f"triton.{module}")


class _Semantic:
    """Stand-in for interpreter_semantic of later releases, which Triton's repairs use."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def to_tensor(self, value: Any, check_type: bool = True) -> Any:
        return _of_ascend("language.semantic").to_tensor(value, self.builder, check_type)

    def cast(self, value: Any, dtype: Any) -> Any:
        return _of_ascend("language.semantic").cast(value, dtype, self.builder)

    def integer_promote_impl(self, left: Any, right: Any) -> Any:
        return _of_ascend("language.semantic").integer_promote_impl(left, right)


def provide_interface(interpreter: Any) -> None:
    """Later releases have an interpreter_semantic, and reductions of a tuple return one."""
    interpreter.interpreter_semantic = _Semantic(interpreter.interpreter_builder)

    def apply(self: Any, inputs: Any) -> Any:
        if not isinstance(inputs, tuple):
            return apply(self, (inputs,))[0]
        self.check_tensor(inputs)
        return tuple(self.apply_impl(inputs))

    interpreter.ReduceScanOpIneterface.apply = apply


def repair_options(interpreter: Any) -> None:
    """The options that Ascend's compiler takes, such as `multibuffer=True`, are taken for arguments of the kernel."""
    options = dataclasses.fields(_of_ascend("backends.ascend.compiler").NPUOptions)
    interpreter.RESERVED_KWS = [*interpreter.RESERVED_KWS, *(field.name for field in options)]


def repair_autotune(interpreter: Any) -> None:
    """An autotuned kernel asks the driver how to time it where it is defined, not where it is launched, and raises."""
    from triton.runtime.autotuner import Autotuner

    create = cast("Any", Autotuner).__init__

    @functools.wraps(create)
    def create_untimed(self: Any, *arguments: Any, **named: Any) -> None:
        bound = inspect.signature(create).bind(self, *arguments, **named).arguments
        create(**(bound | {"do_bench": interpreter}))  # anything: what would call it is repaired

    Autotuner.__init__ = create_untimed


def repair_logical_not(interpreter: Any) -> None:
    """`not mask` and `~mask` raise: there is no int1 to make a mask of all ones from."""
    builder = interpreter.InterpreterBuilder
    get_all_ones_value = builder.get_all_ones_value

    def get_int1_ty(self: Any) -> Any:
        import triton.language as tl

        return tl.int1

    @functools.wraps(get_all_ones_value)
    def all_ones(self: Any, dtype: Any) -> Any:
        return self.get_int1(True) if dtype.scalar.is_bool() else get_all_ones_value(self, dtype)

    builder.get_int1_ty = get_int1_ty
    builder.get_all_ones_value = all_ones


def repair_dot(interpreter: Any) -> None:
    """tl.dot has a GPU's precisions and least sizes. Ascend's default is "ieee", and any size will do."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(
        builder.options, default_dot_input_precision="ieee", allowed_dot_input_precisions=("ieee", "hf32")
    )

    def min_dot_size(left: Any, right: Any) -> tuple[int, int, int]:
        return 1, 1, 1

    builder.codegen_fns["min_dot_size"] = min_dot_size


def repair_libdevice(interpreter: Any) -> None:
    """The functions of `triton.language.extra.ascend.libdevice` aren't patched, and raise."""
    import triton.language as tl

    libdevice = _of_ascend("language.extra.ascend.libdevice")
    for name, function in inspect.getmembers(libdevice, cast("Any", tl.core).is_builtin):
        setattr(libdevice, name, bind_builtin(interpreter, function))


def provide_language(interpreter: Any) -> None:
    """Functions of Ascend's language are missing: slices, gather, flip, sort. Hints and barriers do nothing here."""
    import triton.language as tl

    semantic = _of_ascend("language.semantic")
    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder

    def like(source: Any, data: np.ndarray) -> Any:
        return handle(np.ascontiguousarray(data), source.dtype.scalar)

    def place(offsets: list[Any], sizes: list[int], strides: list[int]) -> tuple[slice, ...]:
        starts = [int(offset.data.item()) for offset in offsets]
        return tuple(slice(a, a + n * s, s) for a, n, s in zip(starts, sizes, strides, strict=True))

    def extract_slice(self: Any, whole: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        return like(whole, whole.data[place(offsets, sizes, strides)])

    def insert_slice(self: Any, whole: Any, part: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        data = whole.data.copy()
        data[place(offsets, sizes, strides)] = part.data
        return like(whole, data)

    def extract_scalar(self: Any, whole: Any, indices: Any) -> Any:
        return like(whole, whole.data[tuple(int(index.data.item()) for index in indices)].reshape(1))

    def flip(self: Any, values: Any, axis: int) -> Any:
        return like(values, np.flip(values.data, axis))

    def sort(self: Any, values: Any, axis: int, descending: bool) -> Any:
        data = np.sort(values.data, axis)
        return like(values, np.flip(data, axis) if descending else data)

    def gather(self: Any, source: Any, index: Any, axis: int) -> Any:
        return like(source, np.take_along_axis(source.data, index.data.astype(np.int64), axis))

    def nothing(self: Any, *arguments: Any) -> None:
        """A hint to the compiler, or a barrier."""

    builder.create_extract_slice = extract_slice
    builder.create_insert_slice = insert_slice
    builder.create_extract_scalar = extract_scalar
    builder.create_flip = flip
    builder.create_sort = sort
    builder.create_gather = gather
    builder.create_annotation = nothing
    builder.create_custom_op_for_inter_core_sync = nothing
    for attribute in ("unit", "bool", "int32", "str", "i64_array"):
        setattr(builder, f"get_{attribute}_attr", nothing)

    # Here offsets and sizes come as the numbers that the compiler would have wrapped.
    def wrap_offsets(name: str, position: int) -> None:
        function = getattr(tl, name)

        @functools.wraps(function)
        def wrapped(*arguments: Any, _builder: Any = None) -> Any:
            offsets = [semantic.to_tensor(offset, _builder) for offset in arguments[position]]
            rest = [[int(getattr(n, "value", n)) for n in numbers] for numbers in arguments[position + 1 :]]
            return function(*arguments[:position], offsets, *rest, _builder=_builder)

        setattr(tl, name, wrapped)
        setattr(tl.tensor, name, wrapped)

    wrap_offsets("get_element", 1)
    wrap_offsets("extract_slice", 1)
    wrap_offsets("insert_slice", 2)
