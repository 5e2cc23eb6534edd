"""The suite's runs come of one process that has imported torch, and are as apart as if each had been started by itself."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Suite = Callable[..., subprocess.CompletedProcess[str]]

PROBE = """
import json, os, pathlib, sys
import torch

seen = {
    "environment": dict(os.environ), "folder": os.getcwd(), "path": sys.path, "process": os.getpid(),
    "left": hasattr(torch, "left"), "languages": [name for name in sys.modules if name.startswith("liger_triton")],
    "input": sys.stdin.read(),
}
torch.left = True
pathlib.Path("seen.json").write_text(json.dumps(seen))
print("said by probe")
print("complained by probe", file=sys.stderr)
if "ABORT" in os.environ:
    os.abort()
"""


@pytest.fixture
def probe(tmp_path: Path, run_suite: Suite) -> Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]:
    """A function that runs no test of the suite, and returns what a plugin in the folder saw before."""
    (tmp_path / "probe.py").write_text(PROBE)

    def run(**variables: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        done = run_suite(tmp_path, "-p", "probe", "--markers", **variables)
        return done, json.loads((tmp_path / "seen.json").read_text())

    return run


def test_a_run_has_what_it_is_given(tmp_path: Path, probe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder, its variables and nothing of pytest's around it; and what it prints and how it ends is told."""
    for name in ("CI", "BUILD_NUMBER", "LIGER_KERNEL_CHECK", "TRITON_INTERPRET", "PYTEST_SOMETHING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SOMETHING_ELSE", "of this process")
    done, seen = probe(GIVEN="to it")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "said by probe" in done.stdout
    assert "complained by probe" in done.stderr
    assert "complained" not in done.stdout
    expected = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "LIGER_", "TRITON_INTERPRET", "CUTILE_INTERPRET", "PYTHONPATH"))
        and name not in ("CI", "BUILD_NUMBER")
    }
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    expected |= {"PYTHONPATH": path, "COLUMNS": "160", "GIVEN": "to it"}
    own = ("PYTEST_VERSION", "PYTEST_CURRENT_TEST")
    assert {name: value for name, value in seen["environment"].items() if name not in own} == expected
    assert seen["folder"] == str(tmp_path)
    assert seen["path"][:2] == [str(tmp_path), str(tmp_path)]  # as `python -m` and PYTHONPATH have it
    assert str(Path(__file__).parent) not in seen["path"]
    assert seen["languages"] == []
    assert seen["input"] == ""


def test_a_run_leaves_nothing_to_the_next(probe: Callable[..., Any]) -> None:
    (first, one), (second, other) = probe(ONLY="once"), probe()
    assert first.returncode == second.returncode == 0
    assert one["process"] != other["process"]
    assert one["left"] is other["left"] is False
    assert "ONLY" not in other["environment"]
    assert second.stdout.count("said by probe") == 1


def test_how_a_run_ended_is_told(probe: Callable[..., Any]) -> None:
    """Also that of a signal; the run after it is none the worse."""
    assert probe(ABORT="1")[0].returncode < 0
    assert probe()[0].returncode == 0


def test_variables_that_are_read_before_are_refused(probe: Callable[..., Any]) -> None:
    probe()
    with pytest.raises(AssertionError, match="OMP_NUM_THREADS: read before the process divides"):
        probe(OMP_NUM_THREADS="7")
