"""Calls of each op, in a module of its name, with float32 tensors on the CPU.

``BAD`` are those that the op refuses. ``small()`` makes the arguments of a call that all tests of `test_references_basic`
take; an op without it has tests of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BadCall(NamedTuple):
    """A call that an op refuses before any kernel runs.

    Attributes:
        id: what is wrong, in words joined by '-'.
        error: the exception's type.
        says: what its message must contain, besides the op's name: the argument's name, and what it got.
        build: makes the arguments, by name.
    """

    id: str
    error: type[Exception]
    says: tuple[str, ...]
    build: Callable[[], dict[str, Any]]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


def mask(probability: float, *shape: int) -> Tensor:
    return torch.rand(shape) < probability
