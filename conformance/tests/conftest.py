"""A language from outside, installed for single tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import liger_core
from liger_conformance import interpreters, plugin, running
from liger_core import backend, dispatch, introspect
from liger_core.backend import BackendInfo
from liger_core.contract import ops

ACME = Path(__file__).parent / "acme"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[BackendInfo], None]:
    """Pretend that one language is installed, and no other."""

    def pretend(info: BackendInfo) -> None:
        for module in (backend, dispatch, introspect, running, plugin):
            if hasattr(module, "discover"):
                monkeypatch.setattr(module, "discover", lambda: ((info,), ()))
            if hasattr(module, "backends"):
                monkeypatch.setattr(module, "backends", lambda: (info,))
        for op in ops.values():
            monkeypatch.setattr(op, "_plans", {})
            monkeypatch.setattr(op, "_ready", {})

    return pretend


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch, install: Callable[[BackendInfo], None]) -> BackendInfo:
    """The language acme, whose kernels are in Triton: interpreted where there is no GPU."""
    monkeypatch.syspath_prepend(str(ACME))
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_acme"]:
        monkeypatch.delitem(sys.modules, name)
    import liger_acme

    if liger_core.infer_device() == "cpu":
        interpreters.repair(liger_acme.backend)
    install(liger_acme.backend)
    return liger_acme.backend
