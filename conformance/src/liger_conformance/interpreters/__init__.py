"""Interpreters of each language's kernels, for machines with no accelerator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import Any

from liger_conformance.interpreters import cutile, tileir, triton, triton_ascend
from liger_conformance.interpreters.triton import Launch
from liger_core.backend import BackendInfo

AROUND = 4
"""Calls around launches: enough for one launch of forward and one of backward."""


def prepare(device: str) -> None:
    """Turn interpreters on where the run is on the CPU. Before any kernel language is imported: they look then."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("CUTILE_INTERPRET", "1")
        os.environ.setdefault("ASCEND_UB_CAPACITY_BITS", str(triton_ascend.UNIFIED_BUFFER_BITS))


def interprets(backend: BackendInfo, device: str) -> bool:
    """Whether this language's kernels run in an interpreter on this device."""
    return device == "cpu" and backend.requires in ("triton", "cuda")


def repair(backend: BackendInfo) -> None:
    """Mend the interpreter of a language, before its kernels are imported."""
    if backend.requires == "triton":
        triton.repair()
    elif backend.requires == "cuda":
        cutile.repair()


def checking(backend: BackendInfo | None, device: str) -> contextlib.AbstractContextManager[None]:
    """A context in which the interpreter of a language sees what host code does, for checks that need it."""
    if backend is not None and interprets(backend, device) and backend.requires == "cuda":
        return tileir.tracking()
    return contextlib.nullcontext()


@contextlib.contextmanager
def launches() -> Generator[list[Launch], None, None]:
    """Record every kernel launch, of every language whose launches can be seen."""
    with triton.launches() as recorded, cutile.launches(recorded):
        yield recorded


def without_launching(backend: BackendInfo) -> contextlib.AbstractContextManager[list[Launch]]:
    """A context in which host code alone runs: launches are recorded, and results hold no values. Interpreters only."""
    return _interpreter(backend).without_launching()


@contextlib.contextmanager
def around_launches(backend: BackendInfo, call: Callable[[], None]) -> Generator[None, None, None]:
    """Run a function before and after launches, `AROUND` times, as another thread might; not around its own launches."""
    calls, running = 0, False

    def once() -> None:
        nonlocal calls, running
        if not running and calls < AROUND:
            calls, running = calls + 1, True
            call()
            running = False

    def between(launch: Any) -> Any:
        def launch_between(*args: Any, **named: Any) -> None:
            once()
            launch(*args, **named)
            once()

        return launch_between

    with _interpreter(backend).launching_by(between):
        yield


def _interpreter(backend: BackendInfo) -> Any:
    """The module that interprets a language's launches."""
    return triton if backend.requires == "triton" else cutile


def counts_launches(backend: BackendInfo) -> bool:
    """Whether `launches` sees this language's launches."""
    return backend.requires in ("triton", "cuda")
