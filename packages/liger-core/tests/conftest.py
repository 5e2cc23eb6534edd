"""Toy languages: one that torch.compile can trace, and one that it can't."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from liger_core import backend, contract, dispatch, resolve
from liger_core.backend import BackendInfo, BrokenBackend

Install = Callable[..., None]

# For the toy languages, and for `op_calls`.
sys.path[:0] = [str(Path(__file__).parent / "toys"), str(Path(__file__).parent)]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Pretend that exactly these languages are installed, and these broken ones."""

    def pretend(*infos: BackendInfo, broken: tuple[BrokenBackend, ...] = ()) -> None:
        discovered = tuple(sorted(infos, key=lambda info: info.language)), broken
        monkeypatch.setattr(backend, "discover", lambda: discovered)
        forget()

    def forget() -> None:
        dispatch.settings.cache_clear()
        resolve._logged.clear()
        for op in contract.ops.values():
            op.forget_plans()

    for variable in ("LANGUAGE", "STRICT", "KERNEL_BACKEND", "KERNEL_STRICT", "KERNEL_CHECK"):
        monkeypatch.delenv(f"LIGER_{variable}", raising=False)
    forget()
    yield pretend
    forget()
    dispatch.state.demand = None


@pytest.fixture
def toys(install: Install) -> None:
    """Both toy languages are installed: toy-traced is the CPU's default, toy-opaque is opt-in."""
    import toy_opaque
    import toy_traced

    install(toy_traced.backend, toy_opaque.backend)
