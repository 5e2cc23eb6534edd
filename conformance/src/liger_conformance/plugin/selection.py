"""Tests of the suite: which ones are made for the targets of a run, and which of them are run, in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_conformance import reach
from liger_conformance.case import QUICK, Case, cases_of
from liger_conformance.compilers.host_code import compiled_cases
from liger_conformance.plugin.options import option, seed
from liger_conformance.plugin.stash import known_key, part_key, spills_key, targets_key
from liger_conformance.target import Target
from liger_conformance.vary import DTYPES, RandomCall

SUITE = "liger_conformance.suite"
MODULES = {
    "interpreted": ("test_interface", "test_layouts", "test_purity", "test_values"),
    "compiled": ("test_compiled",),
}
"""The modules of the suite whose tests call ops, by lane."""
PARAMETERS = ("target", "language", "case", "dtype")
"""Parameters of the suite's tests, in the order of a test's name."""

CASES = (
    "groups",
    "dtypes",
    "first",
    "short",
    "refused",
    "one_op",
    "kernels",
    "recompute",
    "out_of_range",
    "huge",
    "compiled",
    "spills",
    "executed",
    "random",
)
"""Keywords of the mark `cases`."""


def parameters(item: pytest.Item) -> dict[str, Any]:
    """Values that a test is called with, by name; none of a test that isn't parametrized."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _module_of(metafunc).startswith(SUITE):
        return
    wants = metafunc.fixturenames
    targets = metafunc.config.stash[targets_key]
    mark = next(metafunc.definition.iter_markers("cases"), None)
    options: dict[str, Any] = dict(mark.kwargs) if mark else {}
    if unknown := {*options} - {*CASES}:
        name = metafunc.definition.name
        raise pytest.UsageError(f"{name}: cases has no {', '.join(sorted(unknown))}; it takes {', '.join(CASES)}")
    if (option(metafunc.config, "--random") is not None) != options.get("random", False):
        metafunc.parametrize([name for name in PARAMETERS if name in wants], [])
        return
    if "language" in wants:
        asked = {language for language in option(metafunc.config, "--impl") if language != "torch"}
        metafunc.parametrize("language", sorted({t.language for t in targets if t.backend} | asked))
        return
    if "target" not in wants:
        return
    names = [name for name in PARAMETERS if name in wants]
    rows: list[Any] = []
    if options.get("random"):
        for target, call in _random_calls(targets, metafunc.config):
            text = f"{target}-{call}-{short(call.dtype)}"
            rows.append(pytest.param(target, call, call.dtype, id=text))
        metafunc.parametrize(names, rows)
        return
    if options.get("one_op"):
        targets = _one_op_of_each(targets)
    makes_slow = _makes_slow(metafunc.config)
    if metafunc.definition.get_closest_marker("slow") and not makes_slow:
        targets = []
    for target in targets:
        if not _concerns(target, options, metafunc.config):
            continue
        for case, dtype in _calls(target, options, wants):
            slow = is_slow(target, case, dtype, options)
            if slow and not makes_slow:
                continue
            values = {"target": target, "case": case, "dtype": dtype}
            text = [str(target), *([str(case)] if case is not None else []), *([short(dtype)] if dtype else [])]
            marks = [pytest.mark.slow] if slow else []
            rows.append(pytest.param(*(values[n] for n in names), id="-".join(text), marks=marks))
    metafunc.parametrize(names, rows)


def _makes_slow(config: pytest.Config) -> bool:
    """Whether slow tests are made: where they may run, and where known failures, or the command line, may name them.

    They are a quarter of all tests, and collecting takes as much longer with them.
    """
    leaves_slow = (config.option.markexpr or "not slow") == "not slow"
    return not leaves_slow or config.stash[known_key].declares_any or any("::" in name for name in config.args)


def is_slow(target: Target, case: object, dtype: torch.dtype | None, options: dict[str, Any]) -> bool:
    """Whether a test of a case is left to `-m slow`.

    At the sizes of models, wherever it runs. In an interpreter also, but of the op's first case:

    - of a long case everything except values, in float32 and bfloat16 for extreme cases and where dtypes have kernels of
      their own, for the others in one of them in turn;
    - values in float16, except of extreme cases and where float16 has kernels of its own;
    - where the test's `short` names groups, cases of the others.
    """
    if not isinstance(case, Case) or target.lane in ("compiled", "executed"):
        return False
    if case.group not in QUICK:
        return True
    if target.lane != "interpreted" or "first" in options:
        return False
    known = cases_of(target.op.name)
    if case == known.cases[0]:
        return False
    if dtype is torch.float16:
        return case.group != "extreme" and (not known.float16_apart or known.is_long(case))
    if short := options.get("short", ()):
        return known.is_long(case) or case.group not in short
    if not known.is_long(case) or known.dtypes_apart:
        return False
    in_turn = (torch.float32, torch.bfloat16)[known.cases.index(case) % 2]
    return "dtypes" not in options and case.group != "extreme" and dtype is not in_turn


def _is_traced_again(target: Target, start: str | None) -> bool:
    """Whether a test compiles a reference for the CPU that others have compiled: all but rms_norm's is left to `-m slow`."""
    again = start is not None and start != "cold"
    return again and target.backend is None and target.device == "cpu" and target.op.name != "rms_norm"


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
    """A target per language and device: of rms_norm, or else of the first op that there is."""
    chosen: dict[tuple[str, str], Target] = {}
    for target in targets:
        if target.op.name == "rms_norm":
            chosen[target.language, target.device] = target
        chosen.setdefault((target.language, target.device), target)
    return list(chosen.values())


def _calls(target: Target, options: dict[str, Any], wants: list[str]) -> list[tuple[Any, torch.dtype | None]]:
    """The cases of a target's test, and their dtypes; None for what the test doesn't take."""
    cases: list[Any] = [None]
    if "case" in wants:
        if options.get("compiled"):
            return list(compiled_cases(target))
        groups = options.get("groups", QUICK)
        cases = [case for case in cases_of(target.op.name).cases if case.group in groups][: options.get("first")]
    dtypes = options.get("dtypes", DTYPES) if "dtype" in wants else [None]
    return [(case, dtype) for case in cases for dtype in dtypes]


def _concerns(target: Target, options: dict[str, Any], config: pytest.Config) -> bool:
    if any(options.get(lane, False) != (target.lane == lane) for lane in ("compiled", "executed")):
        return False
    spills = config.stash[spills_key]
    if options.get("spills") and not (spills.of(str(target)) or spills.losses_of(str(target))):
        return False
    if options.get("kernels") and target.backend is None:
        return False
    if options.get("recompute") and target.op.recompute is None:
        return False
    if options.get("out_of_range") and not cases_of(target.op.name).out_of_range:
        return False
    return not (options.get("huge") and cases_of(target.op.name).huge is None)


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
        if _is_traced_again(target, values.get("start")):
            item.add_marker(pytest.mark.slow)
        dtype = values.get("dtype")
        item.user_properties += [
            ("liger", place(target, short(dtype) if dtype else "any")),
            ("liger case", str(values.get("case"))),
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
