"""The processes that the tests run on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two processes of one gloo group. One that is stuck ends with the test that it is in."""
    pool = Pool()
    yield pool
    pool.stop()
