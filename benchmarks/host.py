"""Host time of a launch and of a call on an accelerator, in each language.

    python benchmarks/host.py --ops rms_norm,swiglu --languages triton,cutile
    python benchmarks/host.py --smoke

- A launch: of a kernel with nine arguments (`launches`), by the function that launches a package's kernels and by the
  language's own.
- An op's ``small`` case in bfloat16: its kernel's ``forward`` when nothing needs a gradient and when everything does, its
  ``backward``, and the call of the op, where liger_core and autograd come on top.
- What such a call can't be below: an `autograd.Function` that only allocates. Beside it `F.rms_norm`.

A time is `timing.host_time`: nothing of the device is in it, unless a call waits for the device itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import records
import report
import torch
from calls import Arguments, Function, arguments_of, gradient_into, make_call, shrunk, tensors_of, trained
from command import Command
from timing import host_time, release
from torch import Tensor
from traffic import FULL

import liger_core
from liger_conformance.case import Case, cases_of
from liger_conformance.evaluate import kept_gradients
from liger_core.backend import backends
from liger_core.contract import Op, Saved, SavedOnce, ops

COLUMNS = ("what", "language", "measure", "us", "note")

DTYPE = torch.bfloat16

LAUNCHES = ("cutile", "triton")
"""The languages with a module in `launches`."""

Row = dict[str, str]
Seconds = dict[str, float]


class Allocating(torch.autograd.Function):
    """A norm without its kernels: it allocates the result and the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


FLOORS: dict[str, Function] = {
    report.AUTOGRAD: lambda x, weight: Allocating.apply(x, weight),
    "F.rms_norm": cases_of("rms_norm").eager,
}


def launch_times(language: str, device: str) -> Seconds:
    """A launch of the package, and one of the language alone."""
    calls = import_module(f"launches.{language}").launches(device)
    return {measure: host_time(call, device) for measure, call in zip(report.LAUNCHES, calls, strict=True)}


def kernel_times(kernel: ModuleType, op: Op[..., Any], arguments: Arguments, device: str) -> Seconds:
    """A kernel's forward and backward, called as liger_core calls them. `arguments` are all of the contract's."""
    needs = tuple(arguments[name] is not None for name in op.differentiable)
    nothing = (False,) * len(needs)
    options = {name: arguments[name] for name in op.options}
    with torch.no_grad():
        result, saved = kernel.forward(needs, **arguments)
        results = result if isinstance(result, tuple) else (result,)
        flags = kept_gradients(op, arguments, len(results))
        flowing = [id(result) for result in tensors_of(trained(result))]
        incoming = [
            gradient_into(result, DTYPE) if id(result) in flowing else None
            for result, keeps in zip(results, flags, strict=True)
            if keeps
        ]
        saved_anew = refilled(saved)
        return {
            report.KERNEL: host_time(lambda: kernel.forward(nothing, **arguments), device),
            report.KERNEL_SAVING: host_time(lambda: kernel.forward(needs, **arguments), device),
            report.KERNEL_BACKWARD: host_time(
                lambda: kernel.backward(needs, saved_anew(), *incoming, **options), device
            ),
        }


def refilled(saved: Saved) -> Callable[[], Saved]:
    """Saved tensors for any number of backwards: the first one uses a `SavedOnce` up."""
    if not saved or type(saved[-1]) is not SavedOnce:
        return lambda: saved
    *others, once = saved
    tensors = once.take()
    return lambda: (*others, SavedOnce(*tensors))


def call_times(function: Function, arguments: Arguments, device: str) -> Seconds:
    """A call without gradients, with them, and with the backward."""
    call = partial(function, **arguments)
    with torch.no_grad():
        without = host_time(call, device)
    full = make_call(function, arguments, FULL, DTYPE)
    return {
        report.CALL: without,
        report.CALL_GRAD: host_time(call, device),
        report.CALL_BACKWARD: host_time(full, device),
    }


def measure(op: Op[..., Any], case: Case, language: str, device: str) -> list[Row]:
    """The rows of an op in a language; one that says why, where the language doesn't take the case."""
    release(device)
    arguments = arguments_of(op, case, DTYPE, device)
    seconds: Seconds = {}
    with liger_core.use(language):
        try:
            op(**arguments)
        except liger_core.Unsupported as refusal:
            return [not_run(op.name, language, str(refusal))]
        for backend in backends():
            if backend.language == language:
                seconds |= kernel_times(backend.kernel(op.name), op, op.bind((), arguments), device)
        seconds |= call_times(op, arguments, device)
    return rows_of(op.name, language, seconds)


def rows_of(what: str, language: str, seconds: Mapping[str, float]) -> list[Row]:
    """A row for each measure."""
    return [
        dict(zip(COLUMNS, (what, language, measure, f"{time * 1e6:.1f}", ""), strict=True))
        for measure, time in seconds.items()
    ]


def not_run(what: str, language: str, why: str) -> Row:
    """The row of what was not measured."""
    return dict(zip(COLUMNS, (what, language, "", "", f"not run: {why}"), strict=True))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a name that doesn't exist ends the program with those that do."""
    command = Command(__doc__, smoke="the reference alone")
    installed = [backend.language for backend in backends()]
    command.add_names("ops", sorted(ops), default=sorted(ops))
    command.add_names("languages", ["torch", *installed], default=installed)
    options = command.parse_args(words)
    if options.smoke:
        options.device, options.languages = "cpu", ["torch"]
    command.check(options)
    return options


def small_case(op: str, smoke: bool) -> Case:
    """The op's first case at small sizes."""
    case = next(case for case in cases_of(op).cases if case.group == "small")
    return shrunk(case) if smoke else case


def main(words: Sequence[str] | None = None) -> list[Row]:
    """Measure, print as it goes, and write the record after each op. Returns the rows."""
    options = parse(words)
    device, smoke = options.device, options.smoke
    head = records.head_of(device)
    print(records.comment(head) + ",".join(COLUMNS), flush=True)
    rows: list[Row] = []

    def add(new: Sequence[Row]) -> None:
        rows.extend(new)
        for row in new:
            print(",".join(row.values()), flush=True)

    missing = {b.language: why for b in backends() if (why := b.missing(device)) is not None}
    add([not_run("every op", language, missing[language]) for language in options.languages if language in missing])
    languages = [language for language in options.languages if language not in missing]
    for language in languages:
        if language in LAUNCHES:
            add(rows_of("launch", language, launch_times(language, device)))
    arguments = arguments_of(ops["rms_norm"], small_case("rms_norm", smoke), DTYPE, device)
    for name, function in FLOORS.items():
        add(rows_of(name, "torch", call_times(function, arguments, device)))
    for op in options.ops:
        for language in languages:
            add(measure(ops[op], small_case(op, smoke), language, device))
        if not smoke:
            title = "Host costs of a launch and of a call"
            records.write("host", head, rows, COLUMNS, title, report.host_tables(rows), options.out)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
