"""How long a call takes on its device, and how much memory.

On an accelerator a time is the device's own, between an event before the call and one after it, as `triton.testing.do_bench`
takes it: before each call a buffer larger than any L2 cache is cleared, so that inputs come from memory; nothing is awaited
until all the calls are queued. A call whose host side takes longer than its kernels and the clearing is bound by the
host, and its time shows that: so it would in training.

On a CPU a time is the host's, with caches as they are. `host_time` is the host's part of a call on any device.

Nothing here names a vendor: `torch.get_device_module` gives the module with the events of cuda, npu and xpu.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

Call = Callable[[], Any]

FLUSH = 256 << 20
"""Bytes cleared before each call: the size that do_bench clears. The L2 of an H200 holds 60 MB."""

LEAST, MOST = 10, 2000
"""Bounds of the number of times that a call is timed; three times will do on a CPU, where a call may take seconds."""

HOST_CALLS, HOST_REPEATS = 20, 25
"""Calls in a repeat of `host_time`, and repeats."""


def times_of(call: Call, device: str, seconds: float = 0.2) -> list[float]:
    """Time a call over and over, in seconds each, for about `seconds` altogether.

    What the first calls do (compile, tune, allocate) is not timed.
    """
    call()
    call()
    return _times_on_host(call, seconds) if device == "cpu" else _times_on_device(call, device, seconds)


def median_of(call: Call, device: str) -> float:
    """The median of `times_of`, in seconds."""
    return statistics.median(times_of(call, device))


def _times_on_host(call: Call, seconds: float) -> list[float]:
    times: list[float] = []
    while len(times) < MOST and (len(times) < 3 or sum(times) < seconds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _times_on_device(call: Call, device: str, seconds: float) -> list[float]:
    module = torch.get_device_module(device)
    buffer = torch.empty(FLUSH, dtype=torch.int8, device=device)
    few = _queue(call, module, buffer, 5)
    rounds = min(MOST, max(LEAST, int(seconds / statistics.median(few))))
    return _queue(call, module, buffer, rounds)


def _queue(call: Call, module: Any, buffer: torch.Tensor, rounds: int) -> list[float]:
    pairs = [(module.Event(enable_timing=True), module.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in pairs:
        buffer.zero_()
        start.record()
        call()
        end.record()
    module.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def host_time(call: Call, device: str, calls: int = HOST_CALLS, repeats: int = HOST_REPEATS) -> float:
    """Host time of a call in seconds: the mean of some calls, the least of several repeats.

    In a repeat nothing is awaited, and before each all of the device's work is. The calls are few, because a device whose
    queue is full makes launches wait.
    """
    module = torch.get_device_module(device)
    for _ in range(5):
        call()
    least = float("inf")
    for _ in range(repeats):
        module.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        least = min(least, time.perf_counter() - start)
    module.synchronize()
    return least / calls


def release(device: str) -> None:
    """Give back the memory that nothing holds any more."""
    gc.collect()
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


def peak_memory(call: Call, device: str) -> int | None:
    """The most bytes that a call holds beyond what was allocated before it, its results included. None on a CPU."""
    if device == "cpu":
        return None
    module = torch.get_device_module(device)
    call()
    module.synchronize()
    release(device)
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    call()
    module.synchronize()
    return module.max_memory_allocated() - before


class ReplayClock:
    """A clock for pytest-benchmark that goes only as far as times taken elsewhere: by a device, or in another process.

    A test that is marked with ``benchmark(timer=clock.read)`` calls `replay`; pytest-benchmark then makes its statistics of
    those times, and none of its own.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def read(self) -> float:
        """Seconds since the clock was made."""
        return self._now

    def _go_on(self, seconds: float) -> None:
        self._now += seconds

    def replay(self, benchmark: BenchmarkFixture, times: Iterable[float]) -> None:
        """Give `benchmark` one round for each of `times`, in seconds."""
        left = list(times)
        benchmark.pedantic(self._go_on, setup=lambda: ((left.pop(),), {}), rounds=len(left))


clock = ReplayClock()
