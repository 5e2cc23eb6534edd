"""A kernel that refuses a case doesn't claim it, which is neither a pass nor a failure; large cases start with free memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator

import pytest
import torch

from liger_conformance.report import NOT_CLAIMED
from liger_core import Unsupported


@pytest.fixture(scope="session", autouse=True)
def _collect_seldom() -> Iterator[None]:
    """What compilers' front ends allocate soon goes by itself: to look for cycles less often saves a 15th of the time.

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
    if item.get_closest_marker("slow"):
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # pytest's, of a failure, for debuggers
            vars(sys).pop(name, None)
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except Unsupported as refusal:
        pytest.skip(f"{NOT_CLAIMED}{refusal}")
