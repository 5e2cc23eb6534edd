"""`liger-transformers compare MODEL_TYPE`: a few steps on random tokens, plain and swapped, each way in a process of its own."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from xml.sax.saxutils import escape

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import liger_core as liger
from liger_transformers.apply import apply
from liger_transformers.cli import config_of

WAYS = ("plain", "liger")
WARM = 3
"""Steps before those that are timed: kernels are compiled, and memory is allocated."""


class Result(NamedTuple):
    """A way's steps.

    Attributes:
        way: its name.
        milliseconds: of a step, the median.
        tokens_per_second: by the median.
        gigabytes: the most memory, of 10⁹ bytes: PyTorch's on a GPU, the process's on a CPU.
        loss: of the last step.
    """

    way: str
    milliseconds: float
    tokens_per_second: float
    gigabytes: float
    loss: float


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status (1: a way failed, 2: there is no such model)."""
    parser = argparse.ArgumentParser(prog="liger-transformers compare", description=__doc__)
    parser.add_argument("model", metavar="MODEL_TYPE", help="such as llama; or a directory that holds a config.json")
    parser.add_argument("--layers", type=_positive, metavar="N", help="default: as many as the configuration says")
    parser.add_argument("--batch", type=_positive, default=4, metavar="N", help="rows of a step (default: %(default)s)")
    parser.add_argument(
        "--length", type=_positive, default=2048, metavar="N", help="tokens of a row (default: %(default)s)"
    )
    parser.add_argument("--steps", type=_positive, default=10, metavar="N", help="timed steps (default: %(default)s)")
    parser.add_argument("--precision", choices=["fp8"], help="as apply(model, precision=...)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way:
        print(json.dumps(run(options)))
        return 0
    try:
        if type(config_of(options.model)) not in cast("Any", AutoModelForCausalLM)._model_mapping:
            raise ValueError(f"{options.model!r} is no causal language model, and it trains nothing else")
    except ValueError as error:
        print(f"liger-transformers compare: {error}", file=sys.stderr)
        return 2
    results: list[Result] = []
    for way in WAYS:
        command = [sys.executable, "-m", "liger_transformers.compare", *arguments, "--way", way]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            results.append(Result(*json.loads(done.stdout.splitlines()[-1])))
        else:
            print(f"{way}: failed, as it says above", file=sys.stderr)
    print(table(results))
    if liger.infer_device() == "cpu":
        print("On a CPU no kernel runs: these times say nothing about a GPU.")
    if options.picture:
        options.picture.write_text(picture(options.model, results), encoding="utf-8")
    return 0 if len(results) == len(WAYS) else 1


def run(options: Any) -> Result:
    """Train one way in this process, with AdamW: in bfloat16, on a CPU in float32."""
    device = liger.infer_device()
    accelerator = None if device == "cpu" else torch.get_device_module(device)
    config: Any = config_of(options.model)
    if options.layers:
        config.num_hidden_layers = options.layers
    cast("Any", torch).manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if accelerator else torch.float32
        model = cast("Any", AutoModelForCausalLM).from_config(config, dtype=dtype).train()
        ids = torch.randint(config.get_text_config().vocab_size, (options.batch, options.length))
    if options.way == "liger":
        print(apply(model, precision=options.precision), file=sys.stderr)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=accelerator is not None)
    seconds: list[float] = []
    loss = torch.tensor(torch.nan)
    for _ in tqdm(range(WARM + options.steps), desc=options.way, unit="step"):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if accelerator:
            accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    middle = statistics.median(seconds[WARM:])
    peak = accelerator.max_memory_allocated() if accelerator else _process_memory()
    return Result(options.way, middle * 1e3, ids.numel() / middle, peak / 1e9, loss.item())


def table(results: Sequence[Result]) -> str:
    """A line for each way."""
    lines = [f"{'way':8}{'ms a step':>12}{'tokens/s':>12}{'GB at most':>12}{'last loss':>12}"]
    for way, milliseconds, tokens, gigabytes, loss in results:
        lines.append(f"{way:8}{milliseconds:12.1f}{tokens:12.0f}{gigabytes:12.2f}{loss:12.4f}")
    return "\n".join(lines)


def picture(title: str, results: Sequence[Result]) -> str:
    """An SVG of two bars for each way: time and memory beside the largest of them."""
    parts = [f'<text x="8" y="20" font-weight="bold">{escape(title)}</text>']
    y = 36
    for values, unit in (
        ({r.way: r.milliseconds for r in results}, "ms a step"),
        ({r.way: r.gigabytes for r in results}, "GB at most"),
    ):
        for way, value in values.items():
            width = 300 * value / max(values.values())
            parts.append(f'<text x="8" y="{y + 14}">{way}</text>')
            parts.append(f'<rect x="60" y="{y}" width="{width:.0f}" height="18" fill="{COLOURS[way]}"/>')
            parts.append(f'<text x="{66 + width:.0f}" y="{y + 14}">{value:.2f} {unit}</text>')
            y += 26
    style = "text{font:13px sans-serif;fill:#222}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    size = f'width="520" height="{y + 8}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>\n'


COLOURS = {"plain": "#9a9a9a", "liger": "#1f77b4"}


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _process_memory() -> int:
    """The most memory that this process has had, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
