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
    made = {
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
    made = {name: tensor.to(device) for name, tensor in made.items()}
    made["x"].requires_grad_()
    made["weight"].requires_grad_()
    return made


def tokens(given: Inputs, **options: Any) -> Any:
    flat = given["target"].flatten()
    return losses.fused_linear_token_logprobs(given["x"].flatten(0, 1), given["weight"], flat, **options)


def completions(given: Inputs, average: bool = False) -> Tensor:
    target = given["target"]
    return losses.sequence_logprobs(tokens(given).view(target.shape), target != -100, average=average)


def halves(given: Inputs, average: bool = False) -> tuple[Tensor, Tensor]:
    chosen, rejected = completions(given, average).chunk(2)
    return chosen, rejected


def dpo(kind: str) -> Callable[[Inputs], Tensor]:
    smoothing = 0.1 if kind == "exo_pair" else 0.0

    def loss(given: Inputs) -> Tensor:
        reference = given["old"].sum(-1).chunk(2)
        return losses.dpo_loss(
            *halves(given), reference[0], reference[1], loss_type=kind, label_smoothing=smoothing
        ).loss

    return loss


def of_policy(kind: str) -> Callable[[Inputs], Tensor]:
    def loss(given: Inputs) -> Tensor:
        mask, old, advantages = given["target"] != -100, given["old"], given["advantages"]
        lp = tokens(given).view(mask.shape)
        beta = 0.0 if kind == "vespo" else 0.04
        return losses.policy_loss(lp, old, given["reference"], advantages, mask, beta=beta, loss_type=kind).loss

    return loss


def exploring(given: Inputs) -> Tensor:
    found = tokens(given, return_entropy=True, return_lse=True, return_predicted_tokens=True)
    return (found.logprobs - 0.01 * found.entropy + 1e-4 * found.lse.square()).sum()


def packed(given: Inputs) -> Tensor:
    return losses.sequence_logprobs(tokens(given), lengths=given["lengths"], average=True).sum()


def topk(given: Inputs) -> Tensor:
    lp = losses.fused_linear_token_logprobs(given["x"].flatten(0, 1), given["weight"], given["ids"])
    assert isinstance(lp, Tensor)
    return losses.topk_kl(lp, given["teacher"], tail=True).sum()


def with_likelihood(given: Inputs) -> Tensor:
    """Two losses of pairs, weighted, and the likelihood of the chosen."""
    target = given["target"]
    lp, mask = tokens(given).view(target.shape), target != -100
    chosen, rejected = losses.sequence_logprobs(lp, mask).chunk(2)
    pairs = losses.dpo_loss(chosen, rejected).loss + 0.5 * losses.dpo_loss(chosen, rejected, loss_type="hinge").loss
    return pairs - 0.1 * lp.chunk(2)[0].sum() / mask.chunk(2)[0].sum().clamp(min=1)


def with_entropy(given: Inputs) -> Tensor:
    """GRPO with a bonus for the entropy of the tokens that count."""
    mask = given["target"] != -100
    found = tokens(given, return_entropy=True)
    lp, entropy = found.logprobs.view(mask.shape), found.entropy.view(mask.shape)
    policy = losses.policy_loss(lp, given["old"], given["reference"], given["advantages"], mask, loss_type="bnpo").loss
    return policy - 0.01 * (entropy * mask).sum() / mask.sum().clamp(min=1)


def grouped_pairs(given: Inputs) -> Tensor:
    """DPO, a pair after another."""
    x, target = (given[name].unflatten(0, (2, -1)).transpose(0, 1) for name in ("x", "target"))

    def loss(logprobs: Tensor, target: Tensor) -> Tensor:
        chosen, rejected = losses.sequence_logprobs(logprobs, target != -100).chunk(2)
        return losses.dpo_loss(chosen, rejected).loss

    return losses.fused_linear_grouped_loss(loss, x, given["weight"], target, target)


def grouped_completions(given: Inputs) -> Tensor:
    """GRPO, a completion after another."""

    def loss(logprobs: Tensor, target: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        mask = (target != -100)[None]
        return losses.policy_loss(logprobs[None], old[None], None, advantage[None], mask, beta=0.0).loss

    inputs = given["target"], given["old"], given["advantages"]
    return losses.fused_linear_grouped_loss(loss, given["x"], given["weight"], given["target"], *inputs)


LOSSES: dict[str, Callable[[Inputs], Tensor]] = {
    **{f"dpo-{kind}": dpo(kind) for kind in preference.DPO_LOSS_TYPES},
    "orpo": lambda given: losses.orpo_loss(*halves(given, average=True)).loss,
    "simpo": lambda given: losses.simpo_loss(*halves(given, average=True)).loss,
    "cpo": lambda given: losses.cpo_loss(*halves(given)).loss,
    "kto": lambda given: losses.kto_loss(completions(given), given["old"].sum(-1), given["desirable"]).loss,
    **{f"policy-{kind}": of_policy(kind) for kind in policy.LOSS_TYPES},
    "dpo-with-likelihood": with_likelihood,
    "policy-with-entropy": with_entropy,
    "exploring": exploring,
    "packed": packed,
    "topk": topk,
    "grouped-pairs": grouped_pairs,
    "grouped-completions": grouped_completions,
}


def evaluate(loss: Callable[[Inputs], Tensor], given: Inputs) -> tuple[Tensor, ...]:
    found = loss(given)
    return found.detach(), *torch.autograd.grad(found, (given["x"], given["weight"]))


@pytest.mark.parametrize("name", LOSSES)
def test_is_finite_with_an_empty_completion(name: str) -> None:
    assert all(tensor.isfinite().all() for tensor in evaluate(LOSSES[name], inputs("cpu", 0)))


@pytest.mark.parametrize("name", LOSSES)
def test_is_finite_if_nothing_counts(name: str) -> None:
    """All tokens are ignored, those of the chosen too: nothing flows back into hidden states and the head."""
    given = inputs("cpu", 0)
    given["target"].fill_(-100)
    given["ids"].fill_(-100)
    loss, *gradients = evaluate(LOSSES[name], given)
    assert loss.isfinite()
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo"])
def test_micro_batches_add_up_to_the_batch(kind: str) -> None:
    """With the tokens of all of it as what each divides by: without a process group, and however they are divided."""
    given = inputs("cpu", 0, pairs=3)
    mask, old, advantages = given["target"] != -100, given["old"], given["advantages"]
    lp = tokens(given).view(mask.shape)
    items = int(mask.sum())

    def loss(rows: slice) -> Tensor:
        some = lp[rows], old[rows], given["reference"][rows], advantages[rows], mask[rows]
        beta = 0.0 if kind == "vespo" else 0.04
        return losses.policy_loss(*some, beta=beta, loss_type=kind, num_items_in_batch=items).loss

    wanted = given["x"], given["weight"]
    parts = loss(slice(0, 1)) + loss(slice(1, 4)) + loss(slice(4, 6))
    whole = loss(slice(0, 6))
    torch.testing.assert_close(parts, whole)
    got = (torch.autograd.grad(total, wanted, retain_graph=True) for total in (parts, whole))
    torch.testing.assert_close(*got)


def test_sums_of_pairs_add_up_to_the_batch() -> None:
    chosen, rejected = -torch.rand(6), -torch.rand(6)
    parts = (losses.dpo_loss(chosen[s], rejected[s], reduction="sum").loss for s in (slice(0, 1), slice(1, 6)))
    torch.testing.assert_close(sum(parts) / 6, losses.dpo_loss(chosen, rejected).loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_add_up_to_the_cross_entropy(dtype: torch.dtype) -> None:
    """Within the error of its logits, which are of x's dtype; those here are float32, and so is the entropy."""
    given = {name: t.detach().to(dtype) if name in ("x", "weight") else t for name, t in inputs("cpu", 0).items()}
    x, target = given["x"].flatten(0, 1), given["target"].flatten()
    expected = fused_linear_cross_entropy(x, given["weight"], target, reduction="sum")
    found = tokens(given, return_entropy=True)
    assert isinstance(expected, Tensor)
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(-found.logprobs.sum(), expected, rtol=eps, atol=0)
    p = (x.double() @ given["weight"].double().T).softmax(-1)
    entropy = -(p * p.log()).sum(-1).masked_fill(target == -100, 0.0)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_cuda_graph_captures_forward_and_backward(name: str) -> None:
    """A graph that is replayed on other data computes theirs: the host waits for nothing in between."""
    if not torch.cuda.is_available():
        pytest.skip("CUDA graphs need a CUDA device")
    given, other, loss = inputs("cuda", 0), inputs("cuda", 1), LOSSES[name]
    expected = evaluate(loss, other)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        evaluate(loss, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = evaluate(loss, given)
    with torch.no_grad():
        for key, tensor in given.items():
            tensor.copy_(other[key])
    graph.replay()
    for mine, theirs in zip(captured, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["dpo-sigmoid", "policy-grpo", "exploring"])
def test_compiles_whole_for_sizes_that_change(name: str) -> None:
    """One graph, made at the first call: other numbers of sequences and tokens don't compile again."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(LOSSES[name], fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for pairs, length in ((2, 5), (3, 7), (4, 6)):
        given = inputs("cpu", 0, pairs, length)
        torch.testing.assert_close(evaluate(compiled, given), evaluate(LOSSES[name], given))
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]
