"""tools/ascend_report.py: reports of some ops leave those of the others as they are."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def ascend_report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import ascend_report

    yield ascend_report
    del sys.modules["ascend_report"]


def runs_of(ascend_report, op: str, date: str, passed: int):
    def found(gate):
        cells = [{"op": op, "dtype": dtype, "outcomes": {gate.lane: passed}} for dtype in gate.dtypes]
        return {"heading": {"date": date, "torch": "1"}, "cells": cells, "kernels": [], "reasons": {}}

    return {gate: found(gate) for gate in ascend_report.GATES}


def test_a_run_of_one_op_keeps_the_rows_of_others(ascend_report) -> None:
    pages = [
        "- interpreted, not run (3): no device\n",
        "- interpreted, not run (4): no device\n- executed, failed (1): why\n",
    ]
    before = ascend_report.matrix(runs_of(ascend_report, "rope", "2026-01-01", 5), {}, ["rope"], "", pages[:1])
    after = ascend_report.matrix(runs_of(ascend_report, "dyt", "2026-02-02", 7), {}, ["dyt"], before, pages)
    again = ascend_report.matrix(runs_of(ascend_report, "dyt", "2026-03-03", 8), {}, ["dyt"], after, pages)
    (row,) = [line for line in before.splitlines() if line.startswith("| [rope]")]
    for page in (after, again):
        assert row in page
        assert page.index("| [dyt]") < page.index("| [rope]")
        assert "- date 2026-01-01, torch 1\n" in page
        assert "- interpreted, not run (7): no device\n- executed, failed (1): why\n" in page
    assert "- `dyt`: date 2026-02-02, torch 1\n" in after
    assert "| [dyt](dyt.md) | 7 |" in after
    assert "- `dyt`: date 2026-03-03, torch 1\n" in again
    assert "2026-02-02" not in again
