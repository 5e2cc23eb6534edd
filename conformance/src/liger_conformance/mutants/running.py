"""The suite in a fork of a process that imported it: there a mutant takes the place of a kernel file, or of an op's functions.

Nothing of a package is written to: an import hook gives the changed text for the module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_conformance import reach
from liger_conformance.mutants import faults
from liger_conformance.mutants.changes import Change
from liger_conformance.plugin.stash import watch_key
from liger_core.backend import BackendInfo
from liger_core.composed import COMPOSED
from liger_core.contract import ops


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel of an op; `change` is None for a fault."""

    op: str
    name: str
    kind: str
    change: Change | None


class _Changed(importlib.abc.MetaPathFinder):
    """Gives one module's source from another file."""

    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(fullname, self.path) if fullname == self.module else None


class _Told:
    """The first test that failed, and what the tests reached."""

    def __init__(self) -> None:
        self.failed, self.passed = "", 0
        self.reached: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid.rpartition("::")[2]
        self.passed += report.when == "call" and report.passed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = "collection"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        watch = session.config.stash.get(watch_key, None)
        if watch is not None:
            data = watch._coverage.get_data()
            lines = {Path(file).stem: data.lines(file) or [] for file in data.measured_files()}
            self.reached = {"lines": lines, "kernels": [kernel for _, kernel in watch.launched]}


class Suite:
    """The quick suite of the ops of a language.

    Args:
        backend: the language.
        limit: seconds after which the suite hangs.
    """

    def __init__(self, backend: BackendInfo, limit: float) -> None:
        self.backend, self.limit = backend, limit
        self.sources = {source.name: source for source in reach.sources_of(backend.package)}
        self._unchanged: dict[str, dict[str, Any]] = {}
        _import_what_tests_import()

    def run(self, mutant: Mutant) -> dict[str, Any]:
        """The verdict: by the tests of its op and then, of a change, those of the other ops that import the file."""
        started, by = time.monotonic(), ""
        fired = mutant.change is not None and self._reaches(mutant.op, mutant.change)
        for op in self._ops(mutant):
            self.unchanged(op)
            told = self._fork(op, mutant)
            fired = fired or told["fired"] or (mutant.change is not None and self._reaches(op, mutant.change))
            if told["failed"]:
                by = told["failed"]
                break
        verdict = "killed" if by else "survived" if fired else "never reached"
        return {"verdict": verdict, "by": by, "seconds": round(time.monotonic() - started, 1)}

    def unchanged(self, op: str) -> dict[str, Any]:
        """The outcome, and the reach, of an op's tests without any mutant.

        Raises:
            RuntimeError: they fail.
        """
        if op not in self._unchanged:
            told = self._fork(op, None)
            if told["failed"] or not told["passed"]:
                raise RuntimeError(f"{op}: the suite fails without any mutant: {told['failed'] or 'nothing passed'}")
            self._unchanged[op] = told
        return self._unchanged[op]

    def _ops(self, mutant: Mutant) -> Iterable[str]:
        """The ops whose tests are run: the mutant's own, and those that import the changed file."""
        yield mutant.op
        if mutant.change is not None:
            for op in ops:
                if op != mutant.op and self.backend.has_kernel(op) and mutant.change.file in self._files(op):
                    yield op

    def _files(self, op: str) -> set[str]:
        """The files of ``ops`` that an op's kernels come from, directly or not."""
        left = [*COMPOSED[op].files] if op in COMPOSED else [op]
        found: set[str] = set()
        while left:
            file = left.pop()
            if file in self.sources and file not in found:
                found.add(file)
                left += imports(self.sources[file].path, self.backend.package)
        return found

    def _reaches(self, op: str, change: Change) -> bool:
        """Whether an op's tests run the place; of a device function, which no tool sees, they may."""
        reached = self.unchanged(op)["reached"]
        source = self.sources[change.file]
        if change.function in source.kernels:
            return f"{change.file}.{change.function}" in reached["kernels"]
        if change.function in source.functions:
            return change.line in reached["lines"].get(change.file, [])
        return True

    def _fork(self, op: str, mutant: Mutant | None) -> dict[str, Any]:
        """Outcome of a fork that runs an op's tests up to the first failure."""
        reading, writing = os.pipe()
        with tempfile.TemporaryDirectory() as folder:
            process = os.fork()
            if process == 0:
                os.close(reading)
                try:
                    told = self._test(op, mutant, Path(folder))
                    os.write(writing, json.dumps(told).encode())
                finally:
                    os._exit(0)
            os.close(writing)
            ready, _, _ = select.select([reading], [], [], self.limit)
            if not ready:
                os.killpg(process, signal.SIGKILL)
            with open(reading, encoding="utf-8") as pipe:
                text = pipe.read() if ready else ""
            os.waitpid(process, 0)
        if text:
            return json.loads(text)
        return {
            "failed": "the process died" if ready else "the process hung",
            "passed": 0,
            "fired": True,
            "reached": {},
        }

    def _test(self, op: str, mutant: Mutant | None, folder: Path) -> dict[str, Any]:
        """In a process of its own: the tests of an op."""
        os.setsid()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        told = _Told()
        plugins: list[Any] = [told]
        if mutant is not None and mutant.change is not None:
            path = folder / f"{mutant.change.file}.py"
            path.write_text(mutant.change.text, "utf-8")
            sys.meta_path.insert(0, _Changed(f"{self.backend.package}.ops.{mutant.change.file}", path))
        elif mutant is not None:
            plugins.append(_Fault(self.backend, op, mutant.name.removeprefix("fault: ")))
        options = [
            f"--impl={self.backend.language}",
            f"--op={op}",
            "--device=cpu",
            "-n0",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
        ]
        options += ["--tb=no"] if mutant is not None else ["--tb=no", "--reached"]
        status = pytest.main(["--pyargs", "liger_conformance.suite", *options], plugins=plugins)
        failed = told.failed
        if not failed and status not in (0, 1):
            sys.stdout.flush()
            failed = f"pytest: {(folder / 'output').read_text()[-1000:]}"
        return {"failed": failed, "passed": told.passed, "fired": faults.fired, "reached": told.reached}


class _Fault:
    """Puts a fault into an op, once its interpreter is ready."""

    def __init__(self, backend: BackendInfo, op: str, fault: str) -> None:
        self.backend, self.op, self.fault = backend, op, fault

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        faults.FAULTS[self.fault](self.backend.kernel(self.op))


def imports(path: Path, package: str) -> list[str]:
    """The files of a package's ``ops`` that one of them imports from."""
    folder = f"from {package}.ops."
    lines = [line for line in path.read_text("utf-8").splitlines() if line.startswith(folder)]
    return [line.removeprefix(folder).split()[0] for line in lines]


def _import_what_tests_import() -> None:
    """Before the fork, since imports take longer than most runs; but no language."""
    for module in (
        "torch._dynamo",
        "torch.export",
        "torch.fx.experimental.symbolic_shapes",
        "liger_conformance.plugin",
    ):
        importlib.import_module(module)
    torch.set_num_threads(1)
