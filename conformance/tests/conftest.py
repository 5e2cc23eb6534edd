"""A language from outside, installed for single tests; and languages in a folder, with the suite in a process of its own."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import liger_core
from liger_conformance import interpreters
from liger_core import backend
from liger_core.backend import BackendInfo
from liger_core.contract import ops

ACME = Path(__file__).parent / "acme"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[BackendInfo], None]:
    """Pretend that one language is installed, and no other."""

    def pretend(info: BackendInfo) -> None:
        monkeypatch.setattr(backend, "discover", lambda: ((info,), ()))
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


@pytest.fixture(scope="session")
def install_package() -> Callable[..., Path]:
    """A function that installs a language in a folder, as pip would do it."""
    return _install_package


@pytest.fixture(scope="session")
def install_mutant() -> Callable[..., None]:
    """A function that installs a changed copy of a language in a folder."""
    return _install_mutant


@pytest.fixture(scope="session")
def run_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """A function that runs the installed suite where languages are installed in a folder."""
    with Divided(tmp_path_factory.mktemp("output")) as divided:
        yield functools.partial(_run_suite, divided)


def _install_package(site: Path, language: str, source: Path, package: str | None = None) -> Path:
    """Copy the package `source`, under another name if one is given, and declare its `backend`; the copy."""
    package = package or source.name
    shutil.copytree(source, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / f"{package}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[liger.backends]\n{language} = {package}:backend\n")
    return site / package


def _install_mutant(
    site: Path, original: BackendInfo, language: str, file: str, old: str, new: str, op: str | None = None
) -> None:
    """Install a language's package as another language, with `new` for `old` in one file of it.

    It has one op, and those that core composes of device code.
    The file is the op's; or, with an underscore, that of the device code which has the op's name, unless `op` is another.
    """
    op = op or file.removeprefix("_")
    source = Path(importlib.import_module(original.package).__file__ or "").parent
    package = language.replace("-", "_")
    copy = _install_package(site, language, source, package)
    for path in copy.rglob("*.py"):
        if path.parent.name == "ops" and not path.name.startswith("_") and path.stem != op:
            path.unlink()
            continue
        text = path.read_text("utf-8").replace(original.package, package)
        if path == copy / "__init__.py":
            text = text.replace(f'"{original.language}"', f'"{language}"', 1)  # not what it requires, too
        if path == copy / "ops" / f"{file}.py":
            assert old in text, f"{file}.py has changed: bring the mutant {language} up to date"
            text = text.replace(old, new, 1)
        path.write_text(text, "utf-8")


DECIDED = ("PYTEST_", "LIGER_", "TRITON_INTERPRET", "CUTILE_INTERPRET", "PYTHONPATH")
"""Variables of this process that a run doesn't get, because it decides for itself."""

READ_AT_START = ("PYTHON", "LD_", "OMP_", "TORCH_")
"""Variables that Python or torch reads before the process divides, so that a run can't have others."""


class Divided:
    """Runs of pytest, each in a process of its own that has torch already: to import it takes longer than most runs.

    Args:
        folder: for what they print.
    """

    def __init__(self, folder: Path) -> None:
        self.files = {name: str(folder / name) for name in ("output", "errors")}
        self._process: subprocess.Popen[str] | None = None
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Divided:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.communicate()

    def run(self, folder: Path, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run ``python -m pytest`` in a folder."""
        if self._process is None:
            self._environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
            command = [sys.executable, str(Path(__file__).with_name("divide.py"))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(command, env=self._environment, text=True, **pipes)
        differs = {name for name, value in environment.items() if self._environment.get(name) != value}
        late = [name for name in differs - {"PYTHONPATH"} if name.startswith(READ_AT_START)]
        assert not late, f"{', '.join(late)}: read before the process divides"
        for name in self.files.values():
            Path(name).write_text("")
        run = {"folder": str(folder), "arguments": arguments, "environment": environment, **self.files}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(run), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        output, errors = (Path(name).read_text("utf-8") for name in self.files.values())
        return subprocess.CompletedProcess(arguments, status, output, errors)


def _run_suite(divided: Divided, site: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the suite in a process that decides for itself what it interprets; `variables` are of its environment."""
    # Where CI or BUILD_NUMBER is set, pytest prints whole messages in its summary too: each failure twice.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(DECIDED) and name not in ("CI", "BUILD_NUMBER")
    }
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    arguments = ["--pyargs", "liger_conformance", "-q", "-p", "no:cacheprovider", *options]
    return divided.run(site, arguments, environment | {"PYTHONPATH": path, "COLUMNS": "160"} | variables)
