"""Losses of hidden states, composed as docs/losses.md does: each waits for nothing, and compiles whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from liger_core import fused_linear_cross_entropy, losses, policy
from liger_core.losses import preference

Inputs = dict[str, Tensor]


def inputs(device: str, seed: int, pairs: int = 2, length: int = 5) -> Inputs:
    """Hidden states and a head of 40 tokens. The first completion is empty."""
    torch.manual_seed(seed)
    batch = 2 * pairs
    target = torch.randint(40, (batch, length))
    target[:, -1], target[0] = -100, -100
    tensors = {
        "x": torch.randn(batch, length, 16),
        "weight": torch.randn(40, 16) * 0.25,
        "target": target,
        "old": torch.rand(batch, length) - 4,
        "reference": torch.rand(batch, length) - 4,
        "advantages": torch.randn(batch),
        "desirable": torch.rand(batch) < 0.5,
        "ids": torch.randint(40, (batch * length, 3)),
        "teacher": torch.rand(batch * length, 3).log_softmax(-1),
        "lengths": torch.full((batch,), length),
    }
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    tensors["x"].requires_grad_()
    tensors["weight"].requires_grad_()
    return tensors


def tokens(call_inputs: Inputs, **options: Any) -> Any:
    flat = call_inputs["target"].flatten()
    return losses.fused_linear_token_logprobs(call_inputs["x"].flatten(0, 1), call_inputs["weight"], flat, **options)


def completions(call_inputs: Inputs, average: bool = False) -> Tensor:
    target = call_inputs["target"]
    return losses.sequence_logprobs(tokens(call_inputs).view(target.shape), target != -100, average=average)


def halves(call_inputs: Inputs, average: bool = False) -> tuple[Tensor, Tensor]:
    chosen, rejected = completions(call_inputs, average).chunk(2)
    return chosen, rejected


def dpo(kind: str) -> Callable[[Inputs], Tensor]:
    smoothing = 0.1 if kind == "exo_pair" else 0.0

    def loss(call_inputs: Inputs) -> Tensor:
        reference = call_inputs["old"].sum(-1).chunk(2)
        return losses.dpo_loss(
            *halves(call_inputs), reference[0], reference[1], loss_type=kind, label_smoothing=smoothing
        ).loss

    return loss


def of_policy(kind: str) -> Callable[[Inputs], Tensor]:
    def loss(call_inputs: Inputs) -> Tensor:
        mask, old, advantages = call_inputs["target"] != -100, call_inputs["old"], call_inputs["advantages"]
        lp = tokens(call_inputs).view(mask.shape)
        beta = 0.0 if kind == "vespo" else 0.04
        return losses.policy_loss(lp, old, call_inputs["reference"], advantages, mask, beta=beta, loss_type=kind).loss

    return loss


def exploring(call_inputs: Inputs) -> Tensor:
    actual = tokens(call_inputs, return_entropy=True, return_lse=True, return_predicted_tokens=True)
    return (actual.logprobs - 0.01 * actual.entropy + 1e-4 * actual.lse.square()).sum()


def packed(call_inputs: Inputs) -> Tensor:
    return losses.sequence_logprobs(tokens(call_inputs), lengths=call_inputs["lengths"], average=True).sum()


def topk(call_inputs: Inputs) -> Tensor:
    lp = losses.fused_linear_token_logprobs(call_inputs["x"].flatten(0, 1), call_inputs["weight"], call_inputs["ids"])
    assert isinstance(lp, Tensor)
    return losses.topk_kl(lp, call_inputs["teacher"], tail=True).sum()


def with_likelihood(call_inputs: Inputs) -> Tensor:
    """Two losses of pairs, weighted, and the likelihood of the chosen."""
    target = call_inputs["target"]
    lp, mask = tokens(call_inputs).view(target.shape), target != -100
    chosen, rejected = losses.sequence_logprobs(lp, mask).chunk(2)
    pairs = losses.dpo_loss(chosen, rejected).loss + 0.5 * losses.dpo_loss(chosen, rejected, loss_type="hinge").loss
    return pairs - 0.1 * lp.chunk(2)[0].sum() / mask.chunk(2)[0].sum().clamp(min=1)


def with_entropy(call_inputs: Inputs) -> Tensor:
    """GRPO with a bonus for the entropy of the tokens that count."""
    mask = call_inputs["target"] != -100
    actual = tokens(call_inputs, return_entropy=True)
    lp, entropy = actual.logprobs.view(mask.shape), actual.entropy.view(mask.shape)
    policy = losses.policy_loss(
        lp, call_inputs["old"], call_inputs["reference"], call_inputs["advantages"], mask, loss_type="bnpo"
    ).loss
    return policy - 0.01 * (entropy * mask).sum() / mask.sum().clamp(min=1)


def grouped_pairs(call_inputs: Inputs) -> Tensor:
    """DPO, a pair after another."""
    x, target = (call_inputs[name].unflatten(0, (2, -1)).transpose(0, 1) for name in ("x", "target"))

    def loss(logprobs: Tensor, target: Tensor) -> Tensor:
        chosen, rejected = losses.sequence_logprobs(logprobs, target != -100).chunk(2)
        return losses.dpo_loss(chosen, rejected).loss

    return losses.fused_linear_grouped_loss(loss, x, call_inputs["weight"], target, target)


def grouped_completions(call_inputs: Inputs) -> Tensor:
    """GRPO, a completion after another."""

    def loss(logprobs: Tensor, target: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        mask = (target != -100)[None]
        return losses.policy_loss(logprobs[None], old[None], None, advantage[None], mask, beta=0.0).loss

    inputs = call_inputs["target"], call_inputs["old"], call_inputs["advantages"]
    return losses.fused_linear_grouped_loss(
        loss, call_inputs["x"], call_inputs["weight"], call_inputs["target"], *inputs
    )


LOSSES: dict[str, Callable[[Inputs], Tensor]] = {
    **{f"dpo-{kind}": dpo(kind) for kind in preference.DPO_LOSS_TYPES},
    "orpo": lambda call_inputs: losses.orpo_loss(*halves(call_inputs, average=True)).loss,
    "simpo": lambda call_inputs: losses.simpo_loss(*halves(call_inputs, average=True)).loss,
    "cpo": lambda call_inputs: losses.cpo_loss(*halves(call_inputs)).loss,
    "kto": lambda call_inputs: (
        losses.kto_loss(completions(call_inputs), call_inputs["old"].sum(-1), call_inputs["desirable"]).loss
    ),
    **{f"policy-{kind}": of_policy(kind) for kind in policy.LOSS_TYPES},
    "dpo-with-likelihood": with_likelihood,
    "policy-with-entropy": with_entropy,
    "exploring": exploring,
    "packed": packed,
    "topk": topk,
    "grouped-pairs": grouped_pairs,
    "grouped-completions": grouped_completions,
}


def evaluate(loss: Callable[[Inputs], Tensor], call_inputs: Inputs) -> tuple[Tensor, ...]:
    actual = loss(call_inputs)
    return actual.detach(), *torch.autograd.grad(actual, (call_inputs["x"], call_inputs["weight"]))


@pytest.mark.parametrize("name", LOSSES)
def test_is_finite_with_an_empty_completion(name: str) -> None:
    assert all(tensor.isfinite().all() for tensor in evaluate(LOSSES[name], inputs("cpu", 0)))


@pytest.mark.parametrize("name", LOSSES)
def test_is_finite_if_nothing_counts(name: str) -> None:
    """All tokens are ignored, those of the chosen too: nothing flows back into hidden states and the head."""
    call_inputs = inputs("cpu", 0)
    call_inputs["target"].fill_(-100)
    call_inputs["ids"].fill_(-100)
    loss, *gradients = evaluate(LOSSES[name], call_inputs)
    assert loss.isfinite()
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo"])
def test_micro_batches_add_up_to_the_batch(kind: str) -> None:
    """With the tokens of all of it as what each divides by: without a process group, and however they are divided."""
    call_inputs = inputs("cpu", 0, pairs=3)
    mask, old, advantages = call_inputs["target"] != -100, call_inputs["old"], call_inputs["advantages"]
    lp = tokens(call_inputs).view(mask.shape)
    items = int(mask.sum())

    def loss(rows: slice) -> Tensor:
        part = lp[rows], old[rows], call_inputs["reference"][rows], advantages[rows], mask[rows]
        beta = 0.0 if kind == "vespo" else 0.04
        return losses.policy_loss(*part, beta=beta, loss_type=kind, num_items_in_batch=items).loss

    leaves = call_inputs["x"], call_inputs["weight"]
    parts = loss(slice(0, 1)) + loss(slice(1, 4)) + loss(slice(4, 6))
    whole = loss(slice(0, 6))
    torch.testing.assert_close(parts, whole)
    grads = (torch.autograd.grad(total, leaves, retain_graph=True) for total in (parts, whole))
    torch.testing.assert_close(*grads)


def test_sums_of_pairs_add_up_to_the_batch() -> None:
    chosen, rejected = -torch.rand(6), -torch.rand(6)
    parts = (losses.dpo_loss(chosen[s], rejected[s], reduction="sum").loss for s in (slice(0, 1), slice(1, 6)))
    torch.testing.assert_close(sum(parts) / 6, losses.dpo_loss(chosen, rejected).loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_add_up_to_the_cross_entropy(dtype: torch.dtype) -> None:
    """Within the error of its logits, which are of x's dtype; those here are float32, and so is the entropy."""
    call_inputs = {name: t.detach().to(dtype) if name in ("x", "weight") else t for name, t in inputs("cpu", 0).items()}
    x, target = call_inputs["x"].flatten(0, 1), call_inputs["target"].flatten()
    expected = fused_linear_cross_entropy(x, call_inputs["weight"], target, reduction="sum")
    actual = tokens(call_inputs, return_entropy=True)
    assert isinstance(expected, Tensor)
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(-actual.logprobs.sum(), expected, rtol=eps, atol=0)
    p = (x.double() @ call_inputs["weight"].double().T).softmax(-1)
    entropy = -(p * p.log()).sum(-1).masked_fill(target == -100, 0.0)
    torch.testing.assert_close(actual.entropy.double(), entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_cuda_graph_captures_forward_and_backward(name: str) -> None:
    """A graph that is replayed on other data computes theirs: the host waits for nothing in between."""
    if not torch.cuda.is_available():
        pytest.skip("CUDA graphs need a CUDA device")
    call_inputs, other, loss = inputs("cuda", 0), inputs("cuda", 1), LOSSES[name]
    expected = evaluate(loss, other)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        evaluate(loss, call_inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = evaluate(loss, call_inputs)
    with torch.no_grad():
        for key, tensor in call_inputs.items():
            tensor.copy_(other[key])
    graph.replay()
    for mine, theirs in zip(captured, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["dpo-sigmoid", "policy-grpo", "exploring"])
def test_compiles_whole_for_sizes_that_change(name: str) -> None:
    """Compiled code is one graph, made at the first call: other numbers of sequences and tokens don't compile again."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(LOSSES[name], fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for pairs, length in ((2, 5), (3, 7), (4, 6)):
        call_inputs = inputs("cpu", 0, pairs, length)
        torch.testing.assert_close(evaluate(compiled, call_inputs), evaluate(LOSSES[name], call_inputs))
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]
