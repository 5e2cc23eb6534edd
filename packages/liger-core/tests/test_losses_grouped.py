"""`fused_linear_grouped_loss` beside the same loss of all log-probabilities at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_core import lean, losses
from liger_core.host.fused_linear_logit_statistics import plan_of
from liger_core.losses import grouped
from liger_core.ops.fused_linear_logit_statistics import most_statistics_memory

PAIRS, LENGTH, HIDDEN, VOCABULARY = 3, 5, 16, 40
WANTED = ("x", "weight", "bias")

Inputs = dict[str, Tensor]


def inputs(dtype: torch.dtype = torch.float64) -> Inputs:
    """Pairs, whose first completion is empty, and what the reference model says of them."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(VOCABULARY, (PAIRS, 2, LENGTH), generator=generator)
    target[:, :, -1], target[0, 0] = -100, -100
    tensors = {
        "x": torch.randn(PAIRS, 2, LENGTH, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
        "weight": torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).mul(0.25).to(dtype),
        "bias": torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
        "target": target,
        "reference": -20 * torch.rand(PAIRS, 2, generator=generator),
        "old": torch.rand(PAIRS, 2, LENGTH, generator=generator) - 4,
        "advantages": torch.randn(PAIRS, 2, generator=generator),
    }
    tensors["weight"].requires_grad_()
    return tensors


def dpo(logprobs: Tensor, target: Tensor, reference: Tensor) -> Any:
    chosen, rejected = losses.sequence_logprobs(logprobs, target != -100)
    return losses.dpo_loss(chosen[None], rejected[None], reference[:1], reference[1:])


def policy(logprobs: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Any:
    return losses.policy_loss(logprobs, old, None, advantages, target != -100, beta=0.0, loss_type="grpo")


def exploring(output: Any, target: Tensor) -> Tensor:
    return -(output.logprobs.exp() * (target != -100)).sum() - 0.1 * output.entropy.sum()


LOSSES: dict[str, tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]]] = {
    "dpo": (dpo, ("target", "reference"), {}),
    "policy": (policy, ("target", "old", "advantages"), {}),
    "softcap": (dpo, ("target", "reference"), {"softcap": 3.0, "temperature": 0.5}),
    "exploring": (exploring, ("target",), {"return_entropy": True}),
}


def call(name: str, call_inputs: Inputs, **more: Any) -> Any:
    loss, names, options = LOSSES[name]
    return losses.fused_linear_grouped_loss(
        loss,
        call_inputs["x"],
        call_inputs["weight"],
        call_inputs["target"],
        *(call_inputs[key] for key in names),
        bias=call_inputs["bias"],
        **{**options, **more},
    )


def plain(name: str, call_inputs: Inputs) -> list[Any]:
    """The loss of each group, from the log-probabilities of all groups."""
    loss, names, options = LOSSES[name]
    flat = call_inputs["x"].flatten(0, -2), call_inputs["weight"], call_inputs["target"].flatten(), call_inputs["bias"]
    actual = losses.fused_linear_token_logprobs(*flat, **options)
    fields = [
        f.view(call_inputs["target"].shape)
        for f in (actual if isinstance(actual, tuple) else (actual,))
        if f is not None
    ]
    rows = []
    for group in range(PAIRS):
        mine = [field[group] for field in fields]
        first = losses.TokenLogprobsOutput(*mine, None, None) if len(mine) > 1 else mine[0]
        rows.append(loss(first, *(call_inputs[key][group] for key in names)))
    return rows


def first(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


def gradients(loss: Tensor, call_inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [call_inputs[name] for name in WANTED])


@pytest.mark.parametrize("name", LOSSES)
def test_is_the_sum_over_groups(name: str) -> None:
    call_inputs = inputs()
    returned, rows = call(name, call_inputs), plain(name, call_inputs)
    right = sum(map(first, rows))
    assert isinstance(right, Tensor)
    torch.testing.assert_close(first(returned), right)
    # The factor is what a mean, or a scaler of gradients, brings.
    torch.testing.assert_close(gradients(first(returned) / 7, call_inputs), gradients(right / 7, call_inputs))
    if isinstance(returned, tuple):
        assert type(returned) is type(rows[0])
        for mine, *theirs in zip(returned[1:], *(row[1:] for row in rows), strict=True):
            if mine is None:
                assert theirs == [None] * PAIRS
            else:
                assert not mine.requires_grad
                torch.testing.assert_close(mine, torch.stack(theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_as_exact_as_its_dtype(dtype: torch.dtype) -> None:
    call_inputs = inputs(dtype)
    exact = {name: t.detach().double().requires_grad_() if name in WANTED else t for name, t in call_inputs.items()}
    right = gradients(first(call("dpo", exact)), exact)
    for mine, theirs in zip(gradients(first(call("dpo", call_inputs)), call_inputs), right, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=2 * torch.finfo(dtype).eps * theirs.abs().max())


def test_small_gradients_do_not_underflow_in_float16() -> None:
    """Gradients of 1e-9 a token are below float16's range: a scaler's factor comes after they were rounded."""
    call_inputs = inputs(torch.float16)
    scaled = (
        losses.fused_linear_grouped_loss(
            lambda lp: 1e-9 * lp.sum(), call_inputs["x"], call_inputs["weight"], call_inputs["target"]
        )
        * 1e9
    )
    right = losses.fused_linear_grouped_loss(
        lambda lp: lp.sum(), call_inputs["x"], call_inputs["weight"], call_inputs["target"]
    )
    leaves = call_inputs["x"], call_inputs["weight"]
    grads = torch.autograd.grad(scaled, leaves)
    for mine, theirs in zip(grads, torch.autograd.grad(right, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3 * float(theirs.abs().max()))


def test_a_group_is_one_call_that_holds_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    call_inputs, budgets = inputs(torch.bfloat16), []
    logprobs = grouped.fused_linear_token_logprobs

    def noted(*args: Any, **options: Any) -> Any:
        budgets.append(options["memory_budget"])
        return logprobs(*args, **options)

    monkeypatch.setattr(grouped, "fused_linear_token_logprobs", noted)
    returned = first(call("dpo", call_inputs))
    assert budgets == [most_statistics_memory(2 * LENGTH, VOCABULARY, torch.bfloat16)] * PAIRS
    gradients(returned, call_inputs)
    assert len(budgets) == PAIRS
    first(call("dpo", call_inputs, memory_budget=5000))
    assert budgets[PAIRS:] == [5000] * PAIRS
    with torch.no_grad():
        call("dpo", call_inputs)
    assert len(budgets) == 2 * PAIRS + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_of_a_group_is_the_least_that_holds_its_logits(dtype: torch.dtype) -> None:
    x, weight = torch.empty(10, HIDDEN, dtype=dtype), torch.empty(VOCABULARY, HIDDEN, dtype=dtype)
    most = most_statistics_memory(10, VOCABULARY, dtype)

    def held(budget: int) -> bool:
        needs = (True, True, True)
        return plan_of(needs, x, weight, accum_dtype=torch.float32, memory_budget=budget, picked_alone=True).whole

    assert held(most)
    assert held(most - 1) == (dtype is torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_group_of_few_tokens_of_a_small_vocabulary(dtype: torch.dtype, tokens: int) -> None:
    """All logits of it take less memory than a sum of x's gradient, or of the weight's, which the least budget counted."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, 1024, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(256, 1024, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    target = torch.randint(256, (1, tokens), generator=generator)
    loss = losses.fused_linear_grouped_loss(lambda lp: -lp.sum(), x, weight, target)
    every = losses.fused_linear_token_logprobs(x[0], weight, target[0])
    assert isinstance(every, Tensor)
    grads, right = (torch.autograd.grad(one, (x, weight)) for one in (loss, -every.sum()))
    for mine, theirs in zip(grads, right, strict=True):
        torch.testing.assert_close(mine, theirs)
    narrow = x[0].detach(), weight.detach()
    budget = most_statistics_memory(tokens, 256, dtype)
    plan = plan_of((True, True, True), *narrow, accum_dtype=torch.float32, memory_budget=budget, picked_alone=True)
    assert plan.whole


@pytest.mark.parametrize("leaves", [("x",), ("weight",), ("x", "weight")], ids=str)
def test_gradients_of_some(leaves: tuple[str, ...]) -> None:
    call_inputs = {
        name: t.detach().requires_grad_(name in leaves) if name in WANTED else t for name, t in inputs().items()
    }
    tensors = [call_inputs[name] for name in leaves]
    right = sum(map(first, plain("dpo", call_inputs)))
    assert isinstance(right, Tensor)
    torch.testing.assert_close(
        torch.autograd.grad(first(call("dpo", call_inputs)), tensors), torch.autograd.grad(right, tensors)
    )


def test_without_a_gradient() -> None:
    call_inputs = inputs()
    with torch.no_grad():
        returned = call("dpo", call_inputs)
    assert not returned.loss.requires_grad
    assert torch.equal(returned.loss, call("dpo", call_inputs).loss.detach())


def test_a_graph_that_is_retained_gives_its_gradients_again() -> None:
    call_inputs = inputs()
    loss = call("dpo", call_inputs).loss
    once = torch.autograd.grad(loss, [call_inputs[n] for n in WANTED], retain_graph=True)
    torch.testing.assert_close(gradients(2 * loss, call_inputs), tuple(2 * g for g in once))


def test_a_second_derivative_is_an_error() -> None:
    call_inputs = inputs()
    (dx,) = torch.autograd.grad(call("dpo", call_inputs).loss, call_inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="fused_linear_grouped_loss has no second derivative"):
        dx.sum().backward()


def test_under_autocast() -> None:
    """Parameters in float32, products in bfloat16: as by log-probabilities of all groups."""
    call_inputs = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, rows = call("dpo", call_inputs).loss, plain("dpo", call_inputs)
    right = sum(map(first, rows))
    assert isinstance(right, Tensor)
    torch.testing.assert_close(loss, right)
    for mine, theirs in zip(gradients(loss, call_inputs), gradients(right, call_inputs), strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))


@pytest.mark.parametrize("around", ["checkpoint", "save_on_cpu", "lean", "func"])
def test_inside_of_what_changes_autograd(around: str) -> None:
    call_inputs = inputs()
    right = call("dpo", call_inputs).loss
    expected = gradients(right, call_inputs)
    if around == "func":

        def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return call("dpo", {**call_inputs, "x": x, "weight": weight, "bias": bias}).loss

        grads = torch.func.grad(loss, argnums=(0, 1, 2))(*(call_inputs[name].detach() for name in WANTED))
    elif around == "checkpoint":
        grads = gradients(checkpoint(lambda: call("dpo", call_inputs).loss, use_reentrant=False), call_inputs)
    else:
        with lean() if around == "lean" else torch.autograd.graph.save_on_cpu():
            actual = call("dpo", call_inputs).loss
        grads = gradients(actual, call_inputs)
    torch.testing.assert_close(grads, expected)


def test_a_loss_of_nothing_has_gradients_of_zero() -> None:
    call_inputs = inputs()
    returned = losses.fused_linear_grouped_loss(
        lambda lp: torch.zeros((), requires_grad=False), call_inputs["x"], call_inputs["weight"], call_inputs["target"]
    )
    assert not any(g.any() for g in torch.autograd.grad(returned, (call_inputs["x"], call_inputs["weight"])))


def test_groups_without_tokens() -> None:
    x, weight = torch.empty(2, 0, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    returned = losses.fused_linear_grouped_loss(lambda lp: lp.sum(), x, weight, torch.empty(2, 0, dtype=torch.int64))
    assert returned == 0
    dx, dweight = torch.autograd.grad(returned, (x, weight))
    assert dx.shape == x.shape
    assert not dweight.any()


def test_bad_input_is_named() -> None:
    call_inputs = inputs()
    x, weight, target = call_inputs["x"], call_inputs["weight"], call_inputs["target"]

    def total(lp: Tensor, *inputs: Tensor) -> Tensor:
        return lp.sum()

    run = losses.fused_linear_grouped_loss
    with pytest.raises(TypeError, match=r"loss has type Tensor; it takes a function"):
        run(x, weight, target, x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"x has shape \(0, 2, 5, 16\); it takes at least one group"):
        run(total, x[:0], weight, target[:0])
    with pytest.raises(ValueError, match=r"target has shape \(3, 2\); it takes \(3, 2, 5\), that of x"):
        run(total, x, weight, target[..., 0])
    with pytest.raises(ValueError, match=r"input 1 has shape \(2, 2\); it takes \(3, ...\), a row per group"):
        run(total, x, weight, target, target, call_inputs["reference"][:2])
    with pytest.raises(ValueError, match=r"the loss returned shape \(2, 5\); it returns a scalar"):
        run(lambda lp: lp, x, weight, target)
    with pytest.raises(ValueError, match=r"the loss returned None; it returns a scalar"):
        run(lambda lp: None, x, weight, target)
    with pytest.raises(ValueError, match=r"linear_weight"):
        run(total, x, weight[:, :-1], target)
    with pytest.raises(ValueError, match=r"memory_budget is 1; it takes at least"):
        run(total, x, weight, target, memory_budget=1)
    with pytest.raises(IndexError, match=r"target"):
        run(total, x, weight, target + VOCABULARY)


def test_another_source_of_gradients_is_an_error() -> None:
    call_inputs = inputs()
    other = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"depends on a tensor of shape \(4,\) that requires a gradient; .* detach"):
        losses.fused_linear_grouped_loss(
            lambda lp: lp.sum() * other.sum().tanh(), call_inputs["x"], call_inputs["weight"], call_inputs["target"]
        )


def test_inputs_are_constants() -> None:
    call_inputs = inputs()
    scale = torch.ones(PAIRS, requires_grad=True)
    returned = losses.fused_linear_grouped_loss(
        lambda lp, mine: lp.sum() * mine, call_inputs["x"], call_inputs["weight"], call_inputs["target"], scale
    )
    assert torch.autograd.grad(returned, scale, allow_unused=True) == (None,)
