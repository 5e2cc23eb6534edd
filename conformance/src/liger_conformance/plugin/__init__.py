"""The pytest plugin: which implementations are checked, on what, and the report at the end.

``pytest --pyargs liger_conformance --impl=acme`` checks the language ``acme``, wherever its package comes from.
With ``--compile=CHIPS`` its kernels are compiled for those chips instead, and nothing runs. With ``--random=N`` they are
called in N ways that no case has.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_conformance.compilers import results
from liger_conformance.compilers.results import Results
from liger_conformance.known import AnySpills, KnownFailures, KnownSpills, Unclaimed
from liger_conformance.plugin import options
from liger_conformance.plugin.options import option, pytest_addoption, seed
from liger_conformance.plugin.outcomes import (
    Listener,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    watch,
)
from liger_conformance.plugin.selection import (
    MARKS,
    of_suite,
    parameters,
    pytest_collection_modifyitems,
    pytest_deselected,
    pytest_generate_tests,
)
from liger_conformance.plugin.stash import (
    failed_key,
    known_key,
    report_key,
    results_key,
    spills_key,
    targets_key,
    unclaimed_key,
)
from liger_conformance.plugin.targets import chip_targets, targets_of_chips, targets_of_devices
from liger_conformance.target import Target

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_deselected",
    "pytest_generate_tests",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
]
"""Hooks that other modules of this package have: pytest finds them here, beside those below."""


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    options.check(config)
    targets, report = targets_of_chips(config) if option(config, "--compile") else targets_of_devices(config)
    config.stash[targets_key] = targets
    packages = {t.backend.language: t.backend.package for t in targets if t.backend}
    if option(config, "--results") is not None:
        if len(packages) > 1:
            raise pytest.UsageError(f"--results is a file of one language: --impl is one of {', '.join(packages)}")
        share, writes = option(config, "--check-results") or 0.0, option(config, "--write-results")
        results.current = Results(option(config, "--results"), share, seed(config), writes)
        config.stash[results_key] = results.current
    config.stash[known_key] = KnownFailures(packages)
    config.stash[unclaimed_key] = Unclaimed(packages)
    any_spills = option(config, "--any-spills")
    config.stash[spills_key] = AnySpills() if any_spills else KnownSpills(packages, chip_targets())
    if option(config, "--random"):
        traced = ", under torch.compile" if option(config, "--torch-compile") else ""
        report.random = f"{option(config, '--random')} calls, seed {seed(config)}{traced}"
    config.stash[report_key] = report
    config.pluginmanager.register(Listener(config))
    if option(config, "--reached"):
        watch(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """With random calls, which need one device each, processes are spread over all CUDA devices of the machine."""
    if option(config, "--random") and not option(config, "--compile") and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        for i, spec in enumerate(specs):
            spec.env["CUDA_VISIBLE_DEVICES"] = devices[i % len(devices)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Asked for one implementation, the tests of the suite itself are not meant.
    if (
        (option(config, "--impl") or option(config, "--compile"))
        and collection_path.parent.name == "tests"
        and collection_path.parent.parent.name == "conformance"
    ):
        return True
    return None


@pytest.fixture
def known_failures(request: pytest.FixtureRequest) -> KnownFailures:
    """Failures that each implementation declares."""
    return request.config.stash[known_key]


@pytest.fixture
def unclaimed(request: pytest.FixtureRequest) -> Unclaimed:
    """Refusals that each implementation declares."""
    return request.config.stash[unclaimed_key]


@pytest.fixture
def known_spills(request: pytest.FixtureRequest) -> KnownSpills:
    """Spills that each implementation declares."""
    return request.config.stash[spills_key]


@pytest.fixture
def until(request: pytest.FixtureRequest) -> float:
    """When random calls end, in seconds since the epoch."""
    return getattr(request.config.option, "liger_until", float("inf"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[failed_key] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A process that can't use its device any more ends, once its failure is reported: the next tests need another one."""
    result = yield
    if item.stash.get(failed_key, False) and of_suite(item):
        target = parameters(item).get("target")
        if isinstance(target, Target) and target.is_lost():
            if os.environ.get("PYTEST_XDIST_WORKER"):
                os._exit(1)
            item.session.shouldstop = (
                f"{target.device} can't be used by this process any more; -n1 would start another one"
            )
    return result
