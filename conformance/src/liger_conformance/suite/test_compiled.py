"""Kernels that are launched compile, and fit, for chips that this machine doesn't have: under ``--compile``, and nothing else."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_conformance import reach
from liger_conformance.case import Case, MetaMake, cases_of
from liger_conformance.compilers import Compiled, compiler_of
from liger_conformance.compilers.host_code import call, compiled_cases
from liger_conformance.known import KnownSpills, matches
from liger_conformance.route import is_empty
from liger_conformance.target import Target
from liger_core import Unsupported

pytestmark = pytest.mark.lane("compiled")


def compile_launches(target: Target, case: Case, dtype: torch.dtype) -> list[Compiled]:
    """Kernels that a case launches on the target's chip, each kernel once."""
    assert target.backend is not None
    compiler = compiler_of(target.backend)
    assert compiler is not None
    with compiler.compiling(target.device) as (device, compiled):
        call(target, case, dtype, device)
    reach.record(target.backend.package, {kernel.kernel for kernel in compiled})
    return list({str(kernel): kernel for kernel in compiled}.values())


class Seen:
    """Which kernels spilled, or lost fast instructions, in a run so far: its processes tell each other by a file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, target: Target, case: Case, kernels: list[Compiled]) -> None:
        """Add what one case launches."""
        found = [(str(kernel), None) for kernel in kernels if kernel.spills]
        if case.group in ("medium", "large"):
            found += [(str(kernel), what) for kernel in kernels for what in kernel.lost]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps([str(target), *line])}\n" for line in found))

    def of(self, target: Target) -> Iterator[tuple[str, str | None]]:
        """The kernels of a target, with None for one that spilled, or what it lost."""
        lines = self.path.read_text("utf-8").split("\n")[:-1] if self.path.exists() else []
        return ((kernel, what) for name, kernel, what in map(json.loads, lines) if name == str(target))


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.getbasetemp()
    # A process of pytest-xdist has a folder of its own within the run's.
    return Seen((folder.parent if hasattr(request.config, "workerinput") else folder) / "spills.jsonl")


def test_compiled(
    target: Target,
    case: Case,
    dtype: torch.dtype,
    known_spills: KnownSpills,
    seen: Seen,
    record_property: Callable[[str, Any], None],
) -> None:
    """Each launch compiles, takes no more than the chip has, and keeps every register out of memory."""

    def record(kernels: list[Compiled]) -> None:
        record_property("liger kernels", [dataclasses.asdict(kernel) for kernel in kernels])
        seen.add(target, case, kernels)

    check_launches(target, case, dtype, known_spills, record)


def check_launches(
    target: Target,
    case: Case,
    dtype: torch.dtype,
    known_spills: KnownSpills,
    record: Callable[[list[Compiled]], None] = lambda kernels: None,
) -> None:
    """Compile what a case launches, hand it to `record`, and fail what the chip can't run or what it would do badly."""
    kernels = compile_launches(target, case, dtype)
    record(kernels)
    if not kernels and not is_empty(cases_of(target.op.name).make(case, MetaMake(dtype, "meta"))):
        pytest.fail(f"{target} launches no kernel", pytrace=False)
    for kernel in kernels:
        for what in kernel.close:
            warnings.warn(f"{target.device} may have less: {kernel} takes {what}", stacklevel=1)
    if case.group in ("medium", "large") and (
        lost := [
            f"{kernel}: {what}"
            for kernel in kernels
            for what in kernel.lost
            if not known_spills.allows_loss(str(target), str(kernel), what)
        ]
    ):
        advice = "mend the layout, or declare in known_spills.py that there is no faster way:"
        pytest.fail("\n".join([f"fast instructions of {target.device} can't be used; {advice}", *lost]), pytrace=False)
    if over := [f"{kernel} takes {', '.join(kernel.over)}" for kernel in kernels if kernel.over]:
        pytest.fail("\n".join([f"{target.device} has less:", *over]), pytrace=False)
    if spilling := [
        f"{kernel} spills {kernel.spills}"
        for kernel in kernels
        if kernel.spills > known_spills.allowed(str(target), str(kernel))
    ]:
        advice = "take more warps or a smaller block, or declare in known_spills.py that this is faster:"
        pytest.fail("\n".join([f"registers are kept in memory on {target.device}; {advice}", *spilling]), pytrace=False)


@pytest.mark.targets("spills")
def test_known_spills(target: Target, known_spills: KnownSpills, seen: Seen) -> None:
    """Kernels that are declared to spill, or to lose fast instructions, do: in what the run compiled, or else in all cases."""

    def stale() -> list[str]:
        found = [*seen.of(target)]
        spills = [
            p for p, _ in known_spills.of(str(target)) if not any(matches(p, k) for k, what in found if what is None)
        ]
        return spills + [
            f"{pattern}: {loss}"
            for pattern, loss in known_spills.losses_of(str(target))
            if not any(matches(pattern, kernel) and matches(loss, what) for kernel, what in found if what is not None)
        ]

    for case, dtype in reversed(compiled_cases(target)):  # the large ones, of which most declarations are, come last
        if not stale():
            return
        try:
            seen.add(target, case, compile_launches(target, case, dtype))
        except Unsupported:
            continue
    if left := stale():
        advice = "none of these is so any more; take it out of known_spills.py:"
        pytest.fail("\n".join([f"on {target.device} {advice}", *left]), pytrace=False)
