"""What runs each language's kernels with no accelerator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from liger_conformance.interpreters import triton
from liger_conformance.interpreters.triton import Launch
from liger_core.backend import BackendInfo


def prepare(device: str) -> None:
    """Turn interpreters on where the run is on the CPU. Before any kernel language is imported: they look then."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


def interprets(backend: BackendInfo, device: str) -> bool:
    """Whether this language's kernels run in an interpreter on this device."""
    return device == "cpu" and backend.requires == "triton"


def repair(backend: BackendInfo) -> None:
    """Mend the interpreter of a language, before its kernels are imported."""
    if backend.requires == "triton":
        triton.repair()


@contextlib.contextmanager
def launches() -> Iterator[list[Launch]]:
    """Record every kernel launch, of every language whose launches can be seen."""
    with triton.launches() as recorded:
        yield recorded


def counts_launches(backend: BackendInfo) -> bool:
    """Whether `launches` sees this language's launches."""
    return backend.requires == "triton"
