"""The README's program runs."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from pool import Pool

README = Path(__file__).parent.parent / "README.md"


def program() -> list[str]:
    """What the README's program prints, in processes that have a group already."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    (block,) = [block for block in blocks if "init_process_group" in block]
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
