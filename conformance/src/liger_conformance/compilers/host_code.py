"""Host code, called with tensors that hold no data: it launches what it would launch on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, product
from operator import gt
from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import TIMED, Case, Make, cases_of
from liger_conformance.compilers import Compiler, compiler_of
from liger_conformance.running import Arguments, Target, WrongRoute, complete, only, present
from liger_core import Unsupported
from liger_core.contract import Needs

FIRST = 2
"""How many of an op's cases stand for all where these would be too many. They have odd sizes."""


class Blank(Make):
    """Builds a case's tensors without their values."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device

    def _draw(self, draw: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def mask(self, probability: float, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device=self.device)


def compiled_cases(target: Target) -> list[tuple[Case, torch.dtype]]:
    """What is compiled of an op for a chip, so that all ops take minutes for all chips.

    For the language's first chip every case in bfloat16, and options and the sizes of models in float32 too. For the
    others, in bfloat16, the first cases, options and the larger sizes of models, and the largest in float32 too. Where
    the compiler is slow, the first chip gets what otherwise the others do, the smallest size of models, and the medium one
    in float32; and those get the first case and the largest.
    """
    found = cases_of(target.op.name)
    everything = (*found.cases, *([found.huge] if found.huge else []))
    first, slow = _is_first_chip(target), _compiler(target).slow
    if first and not slow:
        narrow = list(everything)
        wide = [case for case in everything if case.group in ("option", *TIMED)]
    elif first or not slow:
        sizes = TIMED if first else TIMED[1:]
        wide = [case for case in found.cases if case.group in sizes[1:]]
        narrow = [case for case in everything if case in found.cases[:FIRST] or case.group in ("option", *sizes)]
    else:
        wide = []
        narrow = [case for case in found.cases if case == found.cases[0] or case.group == "large"]
    return [(case, torch.bfloat16) for case in narrow] + [(case, torch.float32) for case in wide]


def call(target: Target, case: Case, dtype: torch.dtype, device: str) -> None:
    """Call a kernel file's forward and backward: for every gradient and, as `_needs` says, for fewer.

    Args:
        target: whose kernel file.
        case: its sizes and options.
        dtype: of its tensors.
        device: to make them on.

    Raises:
        Unsupported: the kernel refuses the case.
        WrongRoute: the host code computes by a reference, or by another op.
    """
    op, kernel = target.op, target.kernel
    assert kernel is not None
    arguments = complete(op, cases_of(op.name).module.build(Blank(dtype, device), **case.values))
    refuses = getattr(kernel, "refuses", None)
    if refuses is not None and (why := refuses(**arguments)):
        raise Unsupported(f"{target.language}: {why}")
    options = {name: arguments[name] for name in op.options}
    with torch.no_grad(), only(target):
        try:
            for needs in _needs(target, case, dtype, arguments):
                result, saved = kernel.forward(needs, **arguments)
                if any(needs):
                    for incoming in _incoming(target, case, dtype, result):
                        kernel.backward(needs, saved, *incoming, **options)
        except Unsupported as error:
            raise WrongRoute(f"{target} calls another op, which takes no tensors without data") from error


def _needs(target: Target, case: Case, dtype: torch.dtype, arguments: Arguments) -> list[Needs]:
    """Which gradients to ask for.

    All; for the first chip also none at the sizes of models, and any subset for the first cases.
    """
    op = target.op
    there = present(op, arguments)
    every = tuple(name in there for name in op.differentiable)
    if _takes_subsets(target, case, dtype):
        return [needs for needs in product((True, False), repeat=len(every)) if not any(map(gt, needs, every))]
    return [every, (False,) * len(every)] if case.group in TIMED and _is_first_chip(target) else [every]


def _incoming(target: Target, case: Case, dtype: torch.dtype, result: Any) -> list[list[Tensor | None]]:
    """Gradients of the results: of all, and for the first cases also of each one alone."""
    results = result if isinstance(result, tuple) else (result,)
    kept = target.op.keeps_gradient or (True,) * len(results)
    every = [r if r is None else torch.empty(r.shape, dtype=r.dtype, device=r.device) for r in compress(results, kept)]
    if sum(r is not None for r in every) < 2 or not _takes_subsets(target, case, dtype):
        return [every]
    return [every, *([r if r is other else None for r in every] for other in every if other is not None)]


def _takes_subsets(target: Target, case: Case, dtype: torch.dtype) -> bool:
    first = case in cases_of(target.op.name).cases[:FIRST]
    return first and dtype is torch.bfloat16 and _is_first_chip(target) and not _compiler(target).slow


def _is_first_chip(target: Target) -> bool:
    return _compiler(target).chips[0] == target.device


def _compiler(target: Target) -> Compiler:
    assert target.backend is not None
    compiler = compiler_of(target.backend)
    assert compiler is not None
    return compiler
