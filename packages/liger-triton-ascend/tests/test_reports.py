"""The committed reports are of all kernels, and of gates that passed: tools/ascend_report.py writes them."""

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
REPORTS = PACKAGE / "reports"


def test_each_kernel_has_a_report():
    kernels = {path.stem for path in PACKAGE.glob("src/liger_triton_ascend/ops/[!_]*.py")}
    assert {path.stem for path in REPORTS.glob("*.md")} == kernels | {"README"}


def test_nothing_failed():
    lines = (REPORTS / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    assert rows
    assert [row for row in rows if re.search(r"\bfailed\b|\bOVER\b", row)] == []
