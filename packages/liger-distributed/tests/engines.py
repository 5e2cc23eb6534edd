"""Beside engines that people train with, in two processes. They are not installed with the rest:

uv run --with "megatron-core==0.16.*" --with "accelerate==1.15.*" pytest packages/liger-distributed/tests/engines.py -n 0
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from pool import Pool

import liger_core
import liger_distributed

ROWS, BATCH, VOCABULARY, HIDDEN = 5, 3, 12, 8


def beside_megatron() -> tuple[float, float]:
    """How far Megatron-Core's vocabulary-parallel cross-entropy is from ours, in float32: losses, and gradients."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    torch.manual_seed(0)
    logits, target = 3 * torch.randn(ROWS, BATCH, VOCABULARY), torch.randint(VOCABULARY, (ROWS, BATCH))
    mine = logits.chunk(group.size(), -1)[group.rank()].contiguous()
    theirs, ours = mine.clone().requires_grad_(), mine.clone().requires_grad_()
    expected = vocab_parallel_cross_entropy(theirs.clone(), target)  # it writes to its logits
    found = liger_distributed.cross_entropy(ours.flatten(0, 1), target.flatten(), group=group, reduction="none")
    incoming = torch.randn(ROWS, BATCH)
    expected.backward(incoming)
    found.view_as(incoming).backward(incoming)
    assert theirs.grad is not None
    assert ours.grad is not None
    return (expected.flatten() - found).abs().max().item(), (theirs.grad - ours.grad).abs().max().item()


@pytest.fixture(autouse=True)
def _patience(pool: Pool) -> None:
    """An engine's first import takes minutes on a busy machine."""
    pool.patience = 300.0


def test_megatron_core(pool: Pool) -> None:
    for loss, gradient in pool.run(beside_megatron):
        assert loss < 2e-6
        assert gradient < 1e-6


class Model(torch.nn.Module):
    """An embedding, a block of our ops, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.block = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.norm = torch.nn.Parameter(torch.ones(HIDDEN))
        self.head = liger_distributed.LossHead(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + liger_core.swiglu(*self.block(liger_core.rms_norm(x, self.norm)).chunk(2, -1))
        return self.head(x, target=target)


def train_by_accelerate() -> tuple[list[float], list[float]]:
    """The losses of five steps by Accelerate's DDP, averaged over the processes, and those of one process."""
    places = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    places |= {"WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": dist.get_world_size()}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (dist.get_world_size(), BATCH, ROWS))
    target = tokens.clone()
    target[1:, :, 1:] = -100  # process 1 has few labels
    torch.manual_seed(1)
    alone = Model()
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    one = []
    for _ in range(5):
        loss = alone(tokens, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        one.append(loss.item())
    sharded, its = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert isinstance(sharded, torch.nn.parallel.DistributedDataParallel)
    several = []
    for _ in range(5):
        loss = sharded(tokens[dist.get_rank()], target[dist.get_rank()])
        its.zero_grad()
        accelerator.backward(loss)
        its.step()
        several.append(accelerator.reduce(loss.detach(), "mean").item())
    return several, one


def test_accelerate(pool: Pool) -> None:
    several, one = pool.run(train_by_accelerate)[0]
    assert several == pytest.approx(one, rel=1e-5)
    assert several[-1] < several[0]
