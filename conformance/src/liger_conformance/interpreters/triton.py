"""Triton's CPU interpreter (`TRITON_INTERPRET=1`) repaired, and a record of which Triton kernels ran.

With `TRITON_INTERPRET=1` Triton runs a kernel with numpy, which is how the suite runs Triton kernels without a GPU. As
shipped it is silently wrong in places (bf16 is kept as its bits, and added as integers), lacks operations (libdevice,
atomics of bf16), is kinder than a device (`eps` is a float64), and dereferences any pointer. `repair()` mends that, in
this process.

Each repair is a function that says what is wrong, and in which of the releases 3.4 to 3.9. triton-ascend 3.2 needs those
that all releases need, and those of triton_ascend. When no supported release needs one any more, delete it, its line
here and its test.

Importing this module does not import triton; calling its functions does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Generator
from typing import Any, cast

from liger_conformance.interpreters import (
    triton_ascend,
    triton_bounds,
    triton_launch,
    triton_operations,
    triton_syntax,
    triton_types,
    triton_values,
)
from liger_conformance.reach import untraced

__all__ = ["Launch", "launches", "repair"]

_Repair = Callable[[Any], None]
"""Sets names of the module triton.runtime.interpreter, for which no types are declared."""

# Each with the last release that needs it, None while every release does. A later one may wrap what an earlier one set.
_REPAIRS: tuple[tuple[_Repair, tuple[int, int] | None], ...] = (
    (triton_types.keep_numpy_types, None),
    (triton_types.keep_block_types, None),
    (triton_types.keep_names_of_builtins, None),
    (triton_operations.repair_nan_in_min_max, (3, 7)),
    (triton_operations.repair_fma, (3, 8)),
    (triton_operations.repair_erf, None),
    (triton_operations.repair_extern_elementwise, None),
    (triton_operations.repair_reductions, None),
    (triton_operations.repair_scans, None),
    (triton_values.repair_bf16_arithmetic, None),
    (triton_values.repair_bf16_dot, None),
    (triton_values.repair_comparisons, None),
    (triton_values.repair_casts, None),
    (triton_values.repair_bf16_constants, (3, 8)),
    (triton_values.repair_narrow_atomics, None),
    (triton_values.repair_scalar_arguments, None),
    (triton_syntax.repair_syntax, None),
    (triton_launch.repair_patching, None),
    (triton_launch.repair_overflow_check, None),
    (triton_launch.repair_autotune, None),
    (triton_launch.repair_warnings, None),
    (triton_launch.repair_bounds, None),
)
_OF_TRITON: tuple[_Repair, ...] = (
    triton_types.compare_at_once,
    triton_operations.repair_histogram,
    triton_operations.repair_libdevice,
    triton_values.repair_tf32_dot,
)
_OF_TRITON_ASCEND: tuple[_Repair, ...] = (
    triton_ascend.repair_options,
    triton_ascend.repair_autotune,
    triton_ascend.repair_logical_not,
    triton_ascend.repair_dot,
    triton_ascend.provide_language,
    triton_ascend.repair_libdevice,
)
_TRITON_ASCEND = (3, 2)


def repair(*, check_bounds: bool = True) -> None:
    """Mend the interpreter of the installed triton, before any module that defines kernels is imported. SavedOnce is enough.

    With `check_bounds`, a kernel that reads or writes outside every tensor that it was given raises `IndexError`, and
    names them. The last call decides.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton's interpreter is off: set TRITON_INTERPRET=1 before triton is imported")
    import triton

    major, minor, *_ = triton.__version__.split(".")
    release = int(major), int(minor)
    if release < (3, 4) and not (release == _TRITON_ASCEND and hasattr(triton.language, "parallel")):
        raise RuntimeError(f"triton {triton.__version__} is older than 3.4, the oldest whose interpreter this repairs")
    from triton.runtime.interpreter import InterpretedFunction

    # Triton's own device functions, such as tl.max, were decorated when triton was imported.
    if not isinstance(triton.language.max, InterpretedFunction):
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set: set it first")
    _mend(release)
    triton_bounds.enabled = check_bounds


@functools.cache
def _mend(release: tuple[int, int]) -> None:
    from triton.runtime import interpreter

    ascend = release == _TRITON_ASCEND
    if ascend:
        triton_ascend.provide_interface(interpreter)
    for mend, last_release in _REPAIRS:
        if last_release is None or release <= last_release:
            mend(interpreter)
    for mend in _OF_TRITON_ASCEND if ascend else _OF_TRITON:
        mend(interpreter)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a Triton kernel: the kernel's name, the module that defines it, and its grid."""

    kernel: str
    module: str
    grid: tuple[int, int, int]

    @classmethod
    def of(cls, function: Any, grid: Any) -> Launch:
        """The launch of a kernel that is written as a function."""
        x, y, z, *_ = (*map(int, grid), 1, 1)
        return cls(function.__name__, function.__module__, (x, y, z))

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.kernel}"


_recorders: list[list[Launch]] = []


@contextlib.contextmanager
def launches() -> Generator[list[Launch], None, None]:
    """Yield a list that grows by one `Launch` per kernel that is launched until the context ends, from whichever
    thread.

    Interpreted and compiled kernels both, the latter's autotuning included, but not what torch.compile's generated code
    launches. Without triton the list stays empty.
    """
    recorded: list[Launch] = []
    if importlib.util.find_spec("triton") is not None:
        _watch_launches()
    _recorders.append(recorded)
    try:
        with _launches_hooked():
            yield recorded
    finally:
        _recorders[:] = [recorder for recorder in _recorders if recorder is not recorded]


@contextlib.contextmanager
def _launches_hooked() -> Generator[None, None, None]:
    """Hook launches, with nothing: a package that launches what it has compiled by itself then goes through Triton."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.knobs") is None:
        yield
        return
    from triton import knobs

    def nothing(metadata: Any) -> None:
        pass

    knobs.runtime.launch_enter_hook.add(nothing)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(nothing)


@contextlib.contextmanager
def launching_by(replace: Callable[[Any], Any]) -> Generator[None, None, None]:
    """Have what `replace` makes of the function that interprets a launch take its place."""
    from triton.runtime import interpreter

    executor = cast("Any", interpreter.GridExecutor)
    launch = executor.__call__
    executor.__call__ = replace(launch)
    try:
        yield
    finally:
        executor.__call__ = launch


@contextlib.contextmanager
def without_launching() -> Generator[list[Launch], None, None]:
    """Record launches instead of interpreting kernels."""
    recorded: list[Launch] = []

    def record(self: Any, *args: Any, **named: Any) -> None:
        recorded.append(Launch.of(self.fn, self.grid(named) if callable(self.grid) else self.grid))

    with launching_by(lambda launch: record):
        yield recorded


def _record(fn: Any, grid: Any) -> None:
    for recorder in _recorders:
        recorder.append(Launch.of(fn, grid))


@functools.cache
def _watch_launches() -> None:
    _watch_compiled_launches()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _watch_interpreted_launches()


def _watch_compiled_launches() -> None:
    from triton.runtime.jit import JITFunction

    launch = cast("Any", JITFunction).run

    @functools.wraps(launch)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or not _recorders:
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        sizes = grid

        def evaluate(arguments: Any) -> Any:
            nonlocal sizes
            sizes = grid(arguments)
            return sizes

        compiled = launch(self, *args, grid=evaluate if callable(grid) else grid, warmup=warmup, **kwargs)
        _record(self.fn, sizes)
        return compiled

    JITFunction.run = run


def _watch_interpreted_launches() -> None:
    from triton.runtime import interpreter

    executor, builder = cast("Any", interpreter.GridExecutor), cast("Any", interpreter.InterpreterBuilder)
    launch = executor.__call__
    set_grid_dim = builder.set_grid_dim
    running: list[Any] = []

    @untraced
    @functools.wraps(launch)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        running.append(self.fn)
        try:
            launch(self, *args, **kwargs)
        finally:
            running.pop()

    # Called once per launch, before its first program runs.
    @functools.wraps(set_grid_dim)
    def set_and_record(self: Any, *grid: int) -> None:
        set_grid_dim(self, *grid)
        _record(running[-1], grid)

    executor.__call__ = run
    builder.set_grid_dim = set_and_record
