"""The pytest plugin: which implementations are checked, on what, and the report at the end.

``pytest --pyargs liger_conformance --impl=acme`` checks the language ``acme``, wherever its package comes from.
With ``--compile=CHIPS`` its kernels are compiled for those chips instead, and nothing runs. With ``--random=N`` they are
called in N ways that no case has.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from platformdirs import user_cache_path

import liger_core
from liger_conformance import interpreters, reach
from liger_conformance.case import QUICK, Case, cases_of
from liger_conformance.compilers import compiler_of, cutile, executor_of, results
from liger_conformance.compilers.host_code import compiled_cases
from liger_conformance.compilers.results import Results
from liger_conformance.interpreters.tileir import capture
from liger_conformance.known import AnySpills, KnownFailures, KnownSpills, KnownUnreached, Unclaimed, matches
from liger_conformance.report import Report, classify
from liger_conformance.target import Target
from liger_conformance.vary import DTYPES, RandomCall, lane_of
from liger_core.backend import BackendInfo, backends, not_installed
from liger_core.contract import ops

SUITE = "liger_conformance.suite"
MODULES = {
    "interpreted": ("test_interface", "test_layouts", "test_purity", "test_values"),
    "compiled": ("test_compiled",),
}
"""The modules of the suite whose tests call ops, by lane."""
PARAMETERS = ("target", "language", "case", "dtype")
"""Of the suite's tests, in the order of a test's name."""

targets_key = pytest.StashKey[list[Target]]()
known_key = pytest.StashKey[KnownFailures]()
spills_key = pytest.StashKey[KnownSpills]()
unclaimed_key = pytest.StashKey[Unclaimed]()
report_key = pytest.StashKey[Report]()
failed_key = pytest.StashKey[bool]()
watch_key = pytest.StashKey[reach.Watch]()
results_key = pytest.StashKey[Results]()
part_key = pytest.StashKey[str]()
"""Why what was run can't tell what the cases of a language reach, or compile: it is a part of them."""


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
"""What the mark `cases` takes, by keyword."""


def option(config: pytest.Config, name: str) -> Any:
    """An option's value. It is of the type that `pytest_addoption` says, which pytest tells no type checker."""
    return config.getoption(name)


def parameters(item: pytest.Item) -> dict[str, Any]:
    """What a test is called with, by name; of one that isn't parametrized, nothing."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("liger", "liger conformance")
    group.addoption(
        "--impl", action="append", default=[], metavar="LANGUAGE", help="check this language (repeatable; default: all)"
    )
    group.addoption("--op", action="append", default=[], metavar="OP", help="check this op (repeatable; default: all)")
    group.addoption("--device", help="where: cuda, npu, xpu or cpu (default: this machine's accelerator)")
    group.addoption(
        "--compile",
        metavar="CHIPS",
        help="compile only, with no device: for these chips, such as sm_90,gfx942, or for all",
    )
    group.addoption(
        "--execute", action="store_true", help="with --compile: run what is compiled on the CPU, where that is possible"
    )
    group.addoption(
        "--results",
        metavar="FILE",
        type=Path,
        help="with --compile, of one language: a file of results of earlier runs; only launches that it lacks are compiled",
    )
    group.addoption(
        "--check-results",
        metavar="SHARE",
        type=float,
        help="with --results: this share of the launches that the file has is compiled too, and has to agree (default: 0)",
    )
    group.addoption(
        "--write-results",
        action="store_true",
        help="with --results: write the file anew; of a chip whose cases all ran, lines that no launch used leave it",
    )
    group.addoption(
        "--any-spills",
        action="store_true",
        help="with --compile, for a compiler that the kernels weren't tuned for: report registers that are kept in memory "
        "and lost fast instructions, and don't fail them",
    )
    group.addoption(
        "--random", type=int, metavar="N", help="instead of the cases, N random calls of each language, spread over ops"
    )
    group.addoption(
        "--seed",
        type=int,
        metavar="S",
        help="with --random or --check-results: others for each seed (default: 0)",
    )
    group.addoption(
        "--seconds", type=float, metavar="T", help="with --random: calls that T seconds don't suffice for are not run"
    )
    group.addoption("--torch-compile", action="store_true", help="with --random: each call under torch.compile")
    group.addoption(
        "--reached",
        action="store_true",
        help="without an accelerator: fail if the tests of a language, when all of them ran, launched not every kernel or took "
        "not every branch of its host code",
    )
    group.addoption("--report", metavar="DIR", type=Path, help="write the matrix to DIR/conformance.json and .md")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"cases({', '.join(CASES)}): the cases and targets that a conformance test takes",
    )
    config.addinivalue_line("markers", "slow: sizes of real models, and what takes long; run with -m slow")
    for name in option(config, "--op"):
        if name not in ops:
            raise pytest.UsageError(f"--op={name}: there is no such op; the ops are {', '.join(sorted(ops))}")
    if option(config, "--execute") and not option(config, "--compile"):
        raise pytest.UsageError("--execute runs what --compile compiles: name the chips")
    if option(config, "--any-spills") and not option(config, "--compile"):
        raise pytest.UsageError("--any-spills is about what --compile finds: name the chips")
    if option(config, "--results") is not None and not option(config, "--compile"):
        raise pytest.UsageError("--results are those of --compile: name the chips")
    for name in ("--check-results", "--write-results"):
        if option(config, name) and option(config, "--results") is None:
            raise pytest.UsageError(f"{name} takes a file: --results=FILE")
    if option(config, "--torch-compile") and (option(config, "--random") is None or option(config, "--compile")):
        raise pytest.UsageError("--torch-compile is of random calls on a device: --random=N, without --compile")
    if option(config, "--random") is not None:
        if option(config, "--random") < 1:
            raise pytest.UsageError("--random takes a number of calls, at least 1")
        if option(config, "--execute"):
            raise pytest.UsageError("--random calls are not executed: leave out --execute")
        # However many processes end: each is one call's failure.
        if getattr(config.option, "maxworkerrestart", "") is None:
            config.option.maxworkerrestart = str(option(config, "--random"))
        if option(config, "--seconds") is not None and not hasattr(config.option, "liger_until"):
            # Processes of pytest-xdist inherit it.
            config.option.liger_until = time.time() + option(config, "--seconds")
    elif option(config, "--seconds") is not None:
        raise pytest.UsageError("--seconds is of random calls: say how many with --random=N")
    elif option(config, "--seed") is not None and option(config, "--check-results") is None:
        raise pytest.UsageError("--seed is of random calls or of --check-results: say how many with --random=N")
    targets, report = _targets_of_chips(config) if option(config, "--compile") else _targets_of_devices(config)
    config.stash[targets_key] = targets
    packages = {t.backend.language: t.backend.package for t in targets if t.backend}
    if option(config, "--results") is not None:
        if len(packages) > 1:
            raise pytest.UsageError(f"--results is a file of one language: --impl is one of {', '.join(packages)}")
        share, writes = option(config, "--check-results") or 0.0, option(config, "--write-results")
        results.current = Results(option(config, "--results"), share, _seed(config), writes)
        config.stash[results_key] = results.current
    config.stash[known_key] = KnownFailures(packages)
    config.stash[unclaimed_key] = Unclaimed(packages)
    any_spills = option(config, "--any-spills")
    config.stash[spills_key] = AnySpills() if any_spills else KnownSpills(packages, _chip_targets())
    if option(config, "--random"):
        traced = ", under torch.compile" if option(config, "--torch-compile") else ""
        report.random = f"{option(config, '--random')} calls, seed {_seed(config)}{traced}"
    config.stash[report_key] = report
    config.pluginmanager.register(Listener(config))
    if option(config, "--reached"):
        _watch(config)


def _watch(config: pytest.Config) -> None:
    """See what the tests of this process reach, and what other processes tell of theirs."""
    if packages := [package for _, package in _watched(config)]:
        config.stash[watch_key] = reach.Watch(packages)


def _watched(config: pytest.Config) -> list[tuple[str, str]]:
    """The languages that no accelerator runs, and their packages."""
    targets = config.stash[targets_key]
    return sorted({(t.language, t.backend.package) for t in targets if t.backend and t.lane in reach.LANES})


def _seed(config: pytest.Config) -> int:
    return option(config, "--seed") or 0


def _targets_of_devices(config: pytest.Config) -> tuple[list[Target], Report]:
    """What runs: on an accelerator, or in an interpreter."""
    device = option(config, "--device") or liger_core.infer_device()
    interpreters.prepare(device)
    capture.CACHE = _cache("tileir")
    targets: list[Target] = []
    report = Report(device)
    for language in option(config, "--impl") or ["torch", *(b.language for b in backends())]:
        if language == "torch":
            chosen, backend, lane = device, None, "passed"
        else:
            backend = _backend(language)
            chosen = device if device in backend.devices else "cpu" if "cpu" in backend.devices else device
            lane = "interpreted" if interpreters.interprets(backend, chosen) else "passed"
            why = backend.missing(chosen) or _absent(chosen)
            if why is None and chosen != device and option(config, "--device"):
                why = f"--device={device} was asked for, and {language} runs on {', '.join(backend.devices)}"
            if why is not None:
                if language in option(config, "--impl"):
                    raise pytest.UsageError(f"--impl={language} can't run here: {why}")
                report.not_run(language, chosen, why)
                continue
            if lane == "interpreted":
                interpreters.repair(backend)
        for name in sorted(option(config, "--op") or ops):
            if backend is None or backend.has_kernel(name):
                targets.append(Target(ops[name], language, chosen, backend, lane))
            else:
                report.not_claimed(name, language, chosen)
    return targets, report


def _targets_of_chips(config: pytest.Config) -> tuple[list[Target], Report]:
    """What is compiled and doesn't run; a target's device is then a chip."""
    if option(config, "--device"):
        raise pytest.UsageError("--compile runs on no device: leave out --device")
    cutile.CACHE = _cache("tileiras")
    execute = option(config, "--execute")
    asked = option(config, "--compile").split(",")
    targets: list[Target] = []
    known: set[str] = set()
    report = Report(None)
    for backend in map(_backend, option(config, "--impl") or [b.language for b in backends()]):
        language, compiler = backend.language, compiler_of(backend)
        why = "there is no compiler for it here" if compiler is None else compiler.obstacle()
        if execute and why is None:
            executor = executor_of(backend)
            why = "nothing here runs what it compiles to" if executor is None else executor.obstacle_to_execution()
        if compiler is None or why is not None:
            if language in option(config, "--impl"):
                raise pytest.UsageError(f"--impl={language} can't be compiled: {why}")
            report.not_run(language, "any chip", why or "")
            continue
        known |= set(compiler.chips)
        for chip in (c for c in compiler.chips if c in asked or asked == ["all"]):
            for name in sorted(option(config, "--op") or ops):
                if backend.has_kernel(name):
                    targets.append(Target(ops[name], language, chip, backend, "executed" if execute else "compiled"))
                else:
                    report.not_claimed(name, language, chip)
    if not known:
        reasons = [f"{language}: {why}" for language, _, why in report.languages_not_run]
        raise pytest.UsageError(f"--compile: {'; '.join(reasons) or 'no language is installed'}")
    if unknown := set(asked) - known - {"all"}:
        raise pytest.UsageError(f"--compile: no chip {', '.join(sorted(unknown))}; it takes {', '.join(sorted(known))}")
    return targets, report


def _cache(name: str) -> Path:
    """A folder in the user's cache."""
    return cutile.swept(user_cache_path("liger-conformance", appauthor=False) / name)


def _chip_targets() -> list[str]:
    found = ((b.language, compiler) for b in backends() if (compiler := compiler_of(b)))
    return [f"{op}-{language}-{chip}" for language, compiler in found for chip in compiler.chips for op in ops]


def _backend(language: str) -> BackendInfo:
    backend = next((b for b in backends() if b.language == language), None)
    if backend is None:
        raise pytest.UsageError(f"--impl={language}: {not_installed(language)}")
    return backend


def _absent(device: str) -> str | None:
    if device == "cpu":
        return None
    module = getattr(torch, device, None)
    return None if module is not None and module.is_available() else f"this machine has no {device} device"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """With random calls, which need one device each, processes are spread over all CUDA devices of the machine."""
    if option(config, "--random") and not option(config, "--compile") and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        for i, spec in enumerate(specs):
            spec.env["CUDA_VISIBLE_DEVICES"] = devices[i % len(devices)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Asked for one implementation, the tests of the suite itself are not meant.
    if (
        (option(config, "--impl") or option(config, "--compile"))
        and collection_path.parent.name == "tests"
        and collection_path.parent.parent.name == "conformance"
    ):
        return True
    return None


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
            text = f"{target}-{call}-{_short(call.dtype)}"
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
            text = [str(target), *([str(case)] if case is not None else []), *([_short(dtype)] if dtype else [])]
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
    found = cases_of(target.op.name)
    if case == found.cases[0]:
        return False
    if dtype is torch.float16:
        return case.group != "extreme" and (not found.float16_apart or found.is_long(case))
    if short := options.get("short", ()):
        return found.is_long(case) or case.group not in short
    if not found.is_long(case) or found.dtypes_apart:
        return False
    in_turn = (torch.float32, torch.bfloat16)[found.cases.index(case) % 2]
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
        (target, RandomCall(target.op.name, _seed(config), number // len(alike)))
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = config.stash[known_key]
    if why := _part(config, items):
        config.stash[part_key] = why
    # A test that none of the targets takes is left by pytest as one item without parameters.
    idle = {item for item in items if _of_suite(item) and not _has_target(item)}
    items[:] = [item for item in items if item not in idle]
    places = [place for place, item in enumerate(items) if _of_suite(item)]
    # What calls the same kernels is together, so that a process of pytest-xdist compiles few of those that others do.
    suite = sorted([items[place] for place in places], key=_what_it_calls)
    for place, item in zip(places, suite, strict=True):
        items[place] = item
    for item in suite:
        values = parameters(item)
        target = values.get("target")
        if target is None:
            continue
        if _is_traced_again(target, values.get("start")):
            item.add_marker(pytest.mark.slow)
        dtype = values.get("dtype")
        item.user_properties += [
            ("liger", _place(target, _short(dtype) if dtype else "any")),
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
    collected = {_module_of(item) for item in items if _of_suite(item)}
    if left := {f"{SUITE}.{name}" for name in MODULES[lane]} - collected:
        return f"{', '.join(sorted(left))} was not asked for"
    return None


def pytest_deselected(items: list[pytest.Item]) -> None:
    if any(_of_suite(item) and not item.get_closest_marker("slow") for item in items):
        items[0].config.stash[part_key] = "tests were left out"


def _place(target: Target, dtype: str) -> tuple[str, ...]:
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


def _of_suite(item: pytest.Item) -> bool:
    return _module_of(item).startswith(SUITE) and hasattr(item, "callspec")


def _has_target(item: pytest.Item) -> bool:
    values = parameters(item)
    return isinstance(values.get("target", values.get("language")), (Target, str))


@pytest.fixture
def known_failures(request: pytest.FixtureRequest) -> KnownFailures:
    """What each implementation declares as failing."""
    return request.config.stash[known_key]


@pytest.fixture
def unclaimed(request: pytest.FixtureRequest) -> Unclaimed:
    """What each implementation declares that it refuses."""
    return request.config.stash[unclaimed_key]


@pytest.fixture
def known_spills(request: pytest.FixtureRequest) -> KnownSpills:
    """What each implementation declares as spilling."""
    return request.config.stash[spills_key]


@pytest.fixture
def until(request: pytest.FixtureRequest) -> float:
    """When random calls end, in seconds since the epoch."""
    return getattr(request.config.option, "liger_until", float("inf"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[failed_key] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A process that can't use its device any more ends, once its failure is reported: the next tests need another one."""
    result = yield
    if item.stash.get(failed_key, False) and _of_suite(item):
        target = parameters(item).get("target")
        if isinstance(target, Target) and target.is_lost():
            if os.environ.get("PYTEST_XDIST_WORKER"):
                os._exit(1)
            item.session.shouldstop = (
                f"{target.device} can't be used by this process any more; -n1 would start another one"
            )
    return result


class Listener:
    """Hears of a run's outcomes, for its own report: runs of pytest may be nested in one process.

    Args:
        config: the run's.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failures: set[str] = set()
        """Tests of the suite that failed, by node id."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        if place := properties.get("liger"):
            if report.failed:
                self.failures.add(report.nodeid)
            if outcome := classify(report, place[4]):
                self.config.stash[report_key].add(tuple(place[:4]), outcome, report)
                if mode := properties.get("liger mode"):
                    self.config.stash[report_key].add_mode(mode, place[1], place[2], outcome)
            if report.when == "call":
                kernels = properties.get("liger kernels", [])
                self.config.stash[report_key].add_kernels(tuple(place[:4]), properties["liger case"], kernels)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """A test with which a process of pytest-xdist ended, such as one that hung, has failed: the report is to say so."""
        found = re.search(r"\[(.*)\]$", crashitem)
        if found is None:
            return
        if crashitem in self.failures:  # it ended after its failure was reported
            report.when, report.outcome = "teardown", "passed"
            return
        parts = f"{found[1]}-"
        for target in self.config.stash[targets_key]:
            if parts.startswith(f"{target}-"):
                dtype = next((_short(dtype) for dtype in DTYPES if parts.endswith(f"-{_short(dtype)}-")), "any")
                properties: list[tuple[str, object]] = [("liger", _place(target, dtype))]
                report.user_properties = properties
                if call := re.fullmatch(rf"{target}-(\d+)-(\d+)-\w+-", parts):
                    cases, random = cases_of(target.op.name), RandomCall(target.op.name, int(call[1]), int(call[2]))
                    report.longrepr = (
                        f"{report.longrepr}\n    {random.line(cases, random.draw(cases, lane_of(target)))}"
                    )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A process of pytest-xdist ends, and says what its tests reached and compiled."""
    stash = node.config.stash
    output: dict[str, Any] = getattr(node, "workeroutput", {})
    if error or "liger part" not in output:
        stash[part_key] = "a process died"
        return
    if output["liger part"]:
        stash[part_key] = output["liger part"]
    if watch_key in stash:
        stash[watch_key].add(*output["liger reached"])
    if results_key in stash:
        stash[results_key].used.update(output["liger results"])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if option(config, "collectonly"):
        return
    output = getattr(config, "workeroutput", None)
    if output is not None:
        _tell(config, output)
        return
    complete = part_key not in config.stash and not session.shouldstop and not session.shouldfail
    if option(config, "--write-results"):
        whole = complete and session.exitstatus == pytest.ExitCode.OK and not option(config, "--op")
        config.stash[results_key].write({target.device for target in config.stash[targets_key]} if whole else ())
    if watch_key in config.stash and complete:
        watch = config.stash[watch_key]
        failed = [_judge(config, watch, language, package) for language, package in _watched(config)]
        if any(failed) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _tell(config: pytest.Config, output: dict[str, Any]) -> None:
    """Tell the process that started this one, of pytest-xdist, what its tests reached and compiled."""
    output["liger part"] = config.stash.get(part_key, "")
    if watch_key in config.stash:
        watch = config.stash[watch_key]
        output["liger reached"] = watch.branches, sorted(watch.launched)
    if results_key in config.stash:
        output["liger results"] = config.stash[results_key].used


def _judge(config: pytest.Config, watch: reach.Watch, language: str, package: str) -> bool:
    """Report what a language's cases don't reach; whether that is a failure: something new, or declared and reached."""
    lane = _lane(config, language)
    declared = KnownUnreached(package).of(lane)
    found = watch.uncovered(package)
    of_ops = tuple(f"{op}." for op in option(config, "--op"))
    uncovered = [name for name in found.uncovered if not of_ops or name.startswith(of_ops)]
    new = [name for name in uncovered if not any(matches(pattern, name) for pattern in declared)]
    stale = [p for p in declared if not any(matches(p, name) for name in found.uncovered)] if not of_ops else []
    report = config.stash[report_key]
    if not of_ops:
        report.reached.append(
            f"{language}, {lane}: {found.kernels} kernels and {found.branches} branches of host code; "
            f"not reached, for reasons that {package}/uncovered.py gives: {len(uncovered) - len(new)}"
        )
    report.reached += [f"not reached by the cases of {language}, {lane}: {name}" for name in new]
    report.reached += [f"{package}.uncovered declares what is reached, {lane}: {pattern}" for pattern in stale]
    return bool(new or stale) and not of_ops


def _lane(config: pytest.Config, language: str) -> str:
    """How the lane is called in which a language was checked."""
    if not option(config, "--compile"):
        return "interpreted"
    targets = [target for target in config.stash[targets_key] if target.language == language]
    chips = sorted({target.device for target in targets})
    compiler = compiler_of(targets[0].backend) if targets[0].backend else None
    return "compiled" if compiler and set(compiler.chips) == set(chips) else f"compiled-{','.join(chips)}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash[report_key]
    if report.ran:
        terminalreporter.section("conformance")
        terminalreporter.write(report.text())
        if directory := option(config, "--report"):
            report.write(directory)
            terminalreporter.write_line(f"written to {directory}/conformance.json and {directory}/conformance.md")
