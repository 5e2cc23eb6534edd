"""Which kernel a call runs: what was demanded, else the device's default languages, else the reference."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from liger_core.autograd import differentiable
from liger_core.backend import BackendInfo, Unsupported, backends, discover, not_installed

if TYPE_CHECKING:
    from liger_core.contract import Op

log = logging.getLogger("liger_core")


Run = Callable[[dict[str, Any], tuple[bool, ...], dict[str, Any]], Any]
"""Runs a kernel: the arguments, which differentiable ones require a gradient, and the options."""


class Kernel(NamedTuple):
    """A kernel that is ready to run: its language, its objection to a call if it can have one, and the call."""

    language: str
    refuses: Callable[..., str | None] | None
    run: Run


class Plan(NamedTuple):
    """The kernels to try in order. `reasons` says why other candidates are out; a demand doesn't fall back.

    A demand with no kernels is a demand for the reference.
    """

    kernels: tuple[Kernel, ...]
    reasons: tuple[str, ...]
    demanded: bool


class Settings(NamedTuple):
    """The environment variables, as read at the first dispatch."""

    demand: str | None
    strict: bool
    check: bool


@functools.cache
def settings() -> Settings:
    """LIGER_KERNEL_BACKEND, LIGER_KERNEL_STRICT and LIGER_KERNEL_CHECK. Read once."""
    demand = os.environ.get("LIGER_KERNEL_BACKEND", "").strip() or None
    if demand is not None:
        parse_demand(demand, "LIGER_KERNEL_BACKEND")
    return Settings(demand, _on("LIGER_KERNEL_STRICT"), _on("LIGER_KERNEL_CHECK"))


def _on(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    if value not in ("", "0", "1"):
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
    from liger_core.contract import ops

    everywhere, single = None, {}
    for part in demand.split(","):
        name, separator, language = (word.strip() for word in part.partition("="))
        if not separator:
            name, language = "", name
        if separator and name not in ops:
            raise ValueError(f"{source}: there is no op {name!r}; the ops are {', '.join(sorted(ops))}")
        if not language or (not separator and everywhere is not None):
            raise ValueError(f"{source} is {demand!r}; it takes LANGUAGE, OP=LANGUAGE, or both joined by commas")
        if language != "torch" and all(language != b.language for b in backends()):
            raise Unsupported(f"{source}: {not_installed(language)}")
        if separator:
            single[name] = language
        else:
            everywhere = language
    return everywhere, single


def one_language(language: str, source: str) -> str:
    """`language`, where it can be the name of one: `parse_demand` reads more than that."""
    if not isinstance(language, str):
        raise TypeError(f"{source}: a language is {language!r}; it takes a str, such as 'torch'")
    if not re.fullmatch(r"[^\s,=]+", language):
        raise ValueError(f"{source}: a language is {language!r}; it takes the name of one, such as 'torch'")
    return language


class use:
    """Demand a language for every op, or for single ones. Where it can't run, a call raises `Unsupported`.

    It takes effect at once, for the process. As a context manager it restores what was set before:

    >>> import torch, liger_core
    >>> with liger_core.use("torch"):
    ...     liger_core.rms_norm(torch.ones(1, 2), torch.ones(2))
    tensor([[1.0000, 1.0000]])

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
        demand = ",".join(parts) or None
        if demand is not None:
            parse_demand(demand, "use")
        self._before = state.demand
        state.demand = demand

    def __enter__(self) -> use:
        return self

    def __exit__(self, *exception: object) -> None:
        state.demand = self._before


def demanded_language(op: str, demand: str | None) -> str | None:
    """The language that `use`, or else LIGER_KERNEL_BACKEND, asks of an op."""
    for source, text in (("use", demand), ("LIGER_KERNEL_BACKEND", settings().demand)):
        if text is not None:
            everywhere, single = parse_demand(text, source)
            if language := single.get(op, everywhere):
                return language
    return None


def default_backends(device: str) -> tuple[BackendInfo, ...]:
    """The languages chosen on a device without being asked for, in order."""
    return tuple(b for b in backends() if device in b.default_devices)


def make_plan(op: Op[..., Any], device: str, demand: str | None) -> Plan:
    """Look for the kernels of a call, import them, and say why the others are out."""
    language = demanded_language(op.name, demand)
    if language == "torch":
        return Plan((), (), True)
    candidates = default_backends(device) if language is None else [b for b in backends() if b.language == language]
    kernels, reasons = [], []
    for backend in candidates:
        if why := obstacle(backend, op.name, device):
            reasons.append(f"{backend.language}: {why}")
        else:
            kernels.append(_load(op, backend, device))
    if language is None:
        reasons += [f"{b.name}: {b.error}" for b in discover()[1]]
        if not candidates and not reasons:
            reasons.append(f"no installed language serves {device} by default; `liger doctor` lists the others")
    elif not kernels:
        raise Unsupported(f"{op.name} on {device}: {'; '.join(reasons)}")
    return Plan(tuple(kernels), tuple(reasons), language is not None)


def obstacle(backend: BackendInfo, op: str, device: str) -> str | None:
    """Why a language has no kernel for an op on a device of this machine, or None. Imports no kernel."""
    if why := backend.missing(device):
        return why
    return None if backend.has_kernel(op) else f"{backend.package} has no kernel for {op}"


def _load(op: Op[..., Any], backend: BackendInfo, device: str) -> Kernel:
    module = backend.kernel(op.name)
    run = differentiable(op, module, backend.language)
    if device != "cpu" and torch.get_device_module(device).device_count() > 1:
        run = on_its_device(run, op.names[0], torch.get_device_module(device))
    return Kernel(backend.language, getattr(module, "refuses", None), run)


def on_its_device(run: Run, first: str, module: Any) -> Run:
    """Launches go to the current device: make the tensors' device current, in a process that has several.

    Autograd does that for backward by itself, and so does the code that torch.compile makes.
    """

    def guarded(arguments: dict[str, Any], needs: tuple[bool, ...], options: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or arguments[first].device.index == module.current_device():
            return run(arguments, needs, options)
        with module.device(arguments[first].device.index):
            return run(arguments, needs, options)

    return guarded


_said: set[tuple[str, str]] = set()


def fall_back(op: str, device: str, reasons: tuple[str, ...]) -> None:
    """Say once per op and device that the reference runs, and why; an error under LIGER_KERNEL_STRICT=1."""
    if (op, device) not in _said:
        text = f"{op} on {device} runs the PyTorch reference ({'; '.join(reasons)})"
        if settings().strict:
            raise Unsupported(f"{text}, which LIGER_KERNEL_STRICT=1 forbids")
        _said.add((op, device))
        # Nothing is amiss on a CPU without kernels; on an accelerator it costs speed.
        log.log(logging.INFO if device in ("cpu", "meta") else logging.WARNING, text)


def plan_while_tracing(op: str, device: str, demand: str | None) -> bool:
    """Fill an op's table of plans. Dynamo can't trace imports and file look-ups; it can run them, here."""
    from liger_core.contract import ops

    if (device, demand) not in ops[op]._plans:
        ops[op].plan(device, demand)
    return True


# What torch.compiler.assume_constant_result does, without importing Dynamo for it.
for _function in (plan_while_tracing, fall_back):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
