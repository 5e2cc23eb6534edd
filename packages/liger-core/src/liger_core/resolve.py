"""`Resolution`: the kernel that runs a call, and why no other does. A call runs it and `explain` prints it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from liger_core import dispatch, torch_state
from liger_core.autograd import Run, differentiable
from liger_core.backend import BackendInfo, Unsupported, backends, broken_backends, not_installed
from liger_core.declaration import Arguments, Declaration, Needs

log = logging.getLogger("liger_core")


class Candidate(NamedTuple):
    """A language that may run a call.

    Attributes:
        language: its name; "torch" is the reference.
        why_not: why it can't run the call, or None.
        source: ``file:line`` of its code, or None if there is none.
        refuses: the kernel's function that returns why it can't take a call, or None if it has none.
        run: a function that runs the kernel; None for the reference, and for a language without a kernel.
        replayable: the kernel, if its language tells `liger_core.replay` of launches.
    """

    language: str
    why_not: str | None
    source: str | None = None
    refuses: Callable[..., str | None] | None = None
    run: Run | None = None
    replayable: ModuleType | None = None


class Resolution(NamedTuple):
    """The candidates for a call in the order in which they are tried, the reference last. `str()` makes a table of them.

    Attributes:
        op: the op's name.
        device: the device type.
        demanded: the language that is requested of the op, or None.
        candidates: the languages that a call tries, and the reference. `explain` adds the other languages.
        chosen: the candidate that runs. None: the call raises `Unsupported`, since the language that is requested can't run
            it, or since LIGER_STRICT=1 forbids the reference.
        falls_back: whether no kernel takes the call, and none is requested.
        parts: lines about what a call on tensors that are not plain divides and sends.
    """

    op: str
    device: str
    demanded: str | None
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    falls_back: bool
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        asked = f", {self.demanded} demanded" if self.demanded else ""
        lines = [f"{self.op} on {self.device}{asked}:"]
        for c in self.candidates:
            mark = "->" if c is self.chosen else "  "
            standing = "chosen" if c is self.chosen else f"no: {c.why_not}" if c.why_not else "would run next"
            lines.append(f"{mark} {c.language}: {standing}" + (f"  ({c.source})" if c.source else ""))
        if len(self.candidates) == 1 and self.demanded is None:
            lines.append("   no kernel language is installed: `liger doctor` prints how to install one")
        lines += [f"   {part}" for part in self.parts]
        if self.chosen is None:
            lines.append("   the call raises Unsupported")
        return "\n".join(lines)


def resolution(
    op: str, device: str, demanded: str | None, candidates: Sequence[Candidate], empty: bool = False
) -> Resolution:
    """Choose the first candidate that can run. For an `empty` call that is the reference, even if a language is requested."""
    chosen = None
    for candidate in candidates:
        if candidate.why_not is None:
            chosen = candidate
            break
    falls_back = demanded is None and not empty and (chosen is None or chosen.language == "torch")
    return Resolution(op, device, demanded, tuple(candidates), chosen, falls_back)


def plan(op: Declaration[..., Any], device: str, demand: str | None) -> Resolution:
    """Look for the kernels of an op on a device, and import them. This needs no arguments of a call.

    Args:
        op: the op.
        device: the device type.
        demand: the languages that are requested, as `use` writes them.

    Raises:
        Unsupported: several packages declare a language, and no other one is requested.
    """
    language = dispatch.demanded_language(op.name, demand)
    for broken in broken_backends():
        if broken.conflict and language is None:
            raise Unsupported(f"{op.name}: {not_installed(broken.name)}, or request another language")
    why = None
    if language not in (None, "torch"):
        why = f"{language} is demanded"
    elif language is None and dispatch.settings().strict:
        why = f"{dispatch.settings().strict_variable}=1 forbids it"
    tried = [_candidate(backend, op, device) for backend in tried_backends(device, language)]
    return resolution(op.name, device, language, [*tried, Candidate("torch", why, source_of(op.reference))])


def resolve(plan: Resolution, op: Declaration[..., Any], arguments: Arguments, refusal: str | None) -> Resolution:
    """Ask the kernels of a plan whether they take a call.

    Args:
        plan: the op's candidates.
        op: the op.
        arguments: every argument by name, checked.
        refusal: why no kernel of any language takes them, or None.
    """
    if plan.chosen is None or plan.chosen.language == "torch":
        return plan
    first = op.names[0]
    empty = arguments[first].numel() == 0
    candidates: list[Candidate] = []
    changed = False
    for candidate in plan.candidates[:-1]:
        if candidate.why_not is None:
            why = f"{first} is empty; the reference makes the result" if empty else refusal
            if why is None and candidate.refuses is not None:
                why = candidate.refuses(**arguments)
            if why is not None:
                candidate = Candidate(candidate.language, why, candidate.source)
                changed = True
        candidates.append(candidate)
    if not changed:
        return plan
    reference = plan.candidates[-1]
    candidates.append(Candidate("torch", None, reference.source) if empty else reference)
    return resolution(plan.op, plan.device, plan.demanded, candidates, empty)


def decide(resolution: Resolution) -> Candidate:
    """The candidate that runs. A fallback is logged, or raises under LIGER_STRICT=1.

    Raises:
        Unsupported: none may run.
    """
    if resolution.chosen is None or resolution.falls_back:
        reasons = tuple([f"{c.language}: {c.why_not}" for c in resolution.candidates[:-1]])
        if not resolution.falls_back:
            raise Unsupported(f"{resolution.op} on {resolution.device}: {'; '.join(reasons)}")
        fall_back(resolution.op, resolution.device, reasons)
    return resolution.chosen or resolution.candidates[-1]


def untried(op: Declaration[..., Any], device: str, language: str | None) -> Iterator[Candidate]:
    """The installed languages that a call doesn't try, each with the reason, such as a kernel that can't be imported."""
    tried = tried_backends(device, language)
    asked = f"{language} is demanded" if language else None
    for backend in backends():
        if backend not in tried:
            try:
                candidate = _candidate(backend, op, device)
            except Exception as error:  # the kernel's own: no call would raise it
                candidate = Candidate(backend.language, f"{type(error).__name__}: {error}")
            why = candidate.why_not or asked or f'only on demand: liger_core.use("{backend.language}")'
            yield candidate._replace(why_not=why)
    for broken in broken_backends():
        yield Candidate(broken.name, broken.error)


def tried_backends(device: str, language: str | None) -> list[BackendInfo]:
    """The packages whose kernels are tried, in order: those of the language that is requested, else the device's defaults."""
    if language is None:
        return [backend for backend in backends() if device in backend.default_devices]
    return [backend for backend in backends() if backend.language == language]


def obstacle(backend: BackendInfo, op: str, device: str) -> str | None:
    """Why a language has no kernel for an op on a device of this machine, or None. Imports no kernel."""
    if why := backend.missing(device):
        return why
    return None if backend.has_kernel(op) else backend.broken() or f"{backend.package} has no kernel for {op}"


def _candidate(backend: BackendInfo, op: Declaration[..., Any], device: str) -> Candidate:
    if why := obstacle(backend, op.name, device):
        return Candidate(backend.language, why)
    module = backend.kernel(op.name)
    run = differentiable(op, module, backend.language)
    on_device = getattr(torch, device, None)
    if device != "cpu" and on_device is not None and on_device.device_count() > 1:
        run = on_its_device(run, op.names[0], on_device)
    source = source_of(module.forward, module)
    replayable = module if backend.tells_launches else None
    return Candidate(backend.language, None, source, getattr(module, "refuses", None), run, replayable)


def source_of(function: Any, module: ModuleType | None = None) -> str:
    """``file:line`` of a function. For a kernel `module` whose forward is core's host code, the module's file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = getattr(module, "__file__", None)
    if code is None or (file is not None and code.co_filename != file):
        return f"{file}:1"
    return f"{code.co_filename}:{code.co_firstlineno}"


def on_its_device(run: Run, first: str, module: Any) -> Run:
    """Make the tensors' device current while a kernel runs, in a process with several devices: launches go to the current one.

    Autograd does that for backward by itself, and torch.compile's code does it as well.
    """

    def guarded(arguments: Arguments, needs: Needs, options: dict[str, Any], *others: Any) -> Any:
        if torch_state.compiling() or arguments[first].device.index == module.current_device():
            return run(arguments, needs, options, *others)
        with module.device(arguments[first].device.index):
            return run(arguments, needs, options, *others)

    return guarded


_logged: set[tuple[str, str, tuple[str, ...]]] = set()


@torch_state.constant_in_graphs
def fall_back(op: str, device: str, reasons: tuple[str, ...]) -> None:
    """Log once per op, device and reasons that the reference runs; an error under LIGER_STRICT=1."""
    strict = dispatch.settings().strict
    if not strict and (op, device, reasons) in _logged:
        return
    every = (*reasons, *(f"{broken.name}: {broken.error}" for broken in broken_backends()))
    why = "; ".join(every) or f"no installed language serves {device} by default; `liger doctor` lists the others"
    text = f"{op} on {device} runs the PyTorch reference ({why})"
    if strict:
        raise Unsupported(f"{text}, which {dispatch.settings().strict_variable}=1 forbids")
    _logged.add((op, device, reasons))
    # On a CPU without kernels this is normal. On an accelerator it costs speed.
    log.log(logging.INFO if device in ("cpu", "meta") else logging.WARNING, text)
