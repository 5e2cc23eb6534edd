"""Calls that nobody thought of: under ``--random``, and nothing else."""

from __future__ import annotations

import time
import traceback

import pytest
import torch

from liger_conformance.case import cases_of
from liger_conformance.known import KnownSpills
from liger_conformance.random_call import Call, RandomCall, lane_of, smallest
from liger_conformance.suite.test_compiled import check_launches
from liger_conformance.suite.test_values import check_case, traced
from liger_conformance.target import Target
from liger_core import Unsupported

KEPT = 2 << 30
"""Bytes of a device's memory that a process may keep between two tests: others of its kind share the device."""


def test_random(
    target: Target,
    call: RandomCall,
    dtype: torch.dtype,
    known_spills: KnownSpills,
    until: float,
    pytestconfig: pytest.Config,
) -> None:
    """As `test_values`, `test_compile` and `test_compiled`.

    A failure is reported as the smallest call that is found to fail alike.
    """
    by_torch = pytestconfig.getoption("--torch-compile")
    if time.time() > until:
        pytest.skip("the seconds that --seconds gives were over")
    found = cases_of(target.op.name)
    first = call.draw(found, lane_of(target))

    def failure(drawn: Call) -> BaseException | None:
        """The error that a call raises. The frames that it passed hold no tensors any more."""
        try:
            if target.lane == "compiled":
                check_launches(target, call.case(found, drawn), drawn.dtype, known_spills)
            else:
                compiled = traced(target, True if call.number % 2 else None) if by_torch else None
                check_case(target, call.case(found, drawn), drawn.dtype, compiled)
        except (Unsupported, pytest.skip.Exception):
            if drawn is first:
                raise
        except (Exception, pytest.fail.Exception) as error:  # whatever a kernel raises is its failure, reported below
            traceback.clear_frames(error.__traceback__)
            return error
        return None

    last = failure(first)
    if last is None:
        if torch.accelerator.is_available() and torch.accelerator.memory_reserved() > KEPT:
            torch.accelerator.empty_cache()
        return
    kind = type(last)

    def fails(drawn: Call) -> bool:
        nonlocal last
        assert last is not None
        if not isinstance(last, kind) or time.time() > until or target.is_lost():
            return False
        error = failure(drawn)
        if isinstance(error, kind):
            last = error
        return isinstance(error, kind)

    least = smallest(found, first, fails)
    says = [f"{target} fails:", f"    {call.line(found, least)}", str(last)]
    if least != first:
        says.insert(2, f"which was found as\n    {call.line(found, first)}")
    raise AssertionError("\n".join(says)) from last
