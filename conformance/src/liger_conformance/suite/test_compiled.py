"""What is launched compiles, and fits, for chips that this machine doesn't have: under ``--compile``, and nothing else."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liger_conformance.case import Case
from liger_conformance.compilers import Compiled, compiler_of
from liger_conformance.compilers.host_code import call, compiled_cases
from liger_conformance.known import KnownSpills, matches
from liger_conformance.running import Target
from liger_core import Unsupported


def compile_launches(target: Target, case: Case, dtype: torch.dtype) -> list[Compiled]:
    """What a case launches on the target's chip, each kernel once."""
    assert target.backend is not None
    compiler = compiler_of(target.backend)
    assert compiler is not None
    with compiler.compiling(target.device) as (device, compiled):
        call(target, case, dtype, device)
    return list({str(kernel): kernel for kernel in compiled}.values())


@pytest.mark.cases(compiled=True)
def test_compiled(
    target: Target,
    case: Case,
    dtype: torch.dtype,
    known_spills: KnownSpills,
    record_property: Callable[[str, Any], None],
) -> None:
    """Each launch compiles, takes no more than the chip has, and keeps every register out of memory."""
    kernels = compile_launches(target, case, dtype)
    record_property("liger kernels", [dataclasses.asdict(kernel) for kernel in kernels])
    if not kernels:
        pytest.fail(f"{target} launches no kernel", pytrace=False)
    if over := [f"{kernel} takes {', '.join(kernel.over)}" for kernel in kernels if kernel.over]:
        pytest.fail("\n".join([f"{target.device} has less:", *over]), pytrace=False)
    if spilling := [
        f"{kernel} spills {kernel.spills}"
        for kernel in kernels
        if kernel.spills > known_spills.allowed(str(target), str(kernel))
    ]:
        advice = "take more warps or a smaller block, or declare in known_spills.py that this is faster:"
        pytest.fail("\n".join([f"registers are kept in memory on {target.device}; {advice}", *spilling]), pytrace=False)


@pytest.mark.cases(compiled=True, spills=True)
def test_known_spills(target: Target, known_spills: KnownSpills) -> None:
    """What is declared to spill does."""
    spilling = set()
    for case, dtype in compiled_cases(target):
        try:
            spilling |= {str(kernel) for kernel in compile_launches(target, case, dtype) if kernel.spills}
        except Unsupported:
            continue
    stale = [pattern for pattern, _ in known_spills.of(str(target)) if not any(matches(pattern, k) for k in spilling)]
    if stale:
        advice = "none of these spills any more; take it out of known_spills.py:"
        pytest.fail("\n".join([f"on {target.device} {advice}", *stale]), pytrace=False)
