"""Device time, bandwidth and memory of every installed language, at the sizes of the conformance package's timed cases.

One benchmark for each op, language, case, dtype and mode; --impl, --op, --device and --dtype narrow it down, and ``-k``
does the rest. Times are taken as `timing` says, and pytest-benchmark gets them through its `ReplayClock`: its median is
the median device time. Forward runs without grad mode; forward + backward differentiates by all that the contract lets.

``extra_info`` has GB/s or TFLOP/s by the least work that `traffic` counts, and the peak memory in bytes beyond the inputs.

A CPU without accelerator times nothing unless --device=cpu asks for it: then the reference, at small sizes. Kernels run in
interpreters there, whose speed says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import DTYPES, arguments_of, make_call
from pytest_benchmark.fixture import BenchmarkFixture
from timing import clock, peak_memory, release, times_of
from traffic import FORWARD, modes_of, work_of

import liger_core
from liger_conformance.case import TIMED, Case, cases_of
from liger_conformance.plugin.stash import report_key, targets_key
from liger_conformance.target import Target

NAMES = ("target", "case", "dtype", "mode")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(NAMES, [*_timed(metafunc.config), *_not_run(metafunc.config)])


def _timed(config: pytest.Config) -> Iterator[Any]:
    for target in config.stash[targets_key]:
        if _why_not(target, config) is None:
            for case in cases_of(target.op.name).cases:
                if case.group in (TIMED if target.device != "cpu" else ("small",)):
                    for dtype in config.getoption("--dtype") or ["bfloat16"]:
                        for mode in modes_of(target.op):
                            yield pytest.param(target, case, DTYPES[dtype], mode, id=f"{target}-{case}-{dtype}-{mode}")


def _why_not(target: Target, config: pytest.Config) -> str | None:
    if target.device == "cpu":
        if not config.getoption("--device"):
            return "no accelerator; --device=cpu times the reference on small cases"
        if target.backend is not None:
            return "it would be interpreted, which says nothing of its speed"
    return None


def _not_run(config: pytest.Config) -> Iterator[Any]:
    """A skipped test for each language and reason, so that pytest's summary shows it."""
    reasons = {(t.language, t.device, why) for t in config.stash[targets_key] if (why := _why_not(t, config))}
    reasons.update(config.stash[report_key].languages_not_run)
    for language, device, why in sorted(reasons):
        skip = pytest.mark.skip(reason=f"not run: {language} on {device}: {why}")
        yield pytest.param(*(None for _ in NAMES), id=f"{language}-{device}", marks=skip)


@pytest.mark.benchmark(timer=clock.read)
def test_speed(benchmark: BenchmarkFixture, target: Target, case: Case, dtype: torch.dtype, mode: str) -> None:
    op, device = target.op, target.device
    release(device)
    arguments = arguments_of(op, case, dtype, device)
    call = make_call(op, arguments, mode, dtype)
    with liger_core.use(target.language):
        try:
            result = make_call(op, arguments, FORWARD, dtype)()[0]
            work = work_of(op.name, mode, {**arguments, "result": result})
            del result
            if not benchmark.enabled:
                benchmark(call)
                return
            peak = peak_memory(call, device)
            times = times_of(call, device)
        except liger_core.Unsupported as refusal:
            pytest.skip(f"not run: {refusal}")
        except torch.OutOfMemoryError as error:
            if target.backend is not None:
                raise
            pytest.skip(f"not run: the reference needs more memory than {device} has: {str(error).splitlines()[0]}")
    benchmark.group = f"{op.name} {case} {mode}"
    benchmark.extra_info.update(
        suite="speed", op=op.name, case=case.id, dtype=str(dtype).removeprefix("torch."), mode=mode,
        language=target.language, device=device, peak_bytes=peak,
    )  # fmt: skip
    clock.replay(benchmark, times)
    benchmark.extra_info.update(work.rates(statistics.median(times)))
