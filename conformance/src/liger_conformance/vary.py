"""How the values of an op's cases may vary in random calls: sizes, numbers and choices, as an op's file declares them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the suite calls ops with."""

ANY_DTYPE = (None, *DTYPES)
"""Dtypes of an argument that may have another one than the first argument; None: the same."""


@dataclass(frozen=True)
class Size:
    """A number of elements, drawn log-uniform; powers of two, their neighbours and multiples of 8 come often.

    Attributes:
        least, most: its bounds.
        step: it is `least` plus a multiple of this.
        dims: between how many dimensions it is divided: ``build`` gets a tuple of sizes. None: it gets the number.
    """

    least: int = 1
    most: int = 1 << 18
    step: int = 1
    dims: tuple[int, int] | None = None

    def draw(self, source: random.Random, most: int) -> int:
        """A size that is at most `most`, or the least."""
        most = max(self.least, min(self.most, most))
        size = log_uniform(source, self.least, most)
        kind = source.random()
        if kind < 0.35:
            size = (1 << round(math.log2(max(size, 1)))) + (source.choice((-1, 1)) if kind < 0.2 else 0)
        elif kind < 0.55:
            size = max(8, round(size / 8) * 8)
        size = min(max(size, self.least), most)
        return size - (size - self.least) % self.step

    def divide(self, source: random.Random, size: int) -> int | tuple[int, ...]:
        """The size as ``build`` gets it: as a tuple, no more than that in all."""
        if self.dims is None:
            return size
        counts = [*range(self.dims[0], self.dims[1] + 1), *([1] if self.dims[0] <= 1 else [])]
        count = source.choice(counts)
        shape: list[int] = []
        for _ in range(count - 1):
            shape.append(log_uniform(source, 1, size))
            size //= shape[-1]
        shape += [size] * (count > 0)
        source.shuffle(shape)
        return tuple(shape)

    def smaller(self, value: int | tuple[int, ...]) -> Iterator[int | tuple[int, ...]]:
        """Simpler values, the simplest first."""
        if isinstance(value, tuple):
            if self.dims is not None and len(value) > self.dims[0]:
                yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
            for i, one in enumerate(value):
                yield from ((*value[:i], less, *value[i + 1 :]) for less in _smaller(one, 1, 1))
        else:
            yield from _smaller(value, self.least, self.step)


ROWS = Size(most=1 << 20, dims=(0, 3))
"""The dimensions before the last one, any number of them."""


@dataclass(frozen=True)
class Number:
    """A number between two bounds, log-uniform if both are positive; the bounds themselves come often."""

    least: float
    most: float

    def draw(self, source: random.Random) -> float:
        if source.random() < 0.15:
            return source.choice((self.least, self.most))
        if self.least > 0:
            value = math.exp(source.uniform(math.log(self.least), math.log(self.most)))
        else:
            value = source.uniform(self.least, self.most)
        return min(max(float(f"{value:.3g}"), self.least), self.most)


Choices = tuple[Any, ...]

# By how many parameters a function has: of `...` a type checker wouldn't know the parameters of a lambda.
Depending = (
    Callable[[], Choices]
    | Callable[[Any], Choices]
    | Callable[[Any, Any], Choices]
    | Callable[[Any, Any, Any], Choices]
    | Callable[[Any, Any, Any, Any], Choices]
    | Callable[[Any, Any, Any, Any, Any], Choices]
)

Drawn = Number | Choices | Depending


@dataclass(frozen=True)
class Vary:
    """How the values of an op's cases may vary.

    A random call has the values of a committed case; then other sizes, and often other values.

    Attributes:
        sizes: what is a size, by name: a parameter of ``build``, or something that only other values are made from.
        tensors: joint limits: the tensors that may be large, also those that only the reference makes, each as the names
            of the sizes that it is a product of.
        values: other parameters of ``build``: a `Number`; a tuple to choose from, also of these; or a function that gives
            such a tuple from the sizes and values that are its parameters. The latter are drawn for each call.
    """

    sizes: dict[str, Size]
    tensors: tuple[str, ...]
    values: dict[str, Drawn] = field(default_factory=dict[str, Drawn])

    @property
    def depending(self) -> dict[str, Callable[..., Choices]]:
        """The values that follow from others."""
        return {name: values for name, values in self.values.items() if callable(values)}


def _smaller(value: int, least: int, step: int) -> Iterator[int]:
    """Between a value and the least: that, then nearer and nearer to the value."""
    distance = (value - least) // step
    while distance > 0:
        yield value - distance * step
        distance //= 2


def log_uniform(source: random.Random, least: int, most: int) -> int:
    """A number between two bounds; 0 may be the least."""
    return min(most, max(least, int(math.exp(source.uniform(math.log(least or 0.5), math.log(most + 1))))))
