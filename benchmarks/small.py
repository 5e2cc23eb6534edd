"""Small calls with their backward: what Python takes of them, and what is left without it.

    python benchmarks/small.py --ops rms_norm,softmax --providers ours-triton,eager,liger
    python benchmarks/small.py --smoke

Of an op's ``small`` case in bfloat16:

- ``call_us``: what a call and its backward cost the caller, nothing of the device in it;
- ``one_thread_us``: the same under ``torch.autograd.set_multithreading_enabled(False)``: backward runs in the thread that
  asks for it, and not in the device's own;
- ``graph_us``: the device's time of the same call, replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import records
import torch
from calls import make_call, shrunk
from command import Command
from compare import PEERS, default_providers, failures, functions_of, reason
from jobs import TURNS, Job, in_turns, median_ms
from timing import host_time
from traffic import FULL

from liger_conformance.case import cases_of
from liger_core.backend import backends
from liger_core.contract import ops

COLUMNS = ("op", "provider", "call_us", "one_thread_us", "graph_us", "note")

OPS = ("rms_norm", "layer_norm", "fused_add_rms_norm", "softmax", "swiglu", "embedding", "group_norm", "rope")
"""Ops whose small case takes its time in Python."""

Row = dict[str, str]


def in_one_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, its backward in the caller's thread."""

    def wrapped() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return call()

    return wrapped


def replayed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call's work for the device, from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result  # its memory is the graph's

    return replay


def on_the_host(call: Callable[[], Any], device: str) -> float:
    """Microseconds that a call costs its caller."""
    return host_time(call, device, repeats=1 if device == "cpu" else 8) * 1e6  # a CPU runs the smoke test alone


def on_the_device(call: Callable[[], Any], device: str) -> float:
    """Microseconds that a call takes."""
    return median_ms(call, device) * 1e3


def measure(job: Job, providers: Sequence[str]) -> list[Row]:
    """A row for each provider. They are timed in turns."""
    rows = {provider: dict.fromkeys(COLUMNS, "") | {"op": job.op.name, "provider": provider} for provider in providers}
    calls: dict[str, dict[str, Callable[[], float]]] = {}
    for provider in providers:
        try:
            with functions_of(provider) as functions:
                if job.op.name not in functions:
                    rows[provider]["note"] = f"{provider} has no {job.op.name}"
                    continue
                call = make_call(functions[job.op.name], job.arguments(), FULL, job.dtype)
                call()
                calls[provider] = {
                    "call_us": partial(on_the_host, call, job.device),
                    "one_thread_us": partial(on_the_host, in_one_thread(call), job.device),
                }
                if job.device == "cuda":
                    calls[provider]["graph_us"] = partial(on_the_device, replayed(call), job.device)
        except failures() as error:
            rows[provider]["note"] = reason(error)
    times: dict[tuple[str, str], list[float]] = {}
    for provider in in_turns([*calls]):
        with functions_of(provider):
            for column, time in calls[provider].items():
                times.setdefault((provider, column), []).append(time())
    for (provider, column), turns in times.items():
        assert len(turns) == TURNS
        rows[provider][column] = f"{min(turns):.1f}"
    return [*rows.values()]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a name that doesn't exist ends the program with those that do."""
    command = Command(__doc__, smoke="the reference and eager")
    command.add_names("ops", sorted(ops), default=OPS)
    command.add_names("providers", ["ours-torch", *(f"ours-{b.language}" for b in backends()), *PEERS])
    options = command.parse_args(words)
    if options.smoke:
        options.device = "cpu"
    options.providers = options.providers or (
        ["ours-torch", "eager"] if options.smoke else [*default_providers(options.device)]
    )
    command.check(options)
    return options


def main(words: Sequence[str] | None = None) -> list[Row]:
    """Measure, print as it goes, and write the record. Returns the rows."""
    options = parse(words)
    head = records.head_of(options.device)
    print(records.comment(head) + ",".join(COLUMNS), flush=True)
    rows: list[Row] = []
    for op in options.ops:
        case = next(case for case in cases_of(op).cases if case.group == "small")
        case = shrunk(case) if options.smoke else case
        op_rows = measure(Job(ops[op], case, torch.bfloat16, options.device, FULL), options.providers)
        rows += op_rows
        print("\n".join(",".join(row.values()) for row in op_rows), flush=True)
    if not options.smoke:
        lines = [[row[column] for column in COLUMNS] for row in rows]
        title = "Small calls with their backward"
        records.write("small", head, rows, COLUMNS, title, records.table(COLUMNS, lines), options.out)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
