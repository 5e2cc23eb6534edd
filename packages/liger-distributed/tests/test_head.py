"""A head whose forward is the loss, under what trains models on several processes, against one process with all rows."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from seen import Sent
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import liger_core
from liger_distributed import LossHead

HIDDEN, VOCABULARY, ROWS = 8, 11, 6
CALLS = 2  # of a step that accumulates


class Model(nn.Module):
    """An embedding, two blocks, and the head."""

    def __init__(self, way: frozenset[str], dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, dtype=dtype) for _ in range(2))
        self.norm = nn.Parameter(torch.rand(HIDDEN, dtype=dtype))
        self.head = LossHead(HIDDEN, VOCABULARY, "bias" in way, dtype=dtype, **options)
        if "tied" in way:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, target: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(checkpoint(block, x, use_reentrant=False) if "checkpoint" in self.way else block(x))
        x = liger_core.rms_norm(x, self.norm.to(x.dtype))
        if "checkpoint" in self.way:
            return checkpoint(self.head, x, target, labels, use_reentrant=False)
        return self.head(x, target, labels)


def data(few: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of all processes and calls, ``[processes, calls, 2, ROWS]``; process 1 has few labels, or none."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    tokens = torch.randint(VOCABULARY, (dist.get_world_size(), CALLS, 2, ROWS), generator=draw)
    target = torch.randint(VOCABULARY, tokens.shape, generator=draw)
    target[0, 0, 0, :2] = -100
    target[1:].flatten(1)[:, few:] = -100
    return tokens, target


def step(way: frozenset[str], few: int, dtype: torch.dtype, options: dict[str, Any]) -> list[str]:
    """A step of a model that is divided as `way` says; returns the collectives of a call of the head alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    tokens, target = data(few)
    alone = Model(frozenset(way & {"tied", "bias"}), dtype, **options)
    model: Any = copy.deepcopy(alone)
    model.way = way
    loss = alone(tokens, target)  # one process with all rows, which sends nothing
    loss.backward()

    if "fsdp" in way:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "mixed" in way else MixedPrecisionPolicy()
        units = [*model.blocks] if "tied" in way else [*model.blocks, model.head]
        if "compile" in way:
            model.head.compile(backend="aot_eager", fullgraph=True)
        for unit in [*units, model]:
            fully_shard(unit, mp_policy=policy)
        call = model
    else:
        call = nn.parallel.DistributedDataParallel(model)
        if "compile" in way:
            call = torch.compile(call, backend="aot_eager")
    mine, rank = [], dist.get_rank()
    parts = list(zip(tokens[rank], target[rank], strict=True))
    if "accumulate" not in way:
        parts = [(tokens[rank].flatten(0, 1), target[rank].flatten(0, 1))]
    with Sent() if "compile" not in way else contextlib.nullcontext() as sent:
        labels = model.head.count(*[part for _, part in parts]) if "accumulate" in way else None
    for number, (words, goal) in enumerate(parts):
        last = number == len(parts) - 1
        if "fsdp" in way:
            model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or "fsdp" in way else call.no_sync():
            part_loss = call(words, goal, labels)
            part_loss.backward()
        mine.append(part_loss.detach())
    total = torch.stack(mine).sum()
    dist.all_reduce(total)
    rough = {"rtol": 3e-2, "atol": 3e-2} if "mixed" in way else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(total / dist.get_world_size(), loss.detach(), **rough, check_dtype=False)
    whole = dict(alone.named_parameters())
    for name, weight in model.named_parameters():
        gradient = weight.grad.full_tensor() if "fsdp" in way else weight.grad
        torch.testing.assert_close(gradient, whole[name].grad, **rough)
    return [] if sent is None else [kind for kind, _ in sent.collectives]


WAYS = (
    "fsdp",
    "fsdp bias",
    "fsdp tied accumulate",
    "fsdp accumulate checkpoint",
    "fsdp mixed accumulate",
    "fsdp compile",
    "ddp",
    "ddp tied accumulate",
    "ddp accumulate checkpoint",
    "ddp compile",
)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_process(pool: Pool, way: str) -> None:
    """In float64, loss and every gradient, where process 1 has three labels of 24."""
    dtype = torch.float32 if "mixed" in way else torch.float64
    sent = pool.run(step, frozenset(way.split()), 3, dtype, {})
    assert sent[0] == (["all_reduce"] if "accumulate" in way else [])


@pytest.mark.parametrize("way", ["fsdp", "ddp accumulate"])
def test_a_process_without_labels(pool: Pool, way: str) -> None:
    pool.run(step, frozenset(way.split()), 0, torch.float64, {})


def test_options(pool: Pool) -> None:
    options = {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 4.0}
    pool.run(step, frozenset({"fsdp"}), 3, torch.float64, options)


def no_mean_of_means() -> tuple[float, float]:
    """The mean of what each process would compute alone, and that of what it computes, relative to the loss of all."""
    tokens, target = data(1)
    model = Model(frozenset(), torch.float64)
    rank = dist.get_rank()
    x = model.embedding(tokens[rank])
    local_loss = liger_core.fused_linear_cross_entropy(x.flatten(0, -2), model.head.weight, target[rank].flatten())
    both = torch.stack([local_loss, model.head(x, target[rank])]).detach()
    dist.all_reduce(both)
    x = model.embedding(tokens)
    truth = liger_core.fused_linear_cross_entropy(x.flatten(0, -2), model.head.weight, target.flatten()).detach()
    return tuple((both / dist.get_world_size() / truth - 1).abs().tolist())


def test_a_mean_of_means_would_be_another(pool: Pool) -> None:
    """So that the tests above can fail."""
    theirs, ours = pool.run(no_mean_of_means)[0]
    assert theirs > 1e-2
    assert ours < 1e-12


def of_one_call() -> list[tuple[str, int]]:
    tokens, target = data(3)
    model = Model(frozenset(), torch.float64)
    with Sent() as sent:
        model(tokens[0], target[0]).backward()
    return sent.collectives


def test_a_call_sends_one_number(pool: Pool) -> None:
    assert pool.run(of_one_call)[0] == [("all_reduce", 8)]


def divided(sequence: bool) -> None:
    """By a plan of `parallelize_module`: the vocabulary among the processes, rows whole or divided before the head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    tokens, target = (one.flatten(0, 1) for one in data(3))
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    alone = Model(frozenset({"bias"}), torch.float64, group=None, softcap=4.0)
    head = copy.deepcopy(alone.head)
    plan = ColwiseParallel(
        input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate(), use_local_output=True
    )
    parallelize_module(head, mesh, plan)
    x, whole = (torch.rand(*tokens[..., 0].shape, ROWS, HIDDEN, dtype=torch.float64) for _ in range(2))
    dist.broadcast(x, 0)
    whole = x.clone().requires_grad_()
    part: Any = distribute_tensor(x, mesh, [Shard(1) if sequence else Replicate()]).requires_grad_()
    loss, truth = head(part, target=target), alone.head(whole, target)
    torch.testing.assert_close(loss.detach(), truth.detach(), rtol=1e-12, atol=1e-12)
    loss.backward()
    truth.backward()
    torch.testing.assert_close(part.grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(head.parameters(), alone.head.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel(pool: Pool, sequence: bool) -> None:
    pool.run(divided, sequence)


def of_part_of_the_processes() -> float:
    """The loss of a head whose group is this process alone: of its own labels."""
    tokens, target = data(1)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    model = Model(frozenset(), torch.float64, group=groups[rank])
    local_loss = liger_core.fused_linear_cross_entropy(
        model.embedding(tokens[rank]).flatten(0, -2), model.head.weight, target[rank].flatten()
    )
    return float((model.head(model.embedding(tokens[rank]), target[rank]) - local_loss).abs())


def test_the_group_that_is_counted(pool: Pool) -> None:
    assert max(pool.run(of_part_of_the_processes)) < 1e-12


def test_one_process_needs_no_group() -> None:
    """Summed, not averaged; without labels 0; and logits, with their softcap, without a target."""
    head = LossHead(HIDDEN, VOCABULARY, softcap=2.0, averaged=False)
    x, target = torch.randn(2, 3, HIDDEN), torch.tensor([[1, 2, -100], [3, -100, 4]])
    logits = head(x)
    assert logits.shape == (2, 3, VOCABULARY)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(head(x, target), loss)
    torch.testing.assert_close(head(x, target, head.count(target, target)), loss / 2)
    assert head(x, torch.full_like(target, -100)).item() == 0
    assert copy.deepcopy(head)(x, target) == head(x, target)


def test_the_first_argument_is_checked() -> None:
    with pytest.raises(ValueError, match="fused_linear_cross_entropy: target has shape"):
        LossHead(HIDDEN, VOCABULARY)(torch.randn(4, HIDDEN), torch.zeros(3, dtype=torch.int64))


def test_the_count_is_checked() -> None:
    head, target = LossHead(HIDDEN, VOCABULARY), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(TypeError, match="LossHead: labels is 4; it takes the tensor that `count` returns"):
        head(torch.randn(4, HIDDEN), target, labels=4)
    with pytest.raises(TypeError, match="LossHead.count: there is no target; it takes the target of each call"):
        head.count()
