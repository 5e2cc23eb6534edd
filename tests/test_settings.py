"""The settings of every test run, which keep it quick."""

import gc
import subprocess
import sys

import pytest


def test_processes_keep_bytecode(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        pytest.skip("not run: bytecode is kept in pytest's cache, and this run has none")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_garbage_is_not_looked_for_among_tests() -> None:
    assert gc.get_freeze_count() > 0
