"""Settings of every test run in this repository."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Workers inherit this. Without it each starts a thread per core, and they wait for one another.
    if workers := getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
