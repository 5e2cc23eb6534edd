"""The linter's answer doesn't change with what lies beside the sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_reports_change_no_import_order(tmp_path: Path) -> None:
    """`--report=report` makes a folder, and benchmarks have a module of that name."""
    pytest.importorskip("ruff")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    for file in (ROOT / "benchmarks").glob("*.py"):
        shutil.copy(file, tmp_path / "benchmarks")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "conformance.json").write_text("{}")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=I", "benchmarks"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
