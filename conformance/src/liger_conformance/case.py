"""What an op is checked and timed at: cases are data, in `cases/<op>.py`."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

QUICK = ("odd", "edge", "option", "extreme")
"""The groups that every run checks, also in an interpreter. Sizes here are tiny."""

TIMED = ("small", "medium", "large")
"""The groups at a model's sizes: benchmarked, and checked on an accelerator under ``-m slow``."""


BIG = 1 << 24
"""Elements from which on values are drawn on the device. Fewer are drawn on the CPU, so that every device has the same."""


class Make:
    """Builds a case's tensors, the same ones for a seed whatever the dtype and device.

    Args:
        dtype: of the tensors that `randn` and `uniform` make, unless they say otherwise.
        device: where the tensors lie.
        seed: of the values.
    """

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self._cpu = torch.Generator("cpu").manual_seed(seed)
        self._own = torch.Generator(device).manual_seed(seed) if device != "cpu" else self._cpu

    def _draw(self, draw: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        big = torch.Size(shape).numel() > BIG
        device, generator = (self.device, self._own) if big else ("cpu", self._cpu)
        return draw(shape, generator=generator, device=device).to(device=self.device, dtype=dtype or self.dtype)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values."""
        return self._draw(torch.randn, shape, dtype)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Values in [0, 1)."""
        return self._draw(torch.rand, shape, dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._cpu).to(device=self.device, dtype=dtype)

    def mask(self, probability: float, *shape: int) -> Tensor:
        """True with the given probability."""
        return (torch.rand(shape, generator=self._cpu) < probability).to(self.device)


@dataclass(frozen=True, init=False)
class Case:
    """One set of sizes and options. `id` is unique in its op; `group` is one of `QUICK` or `TIMED`.

    Everything else is passed to the file's ``build``.
    """

    id: str
    group: str
    values: dict[str, Any] = field(hash=False)

    def __init__(self, id: str, group: str, **values: Any) -> None:
        if group not in (*QUICK, *TIMED):
            raise ValueError(f"case {id!r}: group is {group!r}; it takes {', '.join((*QUICK, *TIMED))}")
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "values", values)

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True)
class Bad:
    """A call that every implementation refuses with the same error, before any kernel runs.

    Attributes:
        id: what is wrong, in words joined by '-'.
        error: the exception's type.
        says: what its message must contain, besides the op's name: the argument's name, and what it got.
        build: makes the arguments, by name, from a `Make`.
    """

    id: str
    error: type[Exception]
    says: tuple[str, ...]
    build: Callable[[Make], dict[str, Any]]

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True)
class OpCases:
    """The cases of one op, as its file declares them."""

    op: str
    module: ModuleType

    @property
    def cases(self) -> tuple[Case, ...]:
        return self.module.CASES

    @property
    def bad(self) -> tuple[Bad, ...]:
        return self.module.BAD

    @property
    def huge(self) -> Case | None:
        """A case with a tensor of more than 2^31 elements, where such a tensor makes sense."""
        return getattr(self.module, "HUGE", None)

    def build(self, case: Case, dtype: torch.dtype, device: str, draw: int = 0) -> dict[str, Any]:
        """The case's arguments, by name. Another `draw` gives other values of the same sizes."""
        seed = zlib.crc32(f"{self.op}/{case.id}/{draw}".encode())
        return self.module.build(Make(dtype, device, seed), **case.values)


def cases_of(op: str) -> OpCases:
    """The cases of an op of liger_core, from this package's ``cases`` folder."""
    return OpCases(op, importlib.import_module(f"liger_conformance.cases.{op}"))
