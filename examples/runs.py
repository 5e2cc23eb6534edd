"""Shared by the Hugging Face examples: the model, the data, and a run without liger beside one with it.

Without `--model` the model is a tiny Qwen3 with random weights and a byte for a token. The data are sources of Python's
standard library. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    Trainer,
    TrainerCallback,
    set_seed,
)

TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}


class Result(NamedTuple):
    """Cost of a run and its losses."""

    name: str
    losses: list[float]
    tokens_per_s: float
    peak_gb: float | None


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every example."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--plain", action="store_true", help="only the run without liger")
    options.add_argument("--liger", action="store_true", help="only the run with liger")
    options.add_argument("--model", help="a model's name or folder (default: a tiny one with random weights)")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--output", type=Path, default=Path("runs.png"), help="the picture")
    return options


def model_of(name: str | None) -> nn.Module:
    """A model, with the same weights at each call."""
    set_seed(0)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    config = AutoConfig.for_model("qwen3", vocab_size=384, num_key_value_heads=2, **TINY)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def tokenizer_of(name: str | None) -> Any:
    """The model's tokenizer."""
    return AutoTokenizer.from_pretrained(name) if name is not None else ByT5Tokenizer(extra_ids=125)


def texts(count: int, length: int = 120) -> list[str]:
    """Pieces of the standard library's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = "".join(file.read_text("utf-8", errors="ignore") for file in files[: 2 + count * length // 10_000])
    return [source[start : start + length] for start in range(0, count * length, length)]


class Meter:
    """Tokens, time and memory of a run, without its first two steps, which compile kernels."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens, self.steps, self.started = 0, 0, 0.0
        model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.tokens += arguments[0].numel()

    def step(self) -> None:
        """Call it after each step."""
        self.steps += 1
        if self.steps == 2:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.tokens, self.started = 0, time.perf_counter()

    def result(self, name: str, losses: Iterable[float]) -> Result:
        """Measurements of the steps so far; at least three."""
        peak = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 1e9
        return Result(name, list(losses), self.tokens / (time.perf_counter() - self.started), peak)


class Metered(TrainerCallback):
    """Counts a Trainer's steps."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count one."""
        self.meter.step()


def train(name: str, make: Callable[[nn.Module], Trainer], model: nn.Module) -> Result:
    """Train by a Trainer that `make` makes; it shows its own progress."""
    trainer = make(model)
    meter = Meter(trainer.model)
    trainer.add_callback(Metered(meter))
    trainer.train()
    return meter.result(name, (entry["loss"] for entry in trainer.state.log_history if "loss" in entry))


def compare(options: argparse.Namespace, make: Callable[[nn.Module, bool], Trainer]) -> list[Result]:
    """The runs that were asked for, each by a Trainer that `make` makes of a model, with liger or without it."""
    results = [
        train(name, lambda model, swap=name == "liger": make(model, swap), model_of(options.model))
        for name in names(options)
    ]
    report(results, options.output)
    return results


def names(options: argparse.Namespace) -> list[str]:
    """The runs that were asked for: both, unless one was."""
    return [name for name in ("plain", "liger") if getattr(options, name) or not (options.plain or options.liger)]


def report(results: Sequence[Result], picture: Path) -> None:
    """Print the cost of each run, and draw their losses."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result in results:
        peak = "not measured on a CPU" if result.peak_gb is None else f"{result.peak_gb:.2f} GB"
        cost = f"{result.name}: {result.tokens_per_s:,.0f} tokens/s, peak memory {peak}"
        print(f"{cost}, loss {result.losses[-1]:.4f}")
        axes.plot(range(1, len(result.losses) + 1), result.losses, label=cost)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(picture)
    print(f"drew {picture}")


def common(steps: int, folder: str = "trained") -> dict[str, Any]:
    """Arguments of every trainer."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
    }
