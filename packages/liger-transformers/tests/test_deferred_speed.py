"""Time of a deferred tensor beside its op: pytest packages/liger-transformers -k speed -n 0 --benchmark-enable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_transformers.activations import Gate

MOST = 2e-6
"""Seconds of a deferred tensor, where they are measured."""

MOST_CALLS = 18
"""Calls of functions, Python's and C's, which take most of the time and are the same on every machine."""


def check(benchmark: Any, make: Callable[[], Any]) -> Any:
    """The result of `make`, which takes no longer than a deferred tensor may."""
    result = benchmark(make)
    assert benchmark.disabled or benchmark.stats.stats.min < MOST
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        make()
    finally:
        sys.setprofile(before)
    assert calls <= MOST_CALLS
    return result


def test_speed_of_a_gate(benchmark: Any) -> None:
    """A deferred tensor: made, and multiplied by an op that does nothing."""
    gate, up = torch.randn(2, 3), torch.randn(2, 3)

    def op(gate: Tensor, up: Tensor) -> Tensor:
        return up

    assert check(benchmark, lambda: Gate(gate, F.silu, op) * up) is up
