"""Outcomes of a run: the report, what the cases reach, and what other processes of pytest-xdist tell of theirs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from liger_conformance import reach
from liger_conformance.case import cases_of
from liger_conformance.compilers import compiler_of
from liger_conformance.known import KnownUnreached, matches
from liger_conformance.plugin.options import option
from liger_conformance.plugin.selection import place, short
from liger_conformance.plugin.stash import part_key, report_key, results_key, targets_key, watch_key
from liger_conformance.random_call import RandomCall, lane_of
from liger_conformance.report import classify
from liger_conformance.vary import DTYPES


def watch(config: pytest.Config) -> None:
    """See what the tests of this process reach, and what other processes tell of theirs."""
    if packages := [package for _, package in _watched(config)]:
        config.stash[watch_key] = reach.Watch(packages)


def _watched(config: pytest.Config) -> list[tuple[str, str]]:
    """The languages that no accelerator runs, and their packages."""
    targets = config.stash[targets_key]
    return sorted({(t.language, t.backend.package) for t in targets if t.backend and t.lane in reach.LANES})


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
        if cell := properties.get("liger"):
            *where, lane = cell
            if report.failed:
                self.failures.add(report.nodeid)
            if outcome := classify(report, lane):
                self.config.stash[report_key].add(tuple(where), outcome, report)
                if mode := properties.get("liger mode"):
                    self.config.stash[report_key].add_mode(mode, where[1], where[2], outcome)
            if report.when == "call":
                kernels = properties.get("liger kernels", [])
                self.config.stash[report_key].add_kernels(tuple(where), properties["liger case"], kernels)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """A test with which a process of pytest-xdist ended, such as one that hung, has failed: the report is to say so."""
        brackets = re.search(r"\[(.*)\]$", crashitem)
        if brackets is None:
            return
        if crashitem in self.failures:  # it ended after its failure was reported
            report.when, report.outcome = "teardown", "passed"
            return
        parts = f"{brackets[1]}-"
        for target in self.config.stash[targets_key]:
            if parts.startswith(f"{target}-"):
                dtype = next((short(dtype) for dtype in DTYPES if parts.endswith(f"-{short(dtype)}-")), "any")
                properties: list[tuple[str, object]] = [("liger", place(target, dtype))]
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
    reached = watch.uncovered(package)
    of_ops = tuple(f"{op}." for op in option(config, "--op"))
    uncovered = [name for name in reached.uncovered if not of_ops or name.startswith(of_ops)]
    new = [name for name in uncovered if not any(matches(pattern, name) for pattern in declared)]
    stale = [p for p in declared if not any(matches(p, name) for name in reached.uncovered)] if not of_ops else []
    report = config.stash[report_key]
    if not of_ops:
        report.reached.append(
            f"{language}, {lane}: {reached.kernels} kernels and {reached.branches} branches of host code; "
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
