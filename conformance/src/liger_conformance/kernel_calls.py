"""Calls that launch each kernel of an op in each way: with rows apart, for each gradient alone, and without gradients.

Which kernels a case launches is found by host code alone, with no kernel run, which takes milliseconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import DEFAULT_MODE, Case, cases_of
from liger_conformance.dividing import names_of, place_of_rows
from liger_conformance.evaluate import Arguments, complete, evaluate, incoming_of, present
from liger_conformance.interpreters.triton import Launch
from liger_conformance.target import Target, refusal
from liger_core.dimensions import independent

FEW = 64
"""Programs that an interpreter runs soon: of the calls that launch a kernel, the one with the longest rows and no more programs
is taken, or else the one with the fewest."""

FAR = 1 << 31
"""The least offset that 32 bits don't hold."""


class Way(NamedTuple):
    """How a kernel is called.

    Attributes:
        apart: rows lie apart, by strides that keep them aligned.
        grads: the arguments that want a gradient; None: all.
    """

    apart: bool
    grads: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.apart:
            return "rows apart"
        return f"{', '.join(self.grads)} alone" if self.grads else "no gradients"


APART = Way(True, None)


class KernelCall(NamedTuple):
    """A case in some dtype, and the ways to call it."""

    case: Case
    dtype: torch.dtype
    ways: tuple[Way, ...]


def far_apart(tensor: Tensor, number: int) -> Tensor:
    """The same values in rows so far apart that the last one's offset passes 2^31; for each number another multiple of 16.

    Memory that is not touched is not taken on a CPU.
    """
    rows = tensor.shape[:-1].numel()
    if tensor.dim() < 2 or rows < 2 or not tensor.numel():
        return tensor
    columns = tensor.shape[-1]
    stride = -(-max(FAR // (rows - 1), columns) // 16) * 16 + 16 * (number + 1)
    strides = [s * stride for s in torch.empty(tensor.shape[:-1], device="meta").stride()]
    storage = torch.empty((rows - 1) * stride + columns, dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, (*strides, 1)).copy_(tensor)


def rows_apart(values: dict[str, Any], start: int = 0) -> dict[str, Any]:
    """The values, each tensor with a row stride of its own, numbered from `start`."""
    tensors = ((n, v) for n, v in values.items() if isinstance(v, Tensor))
    return values | {n: far_apart(v, start + i) for i, (n, v) in enumerate(tensors)}


def with_three_rows(target: Target, arguments: Arguments) -> Arguments:
    """The arguments, of one or two rows three times as many: a stride then has 32 bits, and the last offset more."""
    op = target.op
    if op.dimensions is not None and not any(map(independent, names_of(op, arguments).get(op.names[0], ()))):
        return arguments
    rows = place_of_rows(op, arguments)
    if rows.number not in (1, 2):
        return arguments
    return {n: torch.cat([v] * 3, rows.arguments[n]) if n in rows.arguments else v for n, v in arguments.items()}


def as_called(target: Target, arguments: Arguments, way: Way) -> tuple[Arguments, dict[str, Tensor]]:
    """The arguments and incoming gradients of a call in some way."""
    if not way.apart:
        return arguments, incoming_of(target.op, arguments)
    arguments = with_three_rows(target, arguments)
    return rows_apart(arguments), rows_apart(incoming_of(target.op, arguments), len(arguments))


def ways(target: Target, arguments: Arguments) -> Iterator[Way]:
    """The ways to call a kernel beside that with rows apart."""
    if len(names := present(target.op, arguments)) > 1:
        for name in names:
            yield Way(False, (name,))
    yield Way(False, ())


def launches_of(target: Target, arguments: Arguments, way: Way) -> list[Launch]:
    """The launches that a call would make."""
    arguments, incoming = as_called(target, arguments, way)
    assert target.backend is not None
    with (
        liger_core.use(target.language),
        interpreters.without_launching(target.backend) as launches,
        torch.set_grad_enabled(way.grads != ()),
    ):
        evaluate(target.op, target.op, arguments, way.grads, incoming)
    return launches


class _Candidate(NamedTuple):
    """A call in some way, and the kernels that it launches, each with each tensor of the call: optional ones have strides too.

    The least rank is the cheapest call that tells most.
    """

    rank: tuple[Any, ...]
    case: Case
    dtype: torch.dtype
    kernels: frozenset[str]


def plain_calls(target: Target) -> Iterator[tuple[Case, torch.dtype, Arguments]]:
    """Cases that are called in the plain way: in float32, which most other tests leave out; in bfloat16 if float32 is refused, or
    has kernels of its own.
    """
    op_cases = cases_of(target.op.name)
    for case in op_cases.cases:
        if case.group not in ("odd", "edge", "option") or case.mode != DEFAULT_MODE or case.by_row or case.holds:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            arguments = complete(target.op, op_cases.build(case, dtype, target.device))
            if refusal(target, arguments) is None:
                yield case, dtype, arguments
                if not op_cases.dtypes_apart:
                    break


def kernel_calls(target: Target) -> list[KernelCall]:
    """For each way, calls that launch all kernels which its calls reach.

    Of the calls that launch the same kernels with rows apart, the best one stands for all in the other ways.
    """
    candidates: dict[Way, list[_Candidate]] = {}
    number = itertools.count()

    def try_call(case: Case, dtype: torch.dtype, arguments: Arguments, way: Way) -> _Candidate:
        launches = launches_of(target, arguments, way)
        length = max(v.shape[-1] for v in arguments.values() if isinstance(v, Tensor) and v.dim())
        programs = sum(math.prod(launch.grid) for launch in launches)
        few = programs <= FEW
        rank = not few, -length if few else programs, programs, dtype is not torch.float32, next(number)
        inputs = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        kernels = frozenset(f"{launch} with {name}" for launch in launches for name in inputs)
        candidate = _Candidate(rank, case, dtype, kernels)
        candidates.setdefault(way, []).append(candidate)
        return candidate

    alike: dict[frozenset[str], list[tuple[_Candidate, Arguments]]] = {}
    for case, dtype, arguments in plain_calls(target):
        candidate = try_call(case, dtype, arguments, APART)
        alike.setdefault(candidate.kernels, []).append((candidate, arguments))
    for calls in alike.values():
        best, arguments = min(calls, key=lambda call: call[0].rank)
        for way in ways(target, arguments):
            try_call(best.case, best.dtype, arguments, way)
    chosen: dict[tuple[Case, torch.dtype], list[Way]] = {}
    for way, calls in candidates.items():
        left = frozenset[str]().union(*(call.kernels for call in calls))
        while left:
            best = min(calls, key=lambda call: (-len(call.kernels & left), call.rank))
            left -= best.kernels
            chosen.setdefault((best.case, best.dtype), []).append(way)
    return [KernelCall(case, dtype, tuple(taken)) for (case, dtype), taken in chosen.items()]
