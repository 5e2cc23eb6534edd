"""Asking which kernel would run, and why."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, NamedTuple

import torch

from liger_core import dispatch, tensors
from liger_core.backend import BackendInfo, backends, broken_backends
from liger_core.calling import Op, by_name, ops
from liger_core.devices import type_of


def get_current_backend(device: str | torch.device | None = None) -> BackendInfo | None:
    """The language that comes first on a device (default: `infer_device()`), or None where the reference runs.

    The name is the one that users know from liger-kernel. A backend is a package; what it brings is a *language*, which is
    the word for it everywhere else.

    It is the one demanded for every op by `use` or LIGER_LANGUAGE, else the device's first default language that
    can run here.
    """
    device = type_of(device)
    language = dispatch.demanded_language("", dispatch.state.demand)
    for backend in backends() if language else dispatch.default_backends(device):
        if language in (None, backend.language) and backend.missing(device) is None:
            return backend
    return None


def list_overridden_ops(device: str | torch.device | None = None) -> list[str]:
    """The ops that some installed package implements on a device (default: `infer_device()`), in name order."""
    device = type_of(device)
    return [op for op in sorted(ops) if any(device in b.devices and b.has_kernel(op) for b in backends())]


class Candidate(NamedTuple):
    """One language's standing for a call."""

    language: str
    why_not: str | None
    source: str | None


class Explanation(NamedTuple):
    """Every candidate for a call, in the order in which they are tried. `str()` makes a readable table of it.

    `parts` has a line for each thing that a call on tensors that are not plain divides or sends; none for plain tensors.
    """

    op: str
    device: str
    demanded: str | None
    candidates: tuple[Candidate, ...]
    parts: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that runs; None when the call would raise `Unsupported`: what is demanded can't run, or what
        runs would be a fallback that LIGER_STRICT=1 forbids.
        """
        return next((c for c in self.candidates if c.why_not is None), None)

    def __str__(self) -> str:
        asked = f", {self.demanded} demanded" if self.demanded else ""
        lines = [f"{self.op} on {self.device}{asked}:"]
        for c in self.candidates:
            mark = "->" if c is self.chosen else "  "
            said = "chosen" if c is self.chosen else f"no: {c.why_not}" if c.why_not else "would run next"
            lines.append(f"{mark} {c.language}: {said}" + (f"  ({c.source})" if c.source else ""))
        if len(self.candidates) == 1 and self.demanded is None:
            lines.append("   no kernel language is installed: `liger doctor` prints how to install one")
        lines += [f"   {part}" for part in self.parts]
        if self.chosen is None:
            lines.append("   the call raises Unsupported")
        return "\n".join(lines)


def source_of(function: Any, module: ModuleType | None = None) -> str:
    """``file:line`` of a function; of a kernel `module` whose forward is core's host code, the module's."""
    code = inspect.unwrap(function).__code__
    if module is not None and module.__file__ and code.co_filename != module.__file__:
        return f"{module.__file__}:1"
    return f"{code.co_filename}:{code.co_firstlineno}"


def explain(
    name: str | Op[..., Any],
    /,
    *args: Any,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> Explanation:
    """Say which kernel a call would run, and why not the others. Nothing is run.

    Args:
        name: the op, or its name.
        *args: the call's arguments; without any, kernels are not asked whether they refuse.
        device: the device or its type, when there are no arguments (default: `infer_device()`).
        **kwargs: the call's arguments by name.

    Raises:
        TypeError, ValueError: what the call itself raises about its arguments. Labels and indices are not read.

    >>> print(explain("rms_norm", torch.ones(2, 4), torch.ones(4)))  # doctest: +ELLIPSIS
    rms_norm on cpu:
    ...
    """
    op = by_name(name)
    arguments = refusal = None
    empty = False
    parts: tuple[str, ...] = ()
    if args or kwargs:
        arguments = op.bind(args, kwargs)
        handler = tensors.handler_of([arguments[n] for n in op.tensors])
        given = arguments.copy()
        device, refusal, _ = op.examine(arguments)
        if handler is not None:
            refusal = None  # kernels get plain tensors then
            if (told := getattr(handler, "explain", None)) is not None:
                parts = tuple(told(op, given))
        empty = arguments[op.names[0]].numel() == 0
    device = type_of(device)
    language = dispatch.demanded_language(op.name, dispatch.state.demand)
    obstacles = {b.language: dispatch.obstacle(b, op.name, device) for b in backends()}
    line = [b.language for b in dispatch.default_backends(device)] if language is None else [language]
    candidates: list[Candidate] = []
    nothing_to_launch = False
    for backend in sorted(backends(), key=lambda b: b.language not in line):
        tried = backend.language in line
        why, module, source = obstacles[backend.language], None, None
        try:
            if why is None:
                module = backend.kernel(op.name)
                source = source_of(module.forward, module)
        except Exception as error:
            if tried:  # a bug, which the call would raise
                raise
            why = f"{type(error).__name__}: {error}"
        if why is None and not tried:
            why = f"{language} is demanded" if language else f'only on demand: liger_core.use("{backend.language}")'
        if why is None and empty:
            why, nothing_to_launch = f"{op.names[0]} is empty; the reference makes the result", True
        if why is None and arguments is not None:
            refuses = getattr(module, "refuses", None)
            why = refusal or (refuses(**arguments) if refuses else None)
        candidates.append(Candidate(backend.language, why, source))
    candidates += [Candidate(broken.name, broken.error, None) for broken in broken_backends()]
    if nothing_to_launch or "torch" in line:
        why = None
    elif language is None:
        why = f"{dispatch.settings().of_strict}=1 forbids it" if dispatch.settings().strict else None
    else:
        why = f"{language} is demanded"
    candidates.append(Candidate("torch", why, source_of(op.reference)))
    return Explanation(op.name, device, language, tuple(candidates), parts)
