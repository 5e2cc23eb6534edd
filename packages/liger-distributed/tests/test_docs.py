"""The README's program runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pool import Pool

README = Path(__file__).parent.parent / "README.md"


def block_with(text: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    (block,) = [block for block in blocks if text in block]
    return block


def program() -> list[str]:
    """Lines that the README's program prints, in processes that have a group already."""
    block = block_with("init_process_group")
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        printed: list[str] = []
        exec(block, {"print": lambda rank, loss: printed.append(repr(loss))})
    return printed


def test_the_program_of_the_readme(pool: Pool) -> None:
    """It prints the same losses everywhere, and they fall."""
    first, second = pool.run(program)
    assert first == second
    losses = [float(text) for text in first]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


def train_the_model() -> list[float]:
    """Three steps of two calls each with the README's model, on this process's rows: the loss before and after them."""
    names: dict[str, Any] = {}
    exec(block_with("fully_shard"), names)
    torch.manual_seed(0)
    model = names["shard"](names["Model"](torch.nn.Embedding(9, 4), 4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(9, (dist.get_world_size(), 2, 3, 4))[dist.get_rank()]
    losses = []
    for _ in range(3):
        losses.append(model(tokens, tokens).detach())
        optimizer.zero_grad()
        names["step"](model, optimizer, [(part, part) for part in tokens])
    losses.append(model(tokens, tokens).detach())
    both = torch.stack(losses)
    dist.all_reduce(both)
    return both.tolist()


def test_the_model_of_the_readme(pool: Pool) -> None:
    losses = pool.run(train_the_model)[0]
    assert losses == sorted(losses, reverse=True)
