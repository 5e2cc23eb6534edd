"""Declarations of liger-cutile, and that it refuses a machine for the right reason."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import liger_cutile
from liger_core import cli, doctor
from liger_cutile import _machine

REAL = "as it is here"
GOOD = dict.fromkeys(_machine.COMPILERS, "13.4.92")


@pytest.fixture
def machine(monkeypatch):
    """A function that makes this machine look like one where cuTile runs, but for what it is given."""
    _machine.refuses.cache_clear()

    def make(*, tile=None, cuda="13.0", driver=13000, capabilities=((9, 0),), wheels=GOOD, wheels_tileiras="tileiras"):
        def version(name):
            if number := wheels.get(name):
                return number
            raise metadata.PackageNotFoundError(name)

        if tile is not REAL:
            monkeypatch.setattr(_machine, "_cuda_tile", lambda: tile)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(_machine, "_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        monkeypatch.setattr(_machine, "version", version)
        monkeypatch.setattr(_machine, "_wheels_tileiras", lambda: wheels_tileiras)
        monkeypatch.setattr(_machine, "glob", lambda pattern: [])
        monkeypatch.setenv("PATH", os.defpath)
        for name in _machine.HOMES:
            monkeypatch.delenv(name, raising=False)

    yield make
    _machine.refuses.cache_clear()


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory):
    """The wheels' real compiler, laid out as a CUDA toolkit."""
    tileiras = _machine._wheels_tileiras()
    if tileiras is None:
        pytest.skip("nvidia-cuda-tileiras is not installed")
    root = tmp_path_factory.mktemp("toolkit")
    for part in ("bin/tileiras", "bin/ptxas", "lib/libnvvm.so.4"):
        (root / part).parent.mkdir(exist_ok=True)
        shutil.copy(Path(tileiras).parent.parent / part, root / part)
    return root


def test_declaration():
    backend = liger_cutile.backend
    devices = ("cuda", "cpu") if os.environ.get("CUTILE_INTERPRET") == "1" else ("cuda",)
    assert (backend.language, backend.devices, backend.default_devices) == ("cutile", devices, ())
    (entry,) = metadata.entry_points(group="liger.backends", name="cutile")
    assert entry.load() is backend


def test_import_leaves_cuda_tile_alone():
    code = "import sys, liger_cutile, liger_cutile.ops; print('cuda.tile' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"capabilities": ((8, 0),)},
        {"capabilities": ((7, 5), (12, 0))},
        {"driver": 13020, "wheels": dict.fromkeys(_machine.COMPILERS, "13.5.1")},
        {"wheels": {**GOOD, "nvidia-nvvm": "13.4.1"}},
    ],
    ids=str,
)
def test_accepts(machine, how):
    machine(**how)
    assert liger_cutile.backend.refuses("cuda") is None


@pytest.mark.parametrize(
    ("how", "why", "fix"),
    [
        ({"cuda": None}, "built without CUDA", "install a build"),
        ({"driver": None}, "no NVIDIA driver", "install r580"),
        ({"driver": 12080}, "supports CUDA 12.8 and cuTile needs 13.0", "install driver r580"),
        ({"capabilities": ()}, "no GPU", "nvidia-smi"),
        ({"capabilities": ((7, 5), (7, 0))}, "this GPU is sm_75", "liger-core[triton]"),
        ({"wheels": {}}, "nvidia-cuda-tileiras, nvidia-cuda-nvcc, nvidia-nvvm not installed", _machine.INSTALL),
        ({"wheels": {**GOOD, "nvidia-nvvm": None}}, "nvidia-nvvm not installed", _machine.INSTALL),
        ({"wheels": {**GOOD, "nvidia-nvvm": "13.0.88"}}, "nvidia-nvvm 13.0.88", _machine.INSTALL),
        ({"wheels_tileiras": None}, "has lost its tileiras", "--reinstall"),
    ],
    ids=str,
)
def test_refuses(machine, how, why, fix):
    machine(**how)
    reason = liger_cutile.backend.refuses("cuda")
    assert reason is not None
    assert why in reason
    assert fix in reason


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("others", [True, False], ids=["cuda-bindings", "nothing"])
def test_refuses_without_cuda_tile(machine, tmp_path, monkeypatch, device, others):
    machine(tile=REAL)
    for name in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    if others:
        (tmp_path / "cuda/bindings").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert liger_cutile.backend.refuses(device) == f"cuda-tile is not installed: {_machine.INSTALL}"
    assert liger_cutile.backend.missing("cuda").endswith(f"is not installed: {_machine.INSTALL}")


def test_interpreters_need_no_gpu(machine):
    machine(cuda=None, driver=None, capabilities=(), wheels={})
    assert liger_cutile.backend.refuses("cpu") is None


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "default"])
def test_accepts_the_toolkits_compiler(machine, toolkit, monkeypatch, where):
    machine(wheels={})
    if where == "default":
        # cuda.tile hides CUDA_HOME from a compiler that it finds here.
        monkeypatch.setattr(_machine, "glob", lambda pattern: [str(toolkit)])
        monkeypatch.setenv("CUDA_HOME", str(toolkit / "older"))
    else:
        monkeypatch.setenv(where, str(toolkit / "bin" if where == "PATH" else toolkit))
    assert liger_cutile.backend.refuses("cuda") is None


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_refuses_another_toolkits_libnvvm(machine, toolkit, monkeypatch, variable):
    machine(wheels={})
    monkeypatch.setenv("PATH", str(toolkit / "bin"))
    monkeypatch.setenv(variable, str(toolkit / "older"))
    reason = liger_cutile.backend.refuses("cuda")
    assert reason is not None
    assert "Return code 5" in reason
    assert reason.endswith(f"unset {variable}")


@pytest.mark.parametrize("home", ["another", "absent"])
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_doctor_tells_of_another_toolkits_libnvvm(machine, toolkit, tmp_path, monkeypatch, capsys, variable, home):
    """`liger doctor` on a machine with a GPU, a compiler on PATH, and a variable that names a toolkit that it isn't of."""
    machine(wheels={})
    monkeypatch.setattr(doctor, "infer_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU", raising=False)
    monkeypatch.setenv("PATH", str(toolkit / "bin"))
    assert not [p for p in doctor.examine().problems if "cutile" in p.what]
    _machine.refuses.cache_clear()
    if home == "another":
        for folder in ("lib64", "nvvm/lib64"):
            (tmp_path / home / folder).mkdir(parents=True)
            (tmp_path / home / folder / "libnvvm.so.4").write_text("of another toolkit")
    monkeypatch.setenv(variable, str(tmp_path / home))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"problem: cutile can't run on this machine's cuda: {variable}={tmp_path / home} makes {toolkit}" in out
    assert f"\n  fix:   unset {variable}\n" in out


def test_wheels_compiler_ignores_cuda_home(machine, monkeypatch):
    machine()
    monkeypatch.setenv("CUDA_HOME", "older")
    assert liger_cutile.backend.refuses("cuda") is None


def test_refuses_a_compiler_that_fails(machine, tmp_path, monkeypatch):
    (tmp_path / "tileiras").write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    (tmp_path / "tileiras").chmod(0o755)
    machine(wheels={})
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = liger_cutile.backend.refuses("cuda")
    assert reason == f"{tmp_path}/tileiras can't compile an empty program (broken, return code 3): {_machine.INSTALL}"


def test_agrees_with_cuda_tile():
    """Copies from cuda.tile's search and its writer still match them."""
    compile_ = pytest.importorskip("cuda.tile._compile", exc_type=ImportError)
    bytecode = pytest.importorskip("cuda.tile._bytecode", exc_type=ImportError)
    assert compile_._PIP_TILEIRAS_PACKAGES == _machine.COMPILERS
    assert compile_._find_compiler_bin().path == _machine._wheels_tileiras()
    program = bytearray()
    with bytecode.write_bytecode(num_functions=0, buf=program, version=bytecode.BytecodeVersion.V_13_1):
        pass
    assert program == _machine.EMPTY_PROGRAM
