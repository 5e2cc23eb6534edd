"""Options, the rows of a run, and what is printed and recorded of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import liger_core

# The modules beside this file; --import-mode=importlib leaves sys.path alone.
sys.path.insert(0, str(Path(__file__).parent))

import records
import report
from calls import DTYPES

rows_key = pytest.StashKey[dict[str, list[report.Row]]]()

SUITES = {
    "dispatch": ("Host costs of a call", lambda rows: f"{report.dispatch_table(rows)}\n\n{report.import_facts(rows)}"),
    "speed": ("Speed and memory of the kernels", report.speed_table),
}
"""Suite to its title and table. A test names its suite in ``benchmark.extra_info``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("liger benchmarks")
    group.addoption(
        "--dtype",
        action="append",
        default=[],
        choices=sorted(DTYPES),
        help="time this dtype (repeatable; default: bfloat16)",
    )
    group.addoption(
        "--record",
        nargs="?",
        const=records.RECORDS,
        type=Path,
        metavar="DIR",
        help=f"write what was measured to DIR (default: {records.RECORDS.name}/ beside the benchmarks)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[rows_key] = {}


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of the run: --device, or this machine's accelerator, or the CPU."""
    return request.config.getoption("--device") or liger_core.infer_device()


@pytest.fixture
def benchmark(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Iterator[BenchmarkFixture]:
    """pytest-benchmark's fixture; what it measured becomes a row of the report."""
    yield benchmark
    if benchmark.stats is not None and "suite" in benchmark.extra_info:
        stats = benchmark.stats.stats
        row = {**benchmark.extra_info, "median": stats.median, "least": stats.min, "rounds": stats.rounds}
        request.config.stash[rows_key].setdefault(row.pop("suite"), []).append(row)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    directory = config.getoption("--record", None)
    for suite, rows in config.stash[rows_key].items():
        title, make_table = SUITES[suite]
        terminalreporter.section(title)
        text = make_table(rows)
        terminalreporter.write_line(text)
        if directory is not None:
            head = records.head_of(config.getoption("--device") or liger_core.infer_device())
            columns = list(dict.fromkeys(name for row in rows for name in row))
            records.write(suite, head, rows, columns, title, text, directory)
