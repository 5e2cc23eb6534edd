"""`liger tune`: which implementation of each op is the fastest on this machine.

Calls are those of the timed cases of liger-conformance, in bfloat16, with their backward. Several processes compile at once;
then one after another they time what they have. A time is the least of three turns, in which the languages alternate:

- eager: from one call to the next, so that small calls are as slow as their Python, and large ones as the device;
- compiled: of the device alone, since Python is no part of a compiled step, with inputs that no cache holds. The operand that is
  the sum of a residual stream in models is added up in the same graph: PyTorch's compiler fuses that addition with its own
  code, and with no kernel.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import queue
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import dispatch, measured
from liger_core.backend import Unsupported, backends
from liger_core.calling import ops

GROUPS = {False: ("small", "medium"), True: ("medium",)}
"""The cases that are measured, eager and compiled. A medium call takes what it takes per byte, as any larger one. So does a small
one, if Python is no part of it."""

TURNS = 3

TURN_S = 0.012
"""Seconds of a turn, about."""

FLUSH = 256 << 20
"""Bytes that are written before each call: more than an L2 cache holds."""


class Cell(NamedTuple):
    """One line of a table."""

    op: str
    group: str
    compiled: bool


class Found(NamedTuple):
    """What was measured: microseconds by language, or why there are none."""

    cell: Cell
    size: int
    times: dict[str, float]
    notes: dict[str, str]


class Ready(NamedTuple):
    """A cell whose code is compiled: a function for each language, or why there is none."""

    cell: Cell
    functions: dict[str, Callable[..., Any]]
    notes: dict[str, str]


def cells_of(names: Sequence[str]) -> list[Cell]:
    """Every cell of these ops."""
    return [Cell(name, group, compiled) for name in names for compiled in (False, True) for group in GROUPS[compiled]]


def cases_of(op: str) -> Any:
    """liger-conformance's cases of an op."""
    try:
        case = importlib.import_module("liger_conformance.case")
    except ModuleNotFoundError as error:
        if error.name != "liger_conformance":
            raise
        raise Unsupported("tune calls the ops as liger-conformance does: uv pip install liger-conformance") from None
    return case.cases_of(op)


def arguments_of(cell: Cell, device: str) -> dict[str, Any]:
    """A cell's arguments. What can get a gradient requires one."""
    cases = cases_of(cell.op)
    case = next(case for case in cases.cases if case.group == cell.group)
    given = cases.build(case, torch.bfloat16, device)
    for name in ops[cell.op].differentiable:
        if given.get(name) is not None:
            given[name].requires_grad_()
    return given


def function_of(cell: Cell) -> Callable[..., Any]:
    """What is called: the op, compiled behind the addition that its operand comes from in models."""
    op: Callable[..., Any] = ops[cell.op]
    if not cell.compiled:
        return op
    residual = cases_of(cell.op).residual

    def compiled(**given: Any) -> tuple[Tensor, ...]:
        if residual is None:
            return as_stored(trained(op(**given)))
        total = given[residual] + given.pop("branch")
        return *as_stored(op(**{**given, residual: total})), total

    return torch.compile(compiled, dynamic=False)


def as_stored(returned: Any) -> tuple[Tensor, ...]:
    """The tensors, with their dimensions in the order of memory.

    Where compiled code ends, torch.compile makes gradients contiguous. In a model, the op is not where it ends.
    """
    return tuple(t.permute(sorted(range(t.dim()), key=t.stride, reverse=True)) for t in _tensors(returned))


def call_of(cell: Cell, function: Callable[..., Any], given: dict[str, Any]) -> Callable[[], Any]:
    """A call with its backward."""
    residual = cases_of(cell.op).residual if cell.compiled else None
    if residual is not None:
        given = given | {"branch": given[residual].detach().clone().requires_grad_()}
    leaves = [value for value in given.values() if isinstance(value, Tensor) and value.requires_grad]
    incoming: list[Tensor] = []

    def call() -> Any:
        results = [r for r in _tensors(trained(function(**given))) if r.requires_grad]
        if not results:
            return None
        if not incoming:
            incoming.extend(torch.ones_like(r) if r.dim() == 0 else torch.randn_like(r) for r in results)
        return torch.autograd.grad(results, leaves, incoming, allow_unused=True)

    return call


def trained(returned: Any) -> Any:
    """What a trainer differentiates: where a result is called `loss`, that alone. The others are for logs."""
    return getattr(returned, "loss", returned) if isinstance(returned, tuple) else returned


def _tensors(returned: Any) -> Iterator[Tensor]:
    if isinstance(returned, Tensor):
        yield returned
    elif isinstance(returned, tuple):
        for part in returned:
            yield from _tensors(part)


def prepare(cell: Cell, languages: Sequence[str], device: str) -> Ready:
    """Compile everything that a cell needs, by a first call in each language."""
    ready = Ready(cell, {language: function_of(cell) for language in languages}, {})
    for language, function in ready.functions.items():
        # Memory that is short now is not when this process alone measures.
        with noted(ready.notes, language), dispatch.use(language), suppress(torch.OutOfMemoryError):
            call_of(cell, function, arguments_of(cell, device))()
    return ready


def measure(ready: Ready, device: str) -> Found:
    """Time a cell, the languages in turns."""
    cell, notes = ready.cell, dict(ready.notes)
    given: dict[str, Any] = {}
    turns: dict[str, list[float]] = {language: [] for language in ready.functions}
    for turn in range(TURNS):
        for language in [*turns][:: -1 if turn % 2 else 1]:
            if language not in notes:
                with noted(notes, language), dispatch.use(language):
                    given = given or arguments_of(cell, device)
                    call = call_of(cell, ready.functions[language], given)
                    turns[language].append(microseconds(call, device, ahead=cell.compiled))
    times = {language: round(min(found), 1) for language, found in turns.items() if language not in notes}
    return Found(cell, given[ops[cell.op].names[0]].numel() if given else 0, times, notes)


@contextmanager
def noted(notes: dict[str, str], language: str) -> Iterator[None]:
    """Note what a language fails with; the others are measured without it."""
    try:
        yield
    except Exception as error:  # of a kernel, or of a compiler, whose classes only its language knows
        notes[language] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def microseconds(call: Callable[[], Any], device: str, ahead: bool) -> float:
    """The time of a call: among calls that follow one another; if `ahead`, the median of the device's, which never waits."""
    call()
    if device == "cpu":
        return statistics.median(_on_the_clock(call, 3))
    module = torch.get_device_module(device)
    module.synchronize()
    start = time.perf_counter()
    call()
    of_host = time.perf_counter() - start
    module.synchronize()
    whole = time.perf_counter() - start
    times = max(3, min(40, int(TURN_S / whole)))
    if not ahead:
        start = time.perf_counter()
        for _ in range(times):
            call()
        module.synchronize()
        return (time.perf_counter() - start) / times * 1e6
    buffer = torch.empty(FLUSH, dtype=torch.int8, device=device)
    pair = _events(module)
    pair[0].record()
    buffer.zero_()
    pair[1].record()
    module.synchronize()
    flushes = min(200, 1 + math.ceil(2 * of_host / (pair[0].elapsed_time(pair[1]) / 1e3)))
    pairs = [_events(module) for _ in range(times)]
    for start_event, end_event in pairs:
        for _ in range(flushes):
            buffer.zero_()
        start_event.record()
        call()
        end_event.record()
    module.synchronize()
    return statistics.median(start_event.elapsed_time(end_event) * 1e3 for start_event, end_event in pairs)


def _events(module: Any) -> tuple[Any, Any]:
    return module.Event(enable_timing=True), module.Event(enable_timing=True)


def _on_the_clock(call: Callable[[], Any], times: int) -> Iterator[float]:
    for _ in range(times):
        start = time.perf_counter()
        call()
        yield (time.perf_counter() - start) * 1e6


def work(
    cells: Sequence[Cell],
    languages: Sequence[str],
    device: str,
    until: tuple[float, float],
    say: Any,
    go: Any,
    turn: Any,
) -> None:
    """What a process does: compile until the first time, wait for `go`, and in its turns measure until the second."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes share the cores
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1 << 16  # all functions of `function_of` are one code
    ready: list[Ready] = []
    for cell in cells:
        if time.time() < until[0]:
            ready.append(prepare(cell, languages, device))
            release(device)
        say.put(cell)
    say.put(None)  # compiled
    go.wait()
    for one in ready:
        with turn:
            if time.time() < until[1]:
                say.put(measure(one, device))
            release(device)


def release(device: str) -> None:
    """Give back the memory that nothing holds any more: the other processes want it."""
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


def tune(
    cells: Sequence[Cell],
    device: str,
    languages: Sequence[str],
    seconds: float,
    processes: int,
    progress: Callable[[str, int], None],
) -> Iterator[Found]:
    """Measure cells, in at most so many seconds. What there is no time for is left out.

    So are, with a warning, the ops of a process that dies.

    `progress` is told what was done last, and how many steps of two per cell are.
    """
    context = multiprocessing.get_context("spawn")
    say, go, turn = context.Queue(), context.Event(), context.Lock()
    start = time.time()
    until = start + 0.65 * seconds, start + seconds
    names = [*dict.fromkeys(cell.op for cell in cells)]  # an op stays in one process: its sizes share code
    shares = [[cell for cell in cells if names.index(cell.op) % processes == i] for i in range(processes)]
    started = [
        context.Process(target=work, args=(share, languages, device, until, say, go, turn), daemon=True)
        for share in shares
        if share
    ]
    for process in started:
        process.start()
    compiling, done = len(started), 0
    while time.time() < until[1] + 0.1 * seconds:
        try:
            said = say.get(timeout=0.2)
        except queue.Empty:
            if not any(process.is_alive() for process in started):
                break
        else:
            if said is None:
                compiling -= 1
            else:
                done += 1
                progress(said.op if isinstance(said, Cell) else said.cell.op, done)
                if isinstance(said, Found):
                    yield said
        # Who died while compiling is not waited for, nor who takes too long.
        dead = sum(process.exitcode not in (None, 0) for process in started)
        if compiling <= dead or time.time() > until[0] + 0.1 * seconds:
            go.set()
    died = [process.exitcode for process in started if process.exitcode not in (None, 0)]
    if died:
        warnings.warn(
            f"{len(died)} of {len(started)} processes died, with exit code {died[0]}: their ops are not measured",
            stacklevel=2,
        )
    for process in started:
        process.join(1.0)
        if process.is_alive():
            process.kill()


def table_of(chip: str, record: str, found: Sequence[Found], languages: Sequence[str]) -> measured.Table:
    """A table with the times of these languages and of the reference."""
    hows: dict[str, Any] = {"record": record, "eager": {}, "compiled": {}}
    for one in sorted(found, key=lambda one: (one.cell.op, one.size)):
        times = {name: us for name, us in one.times.items() if name in languages or name == "torch"}
        if set(times) - {"torch"}:
            lines = hows["compiled" if one.cell.compiled else "eager"].setdefault(one.cell.op, [])
            lines.append([one.size, times])
    return {chip: hows}


def write_own(table: measured.Table) -> None:
    """Add a table to the user's own. Other chips and ops in it stay, if the versions are the same."""
    path = measured.own_table()
    chips: measured.Table = {}
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        chips = before["chips"] if before.get("versions") == measured.versions() else {}
    for chip, hows in table.items():
        old = chips.setdefault(chip, {"eager": {}, "compiled": {}})
        old["record"] = hows["record"]
        for how in ("eager", "compiled"):
            old[how].update(hows[how])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"versions": measured.versions(), "chips": chips}, indent=1) + "\n", "utf-8")


@contextmanager
def shown(total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar where rich is installed, else a line now and then."""
    try:
        bars: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console").Console(stderr=True)
    except ModuleNotFoundError:
        yield lambda what, done: None if done % 20 else print(f"{done} of {total}: {what}", file=sys.stderr)
        return
    with bars.Progress(*bars.Progress.get_default_columns(), console=console) as bar:
        task = bar.add_task("tune", total=total)
        yield lambda what, done: bar.update(task, completed=done, description=what)


def able(device: str) -> list[str]:
    """The languages that run on a device, and the reference."""
    return [*(b.language for b in backends() if b.missing(device) is None), "torch"]


def processes_for(device: str) -> int:
    """How many processes may compile at once: they share the cores, and a large call takes some gigabytes."""
    cores = max(1, (os.cpu_count() or 1) - 2)
    if device == "cpu":
        return 1
    module: Any = torch.get_device_module(device)
    memory: int = module.mem_get_info()[1] if hasattr(module, "mem_get_info") else 0
    return max(1, min(16, cores, memory // (10 << 30)))
