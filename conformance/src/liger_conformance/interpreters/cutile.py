"""cuTile kernels in the interpreter of Tile IR, with all of its checks, and a record of which cuTile kernels ran.

Importing this module does not import cuda.tile; calling its functions does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Generator
from typing import Any, cast

from liger_conformance.interpreters import tileir
from liger_conformance.interpreters.triton import Launch
from liger_conformance.reach import untraced


def repair() -> None:
    """Make `cuda.tile.launch` run kernels on CPU tensors. SavedOnce is enough."""
    if os.environ.get("CUTILE_INTERPRET") != "1":
        raise RuntimeError("the interpreter of Tile IR is off: set CUTILE_INTERPRET=1 before liger_cutile is imported")
    tileir.install()


@contextlib.contextmanager
def launches(recorded: list[Launch]) -> Generator[None, None, None]:
    """Append a `Launch` per cuTile kernel that is launched until the context ends, interpreted or not.

    Not what is launched by a `launch` imported by name.
    """
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.tile") is None:
        yield
        return

    def recording(launch: Any) -> Any:
        @untraced
        @functools.wraps(launch)
        def record(stream: Any, grid: Any, kernel: Any, *arguments: Any, **options: Any) -> None:
            launch(stream, grid, kernel, *arguments, **options)
            recorded.append(Launch.of(kernel._pyfunc, grid))

        return record

    with launching_by(recording):
        yield


@contextlib.contextmanager
def without_launching() -> Generator[list[Launch], None, None]:
    """Record launches instead of making them."""
    recorded: list[Launch] = []

    def record(stream: Any, grid: Any, kernel: Any, *arguments: Any, **options: Any) -> None:
        recorded.append(Launch.of(kernel._pyfunc, grid))

    with launching_by(lambda launch: record):
        yield recorded


@contextlib.contextmanager
def launching_by(replace: Callable[[Any], Any]) -> Generator[None, None, None]:
    """Have what `replace` makes of `cuda.tile.launch` take its place."""
    import cuda.tile

    launch = cast("Any", cuda.tile).launch
    cuda.tile.launch = replace(launch)
    try:
        yield
    finally:
        cuda.tile.launch = launch
