"""Repairs of how Triton's interpreter launches a kernel: what it sets in triton.language, tuning, warnings, bounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from liger_conformance.interpreters import triton_bounds, triton_operations


class _Patches:
    """Patches while a launch runs, undone in reverse order: several modules may have set the same."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.modules: set[int] = set()

    def restore(self) -> None:
        while self.scopes:
            self.scopes.pop().restore()
        self.modules.clear()


@dataclasses.dataclass
class _Names:
    """Names of a kernel's module that mean something else while a launch runs."""

    namespace: dict[str, Any]
    originals: dict[str, Any]

    def restore(self) -> None:
        self.namespace.update(self.originals)


def repair_patching(interpreter: Any) -> None:
    """A builtin imported by name (`from triton.language.math import exp`) isn't patched, and raises. All releases. Each
    call of a device function patches triton.language again, which takes longer than most device functions, and for
    good. From 3.6 on.
    """
    import triton.language as tl

    patch_lang = interpreter._patch_lang
    execute = interpreter.GridExecutor.__call__
    patches = _Patches()

    @functools.wraps(patch_lang)
    def patch_once(fn: Any) -> _Patches:
        names = fn.__globals__
        if id(names) not in patches.modules:
            patches.modules.add(id(names))
            builtins = {name: value for name, value in names.items() if tl.core.is_builtin(value)}
            names.update({name: triton_operations.bind_builtin(interpreter, f) for name, f in builtins.items()})
            patches.scopes.append(_Names(names, builtins))
            if scope := patch_lang(fn):  # until 3.5 nothing is undone, and there is no scope
                patches.scopes.append(scope)
        return patches

    @functools.wraps(execute)
    def execute_and_restore(self: Any, *args: Any, **kwargs: Any) -> None:
        patches.restore()  # what a device function left that was called outside of a launch
        try:
            execute(self, *args, **kwargs)
        finally:
            patches.restore()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = execute_and_restore


def repair_overflow_check(interpreter: Any) -> None:
    """Each + - * of int32 is also computed in int64 and compared, for an assertion that is then dropped: half of the
    time of a kernel that mostly computes offsets. All releases.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def repair_autotune(interpreter: Any) -> None:
    """An autotuned kernel asks the driver of a GPU to time its configurations, and raises. All releases. Here the first
    one is taken.
    """
    from triton.runtime.autotuner import Autotuner

    def time_of_each(self: Any, *args: Any, **kwargs: Any) -> list[float]:
        return [0.0, 0.0, 0.0]

    Autotuner._bench = time_of_each


def repair_warnings(interpreter: Any) -> None:
    """numpy warns of an overflow or a division by zero, which on a device is inf or NaN, and usually in a lane that is
    masked off. All releases.
    """
    execute = interpreter.GridExecutor.__call__

    @functools.wraps(execute)
    def execute_quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            execute(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = execute_quietly


def repair_bounds(interpreter: Any) -> None:
    """Pointers are dereferenced unchecked: see triton_bounds. All releases."""
    executor = interpreter.GridExecutor
    execute = executor.__call__
    init_args_hst = executor._init_args_hst
    unwrap = getattr(interpreter, "_unwrap_tensor", None)  # triton-ascend wraps none
    descriptor_type = getattr(interpreter, "TensorDescriptor", ())  # triton-ascend takes none

    def spans(name: str, argument: Any) -> Iterator[triton_bounds.Span]:
        argument = unwrap(argument) if unwrap else argument
        if isinstance(argument, torch.Tensor):
            yield triton_bounds.Span.of(name, argument)
        elif isinstance(argument, tuple):
            for position, item in enumerate(cast("tuple[Any, ...]", argument)):
                yield from spans(f"{name}[{position}]", item)
        elif isinstance(argument, descriptor_type):
            yield from spans(name, argument.base)

    # Results of init_args_hst are what the kernel is given: copies, for tensors on a device.
    @functools.wraps(init_args_hst)
    def init_args_and_spans(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args_hst, kwargs_hst = init_args_hst(self, args_dev, kwargs)
        arguments = [*zip(self.arg_names, args_hst, strict=False), *kwargs_hst.items()]
        triton_bounds.allow([span for name, argument in arguments for span in spans(name, argument)])
        return args_hst, kwargs_hst

    @functools.wraps(execute)
    def execute_checked(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = f"{self.fn.__module__}.{self.fn.__name__}"
        try:
            with triton_bounds.checking(kernel, interpreter.interpreter_builder):
                execute(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            # Errors of a kernel are wrapped in an InterpreterError, once per device function that they came through.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, triton_bounds.OutOfBounds):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None

    executor.__call__ = execute_checked
    executor._init_args_hst = init_args_and_spans
    interpreter._interpreter = triton_bounds.CheckedMemory(interpreter._interpreter)
