"""Declarations of liger-triton-ascend, and that it refuses a machine for the right reason.

Runs where triton is installed instead of triton-ascend too: it needs neither.
"""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import liger_triton_ascend
from liger_triton_ascend import _machine

PACKAGE = Path(__file__).resolve().parent.parent


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A function that makes an otherwise empty place to install packages, with what it is told to."""
    _machine._clash.cache_clear()

    def make(*, ascend=True, triton=False, npu="works", damage=None):
        if ascend:
            install(
                tmp_path, "triton-ascend", "3.2.0", {"triton/__init__.py": "ours", "triton/_C/libtriton.so": "ours"}
            )
        if triton:
            install(tmp_path, "triton", "3.7.1", {"triton/__init__.py": "theirs"})
        if npu is not None:
            install(tmp_path, "torch_npu", "2.10.0", {"torch_npu/__init__.py": ""})
        if damage == "gone":
            (tmp_path / "triton/_C/libtriton.so").unlink()
        elif damage:
            (tmp_path / "triton/__init__.py").write_text(damage)
        loaded = SimpleNamespace(is_available=lambda: npu == "works")
        monkeypatch.setattr(torch, "npu", None if npu in (None, "not loaded") else loaded, raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        importlib.invalidate_caches()

    yield make
    _machine._clash.cache_clear()


def install(site, name, number, files):
    info = site / f"{name.replace('-', '_')}-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (info / "RECORD").write_text("".join(f"{path},,{len(text)}\n" for path, text in files.items()))
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


@pytest.mark.parametrize(("interpret", "devices"), [("", ("npu",)), ("0", ("npu",)), ("1", ("npu", "cpu"))])
def test_declaration(monkeypatch, interpret, devices):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    backend = runpy.run_path(liger_triton_ascend.__file__, run_name="liger_triton_ascend")["backend"]
    assert (backend.language, backend.devices, backend.default_devices) == ("triton-ascend", devices, ("npu",))
    assert backend.package == "liger_triton_ascend"


def test_import_leaves_triton_alone():
    code = "import sys, liger_triton_ascend.ops; print('triton' in sys.modules)"
    # In an environment with torch-npu and without CANN, torch fails when it loads torch-npu by itself.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(PACKAGE / "src")}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment) == "False\n"


@pytest.mark.parametrize(
    ("device", "how"),
    [("npu", {}), ("cpu", {}), ("cpu", {"npu": None})],
    ids=str,
)
def test_accepts(site, device, how):
    site(**how)
    assert liger_triton_ascend.backend.refuses(device) is None


@pytest.mark.parametrize("device", ["npu", "cpu"])
@pytest.mark.parametrize(
    ("how", "why", "fix"),
    [
        ({"ascend": False}, "triton-ascend is not installed", _machine.INSTALL),
        ({"ascend": False, "triton": True}, "triton-ascend is not installed", _machine.INSTALL),
        ({"triton": True}, "triton 3.7.1 is installed beside triton-ascend", _machine.ALONE),
        ({"damage": "theirs"}, "triton/__init__.py is not the one", _machine.ALONE),
        ({"damage": "gone"}, "libtriton.so is not the one", _machine.ALONE),
    ],
    ids=str,
)
def test_refuses(site, device, how, why, fix):
    site(**how)
    reason = liger_triton_ascend.backend.refuses(device)
    assert reason is not None
    assert why in reason
    assert reason.endswith(fix)


@pytest.mark.parametrize(
    ("npu", "why"),
    [
        (None, 'torch_npu is not installed: uv pip install "liger-triton-ascend[npu]"'),
        ("not loaded", "torch_npu is installed and not loaded: import torch_npu"),
        ("absent", "torch_npu finds no NPU: source CANN's set_env.sh"),
    ],
)
def test_needs_an_npu(site, npu, why):
    site(npu=npu)
    assert liger_triton_ascend.backend.refuses("npu").startswith(why)


def test_old_wheels_are_named(site, monkeypatch):
    site(ascend=False)
    monkeypatch.setattr(sys, "version_info", (3, 12))
    assert "Python 3.11 and older" in liger_triton_ascend.backend.refuses("npu")


def test_command_installs_what_the_package_requires():
    pin = _machine.ALONE.split('"')[1]
    assert f'"{pin};' in (PACKAGE / "pyproject.toml").read_text()
