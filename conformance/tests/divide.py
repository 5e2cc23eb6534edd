"""A process that has imported torch, and divides for every run of pytest that is asked for. Conftest starts it.

A line of its input is a run: arguments, folder, environment, and files for the output. The exit status is a line of its
output. What is divided is as a process that `python -m pytest` starts: no language, no plugin is imported yet.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from typing import Any

import pytest
import torch

__all__ = ["pytest", "torch"]  # imported for those that come of this process

INSTALLED = sys.path[1:]
"""Where Python looks, without this file's folder. Whoever starts this process sets no PYTHONPATH."""


def next_run() -> dict[str, Any] | None:
    """In a new process, what it is to run. In this one None, when nobody asks any more."""
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    return None


def become(run: dict[str, Any]) -> None:
    """Have what a new process would have been given."""
    os.chdir(run["folder"])
    os.environ.clear()
    os.environ.update(run["environment"])
    for number, path in enumerate((os.devnull, run["output"], run["errors"])):
        opened = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    sys.path[:] = [run["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *INSTALLED]
    sys.argv[1:] = run["arguments"]
    importlib.invalidate_caches()


if (asked := next_run()) is not None:
    become(asked)
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)
