"""The `liger` command."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest
import torch

import liger_core
from liger_core import BackendInfo, backend, cli, doctor
from liger_core.backend import BrokenBackend
from liger_core.op import ops


def test_where(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["where", "rms_norm", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "-> toy-traced: chosen" in out
    assert 'toy-opaque: no: only on demand: liger_core.use("toy-opaque")' in out


def test_where_for_an_unknown_op(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["where", "rsm_norm"]) == 2
    assert "there is no op 'rsm_norm'; close to it: rms_norm, " in capsys.readouterr().err


def test_where_on_a_device_that_is_not_here(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["where", "rms_norm", "--device", "npu"]) == 0
    assert capsys.readouterr().out.endswith("no npu device on this machine: this would run on one that has it\n")
    cli.main(["where", "rms_norm", "--device", "cpu"])
    assert "on this machine" not in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"liger-core {metadata.version('liger-core')}\n")
    assert liger_core.__version__ == metadata.version("liger-core")


def test_matrix_for_programs(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)
    assert kernels["rms_norm"] == {"toy-opaque": ["cpu"], "toy-traced": ["cpu"]}
    assert kernels["softmax"] == {}
    assert kernels.keys() == ops.keys()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, 'uv pip install "liger-core[triton]"'),
        ({"url": "file:///a%20b/packages/liger-core", "dir_info": {}}, "uv pip install '/a b/packages/liger-triton'"),
        (
            {"url": "file:///dist/liger_core-1-py3-none-any.whl"},
            'uv pip install --find-links /dist "liger-core[triton]"',
        ),
    ],
    ids=["an index", "a checkout", "a wheel"],
)
def test_the_command_that_installs_is_of_where_liger_core_came_from(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(metadata, "distribution", lambda name: types.SimpleNamespace(read_text=lambda file: text))
    assert backend.install_command("triton") == command


def test_matrix(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:] if line.strip()}
    assert lines["rms_norm"] == ["yes", "yes", "yes"]
    assert lines["softmax"] == ["-", "-", "yes"]


def test_doctor_tells_what_is_missing(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    install(BackendInfo("acme", ("cpu",), "acme_compiler", "toy_traced", "pip install acme"))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "cpu: acme_compiler is not installed: pip install acme" in out
    assert (
        "problem: acme can't run on this machine's cpu: acme_compiler is not installed\n  fix:   pip install acme\n"
        in out
    )


@pytest.mark.parametrize("installed", [True, False])
def test_doctor_tells_of_liger_transformers(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    install()
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if installed else None)
    cli.main(["doctor"])
    assert ("`liger-transformers MODEL_TYPE` prints what it swaps" in capsys.readouterr().out) is installed


@pytest.mark.parametrize("command", ["doctor", "matrix"])
def test_how_to_get_what_is_not_installed(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    install()
    assert cli.main([command]) == 0
    out = capsys.readouterr().out
    for language in ("triton", "triton-ascend", "cutile"):
        assert f"  {language}: {backend.install_command(language)}" in out


def test_matrix_without_a_language(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """Each op runs by the reference, and the reader learns so."""
    install()
    assert cli.main(["matrix"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "No kernel language is installed: every op runs the PyTorch reference, on every device."
    assert {line.strip() for line in lines} >= set(ops)


def test_doctor_names_only_what_is_not_installed(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        BackendInfo("triton", ("cuda",), "torch", "toy_traced", ""), broken=(BrokenBackend("cutile", "ImportError: "),)
    )
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert "\n  triton-ascend: " in out
    assert "\n  triton: " not in out
    assert "\n  cutile: " not in out


def test_where_takes_a_device_and_its_type(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["where", "rms_norm", "--device", "cpu:0"]) == 0
    assert "-> toy-traced: chosen" in capsys.readouterr().out
    assert cli.main(["where", "rms_norm", "--device", "bogus"]) == 2
    assert "device is 'bogus'; it takes a torch device or its type: cpu, cuda, hpu, npu, xpu" in capsys.readouterr().err


def test_where_nothing_may_fall_back(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGER_STRICT", "1")
    install()
    assert cli.main(["where", "rms_norm", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "torch: no: LIGER_STRICT=1 forbids it" in out
    assert "the call raises Unsupported" in out


def test_doctor_fails_on_a_broken_package(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    install(broken=(BrokenBackend("acme", "ImportError: libacme.so"),))
    assert cli.main(["doctor"]) == 1
    assert "problem: acme can't be imported: ImportError: libacme.so" in capsys.readouterr().out


def problems() -> dict[str, str]:
    """The problems that the doctor finds, each with its fix."""
    return {problem.what: problem.fix for problem in doctor.examine().problems}


def test_doctor_sees_packages_that_overwrote_each_other(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only packages that liger loads count: each NVIDIA wheel for CUDA 12 brings an empty nvidia/__init__.py, without harm."""

    def installed(name: str) -> types.SimpleNamespace:
        files = [PurePosixPath(package) / "__init__.py" for package in ("triton", "nvidia")]
        return types.SimpleNamespace(metadata={"Name": name}, files=files)

    monkeypatch.setattr(doctor, "distributions", lambda: [installed("triton"), installed("triton-ascend")])
    install(BackendInfo("acme", ("cuda",), "triton", "toy_traced", ""))
    assert problems() == {
        "triton and triton-ascend both installed the package 'triton'": "uninstall both, then install one"
    }


def test_doctor_sees_an_old_driver(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """A language says itself why its kernels can't run on this machine."""

    def refuses(device: str) -> str:
        return f"the {device} driver is 570: install 580 or later"

    install(BackendInfo("acme", ("cpu",), "torch", "toy_traced", "", refuses=refuses))
    assert problems() == {"acme can't run on this machine's cpu: the cpu driver is 570": "install 580 or later"}
    assert cli.main(["doctor"]) == 1
    assert "problem: acme can't run on this machine's cpu: the cpu driver is 570" in capsys.readouterr().out


@pytest.mark.parametrize("installed", [True, False])
def test_doctor_sees_the_reference_on_an_accelerator(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(doctor, "infer_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU", raising=False)
    install(*[BackendInfo("acme", ("cuda",), "torch", "toy_traced", "")] * installed)
    ((problem, fix),) = problems().items()
    assert problem.startswith("the PyTorch reference runs on cuda, since no")
    assert fix == ('LIGER_LANGUAGE=acme, or liger_core.use("acme")' if installed else backend.install_command("triton"))


def test_doctor_sees_a_version_outside_its_range(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only requirements that hold here count, not an extra's, nor another system's."""
    pytest.importorskip("packaging")
    info = tmp_path / "liger_acme-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: liger-acme\nVersion: 0.3\nRequires-Dist: torch<2,>=1\nRequires-Dist: pytest>=1\n"
        "Requires-Dist: pytest<1; extra == 'old'\nRequires-Dist: pytest<1; sys_platform == 'none'\n"
        "Requires-Dist: not-installed-anywhere>=1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    install()
    assert problems() == {
        f"liger-acme 0.3 needs torch<2,>=1; {metadata.version('torch')} is installed": (
            'uv pip install --upgrade liger-acme "torch<2,>=1"'
        )
    }


@pytest.mark.parametrize("below", [False, True])
def test_doctor_sees_a_cache_that_cant_be_written(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, below: bool
) -> None:
    """The folder itself, or the one that it would be made in."""
    locked = tmp_path / "locked"
    locked.mkdir()
    folder = locked / "inductor" if below else locked
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    install()
    assert problems() == {}
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != locked and real(path, mode)
    )  # root may write anywhere
    assert problems() == {
        f"{folder}, where compiled kernels are kept, can't be written": (
            "TORCHINDUCTOR_CACHE_DIR=<a folder that can be written>"
        )
    }


def test_doctor_of_a_user_without_a_home_directory(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user may have a number and no name."""

    def unknown(*_: object) -> None:
        raise KeyError("getpwuid(): uid not found: 12345")

    for variable in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("liger_core.doctor.find_spec", lambda name: name in ("triton", "packaging") or None)
    install()
    fixes = problems()
    assert list(fixes.values()) == [
        "TRITON_CACHE_DIR=<a folder that can be written>",
        "TORCHINDUCTOR_CACHE_DIR=<a folder that can be written>",
    ]
    assert all(problem.startswith("the folder where compiled kernels are kept can't be found: ") for problem in fixes)


def test_doctor_for_programs(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """The same answer and exit status as text."""
    install(broken=(BrokenBackend("acme", "ImportError: libacme.so"),))
    assert cli.main(["doctor", "--json"]) == 1
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["torch"] == torch.__version__
    assert diagnosis["runs"] == "torch"
    assert diagnosis["problems"] == [
        {"what": "acme can't be imported: ImportError: libacme.so", "fix": "reinstall its package, or uninstall it"}
    ]
    install()
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def distribution(folder: Path, name: str, version: str, files: dict[str, str], **metadata: str) -> None:
    """Install a distribution into a folder, as an installer would leave it: files, what each is listed in, and no wheel."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + metadata.get("wants", "")
    )
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    if entry := metadata.get("entry"):
        (info / "entry_points.txt").write_text(f"[liger.backends]\n{entry}\n")


def test_doctor_of_an_installation_where_much_is_wrong(tmp_path: Path) -> None:
    """Nothing is patched: a process of its own finds the distributions and their entry points, and they are broken."""
    declared = 'from liger_core import BackendInfo\n\n\ndef refuses(device):\n    return "the driver is 570: install 580"\n\n\n'
    declared += (
        'backend = BackendInfo("acme", ("cpu",), "acmec", "liger_acme", "pip install liger-acme", refuses=refuses)\n'
    )
    acme = {"liger_acme/__init__.py": declared, "liger_acme/ops/__init__.py": ""}
    distribution(
        tmp_path,
        "liger-acme",
        "0.3",
        acme,
        entry="acme = liger_acme:backend",
        wants="Requires-Dist: acmec-nightly>=7\n",
    )
    distribution(tmp_path, "acmec", "6.0", {"acmec/__init__.py": ""})
    distribution(tmp_path, "acmec-nightly", "6.1", {"acmec/__init__.py": ""})
    broken = {"liger_bad/__init__.py": 'raise ImportError("libbad.so is not there")\n'}
    distribution(tmp_path, "liger-bad", "1.0", broken, entry="bad = liger_bad:backend")
    (tmp_path / "a-file").touch()
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "a-file" / "below")}
    environment["CUDA_VISIBLE_DEVICES"] = ""

    # In one process: to import torch takes it longest.
    program = (
        "from liger_core import cli; print('\\f', cli.main(['doctor', '--json'])); print('\\f', cli.main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (done.stderr, done.returncode) == ("", 0)
    as_json, text, last = done.stdout.split("\f")
    assert (text.split()[0], last.split()) == ("1", ["1"])  # what `liger doctor` exits with
    diagnosis = json.loads(as_json)
    fixes = {problem["what"]: problem["fix"] for problem in diagnosis["problems"]}
    expected = {
        "bad can't be imported: ImportError: libbad.so is not there": "reinstall its package, or uninstall it",
        "acme can't run on this machine's cpu: the driver is 570": "install 580",
        "acmec and acmec-nightly both installed the package 'acmec'": "uninstall both, then install one",
        f"{tmp_path}/a-file/below, where compiled kernels are kept, can't be written": (
            "TORCHINDUCTOR_CACHE_DIR=<a folder that can be written>"
        ),
    }
    if importlib.util.find_spec("packaging"):
        expected["liger-acme 0.3 needs acmec-nightly>=7; 6.1 is installed"] = (
            'uv pip install --upgrade liger-acme "acmec-nightly>=7"'
        )
    assert expected.items() <= fixes.items()
    assert diagnosis["runs"] == "torch"
    (language,) = (language for language in diagnosis["languages"] if language["language"] == "acme")
    assert language["devices"] == {"cpu": "the driver is 570: install 580"}
    for what, fix in expected.items():
        assert f"problem: {what}\n  fix:   {fix}\n" in text


def test_the_command_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="liger")
    assert entry.load() is cli.main


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at-the-end", "in-between"])
def test_a_reader_that_goes_away_is_no_error(unbuffered: str) -> None:
    """As `head` does, which reads some lines of `liger matrix | head` and closes the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "liger_core.cli", "matrix"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    finally:
        os.close(writing)
    assert (done.stderr, done.returncode) == ("", cli.CLOSED_PIPE)
