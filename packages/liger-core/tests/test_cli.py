"""The `liger` command."""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib import metadata
from pathlib import PurePosixPath

import pytest

from liger_core import BackendInfo, cli
from liger_core.backend import BrokenBackend


def test_where(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["where", "rms_norm", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "-> toy-traced: chosen" in out
    assert 'toy-opaque: no: only on demand: liger_core.use("toy-opaque")' in out


def test_where_for_an_unknown_op(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["where", "rsm_norm"]) == 2
    assert "there is no op 'rsm_norm'; the ops are" in capsys.readouterr().err


def test_matrix(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:] if line.strip()}
    assert lines["rms_norm"] == ["yes", "yes"]
    assert lines["softmax"] == ["-", "-"]


def test_doctor_tells_what_is_missing(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    install(BackendInfo("acme", ("cpu",), "acme_compiler", "toy_traced", "pip install acme"))
    assert cli.main(["doctor"]) == 0
    assert "cpu: acme_compiler is not installed: pip install acme" in capsys.readouterr().out


def test_doctor_fails_on_a_broken_package(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    install(broken=(BrokenBackend("acme", "ImportError: libacme.so"),))
    assert cli.main(["doctor"]) == 1
    assert "problem: acme can't be imported: ImportError: libacme.so" in capsys.readouterr().out


def test_doctor_sees_packages_that_overwrote_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(metadata={"Name": name}, files=[PurePosixPath("triton/__init__.py")])

    monkeypatch.setattr(cli, "distributions", lambda: [installed("triton"), installed("triton-ascend")])
    assert cli.overwritten_packages() == [
        "triton and triton-ascend both installed the package 'triton'; uninstall both, then install one"
    ]


def test_the_command_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="liger")
    assert entry.load() is cli.main
