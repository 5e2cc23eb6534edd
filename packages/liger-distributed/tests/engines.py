r"""Beside engines that people train with, in two processes. They are not installed with the rest:

uv run --with "torch==2.13.*" --with "megatron-core==0.16.*" --with "accelerate==1.15.*" --with "torchtitan==0.3.*" \
    pytest packages/liger-distributed/tests/engines.py -n 0
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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
    losses = liger_distributed.cross_entropy(ours.flatten(0, 1), target.flatten(), group=group, reduction="none")
    incoming = torch.randn(ROWS, BATCH)
    expected.backward(incoming)
    losses.view_as(incoming).backward(incoming)
    assert theirs.grad is not None
    assert ours.grad is not None
    return (expected.flatten() - losses).abs().max().item(), (theirs.grad - ours.grad).abs().max().item()


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

    def get_input_embeddings(self) -> torch.nn.Module:
        """Accelerate's FSDP2 asks, and makes it a unit of its own."""
        return self.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        """Another one."""
        return self.head

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + liger_core.swiglu(*self.block(liger_core.rms_norm(x, self.norm)).chunk(2, -1))
        return self.head(x, target=target)


def train_by_accelerate(fsdp: bool) -> tuple[list[float], list[float], list[str]]:
    """The losses of five steps by Accelerate, averaged over the processes; those of one process; the units of FSDP2."""
    places = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    places |= {"WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": dist.get_world_size()}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    if fsdp:  # it divides on accelerators alone: from here on it takes this CPU for one
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator.state.distributed_type = DistributedType.FSDP
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
    assert isinstance(sharded, FSDPModule if fsdp else torch.nn.parallel.DistributedDataParallel)
    units = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
    divided = [name for name, weight in sharded.named_parameters() if isinstance(weight, DTensor)]
    assert bool(divided) == fsdp
    several = []
    for _ in range(5):
        loss = sharded(tokens[dist.get_rank()], target[dist.get_rank()])
        its.zero_grad()
        accelerator.backward(loss)
        its.step()
        several.append(accelerator.reduce(loss.detach(), "mean").item())
    return several, one, units


@pytest.mark.parametrize(("fsdp", "units"), [(False, []), (True, ["", "embedding", "head"])], ids=["DDP", "FSDP2"])
def test_accelerate(pool: Pool, fsdp: bool, units: list[str]) -> None:
    several, one, wrapped = pool.run(train_by_accelerate, fsdp)[0]
    assert wrapped == units
    assert several == pytest.approx(one, rel=1e-5)
    assert several[-1] < several[0]


def by_torchtitan(folder: Path, processes: int, *options: str) -> dict[str, Any]:
    """The results of `helpers/titan.py`, in processes of its own: torchtitan's trainer starts their group."""
    script, results = Path(__file__).parent / "helpers/titan.py", folder / "found.json"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, str(script), "--out", str(results), *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(2, ("--tp", "2"), id="TP, sequence and loss parallel"),
        pytest.param(2, ("--tp", "2", "--backend", "full_dtensor"), id="the same, all of it DTensors"),
        pytest.param(2, ("--shard", "2"), id="FSDP2"),
        pytest.param(4, ("--shard", "2", "--tp", "2"), id="FSDP2 and TP, two by two"),
    ],
)
def test_torchtitan(tmp_path: Path, processes: int, options: tuple[str, ...]) -> None:
    """Its Llama debug model with our norms, rope, SwiGLU and loss, named in its configuration: the curve is its own."""
    plain = by_torchtitan(tmp_path, processes, *options)
    ours = by_torchtitan(tmp_path, processes, *options, "--ours")
    assert plain["loss"] == "CrossEntropyLoss"
    assert ours["loss"] == "LigerLoss"
    for theirs, name, count in (("RMSNorm", "LigerNorm", 13), ("FeedForward", "LigerFeedForward", 6)):
        assert sum(number for kind, number in ours["modules"].items() if kind.endswith(name)) == count
        assert not any(kind.removeprefix("FSDP") == theirs for kind in ours["modules"])
    assert ours["modules"]["LigerRope"] == 6
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert ours["losses"][-1] < ours["losses"][0] - 0.1
