"""docs/npu-gates.md has every kernel, and gates that passed; tools/ascend_report.py keeps the rows of ops that it doesn't run."""

import re
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


def test_each_kernel_has_a_row_and_none_failed(ascend_report) -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (\d.*)$", ascend_report.PAGE.read_text("utf-8"), re.M))
    assert [*rows] == ascend_report.OPS, "run: .venv-ascend/bin/python tools/ascend_report.py"
    assert [op for op, row in rows.items() if "failed" in row or "OVER" in row] == []


def test_a_run_of_one_op_keeps_the_rows_of_others(ascend_report) -> None:
    def report(lane: str, over: list[str]) -> dict:
        cells = [
            {"op": "rope", "dtype": "float32", "outcomes": outcomes}
            for outcomes in ({lane: 5}, {lane: 2, "not run": 3}, {"failed": 1})
        ]
        uses = {"bytes": 2048, "bytes with double buffers": 4096}
        kernels = [{"calls": ["rope-odd-7-bfloat16"], "uses": uses, "over": over}]
        return {"heading": {"date": "2026-02-02"}, "cells": cells, "kernels": kernels}

    before = ascend_report.PAGE.read_text("utf-8")
    reports = {gate: report(gate.lane, ["programs"]) for gate in ascend_report.GATES[:2]}
    after = ascend_report.written(before, ["rope"], reports)
    (row,) = set(after.splitlines()) - set(before.splitlines())
    counted = "7, 1 failed, 3 not run"
    assert row == f"| rope | 2026-02-02 | {counted} | - | - | - | {counted} | - | - | 2 / 4 OVER | not run | not run |"
    assert len(after.splitlines()) == len(before.splitlines())
