"""Interpreters of each language's kernels, for machines with no accelerator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from liger_conformance.interpreters import cutile, tileir, triton, triton_ascend
from liger_conformance.interpreters.triton import Launch
from liger_core.backend import BackendInfo


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
    return triton.without_launching() if backend.requires == "triton" else cutile.without_launching()


def counts_launches(backend: BackendInfo) -> bool:
    """Whether `launches` sees this language's launches."""
    return backend.requires in ("triton", "cuda")
