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


@pytest.mark.parametrize("command", ["doctor", "matrix"])
def test_how_to_get_what_is_not_installed(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    install()
    assert cli.main([command]) == 0
    out = capsys.readouterr().out
    for language in ("triton", "triton-ascend", "cutile"):
        assert f'{language} is not installed: uv pip install "liger-core[{language}]"' in out


def test_doctor_names_only_what_is_not_installed(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        BackendInfo("triton", ("cuda",), "torch", "toy_traced", ""), broken=(BrokenBackend("cutile", "ImportError: "),)
    )
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert "triton-ascend is not installed" in out
    assert "triton is not installed" not in out
    assert "cutile is not installed" not in out


def test_where_takes_a_device_and_its_type(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["where", "rms_norm", "--device", "cpu:0"]) == 0
    assert "-> toy-traced: chosen" in capsys.readouterr().out
    assert cli.main(["where", "rms_norm", "--device", "bogus"]) == 2
    assert "device is 'bogus'; it takes a torch device or its type: cpu, cuda, npu, xpu" in capsys.readouterr().err


def test_where_nothing_may_fall_back(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "1")
    install()
    assert cli.main(["where", "rms_norm", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "torch: no: LIGER_KERNEL_STRICT=1 forbids it" in out
    assert "the call raises Unsupported" in out


def test_doctor_fails_on_a_broken_package(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    install(broken=(BrokenBackend("acme", "ImportError: libacme.so"),))
    assert cli.main(["doctor"]) == 1
    assert "problem: acme can't be imported: ImportError: libacme.so" in capsys.readouterr().out


def test_doctor_sees_packages_that_overwrote_each_other(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that liger loads: each of NVIDIA's wheels for CUDA 12 brings an empty nvidia/__init__.py, without harm."""

    def installed(name: str) -> types.SimpleNamespace:
        files = [PurePosixPath(package) / "__init__.py" for package in ("triton", "nvidia")]
        return types.SimpleNamespace(metadata={"Name": name}, files=files)

    monkeypatch.setattr(cli, "distributions", lambda: [installed("triton"), installed("triton-ascend")])
    install(BackendInfo("acme", ("cuda",), "triton", "liger_acme.kernels", ""))
    assert cli.overwritten_packages() == [
        "triton and triton-ascend both installed the package 'triton'; uninstall both, then install one"
    ]


def test_the_command_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="liger")
    assert entry.load() is cli.main
