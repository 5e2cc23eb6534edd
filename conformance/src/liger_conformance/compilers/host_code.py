"""Host code, called with tensors that hold no data: it launches what it would launch on a device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress, product
from operator import gt

import torch
from torch import Tensor

from liger_conformance.case import TIMED, Case, MetaMake, cases_of
from liger_conformance.compilers import Compiler, compiler_of
from liger_conformance.evaluate import Arguments, complete, kept_gradients, present
from liger_conformance.layouts import LAYOUTS
from liger_conformance.route import WrongRoute, only
from liger_conformance.target import Target
from liger_core import Unsupported
from liger_core.contract import Needs

FIRST = 2
"""How many of an op's cases stand for all where these would be too many. They have odd sizes."""


def compiled_cases(target: Target) -> list[tuple[Case, torch.dtype]]:
    """Cases of an op that are compiled for a chip, chosen so that all ops take minutes for all chips.

    For the language's first chip every case in bfloat16, options and the sizes of models in float32 too, and the first case
    in float16. What the other chips have otherwise, fewer registers or less shared memory, shows in large tiles: they get the
    first case and the largest ones in bfloat16, and the latter in float32. Where the compiler is slow, the first chip gets the
    odd cases, options and the sizes of models, and the larger of these in float32; and the others nothing in float32.
    """
    found = cases_of(target.op.name)
    everything = (*found.cases, *([found.huge] if found.huge else []))
    first, slow = _is_first_chip(target), _compiler(target).slow
    if first and not slow:
        narrow = list(everything)
        wide = [case for case in everything if case.group in ("option", *TIMED)]
    elif first:
        narrow = [case for case in everything if case in found.cases[:FIRST] or case.group in ("odd", "option", *TIMED)]
        wide = [case for case in found.cases if case.group in TIMED[1:]]
    else:
        narrow = [
            case for case in (found.cases if slow else everything) if case == found.cases[0] or case.group == "large"
        ]
        wide = [] if slow else [case for case in found.cases if case.group == "large"]
    half = found.cases[:1] if first else ()
    return [
        *((case, torch.bfloat16) for case in narrow),
        *((case, torch.float32) for case in wide),
        *((case, torch.float16) for case in half),
    ]


def call(target: Target, case: Case, dtype: torch.dtype, device: str) -> None:
    """Call a kernel file's forward and backward: for every gradient and, as `_needs` says, for fewer.

    For the first chip the first case's tensors are transposed too, which host code copies or takes as they are, and then far
    apart; and backward is called twice, the second time without what forward made for it.

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
    arguments = complete(op, cases_of(op.name).make(case, MetaMake(dtype, device)))
    refuses = getattr(kernel, "refuses", None)
    if refuses is not None and (why := refuses(**arguments)):
        raise Unsupported(f"{target.language}: {why}")
    options = {name: arguments[name] for name in op.options}
    with torch.no_grad(), only(target):
        try:
            for given, needs in _calls(target, case, dtype, arguments, refuses):
                result, saved = kernel.forward(needs, **given)
                if any(needs):
                    for incoming in _incoming(target, case, dtype, arguments, result) * (
                        2 if given is not arguments else 1
                    ):
                        kernel.backward(needs, saved, *incoming, **options)
        except Unsupported as error:
            raise WrongRoute(f"{target} calls another op, which takes no tensors without data") from error


def _calls(
    target: Target,
    case: Case,
    dtype: torch.dtype,
    arguments: Arguments,
    refuses: Callable[..., str | None] | None,
) -> list[tuple[Arguments, Needs]]:
    """The arguments of each call, and which gradients it asks for."""
    needs = _needs(target, case, dtype, arguments)
    calls = [(arguments, some) for some in needs]
    if case == cases_of(target.op.name).cases[0] and _is_first_chip(target):
        for layout in (_transposed, _far_apart):
            given = {name: layout(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
            if refuses is None or not refuses(**given):
                calls.append((given, needs[0]))
    return calls


def _transposed(tensor: Tensor) -> Tensor:
    """Tensor of the same sizes, with the last two dimensions swapped in memory."""
    return LAYOUTS["transposed"].apply(tensor) if tensor.dim() else tensor


def _far_apart(tensor: Tensor) -> Tensor:
    """Tensor of the same sizes, with rows, or its first dimension's items, so far apart that offsets need 64 bits."""
    if tensor.dim() < 2:
        return tensor
    strides = ((1 << 31) + 8, *tensor.contiguous().stride()[1:])
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _needs(target: Target, case: Case, dtype: torch.dtype, arguments: Arguments) -> list[Needs]:
    """Which gradients to ask for.

    All, or those that the case wants. For the first chip also none, at the sizes of models; and for the first cases none,
    each alone, and all but each. Where the compiler is slow: none and each alone, for the first case.
    """
    op = target.op
    there = present(op, arguments)
    wanted = there if case.mode.grads is None else case.mode.grads
    every = tuple(name in there and name in wanted for name in op.differentiable)
    if _takes_subsets(target, case, dtype):
        subsets = [needs for needs in product((True, False), repeat=len(every)) if not any(map(gt, needs, every))]
        sizes = (0, 1) if _compiler(target).slow else (0, 1, sum(every) - 1)
        return [needs for needs in subsets if needs == every or sum(needs) in sizes]
    return [every, (False,) * len(every)] if case.group in TIMED and _is_first_chip(target) else [every]


def _incoming(
    target: Target, case: Case, dtype: torch.dtype, arguments: Arguments, result: Tensor | tuple[Tensor | None, ...]
) -> list[list[Tensor | None]]:
    """Gradients of the results: of all, and for the first cases also of each one alone."""
    results = result if isinstance(result, tuple) else (result,)
    kept = kept_gradients(target.op, arguments, len(results))
    every = [r if r is None else torch.empty(r.shape, dtype=r.dtype, device=r.device) for r in compress(results, kept)]
    if sum(r is not None for r in every) < 2 or not _takes_subsets(target, case, dtype):
        return [every]
    return [every, *([r if r is other else None for r in every] for other in every if other is not None)]


def _takes_subsets(target: Target, case: Case, dtype: torch.dtype) -> bool:
    first = cases_of(target.op.name).cases[: 1 if _compiler(target).slow else FIRST]
    return case in first and dtype is torch.bfloat16 and _is_first_chip(target)


def _is_first_chip(target: Target) -> bool:
    return _compiler(target).chips[0] == target.device


def _compiler(target: Target) -> Compiler:
    assert target.backend is not None
    compiler = compiler_of(target.backend)
    assert compiler is not None
    return compiler
