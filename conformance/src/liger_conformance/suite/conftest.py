"""A kernel that refuses a case doesn't claim it, which is neither a pass nor a failure; large cases start with free memory."""

from __future__ import annotations

import gc
import itertools
import sys
import traceback
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from liger_conformance import reach
from liger_conformance.case import Case, cases_of
from liger_conformance.plugin.selection import Cases, parameters
from liger_conformance.plugin.stash import watch_key
from liger_conformance.report import NOT_CLAIMED
from liger_conformance.target import Target, refusal
from liger_core import Unsupported


@pytest.fixture(scope="session", autouse=True)
def _collect_seldom() -> Iterator[None]:
    """Objects that compilers' front ends allocate soon go by themselves: to look for cycles less often saves a 15th of the time.

    On an accelerator, whose memory cycles would hold, everything stays as it is.
    """
    before = gc.get_threshold()
    if not torch.accelerator.is_available():
        gc.set_threshold(20_000, 20, 50)
    yield
    gc.set_threshold(*before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Free what a test left that failed or found too little memory: its frames are in cycles with what it raised.

    Python's collector, left to itself, counts objects and not their gigabytes.
    """
    if item.get_closest_marker("slow") and not _is_interpreted(item):
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # pytest's, of a failure, for debuggers
            sys.__dict__.pop(name, None)
        gc.collect()


def _is_interpreted(item: pytest.Item) -> bool:
    """Whether a test takes a kernel to an interpreter: its slow calls have no gigabytes."""
    target = parameters(item).get("target")
    return isinstance(target, Target) and target.lane == "interpreted"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, object, object]:
    cases = Cases.of(item)
    if cases.first is not None and cases.claimed:
        _take_one_that_is_claimed(item, cases.groups)
    try:
        with reach.watching(item.config.stash.get(watch_key, None)):
            return (yield)
    except Unsupported as why:
        target = item.funcargs.get("target")
        if isinstance(target, Target) and target.backend is not None and _passed(why, target.backend.package):
            message = f"{target} raised Unsupported while it ran; refuses says it before, or nobody does: {why}"
            raise AssertionError(message) from why
        pytest.skip(f"{NOT_CLAIMED}{why}")


def _passed(error: Unsupported, package: str) -> bool:
    """Whether an error came through a package's code. What `refuses` says is a value: the dispatcher raises it."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(module.startswith(f"{package}.") for module in modules)


def _take_one_that_is_claimed(item: pytest.Function, groups: tuple[str, ...]) -> None:
    """A test takes those of the first cases that the kernel doesn't refuse: the nth test the nth of them.

    Where there is none, the case stays, and the test finds out that it is refused.
    """
    values: dict[str, Any] = item.funcargs
    target: Target = values["target"]
    case: Case = values["case"]
    known = cases_of(target.op.name)
    cases = [other for other in known.cases if other.group in groups]

    def claimed(other: Case) -> bool:
        return refusal(target, known.build(other, values["dtype"], target.device)) is None

    if getattr(target.kernel, "refuses", None) is None:
        return
    instead = next(itertools.islice(filter(claimed, cases), cases.index(case), None), case)
    if instead is not case:
        values["case"] = instead
        item.add_report_section("call", "case", f"{case} or one before it is refused: this is {instead}")
