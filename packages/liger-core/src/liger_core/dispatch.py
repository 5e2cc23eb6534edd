"""Which kernel a call runs: what was demanded, else the device's default languages, else the reference."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

from liger_core import modes
from liger_core.autograd import Parts, Run, differentiable
from liger_core.backend import BackendInfo, Unsupported, backends, broken_backends, not_installed
from liger_core.declaration import Arguments, Declaration, Needs, declared

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("liger_core")


class Route(NamedTuple):
    """The way to a kernel: its language, its objection to a call if it can have one, and what runs it."""

    language: str
    refuses: Callable[..., str | None] | None
    run: Run


class Plan(NamedTuple):
    """The routes to try in order. `reasons` says why other candidates are out; a demand doesn't fall back.

    A demand with no routes is a demand for the reference.
    """

    routes: tuple[Route, ...]
    reasons: tuple[str, ...]
    demanded: bool


class Settings(NamedTuple):
    """The environment variables, as read at the first dispatch, and the names of those that were."""

    demand: str | None
    strict: bool
    check: bool
    of_demand: str = "LIGER_LANGUAGE"
    of_strict: str = "LIGER_STRICT"


@functools.cache
def settings() -> Settings:
    """LIGER_LANGUAGE, LIGER_STRICT and LIGER_KERNEL_CHECK. Read once.

    Where one of the first two is unset, the variable is read that users of liger-kernel know: that package reads those
    as well, and takes neither our languages nor a language per op.
    """
    of_demand = _first_set("LIGER_LANGUAGE", "LIGER_KERNEL_BACKEND")
    of_strict = _first_set("LIGER_STRICT", "LIGER_KERNEL_STRICT")
    demand = os.environ.get(of_demand, "").strip() or None
    if demand is not None:
        parse_demand(demand, of_demand)
    return Settings(demand, _on(of_strict), _on("LIGER_KERNEL_CHECK"), of_demand, of_strict)


def _first_set(ours: str, theirs: str) -> str:
    return theirs if not os.environ.get(ours, "").strip() and os.environ.get(theirs, "").strip() else ours


def _on(variable: str) -> bool:
    value = os.environ.get(variable, "").strip() or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{variable} is {value!r}; it takes 0 or 1")
    return value == "1"


class State:
    """What `use` has set, for the whole process: backward runs in autograd's threads, so a setting of the calling
    thread alone would be lost where activation checkpointing recomputes a forward.
    """

    demand: str | None = None


state = State()


def parse_demand(demand: str, source: str) -> tuple[str | None, dict[str, str]]:
    """Split ``"cutile,rms_norm=triton"`` into the language for every op, and those for single ops."""
    everywhere: str | None = None
    single: dict[str, str] = {}
    for part in demand.split(","):
        name, separator, language = (word.strip() for word in part.partition("="))
        if not separator:
            name, language = "", name
        if separator and name not in declared:
            raise ValueError(f"{source}: there is no op {name!r}; the ops are {', '.join(sorted(declared))}")
        if not language or (not separator and everywhere is not None):
            raise ValueError(f"{source} is {demand!r}; it takes LANGUAGE, OP=LANGUAGE, or both joined by commas")
        if language != "torch" and all(language != b.language for b in backends()):
            raise Unsupported(f"{source}: {not_installed(language)}")
        if separator:
            single[name] = language
        else:
            everywhere = language
    return everywhere, single


def one_language(language: Any, source: str) -> str:
    """`language`, where it can be the name of one: `parse_demand` reads more than that."""
    if not isinstance(language, str):
        raise TypeError(f"{source}: a language is {language!r}; it takes a str, such as 'torch'")
    if not re.fullmatch(r"[^\s,=]+", language):
        raise ValueError(f"{source}: a language is {language!r}; it takes the name of one, such as 'torch'")
    return language


class use:
    """Demand a language for every op, or for single ones. Where it can't run, a call raises `Unsupported`.

    A call of its own sets it for the process, for good. As a context manager it restores what was set before, and as a
    decorator it is in force while the function runs:

    >>> import torch, liger_core
    >>> with liger_core.use("torch"):
    ...     liger_core.rms_norm(torch.ones(1, 2), torch.ones(2))
    tensor([[1.0000, 1.0000]])
    >>> @liger_core.use("torch")
    ... def norm(x):
    ...     return liger_core.rms_norm(x, None)

    Args:
        language: for every op, such as ``"triton"`` or ``"torch"`` (the reference). None: each op's own choice.
        **ops: for single ops, such as ``rms_norm="triton"``.

    Raises:
        Unsupported: a language that is not installed.
        ValueError: an op that doesn't exist, or what can't be a language's name.
    """

    def __init__(self, language: str | None = None, /, **ops: str) -> None:
        parts = ([one_language(language, "use")] if language is not None else []) + [
            f"{name}={one_language(value, 'use')}" for name, value in sorted(ops.items())
        ]
        self._demand = ",".join(parts) or None
        if self._demand is not None:
            parse_demand(self._demand, "use")
        self._before = [state.demand]
        """What to restore, innermost last. The first is what held before the call, which a ``with`` of the same line, or a
        decorator, takes back."""
        self._called = True
        state.demand = self._demand

    def __enter__(self) -> use:
        if not self._called or state.demand != self._demand:
            self._before.append(state.demand)
        self._called = False
        state.demand = self._demand
        return self

    def __exit__(self, *exception: object) -> None:
        state.demand = self._before.pop()

    def __call__(self, function: F) -> F:
        if self._called:
            self._called = False
            state.demand = self._before.pop()

        @functools.wraps(function)
        def demanding(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", demanding)


def demanded_language(op: str, demand: str | None) -> str | None:
    """The language that `use`, or else LIGER_LANGUAGE, asks of an op."""
    for source, text in (("use", demand), (settings().of_demand, settings().demand)):
        if text is not None:
            everywhere, single = parse_demand(text, source)
            if language := single.get(op, everywhere):
                return language
    return None


def default_backends(device: str) -> tuple[BackendInfo, ...]:
    """The languages chosen on a device without being asked for, in order."""
    return tuple(b for b in backends() if device in b.default_devices)


def make_plan(op: Declaration[..., Any], device: str, demand: str | None) -> Plan:
    """Look for the kernels of a call, import them, and say why the others are out."""
    language = demanded_language(op.name, demand)
    if language == "torch":
        return Plan((), (), True)
    candidates = default_backends(device) if language is None else [b for b in backends() if b.language == language]
    routes: list[Route] = []
    reasons: list[str] = []
    for backend in candidates:
        if why := obstacle(backend, op.name, device):
            reasons.append(f"{backend.language}: {why}")
        else:
            routes.append(_load(op, backend, device))
    if language is None:
        reasons += [f"{b.name}: {b.error}" for b in broken_backends()]
        if not candidates and not reasons:
            reasons.append(f"no installed language serves {device} by default; `liger doctor` lists the others")
    elif not routes:
        raise Unsupported(f"{op.name} on {device}: {'; '.join(reasons)}")
    return Plan(tuple(routes), tuple(reasons), language is not None)


def obstacle(backend: BackendInfo, op: str, device: str) -> str | None:
    """Why a language has no kernel for an op on a device of this machine, or None. Imports no kernel."""
    if why := backend.missing(device):
        return why
    return None if backend.has_kernel(op) else backend.broken() or f"{backend.package} has no kernel for {op}"


def _load(op: Declaration[..., Any], backend: BackendInfo, device: str) -> Route:
    module = backend.kernel(op.name)
    run = differentiable(op, module, backend.language)
    if device != "cpu" and torch.get_device_module(device).device_count() > 1:
        run = on_its_device(run, op.names[0], torch.get_device_module(device))
    return Route(backend.language, getattr(module, "refuses", None), run)


def on_its_device(run: Run, first: str, module: Any) -> Run:
    """Launches go to the current device: make the tensors' device current, in a process that has several.

    Autograd does that for backward by itself, and so does the code that torch.compile makes.
    """

    def guarded(arguments: Arguments, needs: Needs, options: dict[str, Any], parts: Parts | None = None, /) -> Any:
        if modes.compiling() or arguments[first].device.index == module.current_device():
            return run(arguments, needs, options, parts)
        with module.device(arguments[first].device.index):
            return run(arguments, needs, options, parts)

    return guarded


_said: set[tuple[str, str, tuple[str, ...]]] = set()


def fall_back(op: str, device: str, reasons: tuple[str, ...]) -> None:
    """Say once per op, device and reasons that the reference runs; an error under LIGER_STRICT=1."""
    if (op, device, reasons) not in _said:
        text = f"{op} on {device} runs the PyTorch reference ({'; '.join(reasons)})"
        if settings().strict:
            raise Unsupported(f"{text}, which {settings().of_strict}=1 forbids")
        _said.add((op, device, reasons))
        # Nothing is amiss on a CPU without kernels; on an accelerator it costs speed.
        log.log(logging.INFO if device in ("cpu", "meta") else logging.WARNING, text)


# What torch.compiler.assume_constant_result does, without importing Dynamo for it.
fall_back._dynamo_marked_constant = True  # type: ignore[attr-defined]
