"""Settings of every test run in this repository."""

import gc
import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Workers inherit this. Without it each starts a thread per core, and they wait for one another.
    if workers := getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    # If Python is told to keep no bytecode, as in many containers, every process that a test starts compiles all that it
    # imports of torch. Nothing is written beside the sources.
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if sys.dont_write_bytecode and cache is not None:
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(cache.mkdir("bytecode"))


def pytest_collection_finish() -> None:
    # Thousands of tests stay until the end. To look for garbage among them takes a second, each time that it is done.
    gc.freeze()
