"""A kernel that refuses a case doesn't claim it, which is neither a pass nor a failure."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from liger_conformance.report import NOT_CLAIMED
from liger_core import Unsupported


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except Unsupported as refusal:
        pytest.skip(f"{NOT_CLAIMED}{refusal}")
