"""Tests of the suite: which ones are made for the targets of a run, and which of them are run, in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from liger_conformance import reach
from liger_conformance.case import QUICK, Case, cases_of
from liger_conformance.compilers.host_code import compiled_cases
from liger_conformance.plugin.options import option, seed, turn
from liger_conformance.plugin.stash import known_key, part_key, spills_key, targets_key
from liger_conformance.random_call import RandomCall
from liger_conformance.target import Target
from liger_conformance.vary import DTYPES
from liger_core.contract import ops

SUITE = "liger_conformance.suite"
MODULES = {
    "interpreted": ("test_interface", "test_layouts", "test_purity", "test_values"),
    "compiled": ("test_compiled",),
}
"""The modules of the suite whose tests call ops, by lane."""
PARAMETERS = ("target", "language", "case", "call", "dtype")
"""Parameters of the suite's tests, in the order of a test's name. A test that takes a `call` takes random ones."""

MARKS = (
    "cases(groups, dtypes, first, short, claimed): the cases that a conformance test takes: selection.Cases",
    "targets(NAME, ...): the targets that a conformance test takes: selection.TARGETS",
    "lane(NAME): a module's tests of the suite take targets that are compiled, or executed, alone",
    "slow: sizes of real models, and what takes long; run with -m slow",
)


@dataclass(frozen=True)
class Cases:
    """The mark `cases`: which cases of an op a test takes.

    Attributes:
        groups: of the cases.
        dtypes: that it is called with; None: all.
        first: so many of the cases stand for all; None: all.
        short: groups of which an interpreter takes short cases alone, and of the others none, but under `-m slow`.
        claimed: with `first`, a case that the kernel refuses is replaced by the next one that it doesn't.
    """

    groups: tuple[str, ...] = QUICK
    dtypes: tuple[torch.dtype, ...] | None = None
    first: int | None = None
    short: tuple[str, ...] = ()
    claimed: bool = True

    @classmethod
    def of(cls, test: Any) -> Cases:
        """The mark of a test's definition or item.

        Raises:
            pytest.UsageError: a keyword that the mark doesn't have.
        """
        mark = test.get_closest_marker("cases")
        try:
            return cls(**mark.kwargs) if mark else cls()
        except TypeError as error:
            raise pytest.UsageError(
                f"{test.name}: cases takes {', '.join(f.name for f in fields(cls))}: {error}"
            ) from None


TARGETS: dict[str, Callable[[Target, pytest.Config], bool]] = {
    "kernel": lambda target, config: target.backend is not None,
    "differentiable": lambda target, config: bool(target.op.differentiable),
    "one_op": lambda target, config: target in _one_op_of_each(config.stash[targets_key]),
    "recompute": lambda target, config: target.op.recompute is not None,
    "out_of_range": lambda target, config: bool(cases_of(target.op.name).out_of_range),
    "huge": lambda target, config: cases_of(target.op.name).huge is not None,
    "spills": lambda target, config: config.stash[spills_key].declares(str(target)),
}
"""Names that the mark `targets` takes: of targets with a kernel, of ops with gradients, of one such op for each language and
device, of ops whose results are made again in `lean`, of ops with arguments out of range, with a huge case, and with declared
spills."""


def parameters(item: pytest.Item) -> dict[str, Any]:
    """Values that a test is called with, by name; none of a test that isn't parametrized."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _module_of(metafunc).startswith(SUITE):
        return
    config, test, wants = metafunc.config, metafunc.definition, metafunc.fixturenames
    names = [name for name in PARAMETERS if name in wants]
    if (option(config, "--random") is not None) != ("call" in wants):
        metafunc.parametrize(names, [])
    elif "call" in wants:
        calls = _random_calls(config.stash[targets_key], config)
        rows = [pytest.param(t, call, call.dtype, id=f"{t}-{call}-{short(call.dtype)}") for t, call in calls]
        metafunc.parametrize(names, rows)
    elif "language" in wants:
        asked = {language for language in option(config, "--impl") if language != "torch"}
        metafunc.parametrize("language", sorted({t.language for t in config.stash[targets_key] if t.backend} | asked))
    elif "target" in wants:
        makes_slow = _makes_slow(config)
        targets = _targets(test, config) if makes_slow or not test.get_closest_marker("slow") else []
        rows = _rows(names, targets, Cases.of(test), makes_slow, turn(config))
        metafunc.parametrize(names, rows)


def _rows(names: list[str], targets: list[Target], cases: Cases, makes_slow: bool, turn: int | None) -> list[Any]:
    """Sets of parameters of a test that is about targets."""
    rows: list[Any] = []
    for target in targets:
        for case, dtype in _calls(target, cases, names):
            slow = is_slow(target, case, dtype, cases, turn)
            if slow and not makes_slow:
                continue
            values = {"target": target, "case": case, "dtype": dtype}
            text = [str(target), *([str(case)] if case is not None else []), *([short(dtype)] if dtype else [])]
            marks = [pytest.mark.slow] if slow else []
            rows.append(pytest.param(*(values[name] for name in names), id="-".join(text), marks=marks))
    return rows


def _targets(test: Any, config: pytest.Config) -> list[Target]:
    """Targets that a test takes by its marks.

    Raises:
        pytest.UsageError: the mark `targets` has a name that is none of `TARGETS`.
    """
    kinds = {kind for mark in test.iter_markers("targets") for kind in mark.args}
    if unknown := kinds - {*TARGETS}:
        raise pytest.UsageError(
            f"{test.name}: targets has no {', '.join(sorted(unknown))}; it takes {', '.join(TARGETS)}"
        )
    mark = test.get_closest_marker("lane")
    lanes = mark.args if mark else ("passed", "interpreted")
    return [
        target
        for target in config.stash[targets_key]
        if target.lane in lanes and all(TARGETS[kind](target, config) for kind in kinds)
    ]


def _makes_slow(config: pytest.Config) -> bool:
    """Whether slow tests are made: where they may run, and where known failures, or the command line, may name them.

    They are a quarter of all tests, and collecting takes as much longer with them.
    """
    leaves_slow = (config.option.markexpr or "not slow") == "not slow"
    return not leaves_slow or config.stash[known_key].declares_any or any("::" in name for name in config.args)


def is_slow(target: Target, case: object, dtype: torch.dtype | None, cases: Cases, turn: int | None = None) -> bool:
    """Whether a test of a case is left to `-m slow`.

    At the sizes of models, wherever it runs. In an interpreter also, but of the op's first case:

    - of a long case everything except values, in float32 and bfloat16 for extreme cases and where dtypes have kernels of
      their own, for the others in one of them in turn. With `turn`, short cases have one as well, and each number the other;
    - values in float16, except of extreme cases and where float16 has kernels of its own;
    - where the test's `short` names groups, cases of the others.
    """
    if not isinstance(case, Case) or target.lane in ("compiled", "executed"):
        return False
    if case.group not in QUICK:
        return True
    if target.lane != "interpreted" or cases.first is not None:
        return False
    known = cases_of(target.op.name)
    if case == known.cases[0]:
        return False
    if dtype is torch.float16:
        return case.group != "extreme" and (not known.float16_apart or known.is_long(case))
    if cases.short:
        return known.is_long(case) or case.group not in cases.short
    if known.dtypes_apart or (turn is None and not known.is_long(case)):
        return False
    in_turn = (torch.float32, torch.bfloat16)[(known.cases.index(case) + (turn or 0)) % 2]
    return cases.dtypes is None and case.group != "extreme" and dtype is not in_turn


def _is_traced_seldom(item: pytest.Item, target: Target, turn: int | None) -> bool:
    """Whether a test that compiles a reference for the CPU is left to `-m slow`.

    Each is compiled once by `test_compile`, with `turn` a quarter of them; rms_norm's besides from a warm start and with dynamic
    sizes.
    """
    name = target.op.name
    if target.backend is not None or target.device != "cpu" or name == "rms_norm":
        return False
    if parameters(item).get("start") == "warm" or item.name.startswith("test_compile_dynamic["):
        return True
    return turn is not None and item.name.startswith("test_compile[") and (sorted(ops).index(name) + turn) % 4 != 0


def _random_calls(targets: list[Target], config: pytest.Config) -> list[tuple[Target, RandomCall]]:
    """The calls of each language and device, spread over its ops."""
    places: dict[tuple[str, str], list[Target]] = {}
    for target in targets:
        places.setdefault((target.language, target.device), []).append(target)
    return [
        (target, RandomCall(target.op.name, seed(config), number // len(alike)))
        for alike in places.values()
        for number in range(option(config, "--random"))
        for target in [alike[number % len(alike)]]
    ]


def _one_op_of_each(targets: list[Target]) -> list[Target]:
    """A target per language and device: of rms_norm, or else of the first op with gradients."""
    chosen: dict[tuple[str, str], Target] = {}
    for target in targets:
        if not target.op.differentiable:
            continue
        if target.op.name == "rms_norm":
            chosen[target.language, target.device] = target
        chosen.setdefault((target.language, target.device), target)
    return list(chosen.values())


def _calls(target: Target, cases: Cases, names: list[str]) -> list[tuple[Any, torch.dtype | None]]:
    """The cases of a target's test, and their dtypes; None for what the test doesn't take."""
    if "case" in names and target.lane == "compiled":
        return list(compiled_cases(target))
    taken: list[Any] = [None]
    if "case" in names:
        taken = [case for case in cases_of(target.op.name).cases if case.group in cases.groups][: cases.first]
    return [(case, dtype) for case in taken for dtype in (cases.dtypes or DTYPES if "dtype" in names else [None])]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = config.stash[known_key]
    if why := _part(config, items):
        config.stash[part_key] = why
    # A test that none of the targets takes is left by pytest as one item without parameters.
    idle = {item for item in items if of_suite(item) and not _has_target(item)}
    items[:] = [item for item in items if item not in idle]
    positions = [position for position, item in enumerate(items) if of_suite(item)]
    # Tests that call the same kernels are together, so that a process of pytest-xdist compiles few of those that others do.
    suite = sorted([items[position] for position in positions], key=_what_it_calls)
    for position, item in zip(positions, suite, strict=True):
        items[position] = item
    for item in suite:
        values = parameters(item)
        target = values.get("target")
        if target is None:
            continue
        if _is_traced_seldom(item, target, turn(config)):
            item.add_marker(pytest.mark.slow)
        dtype = values.get("dtype")
        item.user_properties += [
            ("liger", place(target, short(dtype) if dtype else "any")),
            ("liger case", str(values.get("call", values.get("case")))),
        ]
        if mode := values.get("mode"):
            item.user_properties.append(("liger mode", mode.name))
        if reason := known.reason(target.language, item.name):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    if not option(config, "--op") and option(config, "--compile") in (None, "all"):
        known.collected({item.name for item in suite})
    # The slow ones only when the command line speaks of them.
    if "slow" not in (config.option.markexpr or ""):
        slow = [item for item in suite if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if item not in set(slow)]


def _part(config: pytest.Config, items: list[pytest.Item]) -> str | None:
    """Why the tests that pytest collected of the suite are only a part of it, or None."""
    if any("::" in argument for argument in config.args):
        return "single tests were asked for"
    if option(config, "--random") is not None:
        return "random calls were asked for"
    lane = reach.LANES[bool(option(config, "--compile"))]
    collected = {_module_of(item) for item in items if of_suite(item)}
    if left := {f"{SUITE}.{name}" for name in MODULES[lane]} - collected:
        return f"{', '.join(sorted(left))} was not asked for"
    return None


def pytest_deselected(items: list[pytest.Item]) -> None:
    if any(of_suite(item) and not item.get_closest_marker("slow") for item in items):
        items[0].config.stash[part_key] = "tests were left out"


def place(target: Target, dtype: str) -> tuple[str, ...]:
    """A cell of the matrix, and what success is called there."""
    return target.op.name, target.language, target.device, dtype, target.lane


def _what_it_calls(item: pytest.Item) -> tuple[str, str]:
    values = parameters(item)
    if option(item.config, "--seconds") is not None:
        return "", ""  # as they are, an op after another: those that the time suffices for are of all ops
    return str(values.get("target", "")), str(values.get("dtype", ""))


def _module_of(test: pytest.Item | pytest.Metafunc) -> str:
    """The name of the module that a test is in, or ""."""
    return getattr(getattr(test, "module", None), "__name__", "")


def of_suite(item: pytest.Item) -> bool:
    return _module_of(item).startswith(SUITE) and hasattr(item, "callspec")


def _has_target(item: pytest.Item) -> bool:
    values = parameters(item)
    return isinstance(values.get("target", values.get("language")), (Target, str))
