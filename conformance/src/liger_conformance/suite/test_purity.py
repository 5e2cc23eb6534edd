"""Nothing is written to but the outputs, all of these are, and nothing is kept that isn't needed."""

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import liger_core
from liger_conformance.case import QUICK, Case, cases_of
from liger_conformance.compare import same_bits
from liger_conformance.dispatch import Poison
from liger_conformance.dividing import place_of_rows
from liger_conformance.evaluate import (
    complete,
    differentiable_results,
    evaluate,
    incoming_for,
    name_results,
    present,
    require,
    with_leaves,
)
from liger_conformance.route import only, watched
from liger_conformance.suite.test_values import arguments_of, need_accelerator
from liger_conformance.target import Target
from liger_core import autograd, lean
from liger_core.contract import Recompute
from liger_core.recompute import active


def snapshot(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, Tensor)}


def assert_unchanged(before: dict[str, Tensor], after: dict[str, Any], when: str) -> None:
    for name, value in before.items():
        require(same_bits(value, after[name].detach()), f"{when} wrote to {name}")


@pytest.mark.cases(dtypes=(torch.bfloat16,), short=("odd", "option"))
def test_writes_to_nothing_it_is_given(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Inputs, saved tensors and incoming gradients stay as they were."""
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))
    names = case.mode.grads or present(op, arguments)
    arguments = with_leaves(op, arguments, names)
    inputs = snapshot(arguments)
    with only(target) as observed:
        results = name_results(op, op(**arguments))
        assert_unchanged(inputs, arguments, "forward")
        saved = {f"saved tensor {i}": value for i, value in enumerate(observed.saved[0] if observed.saved else ())}
        incoming = incoming_for(op, arguments, results)
        outputs = {
            n: r for n, r in differentiable_results(op, arguments, results).items() if n in incoming and r.requires_grad
        }
        wanted = [arguments[name] for name in names]
        kept, gradients, returned = snapshot(saved), snapshot(incoming), snapshot(outputs)
        if wanted:
            torch.autograd.grad(list(outputs.values()), wanted, [incoming[n] for n in outputs], allow_unused=True)
    assert_unchanged(inputs, arguments, "backward")
    assert_unchanged(kept, saved, "backward")
    assert_unchanged(gradients, incoming, "backward")
    assert_unchanged(returned, outputs, "backward")


def check_repeats(target: Target, case: Case, dtype: torch.dtype, times: int) -> None:
    """Every second time, memory starts as NaN."""
    op = target.op
    arguments = arguments_of(target, case, dtype)
    with only(target):
        plain = evaluate(op, op, arguments, case.mode.grads).items()
        for time in range(times):
            with contextlib.nullcontext() if time % 2 else Poison():
                other = evaluate(op, op, arguments, case.mode.grads).items()
            differing = [name for name, value in plain.items() if not same_bits(value, other[name])]
            if differing:
                again = evaluate(op, op, arguments, case.mode.grads).items()
                alike = all(same_bits(plain[name], again[name]) for name in differing)
                why = "when memory starts as NaN: an element is not written" if alike else "from run to run"
                raise AssertionError(f"{', '.join(differing)} not the same {why}")


@pytest.mark.cases(dtypes=(torch.bfloat16,), short=QUICK)
def test_same_bits_again(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The same inputs give the same bits, also where allocations start as NaN: every element is written, and always alike."""
    check_repeats(target, case, dtype, times=1)


REPLAYED = (
    "dyt", "embedding", "fused_add_rms_norm", "geglu", "group_norm", "layer_norm", "llama4_rope", "modulated_rms_norm",
    "poly_norm", "quantize", "quantize_gated", "quantize_gated_gradients", "qwen2vl_mrope", "relu_squared", "rms_norm", "rope",
    "softmax", "swiglu",
)  # fmt: skip
"""Ops that Python would slow down: a language that tells its launches has their first case replayed, both ways."""


@contextlib.contextmanager
def replayed_at_once(target: Target) -> Generator[tuple[mock.Mock, mock.Mock], None, None]:
    """Record host code at the second call of a metadata. Returns the kernel's forward and backward, which count their runs.

    Not in `only`, where an interpreter may watch host code: while something does, it isn't replayed.
    """
    kernel = target.kernel
    assert kernel is not None
    backward = getattr(kernel, "backward", None)
    target.op.forget_plans()
    with (
        mock.patch.object(autograd, "REPLAY_AFTER", 0),
        mock.patch.object(kernel, "forward", wraps=kernel.forward) as counted_forward,
        mock.patch.object(kernel, "backward", wraps=backward, create=True) as counted_backward,
        liger_core.use(target.language),
        watched(target),
    ):
        yield counted_forward, counted_backward
    target.op.forget_plans()


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.bfloat16,), short=("odd", "option"))
def test_replayed_calls(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Replayed host code gives the same bits, for other values in other memory, and after a call of another metadata."""
    assert target.backend is not None
    if not target.backend.tells_launches:
        pytest.skip("the language doesn't tell its launches, so no call is replayed")
    op, others = target.op, cases_of(target.op.name).cases[:2]
    arguments, next_arguments = (arguments_of(target, case, dtype, draw) for draw in range(2))
    with only(target):
        expected = evaluate(op, op, next_arguments, case.mode.grads).items()
    with replayed_at_once(target) as (forward, backward):
        # The first call is remembered, the second one's forward is recorded, then the third one's backward.
        for _ in range(3):
            evaluate(op, op, arguments, case.mode.grads)
        op(**arguments_of(target, others[case.id == others[0].id], dtype))
        runs, backward_runs = forward.call_count, backward.call_count
        replayed = evaluate(op, op, next_arguments, case.mode.grads).items()
    differing = [name for name, value in expected.items() if not same_bits(value, replayed[name])]
    require(not differing, f"{', '.join(differing)} not the same as of host code")
    if op.name in REPLAYED and case is others[0]:
        require((forward.call_count, backward.call_count) == (runs, backward_runs), "host code ran again")


@pytest.mark.slow
@pytest.mark.cases(groups=("small", "medium"), dtypes=(torch.bfloat16, torch.float32))
def test_same_bits_at_model_sizes(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The same where a device is full: only there a kernel may be too late for its own copies, and now and then."""
    need_accelerator(target)
    check_repeats(target, case, dtype, times=8)


@pytest.mark.targets("kernel", "differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_gradients_are_not_inputs(target: Target, case: Case, dtype: torch.dtype) -> None:
    """A gradient shares no memory with an input, a saved tensor or an incoming gradient: autograd may add to it in place."""
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))
    names = present(op, arguments)
    arguments = with_leaves(op, arguments, names)
    with only(target) as observed:
        results = name_results(op, op(**arguments))
        incoming, outputs = incoming_for(op, arguments, results), differentiable_results(op, arguments, results)
        saved = [value for value in (observed.saved[0] if observed.saved else ()) if value is not None]
        found = torch.autograd.grad(
            list(outputs.values()), [arguments[n] for n in names], list(incoming.values()), allow_unused=True
        )
    given = {
        t.untyped_storage().data_ptr()
        for t in (*arguments.values(), *incoming.values(), *saved)
        if isinstance(t, Tensor)
    }
    gradients: dict[str, Tensor | None] = dict(zip(names, found, strict=True))
    for name, gradient in gradients.items():
        if gradient is not None and gradient.numel():
            mine = gradient.untyped_storage().data_ptr() not in given
            require(mine, f"the gradient of {name} is memory of somebody else")


def check_saves_nothing(
    target: Target, case: Case, dtype: torch.dtype, mode: Callable[[], AbstractContextManager[Any]], leaves: bool
) -> None:
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))
    wanted = present(op, arguments)
    how = f"under {mode.__name__}" if leaves else "where nothing requires a gradient"
    inputs = snapshot(arguments)
    with only(target) as observed:
        expected = name_results(op, op(**with_leaves(op, arguments, wanted)))
        observed.saved.clear()
        with mode():
            results = name_results(op, op(**with_leaves(op, arguments, wanted if leaves else ())))
        for saved in observed.saved:
            require(not len(saved), f"saved {len(saved)} values that no backward will read, {how}")
    assert_unchanged(inputs, arguments, f"a call {how}")
    for name, value in results.items():
        require(value is None or not value.requires_grad, f"{name} requires a gradient {how}")
        require(same_bits(value, expected[name]), f"{name} differs {how}")


@pytest.mark.targets("kernel", "differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), short=("odd", "option"))
def test_saves_nothing_without_gradients(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Without grad mode nothing is saved, and the results are the same."""
    check_saves_nothing(target, case, dtype, torch.no_grad, leaves=True)


@pytest.mark.targets("kernel", "differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
@pytest.mark.parametrize("way", ["inference-mode", "no-leaves"])
def test_saves_nothing_in_other_ways(target: Target, case: Case, dtype: torch.dtype, way: str) -> None:
    """As without grad mode, in inference mode, and where nothing requires a gradient."""
    mode = torch.inference_mode if way == "inference-mode" else contextlib.nullcontext
    check_saves_nothing(target, case, dtype, mode, leaves=way == "inference-mode")


@pytest.mark.targets("differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=2)
def test_backward_twice(target: Target, case: Case, dtype: torch.dtype) -> None:
    """With `retain_graph`, backward gives the same bits again."""
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))
    names = present(op, arguments)
    arguments = with_leaves(op, arguments, names)
    with only(target):
        results = name_results(op, op(**arguments))
        incoming, outputs = incoming_for(op, arguments, results), differentiable_results(op, arguments, results)
        first, second = (
            torch.autograd.grad(
                list(outputs.values()),
                [arguments[n] for n in names],
                list(incoming.values()),
                retain_graph=True,
                allow_unused=True,
            )
            for _ in range(2)
        )
    for name, one, two in zip(names, first, second, strict=True):
        require(same_bits(one, two), f"the gradient of {name} differs the second time")


class User(torch.autograd.Function):
    """Saves what it is given, as a linear layer does, and says in backward whether that is what it was."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, found: list[bool]) -> Tensor:
        ctx.save_for_backward(result)
        ctx.expected, ctx.found = result.clone(), found
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (result,) = ctx.saved_tensors
        ctx.found.append(same_bits(result, ctx.expected) and result.stride() == ctx.expected.stride())
        return grads[0], None


@pytest.mark.targets("recompute")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=2)
def test_results_made_again(target: Target, case: Case, dtype: torch.dtype) -> None:
    """In `liger_core.lean` whoever saves a result keeps no memory: it is made again, with all its bits."""
    op, recompute, found = target.op, target.op.recompute, list[bool]()
    assert recompute is not None
    arguments = complete(op, arguments_of(target, case, dtype))
    names = present(op, arguments)
    arguments = with_leaves(op, arguments, names)
    own = {n: t for n, t in arguments.items() if isinstance(t, Tensor)}
    # A value that backward doesn't keep has to be a result that can be made again itself.
    lent = {name for name in own if name not in recompute.kept and name not in recompute.instead}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage()._cdata, tensor)

    def kept_bytes() -> int:
        places = {own[name].untyped_storage()._cdata for name in lent}
        return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in places)

    def copied(x: Tensor) -> Tensor:
        return x.clone()

    def run(user: bool) -> tuple[list[Tensor], list[Tensor]]:
        given = dict(arguments)
        if (lean_hooks := active()) is not None:
            for name in lent:
                given[name] = own[name].clone()
                lean_hooks.remember(Recompute("x"), {"x": own[name]}, {}, given[name], copied)
        results = differentiable_results(op, arguments, name_results(op, op(**given)))
        several = 1 if recompute.instead else len(results)
        outputs: list[Tensor] = [User.apply(y, found) if user else y for y in list(results.values())[:several]]
        return outputs, list(incoming_for(op, arguments, results).values())[:several]

    def gradients() -> tuple[Tensor | None, ...]:
        outputs, incoming = run(user=True)
        return torch.autograd.grad(outputs, [own[n] for n in names], incoming, allow_unused=True)

    with only(target):
        expected = gradients()
        with lean():
            actual = gradients()
        with saved_tensors_hooks(keep, lambda t: t):
            outputs = run(user=False)
            alone = kept_bytes()
            kept.clear()
            with lean():
                outputs = run(user=True)
    for name, one, two in zip(names, expected, actual, strict=True):
        require(one is two or same_bits(one, two), f"the gradient of {name} differs")
    assert all(found), "what was made again is not the result"
    if target.backend is None:  # in there it keeps its arguments, and no intermediate results
        alone = max(alone, sum(t.nbytes for name, t in own.items() if name not in lent))
    if recompute.instead:
        alone += outputs[0][0][:1].nbytes  # a row of what takes the place of an argument
    used = kept_bytes()
    require(used <= alone, f"with a user of {len(outputs[0])} results it keeps {used} bytes, and {alone} without")


@pytest.mark.targets("differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_second_derivative(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Kernels have none and say so; the reference has."""
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))
    names = present(op, arguments)
    arguments = with_leaves(op, arguments, names)
    with only(target):
        outputs = differentiable_results(op, arguments, name_results(op, op(**arguments)))
        found = torch.autograd.grad(
            [o.float().square().sum() for o in outputs.values()], [arguments[n] for n in names], create_graph=True
        )
    total = torch.stack([g.float().square().sum() for g in found]).sum()
    if target.backend is None:
        total.backward()
        return
    with pytest.raises(RuntimeError, match=f"{op.name} in {target.language} has no second derivative"):
        total.backward()


def test_empty(target: Target) -> None:
    """Zero rows give empty outputs and zero gradients."""
    op = target.op
    from liger_conformance.case import cases_of

    arguments = complete(op, cases_of(op.name).build(cases_of(op.name).cases[0], torch.bfloat16, target.device))
    for name, at in place_of_rows(op, arguments).arguments.items():
        arguments[name] = arguments[name].narrow(at, 0, 0)
    with liger_core.use(target.language):
        actual = evaluate(op, op, arguments)
    for name, value in actual.items().items():
        assert value is not None, f"{name} is None for zero rows"
        require(not value.isnan().any(), f"{name} is NaN for zero rows")
        require(not value.any(), f"{name} is not zero for zero rows")
