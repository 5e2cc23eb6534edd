"""Cases, at which an op is checked, timed and compared: data, in `cases/<op>.py`."""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_conformance.layouts import LAYOUTS
from liger_conformance.vary import Vary

QUICK = ("odd", "edge", "option", "extreme")
"""The groups that every run checks, also in an interpreter. Sizes here are tiny."""

TIMED = ("small", "medium", "large")
"""The groups at a model's sizes: benchmarked, and checked on an accelerator under ``-m slow``."""


SHORT = 1 << 9
"""Elements of a tensor beyond which a case is long for an interpreter, where a program takes milliseconds."""

BIG = 1 << 20
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
        return torch.randint(low, high, shape, generator=self._cpu, device="cpu").to(device=self.device, dtype=dtype)

    def mask(self, probability: float, *shape: int) -> Tensor:
        """True with the given probability."""
        return (torch.rand(shape, generator=self._cpu, device="cpu") < probability).to(self.device)


class MetaMake(Make):
    """Builds a case's tensors without their values."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device

    def _draw(self, draw: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def mask(self, probability: float, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device=self.device)


@dataclass(frozen=True)
class CallMode:
    """How `test_values` calls an op with a case's arguments, when it is not the plain way.

    Attributes:
        layouts: of arguments, by name, as in `LAYOUTS`. ``incoming`` stands for the gradients of the results.
        grads: the arguments that want a gradient; None: all. For none of them, the call is without grad mode. The same
            bits again, and writes to what is given, are looked for in these gradients too.
        autocast: the call is under autocast, to bfloat16.
        twice: two arguments that are one tensor, the first one's.
    """

    layouts: dict[str, str] = field(default_factory=dict[str, str], hash=False)
    grads: tuple[str, ...] | None = None
    autocast: bool = False
    twice: tuple[str, str] | None = None

    def __repr__(self) -> str:
        changed = [
            f"{f.name}={value!r}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != getattr(DEFAULT_MODE, f.name)
        ]
        return f"CallMode({', '.join(changed)})"


DEFAULT_MODE = CallMode()


@dataclass(frozen=True, init=False)
class Case:
    """A set of sizes and options. `id` is unique in its op; `group` is one of `QUICK` or `TIMED`.

    `holds` gives one element of an argument another value, for infinities: where the reference then gives infinity or
    NaN, a kernel gives either, as ``docs/numerics.md`` says. `by_row` names arguments whose rows are multiplied by 100 and by
    1/100 in turn; ``incoming`` stands for the gradients of the results. What has the same rows is then judged row by row.
    Everything else is passed to the file's ``build``.
    """

    id: str
    group: str
    mode: CallMode
    holds: dict[str, float] = field(hash=False)
    by_row: tuple[str, ...]
    values: dict[str, Any] = field(hash=False)

    def __init__(
        self,
        id: str,
        group: str,
        *,
        mode: CallMode = DEFAULT_MODE,
        holds: dict[str, float] | None = None,
        by_row: tuple[str, ...] = (),
        **values: Any,
    ) -> None:
        if group not in (*QUICK, *TIMED):
            raise ValueError(f"case {id!r}: group is {group!r}; it takes {', '.join((*QUICK, *TIMED))}")
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "mode", mode)
        object.__setattr__(self, "holds", holds or {})
        object.__setattr__(self, "by_row", by_row)
        object.__setattr__(self, "values", values)

    def __str__(self) -> str:
        return self.id


Passes = Mapping[str, float]
"""Argument, or ``result``, to the number of times that as many bytes as it has are read or written."""


class Moves(NamedTuple):
    """The tensors that have to cross the device's memory, and how often: what a speed is measured against.

    A kernel that reads x once and writes a result of its size moves x twice. Tensors of one row, and tables shared by all
    heads, are left out. `backward` is beyond `forward`; what it has to read again, because it fits in no cache, counts again.
    """

    forward: Passes
    backward: Passes


class Product(NamedTuple):
    """A matrix product x[N, H] · weight[V, H]ᵀ, of 2·N·H·V operations, and how often one of its size is computed.

    A `grouped` one has a weight[E, V, H], and `x` names the experts of N rows, each of which takes one.
    """

    x: str
    weight: str
    forward: int
    backward: int
    grouped: bool = False


@dataclass(frozen=True)
class OpCases:
    """The cases of one op, as its file declares them."""

    op: str
    module: ModuleType

    @property
    def cases(self) -> tuple[Case, ...]:
        return self.module.CASES

    @property
    def kind(self) -> str:
        """The kind of op, which is a row of the table in README."""
        return self.module.KIND

    @property
    def out_of_range(self) -> tuple[Case, ...]:
        """Cases with a label or an index that the op's value check refuses with an IndexError."""
        return getattr(self.module, "OUT_OF_RANGE", ())

    @property
    def huge(self) -> Case | None:
        """A case with a tensor of more than 2^31 elements, where such a tensor makes sense."""
        return getattr(self.module, "HUGE", None)

    @property
    def moves(self) -> Moves | None:
        """The memory traffic that bounds the op; None: its products do."""
        return getattr(self.module, "MOVES", None)

    @property
    def products(self) -> tuple[Product, ...]:
        """The matrix products that bound the op."""
        return getattr(self.module, "PRODUCTS", ())

    @property
    def eager(self) -> Callable[..., Any]:
        """PyTorch's own function where there is one, else the formula, in float32 where bfloat16 would not do.

        It takes the arguments of the timed cases, by name.
        """
        return self.module.eager

    @property
    def liger(self) -> Callable[..., Any] | None:
        """liger-kernel's function, whose first argument is its module of Functions; None: it has none."""
        return self.module.liger

    @property
    def float16_apart(self) -> bool:
        """Whether kernels compute float16 by other means than bfloat16."""
        return getattr(self.module, "FLOAT16_APART", False)

    @property
    def exact(self) -> bool:
        """Whether results have the bits of the reference's, which is a formula without another right answer."""
        return getattr(self.module, "EXACT", False)

    @property
    def dtypes_apart(self) -> bool:
        """Whether some kernels take only float32, or only bfloat16."""
        return getattr(self.module, "DTYPES_APART", False)

    @property
    def vary(self) -> Vary:
        """How the values of the cases may vary in random calls."""
        return self.module.VARY

    @functools.cache  # noqa: B019  there are few, for good
    def is_long(self, case: Case) -> bool:
        """Whether a tensor of the case has more than `SHORT` elements."""
        # With values: of operations without, PyTorch imports Dynamo.
        arguments = self.build(case, torch.bfloat16, "cpu").values()
        return any(isinstance(value, Tensor) and value.numel() > SHORT for value in arguments)

    def build(self, case: Case, dtype: torch.dtype, device: str, draw: int = 0) -> dict[str, Any]:
        """The case's arguments, by name. Another `draw` gives other values of the same sizes."""
        seed = zlib.crc32(f"{self.op}/{case.id}/{draw}".encode())
        return self.make(case, Make(dtype, device, seed))

    def make(self, case: Case, make: Make) -> dict[str, Any]:
        """The case's arguments, by name, of the tensors that `make` makes."""
        arguments = self.module.build(make, **case.values)
        for name in case.by_row:
            if name != "incoming":
                arguments[name] = uneven(arguments[name])
        for name, value in case.holds.items():
            arguments[name].view(-1)[arguments[name].numel() // 2] = value
        for name, layout in case.mode.layouts.items():
            if arguments.get(name) is not None:
                arguments[name] = LAYOUTS[layout].apply(arguments[name])
        if case.mode.twice is not None:
            one, other = case.mode.twice
            arguments[other] = arguments[one]
        return arguments


def uneven(tensor: Tensor) -> Tensor:
    """A tensor whose rows are multiplied by 100 and by 1/100 in turn."""
    even = torch.arange(tensor.shape[0], device=tensor.device) % 2 == 0
    factors = torch.where(even, 100.0, 0.01).to(tensor.dtype)
    return tensor * factors.view(-1, *[1] * (tensor.dim() - 1))


def cases_of(op: str) -> OpCases:
    """The cases of an op of liger_core, from this package's ``cases`` folder."""
    return OpCases(op, importlib.import_module(f"liger_conformance.cases.{op}"))
