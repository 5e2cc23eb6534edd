"""A cell of the comparison: a provider's function on a case, timed and checked.

A time is the least of the medians that `triton.testing.do_bench` gives in several turns; it clears the L2 cache before each
call. The providers take turns, so that all of them meet the host in its slow moments and in its quick ones, which differ
twofold where the host is what is timed. Memory is the peak beyond the inputs. The error is that of the first result, or with
the backward the largest of the gradients': the norm of the difference to the reference in float32 (float64 for float32
inputs), over the norm of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from calls import Arguments, Function, arguments_of, make_call
from timing import median_of, peak_memory, release
from torch import Tensor
from traffic import FORWARD, FULL, Work, work_of

from liger_conformance.case import Case
from liger_core.contract import Op

TURNS = 3
"""How often each provider is timed."""

COLUMNS = (
    *("op", "case", "dtype", "provider", "mode", "ms", "ratio", "gbps", "tflops", "peak_mib", "error"),
    *("spread", "note"),  # spread: the slowest turn's median over the fastest's, less 1
)

Row = dict[str, Any]


class Job(NamedTuple):
    """A cell of the comparison, all but its provider."""

    op: Op[..., Any]
    case: Case
    dtype: torch.dtype
    device: str
    mode: str

    def arguments(self) -> Arguments:
        """The case's inputs, made anew; boolean masks as int32, which every provider takes."""
        arguments = arguments_of(self.op, self.case, self.dtype, self.device)
        return {
            name: value.int() if isinstance(value, Tensor) and value.dtype is torch.bool else value
            for name, value in arguments.items()
        }

    def row(self, provider: str, **values: Any) -> Row:
        place = (self.op.name, self.case.id, str(self.dtype).removeprefix("torch."), provider, self.mode)
        return dict.fromkeys(COLUMNS, "") | dict(zip(COLUMNS, place, strict=False)) | values


def truth_of(job: Job) -> tuple[Tensor | None, ...] | None:
    """The reference's first result or gradients, in higher precision; None if memory is too small."""
    try:
        return _truth_of(job)
    except torch.OutOfMemoryError:
        return None


def _truth_of(job: Job) -> tuple[Tensor | None, ...]:
    wider = torch.float64 if job.dtype is torch.float32 else torch.float32
    wide = {
        name: value.detach().to(wider).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in job.arguments().items()
    }
    results = make_call(job.op.reference, wide, job.mode, job.dtype)()
    return results if job.mode == FULL else results[:1]


def error_of(results: Sequence[Tensor | None], truth: Sequence[Tensor | None]) -> float:
    """The largest of the differences' norms, each relative to the norm of what is true. A missing one is an infinite error."""
    errors = [0.0]
    for got, true in zip(results, truth, strict=False):
        if true is None:
            continue
        if got is None:
            return float("inf")
        norm = true.norm().clamp(min=torch.finfo(true.dtype).tiny)
        errors.append(((got.to(true.dtype) - true).norm() / norm).item())
    return max(errors)


def median_ms(call: Callable[[], Any], device: str) -> float:
    """Milliseconds of a call: do_bench's median, or on a CPU that of the clock."""
    if device == "cpu":
        return median_of(call, device) * 1e3
    from triton.testing import do_bench

    median: Any = do_bench(call, warmup=15, rep=40, return_mode="median")
    return median


def in_turns(names: Sequence[Any]) -> Iterator[Any]:
    """Each of the names `TURNS` times, in both orders by turns, so that none is always first."""
    for turn in range(TURNS):
        yield from names[:: -1 if turn % 2 else 1]


class Measured(NamedTuple):
    """A provider on one job: the call to be timed, and all of its row but the time."""

    call: Callable[[], Any]
    work: Work
    columns: dict[str, str]

    def row(self, job: Job, provider: str, turns: Sequence[float]) -> Row:
        """The row, with the least of the turns' times, in milliseconds."""
        ms = min(turns)
        rates = self.work.rates(ms / 1e3)
        rate_columns = {
            key: f"{rates[unit]:.4g}" for key, unit in (("gbps", "GB/s"), ("tflops", "TFLOP/s")) if unit in rates
        }
        spread = f"{max(turns) / ms - 1:.3f}"
        return job.row(provider, ms=f"{ms:.5f}", spread=spread, **rate_columns, **self.columns)


def measure(job: Job, function: Function, truth: Sequence[Tensor | None] | None) -> Measured:
    """Everything of a provider's function on one job but its time."""
    release(job.device)
    arguments = job.arguments()
    call = make_call(function, arguments, job.mode, job.dtype)
    first = call()
    error = None if truth is None else error_of(first, truth)
    del first
    result = make_call(function, arguments, FORWARD, job.dtype)()[0]
    work = work_of(job.op.name, job.mode, {**arguments, "result": result})
    del result
    peak = peak_memory(call, job.device)
    columns = {
        "peak_mib": "" if peak is None else f"{peak / 2**20:.1f}",
        "error": "" if error is None else f"{error:.2e}",
        "note": "" if truth is not None else "not checked: the reference needs more memory than the device has",
    }
    return Measured(call, work, columns)
