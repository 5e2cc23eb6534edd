"""Launches that cost little: a compiled kernel is looked up by all that its compilation depends on.

At small sizes an op takes as long as its Python. On an H200's host such a launch with nine arguments takes 8.2 µs; by
`triton.jit` it takes 12.5.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_core import replay
from liger_core.contract import compiling

MOST_REMEMBERED = 4096
"""Launches that a kernel remembers; past that it forgets all of them."""


def _specialised(n: int) -> int:
    """The property of an integer that Triton compiles a kernel for: 1 itself, or its width and whether 16 divides it.

    `triton.jit` finds the same in `specialize_impl`. No part of that which can be called costs less than a launch.
    """
    if n == 1:
        return 1
    width = 2 if -(1 << 31) <= n < 1 << 31 else 3 if n < 1 << 63 else 4
    return -width if n % 16 else width


class Kernel:
    """A Triton kernel, launched as ``kernel[grid](tensors and numbers, CONSTANT=..., num_warps=...)``.

    Runtime arguments are positional. Constants and options are named. Constants come after the runtime arguments in the
    signature and are given in its order.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._constants = tuple(p.name for p in jit.params if p.is_constexpr)
        self._compiled: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if compiling():
            return self.jit[grid]
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        key, runtime_arguments, pointers, device = list(named.values()), [], 0, -1
        # On AMD, Triton compiles separately for tensors whose offsets fit 32 bits. Read on each launch: one process compiles for
        # several chips.
        on_amd = torch.version.hip is not None
        for value in args:
            kind = value.__class__
            if kind is int:
                key.append(_specialised(value))
            elif isinstance(value, Tensor):  # including subclasses: as a key, a tensor would be kept alive
                key.append(value.dtype)
                if on_amd:
                    key.append(value.untyped_storage().size() < 1 << 31)
                device = value.get_device()
                value = value.data_ptr()
                pointers |= value
            elif kind is TensorDescriptor:
                key.append((value.base.dtype, *value.block_shape))
            else:  # None is compiled in; the values of floats and bools are not
                key.append(kind)
            runtime_arguments.append(value)
        key.append(device)
        key = tuple(key)
        compiled = self._compiled.get(key)
        # Triton compiles for a pointer's alignment as well. Unaligned pointers are too rare to remember. Profilers hook
        # launches.
        if compiled is None or pointers % 16 or _hooked():
            self._launch_anew(grid, args, named, None if pointers % 16 else key)
            return
        run, function, metadata, stream_of, constants = compiled
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *runtime_arguments, *constants)
        if (recorder := replay.state.recorder) is not None:
            before = x, y, z, replay.Each(stream_of, (device,)), function, metadata, None, None, None
            recorder.launch(run, *before, *args, *constants, addresses=True, unless=_hooked)

    def _launch_anew(self, grid: tuple[int, ...], args: Sequence[Any], named: dict[str, Any], key: Any) -> None:
        if (recorder := replay.state.recorder) is not None:
            recorder.refuse("a kernel is compiled, takes an unaligned tensor, or is watched by a profiler")
        # Releases of Triton differ in whether they fuse a multiplication and an addition unasked.
        compiled = self.jit[grid](*args, **named, enable_fp_fusion=True)
        if key is not None and compiled is not None:
            if len(self._compiled) >= MOST_REMEMBERED:
                self._compiled.clear()
            constants = [named[name] for name in self._constants]
            stream_of = driver.active.get_current_stream
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, stream_of, constants


def _hooked() -> bool:
    return bool(knobs.runtime.launch_enter_hook.calls)


def kernel(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """`triton.jit`, for the kernels that host code launches. It takes the same options."""
    if function is None:
        return functools.partial(kernel, **options)
    jit = triton.jit(function, **options)
    return Kernel(jit) if isinstance(jit, JITFunction) else _Interpreted(jit)


class _Interpreted:
    """A kernel that Triton's interpreter runs."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, self.function[grid])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def _launch(self, run: Callable[..., Any], *args: Any, **named: Any) -> None:
        replay.launch(functools.partial(run, **named), *args)
