"""Options of the command line, and combinations of them that make no sense."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from liger_core.contract import ops


def option(config: pytest.Config, name: str) -> Any:
    """An option's value. It is of the type that `pytest_addoption` says, which pytest tells no type checker."""
    return config.getoption(name)


def seed(config: pytest.Config) -> int:
    return option(config, "--seed") or 0


def turn(config: pytest.Config) -> int | None:
    """Which part of the costly tests runs; None: all."""
    return seed(config) if option(config, "--turn") else None


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
        help="with --random, --check-results or --turn: others for each seed (default: 0)",
    )
    group.addoption(
        "--seconds", type=float, metavar="T", help="with --random: calls that T seconds don't suffice for are not run"
    )
    group.addoption("--torch-compile", action="store_true", help="with --random: each call under torch.compile")
    group.addoption(
        "--turn",
        action="store_true",
        help="an interpreter checks values of a short case in one of float32 and bfloat16, and torch.compile takes a quarter of "
        "the references: others for each --seed",
    )
    group.addoption(
        "--reached",
        action="store_true",
        help="without an accelerator: fail if the tests of a language, when all of them ran, launched not every kernel or took "
        "not every branch of its host code",
    )
    group.addoption("--report", metavar="DIR", type=Path, help="write the matrix to DIR/conformance.json and .md")


def check(config: pytest.Config) -> None:
    """Refuse options that don't go together.

    Raises:
        pytest.UsageError: with what is wrong, and what it takes.
    """
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
    _check_random(config)


def _check_random(config: pytest.Config) -> None:
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
    elif (
        option(config, "--seed") is not None
        and not option(config, "--turn")
        and option(config, "--check-results") is None
    ):
        raise pytest.UsageError("--seed is of --random=N, --check-results or --turn: add one of them")
