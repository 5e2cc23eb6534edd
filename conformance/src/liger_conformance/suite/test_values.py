"""Values and gradients, by the float64 rule."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import liger_core
from liger_conformance.case import TIMED, Case, cases_of, uneven
from liger_conformance.compare import check_reference, compare, same_bits
from liger_conformance.dispatch import Poison
from liger_conformance.evaluate import (
    Arguments,
    Outcome,
    baseline_and_truth,
    complete,
    evaluate,
    has_rows,
    incoming_for,
    incoming_of,
    name_results,
    present,
    require,
    with_leaves,
)
from liger_conformance.layouts import LAYOUTS
from liger_conformance.plugin.options import turn
from liger_conformance.random_call import together
from liger_conformance.rounding import Samples
from liger_conformance.route import Observed, only
from liger_conformance.target import Target, refusal
from liger_core.contract import Op


def arguments_of(target: Target, case: Case, dtype: torch.dtype, draw: int = 0) -> Arguments:
    return cases_of(target.op.name).build(case, dtype, target.device, draw)


def check(
    target: Target,
    build: Callable[[int], Arguments],
    wanted: tuple[str, ...] | None = None,
    incoming: dict[str, torch.Tensor] | None = None,
    call: Callable[..., Any] | None = None,
    autocast: bool = False,
    infinite: bool = False,
    by_row: bool = False,
    observe: Callable[[Observed], None] = lambda observed: None,
) -> Outcome:
    """Run a target, prove that it ran, and compare every result and the gradients of the `wanted` arguments.

    Args:
        target: what is checked.
        build: makes the arguments of a draw, by number; 0 is the one that is checked.
        wanted: the arguments to differentiate by; None: all.
        incoming: gradients of the results; None: random ones.
        call: what runs the op, compiled code that can't be watched; None: the op itself.
        autocast: run under autocast to bfloat16: what is checked is then the call with the arguments that it casts.
        infinite: an argument holds an infinity, as `compare` has it.
        by_row: what has the rows of the first argument is judged row by row.
        observe: gets what the kernel saved and returned, unless `call` runs the op.

    Raises:
        Mismatch: a value is wrong.
        WrongRoute: another implementation ran.
    """
    arguments = complete(target.op, build(0))
    seen = cast(target.op, arguments) if autocast else arguments
    why, expected = refusal(target, seen), None
    if why is None:  # else the kernel is not run, which says so below
        # Before the kernel, which may write to what it is given: that is another test's to say.
        with contextlib.suppress(torch.OutOfMemoryError):
            expected = baseline_and_truth(target.op, seen, wanted, incoming)
    if call is None:
        with torch.autocast(target.device, torch.bfloat16, enabled=autocast):
            actual = _run(target, arguments, seen, wanted, incoming, observe)
    else:
        if why is not None:  # before Dynamo makes something else of it
            raise liger_core.Unsupported(f"{target.op.name} on {target.device}: {target.language}: {why}")
        with liger_core.use(target.language), torch.autocast(target.device, torch.bfloat16, enabled=autocast):
            actual = evaluate(target.op, call, arguments, wanted, incoming)
        for name, gradient in actual.gradients.items():
            if gradient is not None and autocast:
                _require_dtype(name, gradient, arguments[name].dtype)
                actual.gradients[name] = gradient.to(seen[name].dtype)
    if expected is None:  # a kernel that runs out of memory, too, has failed above
        pytest.skip("the float64 reference doesn't fit this device's memory")
    baseline, truth = expected
    rows = seen[target.op.names[0]].shape[0] if by_row else None
    samples = Samples(target.op, seen, wanted, incoming, rows)
    same = actual.items().keys() == baseline.items().keys()
    require(same, f"there are {', '.join(actual.items())}; the contract says {', '.join(baseline.items())}")
    for name, value in actual.items().items():
        each = rows is not None and has_rows(value, rows)
        answers = baseline.items()[name], truth.items()[name]
        compare(name, value, *answers, samples, infinite=infinite, by_row=each, exact=cases_of(target.op.name).exact)
    return actual


def traced(target: Target, dynamic: bool | None = None) -> Callable[..., Any]:
    """The op under torch.compile, as one graph. It is to be called under `use(target.language)`.

    Skips the test of an interpreter, which can't be traced.
    """
    if target.lane == "interpreted":
        pytest.skip("an interpreter can't be traced by torch.compile")
    torch.compiler.reset()
    target.op.forget_plans()
    backend = "aot_eager" if target.device == "cpu" else "inductor"
    return torch.compile(target.op, fullgraph=True, dynamic=dynamic, backend=backend)


def cast(op: Op[..., Any], arguments: Arguments) -> Arguments:
    """The arguments of a call as autocast to bfloat16 casts them: the operands of a matmul."""
    return {
        name: value.bfloat16() if name in op.autocast and value is not None else value
        for name, value in arguments.items()
    }


def _run(
    target: Target,
    arguments: Arguments,
    seen: Arguments,
    wanted: tuple[str, ...] | None,
    incoming: dict[str, torch.Tensor] | None,
    observe: Callable[[Observed], None],
) -> Outcome:
    """Run the target and no other; each gradient has its argument's shape and dtype before autograd sees to that.

    `seen` are the arguments as the kernel gets them. The gradients are given back in their dtypes.
    """
    with only(target) as observed:
        actual = evaluate(target.op, target.op, arguments, wanted, incoming)
    observe(observed)
    for gradients in observed.gradients:
        for name, gradient in zip(target.op.differentiable, gradients, strict=True):
            for what in ("shape", "dtype") if gradient is not None else ():
                got, contract = getattr(gradient, what), getattr(seen[name], what)
                require(
                    got == contract, f"backward gives {name} a gradient of {what} {got}; the contract says {contract}"
                )
    made = dict(zip(target.op.differentiable, observed.gradients[-1], strict=True)) if observed.gradients else {}
    for name, gradient in actual.gradients.items():
        if gradient is not None and arguments[name].dtype != seen[name].dtype:
            contract = arguments[name].dtype
            _require_dtype(name, gradient, contract)
            # The kernel's own. In the argument's dtype it is rounded again: in float16 to a multiple of 6e-8.
            own = made[name]
            require(same_bits(gradient, own.to(contract)), f"the gradient of {name} under autocast is not the kernel's")
            actual.gradients[name] = own
    return actual


def _require_dtype(name: str, gradient: torch.Tensor, contract: torch.dtype) -> None:
    got = gradient.dtype
    require(got == contract, f"the gradient of {name} has dtype {got} under autocast; {name} has {contract}")


def check_case(target: Target, case: Case, dtype: torch.dtype, call: Callable[..., Any] | None = None) -> Outcome:
    """Check a case in the way that it says: its layouts, the gradients that it wants, and whether it is under autocast.

    `call` is as in `check`.

    Raises:
        Mismatch, WrongRoute: as `check`.
    """
    op, mode = target.op, case.mode
    incoming = None
    layout = mode.layouts.get("incoming")
    if layout or "incoming" in case.by_row:
        arguments = complete(op, arguments_of(target, case, dtype))
        incoming = incoming_of(op, cast(op, arguments) if mode.autocast else arguments)
    if incoming is not None and "incoming" in case.by_row:
        incoming = {name: uneven(value) for name, value in incoming.items()}
    if incoming is not None and layout:
        incoming = {name: LAYOUTS[layout].apply(value) if value.dim() else value for name, value in incoming.items()}
    with torch.set_grad_enabled(mode.grads != ()):
        return check(
            target,
            lambda draw: arguments_of(target, case, dtype, draw),
            mode.grads,
            incoming,
            call,
            autocast=mode.autocast,
            infinite=bool(case.holds),
            by_row=bool(case.by_row),
        )


def floating_dtypes(arguments: Arguments) -> set[torch.dtype]:
    return {v.dtype for v in arguments.values() if isinstance(v, torch.Tensor) and v.is_floating_point()}


def test_values(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The kernel is at most twice as far from the float64 answer as PyTorch is in the same dtype."""
    # An interpreter's quick lane has no other test of a long case that finds what its kernels don't write.
    long = target.lane == "interpreted" and cases_of(target.op.name).is_long(case)
    with Poison() if long else contextlib.nullcontext():
        actual = check_case(target, case, dtype)
    exact = cases_of(target.op.name).exact
    if (
        target.backend is None and case.group != "extreme" and not exact
    ):  # there, cancellation leaves any formula few digits
        arguments = arguments_of(target, case, dtype)
        truth = baseline_and_truth(target.op, arguments)[1]
        eps = max(torch.finfo(d).eps for d in floating_dtypes(arguments))
        for name, value in actual.items().items():
            check_reference(name, value, truth.items()[name], eps)


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.float32,))
def test_options_together(target: Target, dtype: torch.dtype, pytestconfig: pytest.Config) -> None:
    """Three options that no case has together are right together; other ones for each seed of ``--turn``."""
    cases = together(cases_of(target.op.name), dtype, turn(pytestconfig) or 0)
    claimed = [
        case for case in cases if refusal(target, complete(target.op, arguments_of(target, case, dtype))) is None
    ]
    if not claimed:
        pytest.skip("there are no three options that no case has together")
    for case in claimed:
        try:
            check_case(target, case, dtype)
        except AssertionError as wrong:
            raise AssertionError(f"{case!r}: {wrong}") from wrong


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


@pytest.mark.targets("differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_partial_gradients(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Any subset of the arguments may want a gradient: those get the right one, and the others cost nothing."""
    names = present(target.op, complete(target.op, arguments_of(target, case, dtype)))

    def only_these(wanted: tuple[str, ...], observed: Observed) -> None:
        for gradients in observed.gradients:
            for name, gradient in zip(target.op.differentiable, gradients, strict=True):
                require((gradient is not None) == (name in wanted), f"{name}: {wanted} want a gradient")

    for bits in range(1, 2 ** len(names) - 1):
        wanted = tuple(name for i, name in enumerate(names) if bits >> i & 1)
        observe = functools.partial(only_these, wanted)
        check(target, lambda draw: arguments_of(target, case, dtype, draw), wanted, observe=observe)


@pytest.mark.targets("differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_some_results_unused(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Each differentiable result may be the only one with an incoming gradient. It gives none to what it doesn't depend on."""
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))
    with torch.no_grad():
        incoming = incoming_for(op, arguments, name_results(op, op.reference(**arguments)))
    for name, gradient in incoming.items():
        check(target, lambda draw: arguments_of(target, case, dtype, draw), None, {name: gradient})
        for wanted in present(op, arguments) if len(incoming) > 1 else ():
            leaves = with_leaves(op, arguments, (wanted,))
            reference = name_results(op, op.reference(**leaves))[name]
            with liger_core.use(target.language):
                result = name_results(op, op(**leaves))[name]
            assert result is not None
            assert reference is not None
            if result.requires_grad and not reference.requires_grad:
                result.backward(gradient)
                found: torch.Tensor | None = leaves[wanted].grad
                require(found is None or not found.any(), f"{name} gives {wanted} a gradient")
