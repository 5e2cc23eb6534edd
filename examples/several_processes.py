"""Draw the loss curves of train_lm in one process, in two and in four: python examples/several_processes.py.

The curves and what made them are kept in the picture's own text, for the test that asks whether it is current.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import train_lm
from matplotlib.figure import Figure

PICTURE = Path(__file__).resolve().parent.parent / "packages/liger-distributed/several-processes.png"
STEPS = 100
WAYS = {
    "2 processes --fsdp": ["--nproc-per-node", "2", train_lm.__file__, "--fsdp"],
    "2 processes --tp 2": ["--nproc-per-node", "2", train_lm.__file__, "--tp", "2"],
    "4 processes --fsdp --tp 2": ["--nproc-per-node", "4", train_lm.__file__, "--fsdp", "--tp", "2"],
}


def settings() -> str:
    """The settings that the curves depend on."""
    return repr(replace(train_lm.PRESETS["tiny"], steps=STEPS))


def curves_of(name: str, folder: str) -> dict[str, list[float]]:
    """The losses of the processes, and those of one process on the same machine."""
    path = Path(folder) / "curves.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *WAYS[name], "--steps", str(STEPS)]
    command += ["--device", "cpu", "--curves", str(path), "--output", f"{folder}/curves.png"]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(path.read_text("utf-8"))


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """All curves above, and below how far each is from that of one process."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    one = curves["one process"]
    for number, (name, losses) in enumerate(curves.items()):
        above.plot(losses, label=name, linewidth=2 * (len(curves) - number) - 1, alpha=0.7)
        if losses is not one:
            below.plot(
                [a / b - 1 for a, b in zip(losses, one, strict=True)], label=name, linewidth=1, color=f"C{number}"
            )
    above.set_ylabel("loss, nats per token")
    above.legend()
    below.set(xlabel="step", ylabel="relative difference")
    figure.suptitle(f"examples/train_lm.py, gloo on a CPU, torch {torch.__version__}")
    figure.savefig(path, dpi=80, metadata={"settings": settings(), "curves": json.dumps(curves)})


def main() -> None:
    """Train and draw."""
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in WAYS:
            pair = curves_of(name, folder)
            curves = {"one process": pair["one process"], **curves, name: pair[name]}
    draw(curves, PICTURE)


if __name__ == "__main__":
    main()
