"""Which languages are requested: `use`, and the environment variables."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from liger_core.backend import Unsupported, backends, close_to, not_installed
from liger_core.declaration import declared
from liger_core.torch_state import constant_in_graphs

F = TypeVar("F", bound=Callable[..., Any])


class Settings(NamedTuple):
    """The environment variables, as read at the first dispatch, and the names of those that were."""

    demand: str | None
    strict: bool
    check: bool
    demand_variable: str = "LIGER_LANGUAGE"
    strict_variable: str = "LIGER_STRICT"


@functools.cache
def settings() -> Settings:
    """LIGER_LANGUAGE, LIGER_STRICT and LIGER_KERNEL_CHECK. Read once.

    Where one of the first two is unset, the variable is read that users of liger-kernel know: that package reads those
    as well, and takes neither our languages nor a language per op.
    """
    demand_variable = _first_set("LIGER_LANGUAGE", "LIGER_KERNEL_BACKEND")
    strict_variable = _first_set("LIGER_STRICT", "LIGER_KERNEL_STRICT")
    demand = os.environ.get(demand_variable, "").strip() or None
    if demand is not None:
        parse_demand(demand, demand_variable)
    return Settings(demand, _on(strict_variable), _on("LIGER_KERNEL_CHECK"), demand_variable, strict_variable)


def _first_set(ours: str, theirs: str) -> str:
    return theirs if not os.environ.get(ours, "").strip() and os.environ.get(theirs, "").strip() else ours


def _on(variable: str) -> bool:
    value = os.environ.get(variable, "").strip() or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{variable} is {value!r}; it takes 0 or 1")
    return value == "1"


def reads_values(device: str) -> bool:
    """Whether checks read tensors' data on a device: on the CPU always, on an accelerator under LIGER_KERNEL_CHECK=1."""
    return device == "cpu" or settings().check


class DemandState:
    """The demand that `use` has set, for the whole process. Backward runs in autograd's threads: a setting of the calling thread
    alone would be lost when activation checkpointing recomputes a forward.
    """

    demand: str | None = None


state = DemandState()


def parse_demand(demand: str, source: str) -> tuple[str | None, dict[str, str]]:
    """Split ``"cutile,rms_norm=triton"`` into the language for every op, and those for single ops."""
    everywhere: str | None = None
    single: dict[str, str] = {}
    for part in demand.split(","):
        name, separator, language = (word.strip() for word in part.partition("="))
        if not separator:
            name, language = "", name
        if separator and name not in declared:
            close = close_to(name, declared)
            raise ValueError(f"{source}: there is no op {name!r}{close}; the ops are {', '.join(sorted(declared))}")
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


@constant_in_graphs
def checked_demand(language: str | None, /, **ops: str) -> str | None:
    """The arguments of `use` as one text that `parse_demand` reads, or None if there are none.

    Raises:
        TypeError, Unsupported, ValueError: as `use` does.
    """
    parts = ([one_language(language, "use")] if language is not None else []) + [
        f"{name}={one_language(value, 'use')}" for name, value in sorted(ops.items())
    ]
    if parts:
        parse_demand(",".join(parts), "use")
    return ",".join(parts) or None


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
        self._demand = checked_demand(language, **ops)
        self._before = [state.demand]
        """Demands to restore, innermost last. The first was set before the call: a ``with`` of the same line, or a decorator,
        takes it back."""
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
    for source, text in (("use", demand), (settings().demand_variable, settings().demand)):
        if text is not None:
            everywhere, single = parse_demand(text, source)
            if language := single.get(op, everywhere):
                return language
    return None
