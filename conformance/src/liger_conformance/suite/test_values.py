"""Values and gradients, by the float64 rule."""

import pytest
import torch

from liger_conformance.case import QUICK, TIMED, Case, cases_of
from liger_conformance.compare import check_reference, compare
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
)


def arguments_of(target: Target, case: Case, dtype: torch.dtype, draw: int = 0) -> Arguments:
    return cases_of(target.op.name).build(case, dtype, target.device, draw)


def check(target: Target, case: Case, dtype: torch.dtype, wanted: tuple[str, ...] | None = None) -> None:
    """One case of one target: every result, and the gradients of the `wanted` arguments."""
    arguments = arguments_of(target, case, dtype)
    baseline, truth = baseline_and_truth(target.op, arguments, wanted)
    with only(target):
        actual = evaluate(target.op, target.op, arguments, wanted)
    compare_outcomes(target, case, dtype, actual, baseline, truth, wanted)


def compare_outcomes(
    target: Target,
    case: Case,
    dtype: torch.dtype,
    actual: Outcome,
    baseline: Outcome,
    truth: Outcome,
    wanted: tuple[str, ...] | None = None,
) -> None:
    if target.backend is None and case.group != "extreme":  # there, cancellation leaves any formula few digits
        eps = max(torch.finfo(d).eps for d in floating_dtypes(arguments_of(target, case, dtype)))
        for name, value in actual.items().items():
            check_reference(name, value, truth.items()[name], eps)
    others: list[tuple[Outcome, Outcome]] = []
    assert actual.items().keys() == baseline.items().keys()
    for name, value in actual.items().items():

        def other_draws(name: str = name) -> list[tuple[torch.Tensor, torch.Tensor]]:
            if not others:
                draws = [arguments_of(target, case, dtype, draw) for draw in range(1, 5)]
                others.extend(baseline_and_truth(target.op, arguments, wanted) for arguments in draws)
            return [(b.items()[name], t.items()[name]) for b, t in others]

        compare(name, value, baseline.items()[name], truth.items()[name], other_draws)


def floating_dtypes(arguments: Arguments) -> set[torch.dtype]:
    return {v.dtype for v in arguments.values() if isinstance(v, torch.Tensor) and v.is_floating_point()}


def test_values(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The kernel is at most twice as far from the float64 answer as PyTorch is in the same dtype."""
    check(target, case, dtype)


@pytest.mark.slow
@pytest.mark.cases(groups=TIMED, dtypes=(torch.bfloat16, torch.float32))
def test_values_at_model_sizes(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The same, at the sizes of real models."""
    if target.device == "cpu":
        pytest.skip("the sizes of real models need an accelerator")
    arguments = arguments_of(target, case, dtype)
    try:
        baseline, truth = baseline_and_truth(target.op, arguments)
    except torch.OutOfMemoryError:
        pytest.skip("the float64 reference doesn't fit this device's memory")
    with only(target):
        actual = evaluate(target.op, target.op, arguments)
    compare_outcomes(target, case, dtype, actual, baseline, truth)


@pytest.mark.cases(groups=QUICK, dtypes=(torch.bfloat16,), first=2)
def test_partial_gradients(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Any subset of the arguments may want a gradient: those get the right one, and the others cost nothing."""
    arguments = complete(target.op, arguments_of(target, case, dtype))
    names = present(target.op, arguments)
    for bits in range(1, 2 ** len(names) - 1):
        wanted = tuple(name for i, name in enumerate(names) if bits >> i & 1)
        baseline, truth = baseline_and_truth(target.op, arguments, wanted)
        with only(target) as observed:
            actual = evaluate(target.op, target.op, arguments, wanted)
        compare_outcomes(target, case, dtype, actual, baseline, truth, wanted)
        for gradients in observed.gradients:
            for name, gradient in zip(target.op.differentiable, gradients, strict=True):
                assert (gradient is not None) == (name in wanted), f"{name}: {wanted} want a gradient"


@pytest.mark.cases(groups=QUICK, dtypes=(torch.bfloat16,), first=1)
def test_some_results_unused(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Each differentiable result may be the only one with an incoming gradient."""
    arguments = complete(target.op, arguments_of(target, case, dtype))
    with torch.no_grad():
        incoming = incoming_for(target.op, name_results(target.op, target.op.reference(**arguments)))
    for name, gradient in incoming.items():
        baseline, truth = baseline_and_truth(target.op, arguments, None, {name: gradient})
        with only(target):
            actual = evaluate(target.op, target.op, arguments, None, {name: gradient})
        for what, value in actual.gradients.items():
            compare(f"gradient of {what}", value, baseline.gradients[what], truth.gradients[what])
