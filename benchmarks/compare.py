"""Ours beside its peers: the same inputs, the same run, one table.

    python benchmarks/compare.py --ops rms_norm,swiglu --groups small,large
    CUDA_VISIBLE_DEVICES=1 python benchmarks/compare.py --groups medium
    python benchmarks/compare.py --render first.csv second.csv
    python benchmarks/compare.py --smoke

Providers are ``ours-LANGUAGE`` for each installed language, ``eager`` (PyTorch as its users write the op), ``compile``
(torch.compile of the same), ``grouped`` (of fused_moe alone: PyTorch's grouped product), ``liger``, ``liger-cutile`` and
``liger-cutedsl`` (liger-kernel in its three languages), and ``quack``. Cases are the timed ones of the conformance package.
Each provider gets fresh inputs of the same values, because some write over theirs.

How a cell is measured is said in `jobs`. A provider that fails is a row that says why. One that takes longer than ``--limit`` to
compile and to be checked is left out of the op's other cells.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import peers
import records
import report
import torch
from calls import DTYPES, shrunk
from command import Command
from jobs import COLUMNS, Job, Measured, Row, in_turns, measure, median_ms, truth_of
from traffic import MODES, modes_of

import liger_core
from liger_conformance.case import TIMED, cases_of
from liger_core.backend import backends
from liger_core.contract import ops

PEERS: dict[str, Callable[[], peers.Functions]] = {
    "eager": peers.eager,
    "compile": peers.compiled,
    "grouped": peers.grouped,
    "liger": peers.liger,
    "liger-cutile": lambda: peers.liger("liger_kernel.ops.cutile.ops"),
    "liger-cutedsl": peers.liger_cutedsl,
    "quack": peers.quack,
}

WHERE_INSTALLED = {"liger-cutedsl": ("liger_kernel", "cutlass"), "quack": ("quack",)}
"""Peers that are compared by default where these modules are."""


class TookTooLong(RuntimeError):
    """A provider wasn't ready in time."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer, by `TookTooLong`."""

    def interrupt(*_: object) -> None:
        raise TookTooLong(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second: a compiler may catch the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def failures() -> tuple[type[Exception], ...]:
    """Errors with which a provider may refuse a call: PyTorch's, Python's and the compilers'."""
    errors: list[type[Exception]] = [
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ImportError,
        OSError,
        AssertionError,
        torch.OutOfMemoryError,
    ]
    compilers = {"triton.errors": "TritonError", "cuda.tile": "TileError", "cutlass.base_dsl.common": "DSLBaseError"}
    # An error that was raised belongs to a module that was imported.
    errors += [getattr(sys.modules[module], name) for module, name in compilers.items() if module in sys.modules]
    return tuple(errors)


def default_providers(device: str) -> list[str]:
    """Every language that runs on a device, then the peers; those of `WHERE_INSTALLED` where they are."""
    ours = [f"ours-{b.language}" for b in backends() if b.missing(device) is None]
    peers = [name for name, modules in WHERE_INSTALLED.items() if all(map(find_spec, modules))]
    return [*ours, "eager", "compile", "liger", *peers]


@contextlib.contextmanager
def functions_of(provider: str) -> Iterator[peers.Functions]:
    """The functions of a provider by op, and while they are used, ours in no other language."""
    if report.is_ours(provider):
        with liger_core.use(provider.removeprefix("ours-")):
            yield {**ops}
    else:
        yield PEERS[provider]()


def compare(job: Job, providers: Sequence[str], limit: float, late: dict[str, str]) -> list[Row]:
    """A row for each provider. They are timed in turns.

    Args:
        limit: the seconds that a provider may take until it can be timed.
        late: why providers are left out; those that take longer are added.
    """
    truth = truth_of(job)
    rows: dict[str, Row] = {}
    measured: dict[str, Measured] = {}
    for provider in providers:
        if provider in late:
            rows[provider] = job.row(provider, note=late[provider])
            continue
        try:
            with limited(limit), functions_of(provider) as functions:
                if job.op.name in functions:
                    measured[provider] = measure(job, functions[job.op.name], truth)
                else:
                    rows[provider] = job.row(provider, note=f"{provider} has no {job.op.name}")
        except TookTooLong as error:
            late[provider] = f"{error} for {job.case.id} {job.mode}"
            rows[provider] = job.row(provider, note=late[provider])
        except failures() as error:
            rows[provider] = job.row(provider, note=reason(error))
    del truth
    times: dict[str, list[float]] = {provider: [] for provider in measured}
    for provider in in_turns(list(measured)):
        if provider in rows:
            continue
        try:
            with functions_of(provider):
                times[provider].append(median_ms(measured[provider].call, job.device))
        except failures() as error:
            rows[provider] = job.row(provider, note=reason(error))
    for provider, measurement in measured.items():
        rows.setdefault(provider, measurement.row(job, provider, times[provider]))
    return with_ratios([rows[provider] for provider in providers])


def reason(error: Exception) -> str:
    """Why a provider failed, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one job, each with its time as a multiple of the best of ours."""
    ours = min((float(row["ms"]) for row in rows if row["ms"] and report.is_ours(row["provider"])), default=None)
    return [row | {"ratio": f"{float(row['ms']) / ours:.3f}"} if ours and row["ms"] else row for row in rows]


def write(head: records.Head, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write the CSV and the Markdown of a record."""
    title = "Side by side with the peers"
    records.write(options.name, head, rows, COLUMNS, title, report.comparison(rows), options.out)


def render(files: Sequence[Path], options: argparse.Namespace) -> None:
    """Make one record of several CSVs of one machine.

    Raises:
        ValueError: machine, versions or commit are not the same in all of them.
    """
    heads, tables = zip(*map(records.read_csv, files), strict=True)
    records.check_alike({key: {head[key] for head in heads} for key in ("machine", "versions", "commit")})
    write(heads[0], [row for table in tables for row in table], options)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a name that doesn't exist ends the program with those that do."""
    command = Command(__doc__, smoke="the reference and eager")
    for option, known in {"ops": sorted(ops), "groups": TIMED, "modes": MODES}.items():
        command.add_names(option, known, default=known)
    command.add_names(
        "providers",
        ["ours-torch", *(f"ours-{b.language}" for b in backends()), *PEERS],
        note="; default: every language that runs here, eager, compile, liger, and "
        f"{' and '.join(WHERE_INSTALLED)} where installed; grouped has fused_moe alone",
    )
    command.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    command.add_argument(
        "--limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long a provider may take until it can be timed",
    )
    command.add_argument("--name", help="the record's name; default: compare, with the groups unless all are measured")
    command.add_argument(
        "--render", type=Path, nargs="+", metavar="CSV", help="measure nothing: make one record of these"
    )
    options = command.parse_args(words)
    if options.smoke:
        options.device, options.groups = "cpu", ["small"]
    if options.name is None:
        options.name = "-".join(["compare", *(options.groups if set(options.groups) != set(TIMED) else ())])
    providers = ["ours-torch", "eager"] if options.smoke else default_providers(options.device)
    options.providers = options.providers or providers
    command.check(options, measures=not options.render)
    return options


def jobs_of(options: argparse.Namespace, op: str) -> Iterator[Job]:
    for case in cases_of(op).cases:
        if case.group in options.groups:
            chosen = shrunk(case) if options.smoke else case
            for mode in (mode for mode in options.modes if mode in modes_of(ops[op])):
                yield Job(ops[op], chosen, DTYPES[options.dtype], options.device, mode)


def main(words: Sequence[str] | None = None) -> list[Row]:
    """Measure, print as it goes, and write the record after each op. Returns the rows."""
    options = parse(words)
    if options.render:
        render(options.render, options)
        return []
    head = records.head_of(options.device)
    print(records.comment(head) + ",".join(COLUMNS), flush=True)
    rows: list[Row] = []
    for op in options.ops:
        if not options.smoke:  # what has been imported till here stays: `release` needn't look at it again
            gc.collect()
            gc.freeze()
        late: dict[str, str] = {}
        for job in jobs_of(options, op):
            job_rows = compare(job, options.providers, options.limit, late)
            rows += job_rows
            print("\n".join(",".join(map(str, row.values())) for row in job_rows), flush=True)
        if not options.smoke:
            write(head, rows, options)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
