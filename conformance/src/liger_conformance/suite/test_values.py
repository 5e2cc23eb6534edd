"""Values and gradients, by the float64 rule."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import liger_core
from liger_conformance.case import QUICK, TIMED, Case, cases_of
from liger_conformance.compare import DRAWS, check_reference, compare
from liger_conformance.running import (
    Arguments,
    Outcome,
    Target,
    baseline_and_truth,
    complete,
    evaluate,
    incoming_for,
    name_results,
    only,
    present,
    refusal,
    require,
)


def arguments_of(target: Target, case: Case, dtype: torch.dtype, draw: int = 0) -> Arguments:
    return cases_of(target.op.name).build(case, dtype, target.device, draw)


def check(
    target: Target,
    build: Callable[[int], Arguments],
    wanted: tuple[str, ...] | None = None,
    incoming: dict[str, torch.Tensor] | None = None,
    call: Callable[..., Any] | None = None,
) -> Outcome:
    """Run a target, prove that it ran, and compare every result and the gradients of the `wanted` arguments.

    Args:
        target: what is checked.
        build: makes the arguments of a draw, by number; 0 is the one that is checked.
        wanted: the arguments to differentiate by; None: all.
        incoming: gradients of the results; None: random ones.
        call: what runs the op, compiled code that can't be watched; None: the op itself.

    Raises:
        Mismatch: a value is wrong.
        WrongRoute: another implementation ran.
    """
    arguments = complete(target.op, build(0))
    expected = None
    if refusal(target, arguments) is None:  # else the kernel is not run, which says so below
        # Before the kernel, which may write to what it is given: that is another test's to say.
        with contextlib.suppress(torch.OutOfMemoryError):
            expected = baseline_and_truth(target.op, arguments, wanted, incoming)
    if call is None:
        actual = _run(target, arguments, wanted, incoming)
    else:
        with liger_core.use(target.language):
            actual = evaluate(target.op, call, arguments, wanted, incoming)
    if expected is None:  # a kernel that runs out of memory, too, has failed above
        pytest.skip("the float64 reference doesn't fit this device's memory")
    baseline, truth = expected
    others: list[tuple[Outcome, Outcome]] = []

    def other_draws(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not others:
            draws = range(1, DRAWS)
            others.extend(baseline_and_truth(target.op, build(draw), wanted, incoming, draw) for draw in draws)
        return [(b.items()[name], t.items()[name]) for b, t in others]

    same = actual.items().keys() == baseline.items().keys()
    require(same, f"there are {', '.join(actual.items())}; the contract says {', '.join(baseline.items())}")
    for name, value in actual.items().items():
        compare(name, value, baseline.items()[name], truth.items()[name], lambda name=name: other_draws(name))
    return actual


def _run(
    target: Target, arguments: Arguments, wanted: tuple[str, ...] | None, incoming: dict[str, torch.Tensor] | None
) -> Outcome:
    """Run the target and no other; each gradient has its argument's shape and dtype before autograd sees to that."""
    with only(target) as observed:
        actual = evaluate(target.op, target.op, arguments, wanted, incoming)
    for gradients in observed.gradients:
        for name, gradient in zip(target.op.differentiable, gradients, strict=True):
            for what in ("shape", "dtype") if gradient is not None else ():
                got, contract = getattr(gradient, what), getattr(arguments[name], what)
                require(
                    got == contract, f"backward gives {name} a gradient of {what} {got}; the contract says {contract}"
                )
    return actual


def floating_dtypes(arguments: Arguments) -> set[torch.dtype]:
    return {v.dtype for v in arguments.values() if isinstance(v, torch.Tensor) and v.is_floating_point()}


def test_values(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The kernel is at most twice as far from the float64 answer as PyTorch is in the same dtype."""
    actual = check(target, lambda draw: arguments_of(target, case, dtype, draw))
    if target.backend is None and case.group != "extreme":  # there, cancellation leaves any formula few digits
        arguments = arguments_of(target, case, dtype)
        truth = baseline_and_truth(target.op, arguments)[1]
        eps = max(torch.finfo(d).eps for d in floating_dtypes(arguments))
        for name, value in actual.items().items():
            check_reference(name, value, truth.items()[name], eps)


def need_accelerator(target: Target) -> None:
    """Skip, with the reason, what would take a CPU hours."""
    if target.device == "cpu":
        pytest.skip("the sizes of real models need an accelerator")


@pytest.mark.slow
@pytest.mark.cases(groups=TIMED, dtypes=(torch.bfloat16, torch.float32))
def test_values_at_model_sizes(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The same, at the sizes of real models."""
    need_accelerator(target)
    check(target, lambda draw: arguments_of(target, case, dtype, draw))


@pytest.mark.cases(groups=QUICK, dtypes=(torch.bfloat16,), first=2)
def test_partial_gradients(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Any subset of the arguments may want a gradient: those get the right one, and the others cost nothing."""
    names = present(target.op, complete(target.op, arguments_of(target, case, dtype)))
    for bits in range(1, 2 ** len(names) - 1):
        wanted = tuple(name for i, name in enumerate(names) if bits >> i & 1)
        check(target, lambda draw: arguments_of(target, case, dtype, draw), wanted)
        with only(target) as observed:
            evaluate(target.op, target.op, arguments_of(target, case, dtype), wanted)
        for gradients in observed.gradients:
            for name, gradient in zip(target.op.differentiable, gradients, strict=True):
                require((gradient is not None) == (name in wanted), f"{name}: {wanted} want a gradient")


@pytest.mark.cases(groups=QUICK, dtypes=(torch.bfloat16,), first=1)
def test_some_results_unused(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Each differentiable result may be the only one with an incoming gradient."""
    arguments = complete(target.op, arguments_of(target, case, dtype))
    with torch.no_grad():
        incoming = incoming_for(target.op, name_results(target.op, target.op.reference(**arguments)))
    for name, gradient in incoming.items():
        check(target, lambda draw: arguments_of(target, case, dtype, draw), None, {name: gradient})
