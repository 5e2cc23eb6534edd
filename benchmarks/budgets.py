"""Time of `fused_linear_cross_entropy` with its backward under small memory budgets, in each language.

    python benchmarks/budgets.py --cases large --languages triton
    python benchmarks/budgets.py --smoke

`SETTINGS` are the dtypes and the budgets. Memory is what the call takes at most beyond the inputs and their gradients; how it
and the time are measured is said in `timing` and `jobs`. The error is that of the worst gradient, as in `compare`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import records
import torch
from calls import DTYPES, shrunk
from command import Command
from jobs import Job, Measured, Row, in_turns, measure, median_ms, truth_of
from traffic import FULL

import liger_core
from liger_conformance.case import TIMED, Case, cases_of
from liger_core.backend import backends
from liger_core.contract import ops

COLUMNS = ("case", "language", "accum_dtype", "memory_budget", "ms", "tflops", "extra_mb", "error")

SETTINGS = (
    ("float32", None),
    ("float32", 1_500_000_000),
    ("float32", 1_300_000_000),
    ("float32", 600_000_000),
    ("bfloat16", 500_000_000),
)
"""`accum_dtype` and `memory_budget`, in bytes. The first is the default."""

STEP = Case("step", "large", rows=16384, hidden=2048, vocabulary=128256)
"""The head of a Llama of 1.2 B in a step of 8 × 2048 tokens, as in `end_to_end`."""

OP = ops["fused_linear_cross_entropy"]


class Setting(NamedTuple):
    """A language with an `accum_dtype` and a `memory_budget`."""

    language: str
    accum_dtype: str
    budget: int | None


def measure_case(case: Case, languages: Sequence[str], device: str) -> list[Row]:
    """A row for each language and setting. They are timed in turns."""
    job = Job(OP, case, torch.bfloat16, device, FULL)
    truth, returned = truth_of(job), gradient_bytes(job)
    settings = [Setting(language, *setting) for language in languages for setting in SETTINGS]
    measured: dict[Setting, Measured] = {}
    for setting in settings:
        values = {**case.values, "accum_dtype": DTYPES[setting.accum_dtype], "memory_budget": setting.budget}
        with liger_core.use(setting.language):
            measured[setting] = measure(job._replace(case=Case(case.id, case.group, **values)), OP, truth)
    del truth
    times: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for setting in in_turns(settings):
        with liger_core.use(setting.language):
            times[setting].append(median_ms(measured[setting].call, device))
    return [row_of(job, setting, measured[setting].row(job, "", times[setting]), returned) for setting in settings]


def row_of(job: Job, setting: Setting, row: Row, returned: int) -> Row:
    """A row of this table from one of `jobs`; `returned` are the gradients' bytes."""
    extra = f"{(float(row['peak_mib']) * 2**20 - returned) / 1e6:.0f}" if row["peak_mib"] else ""
    values = setting.language, setting.accum_dtype, setting.budget or "", row["ms"], row["tflops"], extra, row["error"]
    return dict(zip(COLUMNS, (job.case.id, *values), strict=True))


def gradient_bytes(job: Job) -> int:
    """Bytes of the gradients that the call returns."""
    arguments = job.arguments()
    return sum(arguments[name].nbytes for name in OP.differentiable if name in arguments)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a name that doesn't exist ends the program with those that do."""
    command = Command(__doc__, smoke="the reference alone")
    command.add_names("languages", ["torch", *(backend.language for backend in backends())])
    command.add_names("cases", [*TIMED, STEP.id], default=TIMED)
    options = command.parse_args(words)
    if options.smoke:
        options.device, options.languages, options.cases = "cpu", ["torch"], ["small"]
    able = [backend.language for backend in backends() if backend.missing(options.device) is None]
    options.languages = options.languages or able
    command.check(options)
    return options


def main(words: Sequence[str] | None = None) -> list[Row]:
    """Measure, print as it goes, and write the record. Returns the rows."""
    options = parse(words)
    head = records.head_of(options.device)
    print(records.comment(head) + ",".join(COLUMNS), flush=True)
    rows: list[Row] = []
    for case in (*cases_of(OP.name).cases, STEP):
        if (case.id if case is STEP else case.group) in options.cases:
            measured = measure_case(shrunk(case) if options.smoke else case, options.languages, options.device)
            print("\n".join(",".join(map(str, row.values())) for row in measured), flush=True)
            rows += measured
    if not options.smoke:
        title = "fused_linear_cross_entropy and its backward in little memory"
        lines = [[str(row[column]) for column in COLUMNS] for row in rows]
        records.write("budgets", head, rows, COLUMNS, title, records.table(COLUMNS, lines), options.out)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
