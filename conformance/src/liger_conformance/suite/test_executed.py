"""Kernels compiled for a chip compute what they should, run on the CPU: under ``--compile --execute``, and nothing else."""

import pytest
import torch
from torch import Tensor

from liger_conformance.case import Case, cases_of
from liger_conformance.compare import compare
from liger_conformance.compilers import CannotExecute, executor_of
from liger_conformance.evaluate import (
    Outcome,
    baseline_and_truth,
    complete,
    incoming_for,
    kept_gradients,
    name_results,
    present,
    require,
)
from liger_conformance.report import NOT_CLAIMED
from liger_conformance.rounding import Samples
from liger_conformance.route import only
from liger_conformance.target import Target, refusal

pytestmark = pytest.mark.lane("executed")


def execute(target: Target, case: Case, dtype: torch.dtype) -> Outcome:
    """Call a kernel file's forward and backward, for the gradients that the case wants."""
    op, kernel = target.op, target.kernel
    assert target.backend is not None
    assert kernel is not None
    executor = executor_of(target.backend)
    assert executor is not None
    with executor.executing(target.device) as device, torch.no_grad(), only(target):
        arguments = complete(op, cases_of(op.name).build(case, dtype, device, 0))
        if why := refusal(target, arguments):
            pytest.skip(f"{NOT_CLAIMED}{why}")
        there = present(op, arguments) if case.mode.grads is None else case.mode.grads
        needs = tuple(name in there for name in op.differentiable)
        returned: Tensor | tuple[Tensor | None, ...]
        returned, saved = kernel.forward(needs, **arguments)
        results = name_results(op, op.result(*returned) if op.result and isinstance(returned, tuple) else returned)
        gradients = ()
        if any(needs):
            incoming = incoming_for(op, arguments, results)
            kept = kept_gradients(op, arguments, len(results))
            given = [incoming.get(name) for name, keeps in zip(results, kept, strict=True) if keeps]
            options = {name: arguments[name] for name in op.options}
            gradients = kernel.backward(needs, saved, *given, **options)
    named = zip(op.differentiable, gradients, strict=True) if gradients else ()
    return Outcome(results, {name: gradient for name, gradient in named if name in there})


@pytest.mark.cases(groups=("odd", "option"), dtypes=(torch.float32, torch.bfloat16))
def test_executed(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The kernel computes, as it is lowered for the chip, what the contract says.

    By the float64 rule, with 64 units of rounding in float32: of that a sum adds one term after another here, as no vector
    unit does.
    """
    try:
        actual = execute(target, case, dtype)
    except CannotExecute as error:
        pytest.skip(f"{target.op.name} can't be executed: {error}")
    arguments = complete(target.op, cases_of(target.op.name).build(case, dtype, "cpu"))
    baseline, truth = baseline_and_truth(target.op, arguments, case.mode.grads)
    samples = Samples(target.op, arguments, case.mode.grads)
    same = actual.items().keys() == baseline.items().keys()
    require(same, f"there are {', '.join(actual.items())}; the contract says {', '.join(baseline.items())}")
    for name, value in actual.items().items():
        units = 64 if value is not None and value.dtype is torch.float32 else 1
        compare(
            name,
            value,
            baseline.items()[name],
            truth.items()[name],
            samples,
            units=units,
            exact=cases_of(target.op.name).exact,
        )
