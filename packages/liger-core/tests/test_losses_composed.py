"""Losses of hidden states, composed as docs/losses.md does: each waits for nothing, and compiles whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from liger_core import losses
from liger_core.losses import policy, preference

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


LOSSES: dict[str, Callable[[Inputs], Tensor]] = {
    **{f"dpo-{kind}": dpo(kind) for kind in preference.DPO_LOSS_TYPES},
    "orpo": lambda given: losses.orpo_loss(*halves(given, average=True)).loss,
    "simpo": lambda given: losses.simpo_loss(*halves(given, average=True)).loss,
    "cpo": lambda given: losses.cpo_loss(*halves(given)).loss,
    "kto": lambda given: losses.kto_loss(completions(given), given["old"].sum(-1), given["desirable"]).loss,
    **{f"policy-{kind}": of_policy(kind) for kind in policy.LOSS_TYPES},
    "exploring": exploring,
    "packed": packed,
    "topk": topk,
}


def evaluate(loss: Callable[[Inputs], Tensor], given: Inputs) -> tuple[Tensor, ...]:
    found = loss(given)
    return found.detach(), *torch.autograd.grad(found, (given["x"], given["weight"]))


@pytest.mark.parametrize("name", LOSSES)
def test_is_finite_with_an_empty_completion(name: str) -> None:
    assert all(tensor.isfinite().all() for tensor in evaluate(LOSSES[name], inputs("cpu", 0)))


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
