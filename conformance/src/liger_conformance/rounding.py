"""Roundings of the reference, simulated: samples of its error, beside which a kernel's is judged."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from liger_conformance.dispatch import DispatchMode
from liger_conformance.evaluate import Arguments, complete, evaluate, has_rows, incoming_of, widen
from liger_core.contract import Op

DRAWS = 16
"""How many samples of the baseline's error are taken, in each way, where one may be small by luck."""


class Samples:
    """Samples of what roundings do to the reference at a call. They are drawn when they are first asked for.

    Args:
        op: the contract.
        arguments: by name, detached.
        grads: the arguments to differentiate by; None: all that are there.
        incoming: gradients of the results; None: those of `incoming_for`.
        rows: a result or gradient of so many rows has an error for each.
    """

    def __init__(
        self,
        op: Op[..., Any],
        arguments: Arguments,
        grads: tuple[str, ...] | None = None,
        incoming: dict[str, Tensor] | None = None,
        rows: int | None = None,
    ) -> None:
        self.op, self.grads, self.rows = op, grads, rows
        self.arguments = complete(op, arguments)
        self._incoming = incoming

    @functools.cached_property
    def incoming(self) -> dict[str, Tensor]:
        return incoming_of(self.op, self.arguments) if self._incoming is None else self._incoming

    @functools.cached_property
    def errors(self) -> dict[str, list[Tensor]]:
        """How far roundings may take an answer from the truth, for each result and gradient.

        Half of the samples are the baseline's largest error at other inputs, as near as roundings are. The others are that of
        the reference whose inputs and operations are all rounded to float32 at random, those that add up terms at each term:
        what float32 inside comes to with this condition. A baseline may do better for no merit, as in the gradient of a layer
        norm of two columns, where it cancels. What the truth decides, such as which elements are equal, stays decided. In the
        rounded samples alone, on which side of a constant bound a number lies may change, unless it is equal to the bound.
        """
        arguments, incoming = self.arguments, self.incoming
        wide, wide_incoming = _widened(arguments), _widened(incoming)
        halves = any(isinstance(v, Tensor) and v.dtype in (torch.bfloat16, torch.float16) for v in arguments.values())
        decisions: list[Tensor] = []
        with Deciding(decisions):
            truth = self._evaluate(wide, wide_incoming)
        errors: dict[str, list[Tensor]] = {name: [] for name in truth}
        for draw in range(1, DRAWS):
            near, near_incoming = moved(arguments, draw), moved(incoming, draw)
            with Decided(decisions):
                baseline = self._evaluate(near, near_incoming)
            near, near_incoming = _widened(near), _widened(near_incoming)
            with Decided(decisions):
                near_truth = self._evaluate(near, near_incoming)
            inexact, inexact_incoming = (moved(values, draw, torch.float32) for values in (wide, wide_incoming))
            with Decided(decisions, draw, halves):
                rounded = self._evaluate(inexact, inexact_incoming)
            for name, value in truth.items():
                by_row = self.rows is not None and has_rows(value, self.rows)
                errors[name].append(largest_error(baseline[name], near_truth[name], by_row))
                errors[name].append(largest_error(rounded[name], value, by_row))
        return errors

    @functools.cached_property
    def without_overflow(self) -> dict[str, Tensor | None]:
        """The baseline as it would be if its dtypes had no largest number: in float64, each operation rounded to their digits."""
        arguments, incoming = self.arguments, self.incoming
        wide, wide_incoming = _widened(arguments), _widened(incoming)
        dtypes: list[torch.dtype] = []
        with _Dtypes(dtypes):
            self._evaluate(arguments, incoming)
        with _Rounded(dtypes) as rounding:
            unbounded = self._evaluate(wide, wide_incoming)
        assert next(rounding.next, None) is None, f"{self.op.name}: the reference does other operations in float64"
        return unbounded

    def _evaluate(self, arguments: Arguments, incoming: dict[str, Tensor]) -> dict[str, Tensor | None]:
        return evaluate(self.op, self.op.reference, arguments, self.grads, incoming).items()


def _widened(values: dict[str, Any]) -> dict[str, Any]:
    return {name: widen(value) for name, value in values.items()}


def largest_error(baseline: Tensor | None, truth: Tensor | None, by_row: bool = False) -> Tensor:
    """The largest distance of the reference, in some dtype, from the truth; 0 for what has no values or nothing to round.

    One number, or with `by_row` one for each row of the first dimension.
    """
    if baseline is None or truth is None or not _is_inexact(baseline) or baseline.numel() == 0:
        return torch.zeros(1, dtype=torch.float64)
    baseline = baseline.to(truth.device)
    return error_and_scale(baseline, truth, baseline.isfinite() & truth.isfinite(), by_row)[0]


def error_and_scale(value: Tensor, truth: Tensor, finite: Tensor, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """The largest distance from the truth, and the largest magnitude of the truth, where the reference is finite."""
    zero = torch.zeros((), dtype=torch.float64, device=value.device)
    rows = truth.shape[0] if by_row else 1
    distance = (value.double() - truth).where(finite, zero).abs().reshape(rows, -1).amax(1)
    return distance, truth.where(finite, zero).double().abs().reshape(rows, -1).amax(1)


class Deciding(DispatchMode):
    """Notes what operations decide: the results that are no floating-point numbers, such as those of comparisons; and signs."""

    def __init__(self, decisions: list[Tensor]) -> None:
        mode: Any = super()
        mode.__init__()
        self.decisions = decisions

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in function._schema.returns):  # a view, or in place
            return result
        return tree_map_only(Tensor, functools.partial(self._one, function, args, kwargs or {}), result)

    def _one(self, function: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
        if not _is_inexact(value) or function._schema.name in _SIGNS:
            self.decisions.append(value)
        if _is_bounded(function, args):
            bound = torch.full_like(args[0], args[1])
            self.decisions.append(torch.isclose(args[0], bound, rtol=TIE, atol=TIE))
        return value


class Decided(Deciding):
    """Gives operations the results that were noted, and may round the others. Of signs only those of 0 are given.

    Args:
        decisions: of a run of the same operations.
        seed: of the roundings, which move the result of each operation in float64 by up to half a unit of rounding in
            float32, and with it the side of a constant bound on which it lies; None for no rounding. Those of a sum and of a
            matrix product move each term so, all terms of an element alike: in which order terms are added, and so how large
            the sums between are, is nobody's to say. A row of a log-softmax is moved as a whole besides: its log-sum-exp is
            rounded.
        halves: operands have half precision, whose products tensor cores add up, `AT_ONCE` at a time, to a sum that they cut
            off: always towards zero.
    """

    def __init__(self, decisions: list[Tensor], seed: int | None = None, halves: bool = False) -> None:
        super().__init__(decisions)
        self.next, self.seed, self.halves, self.rounded = iter(decisions), seed, halves, 0

    def _one(self, function: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
        if not _is_inexact(value):
            decided = next(self.next).to(value.device, value.dtype)
            if not _is_bounded(function, args):
                return decided
            tie = next(self.next).to(value.device)
            return decided if self.seed is None else torch.where(tie, decided, value)
        if function._schema.name in _SIGNS:
            return value.where(next(self.next).to(value.device) != 0, 0.0)
        if self.seed is None:
            return value
        self.rounded += 1
        generator = torch.Generator(value.device).manual_seed(zlib.crc32(f"{self.seed}/{self.rounded}".encode()))
        by = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float64) - 0.5
        cut = torch.rand((), generator=generator, device=value.device, dtype=torch.float64)
        terms, lost, walk = self._moves(function, args, kwargs, value)
        moved = by * terms - cut * lost
        if walk is not None:
            moved += torch.randn(value.shape, generator=generator, device=value.device, dtype=torch.float64) * walk
        if function._schema.name == "aten::_log_softmax":
            log_sums = _log_sums(args[0], value, args[1])
            by = torch.rand(log_sums.shape, generator=generator, device=value.device, dtype=torch.float64) - 0.5
            moved += by * log_sums
        # Infinite terms leave no error to speak of, and infinity times 0 is NaN.
        return value + torch.finfo(torch.float32).eps * moved.where(moved.isfinite(), 0.0)

    def _moves(
        self, function: Any, args: Any, kwargs: Any, value: Tensor
    ) -> tuple[Tensor, Tensor | float, Tensor | None]:
        """The rounded part of a result: itself, or the terms that are added up to it, without their signs; and what is cut off.

        Of a product of float32 matrices also how far the sums between take it, if its n products join one after another. Each of
        those sums is rounded by up to half a unit of itself, 1/√12 of one in root mean square. Their squares add up to
        n (value² / 3 + Σ products² / 6): they grow to the result along a straight line, and walk about it.

        Sums that are cut off lose about half a unit each time, and as much again because products are cut off before they join.
        Where terms cancel sums are as large as their root mean square suggests, of any sign. Those that don't grow to the result,
        of which they are half on average, and all lose alike.
        """
        name = function._schema.name
        if name == "aten::_log_softmax_backward_data":  # gradient − e^output · Σ gradient
            gradient, output, dim = _magnitude(args[0]), args[1], args[2]
            return gradient + output.exp() * gradient.sum(dim, keepdim=True), 0.0, None
        if name not in _SUMS and name not in _PRODUCTS:
            return value, 0.0, None
        terms = function(*tree_map_only(Tensor, _magnitude, args), **kwargs)
        if name not in _PRODUCTS:
            return terms, 0.0, None
        products = args[_PRODUCTS[name]].shape[-1]
        squares = function(*tree_map_only(Tensor, lambda operand: _magnitude(operand).square(), args), **kwargs)
        if not self.halves:
            return terms, 0.0, (products / 12 * (value.square() / 3 + squares / 6)).sqrt()
        times = products / AT_ONCE
        return terms + times * squares.sqrt(), times * value / 2, None


class _Dtypes(Deciding):
    """Notes the dtypes of operations' results, but for conversions, which float64 has none of."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__([])
        self.dtypes = dtypes

    def _one(self, function: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
        if _is_inexact(value) and function._schema.name != "aten::_to_copy":
            self.dtypes.append(value.dtype)
        return value


class _Rounded(Deciding):
    """Rounds the results of operations to the digits of the dtypes that were noted."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__([])
        self.next = iter(dtypes)

    def _one(self, function: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
        if not _is_inexact(value) or function._schema.name == "aten::_to_copy":
            return value
        kind = torch.finfo(next(self.next))
        if value.is_complex():
            return torch.view_as_complex(_rounded_to(torch.view_as_real(value), kind))
        return _rounded_to(value, kind)


def _rounded_to(value: Tensor, kind: torch.finfo) -> Tensor:
    """A float64 value, rounded to the digits of a dtype; the unit of its subnormal values is that of its smallest normal one."""
    digits = 1 - round(math.log2(kind.eps))
    exponent = torch.frexp(value)[1].clamp(min=1 + round(math.log2(kind.smallest_normal)))
    unit = torch.ldexp(torch.ones_like(value), exponent - digits)
    return torch.where(value.isfinite(), (value / unit).round() * unit, value)


def _magnitude(value: Tensor) -> Tensor:
    return value.abs() if _is_inexact(value) else value


def _log_sums(x: Tensor, log_softmax: Tensor, dim: int) -> Tensor:
    """The rounded part of each row: its log-sum-exp, or the logarithm that is added to its maximum, whichever is larger."""
    whole = (x - log_softmax).nan_to_num(0.0, 0.0, 0.0)
    return torch.maximum(whole.abs(), (whole - x.amax(dim, keepdim=True)).abs()).amax(dim, keepdim=True)


AT_ONCE = 16
"""Products of half-precision numbers that a tensor core adds to a float32 sum at a time."""

TIE = 1e-12
"""Distance from a bound, absolute or relative to it, at which a float64 number counts as equal to it."""

_BOUNDS = ("aten::le", "aten::ge", "aten::lt", "aten::gt")
_SIGNS = ("aten::sgn", "aten::sign")
_SUMS = ("aten::sum", "aten::mean")
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::mv": 0, "aten::dot": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Matrix products, and where their first operand stands."""


def _is_bounded(function: Any, args: Any) -> bool:
    """Whether an operation compares numbers with a constant, as the gradient of a clamp does."""
    return function._schema.name in _BOUNDS and not isinstance(args[1], Tensor) and _is_inexact(args[0])


def _is_inexact(value: Tensor) -> bool:
    """Whether roundings of a value are simulated: those to 8 bits are the op's result, and stay as they are decided."""
    return (value.is_floating_point() and value.element_size() > 1) or value.is_complex()


def moved(values: dict[str, Any], draw: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The values, of which floating-point ones are moved by up to a unit of rounding, otherwise for each draw.

    The unit is of `dtype`, or of each one's own. Zeros, infinities and NaN stay.
    """
    moved = dict(values)
    for name, value in values.items():
        if isinstance(value, Tensor) and _is_inexact(value):
            eps = torch.finfo(dtype or value.dtype).eps
            generator = torch.Generator(value.device).manual_seed(zlib.crc32(f"{name}/{draw}".encode()))
            by = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float32)
            moved[name] = (widen(value) * (1 + eps * (2 * widen(by) - 1))).to(value.device, value.dtype)
    return moved
