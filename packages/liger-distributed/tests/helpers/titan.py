"""torchtitan's own trainer and Llama debug model on CPU processes, as it is or with the overrides of `titan_ops`.

torchrun --nproc-per-node 2 packages/liger-distributed/tests/helpers/titan.py --tp 2 --backend partial_dtensor --ours
"""

# ruff: noqa: E402  torchtitan's modules are imported when it knows the device

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

# Without an accelerator it takes "cuda", and other modules read this when they are imported.
utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed import utils as processes
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel

BATCH, LENGTH, STEPS = 2, 32, 5


class Counting(BaseDataLoader):
    """Rows of numbers that count on: a model learns them in a few steps, and each process of data parallelism has its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to set."""

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **kwargs: Any) -> None:
        self.size, self.rank = dp_world_size, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator(torch.get_default_device()).manual_seed(0)
        while True:
            starts = torch.randint(2000, (2 * BATCH, 1), generator=generator).chunk(self.size)[self.rank]
            rows = starts + torch.arange(LENGTH + 1)
            labels = rows[:, 1:].clone()
            labels[0, :7] = -100
            yield {"input": rows[:, :-1] % 2048}, torch.where(labels < 0, labels, labels % 2048)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


class NoTokens:
    """The tokenizer that the trainer builds, and that nobody asks: `Counting` makes tokens."""

    class Config:
        def build(self, **kwargs: Any) -> NoTokens:
            return NoTokens()


class NoMemory:
    """The monitor of a device's memory: torch counts none of a CPU."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Nothing to reset."""


def train(tp: int, shard: int, backend: str, ours: bool) -> dict[str, Any]:
    """The losses and the gradients' norms of a few steps, and what trained: modules by class, and the loss."""
    metrics.build_device_memory_monitor = NoMemory
    processes.set_pg_timeouts = lambda **_: None  # its barrier names a device by number, which a CPU has not
    config = llama3_debugmodel()
    config.hf_assets_path = ""
    config.tokenizer = NoTokens.Config()
    config.dataloader = Counting.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    for layer in config.model_spec.model.layers:
        assert isinstance(
            layer.attention.inner_attention, FlexAttention.Config
        )  # a compiled kernel, forward alone on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.local_batch_size = 2 * BATCH // shard
    config.training.seq_len, config.training.steps = LENGTH, STEPS
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.tensor_parallel_degree = tp
    config.parallelism.data_parallel_shard_degree = shard
    config.parallelism.spmd_backend = backend
    config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = 0
    if ours:
        import titan_ops

        config.override.imports = titan_ops.ALL
    curve: list[tuple[float, float]] = []

    def remembered(self: Any, step: int, loss: float, most: float, norm: float, **kwargs: Any) -> None:
        curve.append((loss, norm))

    metrics.MetricsProcessor.log = remembered
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):  # gradients are added, not averaged, and gloo has no scaled sum for that
                module.set_force_sum_reduction_for_comms(True)
    trainer.train()
    trainer.close()
    modules = collections.Counter(type(module).__name__ for part in trainer.model_parts for module in part.modules())
    loss = type(trainer.loss_fn).__name__
    return {
        "losses": [loss for loss, _ in curve],
        "norms": [norm for _, norm in curve],
        "modules": modules,
        "loss": loss,
    }


def main() -> None:
    """Train, and write the curve from process 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument(
        "--backend", choices=("partial_dtensor", "full_dtensor", "spmd_types"), default="partial_dtensor"
    )
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = train(options.tp, options.shard, options.backend, options.ours)
    if dist.get_rank() == 0:
        print(json.dumps(results))
        if options.out is not None:
            options.out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Python's own end would abort this process where a thread of gloo drops its last tensor after it. FSDP keeps the group, so
    # the threads outlive destroy_process_group.
    os._exit(0)
