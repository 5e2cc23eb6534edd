"""`liger new-op`: what it writes is an op that works, at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from liger_core import cli
from liger_core.new_op import LANGUAGES

ROOT = Path(__file__).parents[3]

SOURCES = ("conformance/src", "packages/liger-core/src", "packages/liger-triton/src")
"""Of the checkout that the op goes into. The test needs no other language's compiler."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for source in SOURCES:
        shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    for language in LANGUAGES:
        name = f"liger_{language.replace('-', '_')}"
        (tmp_path / f"packages/liger-{language}/src/{name}/ops").mkdir(parents=True, exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_the_op_passes_its_first_case(checkout: Path, capsys: pytest.CaptureFixture[str], impl: str) -> None:
    languages = [word for language in LANGUAGES for word in ("--language", language)]
    assert cli.main(["new-op", "scaled_copy", *languages, "--root", str(checkout)]) == 0
    out = capsys.readouterr().out
    for language in LANGUAGES:
        path = f"packages/liger-{language}/src/liger_{language.replace('-', '_')}/ops/scaled_copy.py"
        compile((checkout / path).read_text(), path, "exec")
        assert path in out
    paths = os.pathsep.join(str(checkout / source) for source in SOURCES)
    command = [
        "-m",
        "pytest",
        "--pyargs",
        "liger_conformance",
        "--op=scaled_copy",
        "-n",
        "0",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        [sys.executable, *command, f"--impl={impl}", "-k", "test_values and odd and float32 and not float16"],
        cwd=checkout, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert ("passed" if impl == "torch" else "interpreted") in run.stdout


def test_what_is_written_is_formatted(checkout: Path) -> None:
    before = (checkout / "packages/liger-core/src/liger_core/__init__.py").read_text()
    cli.main(["new-op", "scaled_copy", "--language", "triton", "--root", str(checkout)])
    after = (checkout / "packages/liger-core/src/liger_core/__init__.py").read_text()
    added = sorted({*after.splitlines()} - {*before.splitlines()})
    assert added == ['    "scaled_copy",', "from liger_core.ops.scaled_copy import scaled_copy"]
    for command in (["check"], ["format", "--check"]):
        config = ["--config", str(ROOT / "pyproject.toml")]
        run = subprocess.run(["ruff", *command, *config, str(checkout)], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [("MyNorm", "is no name for an op"), ("class", "is no name for an op"), ("rms_norm", "has the name 'rms_norm'")],
)
def test_a_bad_name_writes_nothing(checkout: Path, capsys: pytest.CaptureFixture[str], name: str, says: str) -> None:
    before = sorted(checkout.rglob("*"))
    assert cli.main(["new-op", name, "--language", "triton", "--root", str(checkout)]) == 2
    assert says in capsys.readouterr().err
    assert sorted(checkout.rglob("*")) == before


def test_a_file_is_never_written_over(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = checkout / "packages/liger-triton/src/liger_triton/ops/scaled_copy.py"
    kernel.write_text("mine")
    assert cli.main(["new-op", "scaled_copy", "--language", "triton", "--root", str(checkout)]) == 2
    assert "there is packages/liger-triton" in capsys.readouterr().err
    assert kernel.read_text() == "mine"
    assert not (checkout / "packages/liger-core/src/liger_core/ops/scaled_copy.py").exists()


def test_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new-op", "scaled_copy", "--root", str(tmp_path)]) == 2
    assert "is no checkout of liger" in capsys.readouterr().err
