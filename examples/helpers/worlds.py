"""Commands of train_lm on processes that are started once, with a model of a test's size.

torchrun --nproc-per-node 4 examples/helpers/worlds.py FOLDER '[[[2, ["--fsdp"]], [2, ["--tp", "2"]]], [[4, ["--tp", "4"]]]]'

The commands of a round run at once, each on so many of the processes, which are then a world of their own. Each writes its
curves into the folder, under its arguments.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import parallel
import train_lm


def main() -> int:
    """Run the rounds; the largest of what the commands return."""
    folder, rounds = Path(sys.argv[1]), json.loads(sys.argv[2])
    tiny = train_lm.PRESETS["tiny"]
    train_lm.PRESETS["tiny"] = replace(tiny, hidden=32, layers=2, feed_forward=64, context=32, batch=4)
    place, returned = int(os.environ["RANK"]), 0
    for number, commands in enumerate(rounds):
        first = 0
        for processes, arguments in commands:
            if (rank := place - first) in range(processes):
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
                store = f"file://{folder.resolve()}/store-{number}-{first}"
                dist.init_process_group("gloo", store, rank=rank, world_size=processes)
                path = folder / " ".join(arguments)
                options = ["--device", "cpu", "--steps", "3", "--output", f"{path}.png", "--curves", f"{path}.json"]
                returned = max(returned, train_lm.main([*arguments, *options]))
                dist.destroy_process_group()
            first += processes
    return returned


if __name__ == "__main__":
    parallel.leave(main())
