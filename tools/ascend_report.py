#!/usr/bin/env python3
"""Run the gates of liger-triton-ascend's kernels, which need no NPU, and write their outcomes into docs/npu-gates.md.

    .venv-ascend/bin/python tools/ascend_report.py               all ops
    .venv-ascend/bin/python tools/ascend_report.py --op=rope     one op: the others' rows stay

A gate is a run of the conformance suite in a process of its own. A row has its day, because ops are run at different times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch fails where torch-npu is installed and CANN is not

from liger_conformance.compilers import ascend_execute
from liger_core.contract import ops
from liger_triton_ascend import backend

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/npu-gates.md"
OPS = sorted(op for op in ops if backend.has_kernel(op))


class Gate(NamedTuple):
    """A run of the suite. Gates 2 and 3 are one: each launch that is lowered is also measured."""

    lane: str
    options: tuple[str, ...]
    dtypes: tuple[str, ...]


# With the long cases, and without those that need a device.
EVERY_CASE = ("-m", "slow or not slow", "-k", "not model_sizes and not test_huge and not test_compile_options")
INTERPRETED = Gate("interpreted", EVERY_CASE, ("float32", "bfloat16", "float16", "any"))
LOWERED = Gate("compiled", ("--compile=all",), ("float32", "bfloat16"))
EXECUTED = Gate("executed", ("--compile=all", "--execute"), ("float32", "bfloat16"))
GATES = (INTERPRETED, LOWERED, EXECUTED)

Report = dict[str, Any]  # a conformance.json


def run(gate: Gate, chosen: Sequence[str], directory: Path) -> Report:
    """Run a gate's tests, of chosen ops if there are any, and return the suite's report."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if gate is INTERPRETED else {}
    command = [sys.executable, "-m", "pytest", "conformance", "--impl=triton-ascend", *gate.options, "-q"]
    command += [f"--op={op}" for op in chosen]
    done = subprocess.run([*command, f"--report={directory}"], cwd=ROOT, env=environment, check=False)
    if done.returncode not in (0, 1):  # 1: tests failed, which the report says
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads((directory / "conformance.json").read_text(encoding="utf-8"))


def outcomes(report: Report, op: str, dtype: str, lane: str) -> str:
    """A cell: how many tests passed as the lane passes, and every other outcome by name."""
    cells = (cell["outcomes"] for cell in report["cells"] if (cell["op"], cell["dtype"]) == (op, dtype))
    counts = sum(map(Counter, cells), Counter[str]())
    passed = [str(counts.pop(lane))] if lane in counts else []
    return ", ".join(passed + [f"{count} {outcome}" for outcome, count in sorted(counts.items())]) or "-"


def buffer(report: Report, op: str, dtype: str) -> str:
    """A cell of gate 3: the most KiB that a launch takes of the Unified Buffer, and the most with double buffers."""
    kernels = [
        kernel
        for kernel in report["kernels"]
        if any(call.partition("-")[0] == op and call.endswith(f"-{dtype}") for call in kernel["calls"])
    ]
    if not kernels:
        return "-"
    most = [max(k["uses"][use] for k in kernels) / 1024 for use in ("bytes", "bytes with double buffers")]
    return f"{most[0]:.0f} / {most[1]:.0f}" + " OVER" * any(kernel["over"] for kernel in kernels)


def row(op: str, reports: Mapping[Gate, Report]) -> str:
    """The line of an op. A gate that was not run has `not run`."""
    cells = [op, reports[INTERPRETED]["heading"]["date"]]
    for gate in GATES:
        report = reports.get(gate)
        cells += [outcomes(report, op, dtype, gate.lane) if report else "not run" for dtype in gate.dtypes]
        if gate is LOWERED:
            cells += [buffer(reports[gate], op, dtype) for dtype in gate.dtypes]
    return f"| {' | '.join(cells)} |"


def written(page: str, ops: Sequence[str], reports: Mapping[Gate, Report]) -> str:
    """The page with new rows of these ops; ops that have no kernel lose theirs."""
    lines = page.splitlines()
    rows = {match[1]: line for line in lines if (match := re.match(r"\| (\w+) \| \d", line)) and match[1] in OPS}
    rows |= {op: row(op, reports) for op in ops}
    head = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    return "\n".join([*lines[: head + 1], *(rows[op] for op in sorted(rows)), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", default=[], choices=OPS, metavar="OP", help="this op (repeatable)")
    chosen = parser.parse_args().op
    obstacle = ascend_execute.obstacle()
    if obstacle:
        print(f"gate 4, executed: not run: {obstacle}")
    with tempfile.TemporaryDirectory() as folder:
        gates = [gate for gate in GATES if gate is not EXECUTED or not obstacle]
        reports = {gate: run(gate, chosen, Path(folder, gate.lane)) for gate in gates}
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), chosen or OPS, reports), encoding="utf-8")
    failed = sum(cell["outcomes"].get("failed", 0) for report in reports.values() for cell in report["cells"])
    print(f"{PAGE.relative_to(ROOT)}: {len(chosen or OPS)} ops, {failed} tests failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
