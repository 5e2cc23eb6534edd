"""Asking which kernel would run, and why."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch

from liger_core import dispatch
from liger_core.backend import LOAD_ERRORS, BackendInfo, Unsupported, backends, discover
from liger_core.contract import Op, by_name, ops

ACCELERATORS = ("cuda", "npu", "xpu")


def infer_device() -> str:
    """The accelerator of this process: ``"cuda"`` (also ROCm), ``"npu"`` or ``"xpu"``; else ``"cpu"``."""
    for device in ACCELERATORS:
        module = getattr(torch, device, None)
        if module is not None and module.is_available():
            return device
    return "cpu"


def type_of(device: str | torch.device | None) -> str:
    """The type of a device: ``"cuda"`` for ``"cuda:1"``, `infer_device()` for None."""
    if device is None:
        return infer_device()
    try:
        return torch.device(device).type
    except RuntimeError:
        # What torch knows only with a plug-in, such as torch-npu for "npu", can be asked about without it.
        known = sorted({"cpu", *ACCELERATORS, *(d for b in backends() for d in b.devices)})
        match = re.fullmatch(r"(\w+)(:\d+)?", str(device))
        if match and match[1] in known:
            return match[1]
        raise ValueError(f"device is {device!r}; it takes a torch device or its type: {', '.join(known)}") from None


def get_current_backend(device: str | torch.device | None = None) -> BackendInfo | None:
    """The language that comes first on a device (default: `infer_device()`), or None where the reference runs.

    It is the one demanded for every op by `use` or LIGER_KERNEL_BACKEND, else the device's first default language that
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


class BoundOp:
    """An op held to a device and a language: what `get_op` returns. Call it like the op."""

    def __init__(self, op: Op[..., Any], device: str | None, language: str | None) -> None:
        self.op, self.device, self.language = op, device, language
        self.__doc__ = op.__doc__
        self.__name__ = op.name

    def __repr__(self) -> str:
        return f"<liger op {self.op.name} in {self.language or 'the best language'} on {self.device or 'any device'}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.device is not None:
            device, _ = self.op.inspect(self.op.bind(args, kwargs))
            if device != self.device:
                raise ValueError(f"{self.op.name}: the tensors are on {device}; this callable takes {self.device}")
        return self.op.call(self.language or dispatch.state.demand, args, kwargs)


def get_op(name: str, *, device: str | torch.device | None = None, language: str | None = None) -> BoundOp:
    """The callable that runs an op on a device in a language; either may be left out.

    Without `language` it chooses as the op itself does, now: `BoundOp.language` tells what it found (None where the
    tensors' device decides).

    Raises:
        Unsupported: the language can't run the op there.
        ValueError: an op or a device that doesn't exist, or what can't be a language's name.
    """
    op = by_name(name)
    device = None if device is None else type_of(device)
    if language is not None:
        dispatch.parse_demand(dispatch.one_language(language, "get_op"), "get_op")
        if language != "torch":
            backend = next(b for b in backends() if b.language == language)
            places = [device] if device else list(backend.devices)
            obstacles = [dispatch.obstacle(backend, name, place) for place in places]
            if all(obstacles):
                raise Unsupported(f"{name} in {language}: {'; '.join(filter(None, obstacles))}")
    elif device is not None:
        plan = op.plan(device, dispatch.state.demand)
        language = plan.kernels[0].language if plan.kernels else "torch"
    return BoundOp(op, device, language)


class Candidate(NamedTuple):
    """One language's standing for a call."""

    language: str
    why_not: str | None
    source: str | None


class Explanation(NamedTuple):
    """Every candidate for a call, in the order in which they are tried. `str()` makes a readable table of it."""

    op: str
    device: str
    demanded: str | None
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that runs; None when the call would raise `Unsupported`: what is demanded can't run, or what
        runs would be a fallback that LIGER_KERNEL_STRICT=1 forbids.
        """
        return next((c for c in self.candidates if c.why_not is None), None)

    def __str__(self) -> str:
        asked = f", {self.demanded} demanded" if self.demanded else ""
        lines = [f"{self.op} on {self.device}{asked}:"]
        for c in self.candidates:
            mark = "->" if c is self.chosen else "  "
            said = "chosen" if c is self.chosen else f"no: {c.why_not}" if c.why_not else "would run next"
            lines.append(f"{mark} {c.language}: {said}" + (f"  ({c.source})" if c.source else ""))
        if self.chosen is None:
            lines.append("   the call raises Unsupported")
        return "\n".join(lines)


def source_of(function: Any) -> str:
    """``file:line`` of a function."""
    function = inspect.unwrap(function)
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def explain(
    name: str | Op[..., Any], /, *args: Any, device: str | torch.device | None = None, **kwargs: Any
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
    if args or kwargs:
        arguments = op.bind(args, kwargs)
        device, refusal, _ = op.examine(arguments)
        empty = arguments[op.names[0]].numel() == 0
    device = type_of(device)
    language = dispatch.demanded_language(op.name, dispatch.state.demand)
    candidates = []
    nothing_to_launch = False
    for backend in _in_order(device):
        tried = device in backend.default_devices if language is None else backend.language == language
        module = source = None
        try:
            why = dispatch.obstacle(backend, op.name, device)
            if why is None:
                module = backend.kernel(op.name)
                source = source_of(module.forward)
        except LOAD_ERRORS as error:
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
    candidates += [Candidate(broken.name, broken.error, None) for broken in discover()[1]]
    if nothing_to_launch or language == "torch":
        why = None
    elif language is None:
        why = "LIGER_KERNEL_STRICT=1 forbids it" if dispatch.settings().strict else None
    else:
        why = f"{language} is demanded"
    candidates.append(Candidate("torch", why, source_of(op.reference)))
    return Explanation(op.name, device, language, tuple(candidates))


def _in_order(device: str) -> list[BackendInfo]:
    defaults = dispatch.default_backends(device)
    return [*defaults, *(b for b in backends() if b not in defaults)]
