"""Random calls: the one that a seed and a number give, and a smaller one that fails like it."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import DEFAULT_MODE, QUICK, CallMode, Case, MetaMake, OpCases
from liger_conformance.layouts import LAYOUTS
from liger_conformance.target import Target
from liger_conformance.vary import DTYPES, Choices, Number, Vary, log_uniform
from liger_core.contract import Op, ops

ATTEMPTS = 200
"""How often a call is drawn until the contract takes it."""

MOST = {"passed": (1 << 24, 1 << 24), "compiled": (1 << 24, 1 << 24)}
"""Elements of a call's largest tensor, by lane: the limit of a call is drawn between these."""

MOST_ELSEWHERE = 1 << 3, 1 << 10
"""In an interpreter, where a program takes milliseconds, and on a CPU."""

DRAWN, TOGETHER, MOST_TOGETHER = 40, 2, 64
"""Calls that `together` draws and takes, and elements of their largest tensors."""

STEPS = 200
"""How many calls are tried in the search for a smaller one that fails."""


@dataclass(frozen=True)
class Call:
    """A call of an op: everything that it was drawn as.

    Attributes:
        values: of ``build``, and sizes that only other values are made from.
        mode: how it is called.
        dtype: of its tensors.
    """

    values: dict[str, Any]
    mode: CallMode
    dtype: torch.dtype


@dataclass(frozen=True)
class RandomCall:
    """A call's number, which a test gets: the same call of an op for a seed whatever the language."""

    op: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"{self.seed}-{self.number}"

    @property
    def id(self) -> str:
        """The id of its case. The values of its tensors follow from it."""
        return f"random-{self}"

    @property
    def dtype(self) -> torch.dtype:
        return self._source("dtype").choice(DTYPES)

    def _source(self, of: str) -> random.Random:
        return random.Random(f"{self.op}/{self.seed}/{self.number}/{of}")

    def draw(self, op_cases: OpCases, lane: str) -> Call:
        """The call, with tensors of a size that the lane bears."""
        source, vary = self._source("call"), op_cases.vary
        most = log_uniform(source, *MOST.get(lane, MOST_ELSEWHERE))
        for _ in range(ATTEMPTS):
            case = source.choice([case for case in op_cases.cases if case.group in QUICK])
            values = {name: value for name, value in case.values.items() if name not in vary.sizes}
            if source.random() < 0.5:
                values |= _draw_values(source, vary)
            values |= _draw_sizes(source, vary, most)
            for name, choices in vary.depending.items():
                values[name] = _pick(source, _call(choices, op_cases, values))
            call = Call(values, DEFAULT_MODE, self.dtype)
            if (arguments := arguments_of(op_cases, call)) is not None:
                call = replace(call, mode=_draw_mode(source, ops[self.op], arguments))
                if arguments_of(op_cases, call) is not None:
                    return call
        raise ValueError(f"{self.op}: of {ATTEMPTS} random calls the contract takes none: mend VARY in its cases")

    def case(self, op_cases: OpCases, call: Call) -> Case:
        """The call as a case."""
        return Case(self.id, "edge", mode=call.mode, **_for_build(op_cases, call.values))

    def line(self, op_cases: OpCases, call: Call) -> str:
        """The call as the op's file would have it among its cases."""
        case = self.case(op_cases, call)
        named = case.values if case.mode == DEFAULT_MODE else {"mode": case.mode, **case.values}
        words = [repr(case.id), repr(case.group), *(f"{name}={value!r}" for name, value in named.items())]
        return f"Case({', '.join(words)}),  # {str(call.dtype).removeprefix('torch.')}"


def together(found: OpCases, dtype: torch.dtype, seed: int) -> list[Case]:
    """The few of many small calls that have the most threes of options which no case has together; other ones for each seed."""
    source, vary = random.Random(f"{found.op}/{seed}/together"), found.vary
    cases = [case.values for case in found.cases if case.group in QUICK]
    seen = set[tuple[Any, ...]]().union(*(_threes(found, values) for values in cases))
    drawn: list[tuple[dict[str, Any], set[tuple[Any, ...]]]] = []
    for _ in range(DRAWN):
        values = _draw_values(source, vary, 0.6) | _draw_sizes(source, vary, MOST_TOGETHER)
        for name, choices in vary.depending.items():
            values[name] = _pick(source, _call(choices, found, values))
        if arguments_of(found, Call(values, DEFAULT_MODE, dtype)) is not None:
            drawn.append((values, _threes(found, values)))
    chosen: list[Case] = []
    for number in range(TOGETHER if drawn else 0):
        values, threes = max(drawn, key=lambda one: len(one[1] - seen))
        if threes <= seen:
            break
        chosen.append(Case(f"together-{seed}-{number}", "option", **_for_build(found, values)))
        seen |= threes
    return chosen


def _threes(found: OpCases, values: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Each three options of a call that haven't their defaults, with their values; all numbers are one."""
    defaults = ops[found.op].template | _defaults(found)
    options = [
        (name, "number" if isinstance(values[name], float) else repr(values[name]))
        for name in sorted(found.vary.values)
        if name in values and repr(values[name]) != repr(defaults.get(name))
    ]
    return {*itertools.combinations(options, 3)}


def lane_of(target: Target) -> str:
    """The lane that decides how large a target's calls are; on a CPU they are as in an interpreter."""
    return "interpreted" if target.device == "cpu" else target.lane


def arguments_of(op_cases: OpCases, call: Call) -> dict[str, Any] | None:
    """The call's arguments, without data; None where the contract doesn't take them."""
    op = ops[op_cases.op]
    case = Case("", "edge", mode=call.mode, **_for_build(op_cases, call.values))
    arguments = op.bind((), op_cases.make(case, MetaMake(call.dtype, "meta")))
    grads = op.differentiable if call.mode.grads is None else call.mode.grads
    for name in grads:
        if arguments[name] is not None:
            arguments[name] = arguments[name].detach().requires_grad_()
    checked = dict(arguments)
    if call.mode.autocast:  # which knows of no meta device
        cast = [name for name in op.autocast if arguments[name] is not None]
        checked |= {name: arguments[name].to(torch.bfloat16) for name in cast}
    try:
        op.examine(checked)
    except (TypeError, ValueError):
        return None
    return arguments


def smallest(op_cases: OpCases, call: Call, fails: Callable[[Call], bool]) -> Call:
    """The simplest call that fails of those that are found from one that does, a simplification at a time."""
    tried = 0
    seen = [call]
    progress = True
    while progress:
        progress = False
        for simpler in _simpler(op_cases, call):
            if simpler in seen or arguments_of(op_cases, simpler) is None:
                continue
            tried += 1
            if tried > STEPS:
                return call
            seen.append(simpler)
            if fails(simpler):
                call, progress = simpler, True
                break
    return call


def _simpler(op_cases: OpCases, call: Call) -> Iterator[Call]:
    """Calls that are simpler in one thing."""
    mode, vary = call.mode, op_cases.vary
    if mode != DEFAULT_MODE:
        yield replace(call, mode=DEFAULT_MODE)
    if mode.autocast:
        yield replace(call, mode=replace(mode, autocast=False))
    if mode.grads is not None:
        yield replace(call, mode=replace(mode, grads=None))
    if mode.twice is not None:
        yield replace(call, mode=replace(mode, twice=None))
    for name in mode.layouts:
        yield replace(call, mode=replace(mode, layouts={n: l for n, l in mode.layouts.items() if n != name}))
    if call.dtype is not torch.float32:
        yield replace(call, dtype=torch.float32)
    needed = {name for name, default in _defaults(op_cases).items() if default is inspect.Parameter.empty}
    for name in call.values:
        if name not in needed and name not in vary.sizes:
            yield replace(call, values={n: v for n, v in call.values.items() if n != name})
    for name, size in vary.sizes.items():
        for less in size.smaller(call.values[name]):
            values = call.values | {name: less}
            for other, choices in vary.depending.items():
                if other in values and values[other] not in (possible := _call(choices, op_cases, values)):
                    values[other] = possible[0]
            yield replace(call, values=values)


def _draw_sizes(source: random.Random, vary: Vary, most: int) -> dict[str, Any]:
    """Sizes, drawn one after the other in any order, each within what the others leave of the tensors."""
    sizes = {name: size.least for name, size in vary.sizes.items()}
    for name in source.sample(list(sizes), len(sizes)):
        left = [
            most // max(1, math.prod(sizes[other] for other in tensor.split() if other != name))
            for tensor in vary.tensors
            if name in tensor.split()
        ]
        sizes[name] = vary.sizes[name].draw(source, min(left, default=most))
    return {name: vary.sizes[name].divide(source, size) for name, size in sizes.items()}


def _draw_values(source: random.Random, vary: Vary, share: float = 0.4) -> dict[str, Any]:
    """About this share of the values that follow from no others."""
    drawn: dict[str, Any] = {}
    for name, values in vary.values.items():
        if not callable(values) and source.random() < share:
            drawn[name] = _pick(source, values)
    return drawn


def _pick(source: random.Random, values: Number | Choices) -> Any:
    chosen: Any = source.choice(values) if isinstance(values, tuple) else values
    return chosen.draw(source) if isinstance(chosen, Number) else chosen


def _draw_mode(source: random.Random, op: Op[..., Any], arguments: dict[str, Any]) -> CallMode:
    """The layout of some arguments and of the incoming gradients, what wants a gradient, and what is one tensor."""
    layouts: dict[str, str] = {}
    if source.random() < 0.6:
        for name in (*op.tensors, "incoming"):
            tensor = arguments.get(name)
            if source.random() < 0.5 and (name == "incoming" or (isinstance(tensor, Tensor) and tensor.dim())):
                fit = [key for key, layout in LAYOUTS.items() if tensor is None or layout.fits(tensor)]
                layouts[name] = source.choice(fit)
    there = [name for name in op.differentiable if arguments[name] is not None]
    grads, kind = None, source.random()
    if kind < 0.1:
        grads = ()
    elif kind < 0.4 and len(there) > 1:
        grads = tuple(source.sample(there, source.randrange(1, len(there))))
    autocast = source.random() < 0.07
    alike = [
        (one, other)
        for one, other in itertools.combinations(there, 2)
        if arguments[one].dim()
        and (arguments[one].shape, arguments[one].dtype) == (arguments[other].shape, arguments[other].dtype)
    ]
    twice = source.choice(alike) if alike and source.random() < 0.1 else None
    return CallMode(layouts, grads, autocast, twice)


def _defaults(op_cases: OpCases) -> dict[str, Any]:
    """The parameters of ``build``, and their defaults."""
    return {name: parameter.default for name, parameter in inspect.signature(op_cases.module.build).parameters.items()}


def _for_build(op_cases: OpCases, values: dict[str, Any]) -> dict[str, Any]:
    """The values that ``build`` takes, among them options that the contract has, in its order."""
    takes = (*_defaults(op_cases), *ops[op_cases.op].names, *(name for case in op_cases.cases for name in case.values))
    return {name: values[name] for name in dict.fromkeys(takes) if name in values}


def _call(choices: Callable[..., Choices], op_cases: OpCases, values: dict[str, Any]) -> Choices:
    """Choices of a value beside others; those that are not there have the default of ``build`` or of the op."""
    known = ops[op_cases.op].template | _defaults(op_cases) | values
    return choices(*(known[name] for name in inspect.signature(choices).parameters))
