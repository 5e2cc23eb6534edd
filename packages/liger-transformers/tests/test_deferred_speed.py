"""Time of a deferred tensor beside its op: pytest packages/liger-transformers -k speed -n 0 --benchmark-enable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_transformers.activations import Gate
from liger_transformers.head import head_class
from liger_transformers.logits import Logits

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


@pytest.fixture
def logits() -> Logits:
    return Logits.of(torch.randn(2, 3, 4), head())


def head() -> nn.Module:
    head = nn.Linear(4, 5)
    head.__class__ = head_class(nn.Linear)
    return head


def test_speed_of_logits(benchmark: Any) -> None:
    """A deferred tensor: the logits of a head."""
    linear, x = head(), torch.randn(2, 3, 4)
    assert isinstance(check(benchmark, lambda: Logits.of(x, linear)), Logits)


def test_speed_of_scaled_logits(benchmark: Any, logits: Logits) -> None:
    """A deferred tensor of another one."""
    assert isinstance(check(benchmark, lambda: logits * 2.0), Logits)


def test_speed_of_widened_logits(benchmark: Any, logits: Logits) -> None:
    """`float`, which changes nothing here, as an example of most functions."""
    assert check(benchmark, lambda: logits.float()) is logits
