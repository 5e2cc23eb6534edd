"""A language from outside, installed for single tests; and languages in a folder, with the suite in a process of its own."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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
def run_suite() -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs the installed suite where languages are installed in a folder."""
    return _run_suite


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
    """Install a language's package as another language, with one op, and `new` for `old` in one file of it.

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


def _run_suite(site: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the suite in a process that decides for itself what it interprets; `variables` are of its environment."""
    decided = ("PYTEST_", "LIGER_", "TRITON_INTERPRET", "CUTILE_INTERPRET")
    # Where CI or BUILD_NUMBER is set, pytest prints whole messages in its summary too: each failure twice.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(decided) and name not in ("CI", "BUILD_NUMBER")
    }
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "liger_conformance", "-q", "-p", "no:cacheprovider", *options],
        env=environment | {"PYTHONPATH": path, "COLUMNS": "160"} | variables,
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )
