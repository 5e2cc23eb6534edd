"""One training step of a whole model: time, memory, loss and the kernels' time, per way of running it.

    python benchmarks/end_to_end.py --models llama-1b --ways plain,compile,liger,triton,triton-lean
    python benchmarks/end_to_end.py --render first.csv second.csv
    python benchmarks/end_to_end.py --smoke

A model is transformers' own, in bfloat16, with random weights from its configuration and random tokens; the optimizer is AdamW
with fused kernels. Each way is a process of its own:

- `plain`, `compile`: transformers' code, and torch.compile of it.
- `liger`: liger-kernel's patch of the model.
- `LANGUAGE`: `liger_transformers.apply` with kernels of that language; `LANGUAGE-lean`: with ``lean=True``. Either may end in
  `-compile`.

Attention is causal in all of them and gets no mask: compiled code would otherwise build one, and take a slower kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import records
import torch
from command import Command

from liger_core.backend import backends

PLACES = {
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "attention": ("flash", "fmha", "sdpa"),
    "optimizer": ("adam", "multi_tensor"),
}
"""What a kernel's name holds, by the column that its time is added to. The rest of `device_ms` is norms, activations, rope, the
loss, additions, copies and attention's small kernels."""

COLUMNS = (
    "model", "way", "tokens", "checkpointing", "parameters", "ms", "tokens_per_s", "peak_gb", "forward_peak_gb", "kept_gb",
    "start_s", "first_loss", "last_loss", "loss_off", "device_ms", *(f"{place}_ms" for place in PLACES), "note",
)  # fmt: skip
"""`kept_gb` is what a forward leaves for its backward, `start_s` the first steps, which compile. `loss_off` is the largest
relative difference of a step's loss from that of the first way."""

WARM = 4
"""Steps before the first that is timed: they compile, and fill the optimizer's state."""


class Model(NamedTuple):
    """A model by its configuration. `smoke` is what a CPU can do."""

    kind: str
    sizes: dict[str, Any]


LLAMA = {"num_key_value_heads": 8, "num_attention_heads": 32, "max_position_embeddings": 131072, "vocab_size": 128256}

MODELS = {
    # Llama 3.2 1B; Llama 3.1 8B and Gemma 2 2B with fewer layers, which a GPU of 80 GB holds with the optimizer.
    "llama-1b": Model("llama", LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True,
    }),
    "llama-8b-8-layers": Model("llama", LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "tie_word_embeddings": False,
    }),
    "qwen3-moe-8-layers": Model("qwen3_moe", {
        "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4,
        "tie_word_embeddings": False,
    }),
    "gemma2-2b-8-layers": Model("gemma2", {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "attn_logit_softcapping": None,
    }),
}  # fmt: skip

SMOKE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


class Job(NamedTuple):
    """What one process measures."""

    model: str
    way: str
    batch: int
    length: int
    steps: int
    checkpointing: bool
    device: str
    smoke: bool


def measure(job: Job) -> dict[str, Any]:
    """Train a few steps, and return what a row holds but for `loss_off`, with all losses."""
    torch.manual_seed(0)
    forward, finish, parameters = trainer(job)
    device = torch.get_device_module(job.device)

    def step() -> torch.Tensor:
        loss = forward()
        finish(loss)
        return loss.detach()

    start = time.perf_counter()
    losses = [step().item() for _ in range(1 if job.smoke else WARM)]
    device.synchronize()
    started = time.perf_counter() - start
    if job.device != "cpu":
        device.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(job.steps):
        device.synchronize()
        start = time.perf_counter()
        loss = step()
        device.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    ms = statistics.median(times) * 1e3
    row: dict[str, Any] = {
        "ms": f"{ms:.1f}",
        "tokens_per_s": f"{job.batch * job.length / ms * 1e3:.0f}",
        "parameters": parameters,
        "start_s": f"{started:.1f}",
        "losses": losses,
    }
    if job.device != "cpu":
        row["peak_gb"] = _gb(device.max_memory_allocated())
        before = device.memory_allocated()
        device.reset_peak_memory_stats()
        loss = forward()
        row |= {
            "kept_gb": _gb(device.memory_allocated() - before),
            "forward_peak_gb": _gb(device.max_memory_allocated()),
        }
        finish(loss)
        row |= places(step, device.synchronize)
    return row


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def trainer(job: Job) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None], int]:
    """What returns the loss of a step, what does the rest of the step, and the number of parameters."""
    import transformers

    kind, sizes = MODELS[job.model]
    way, *extras = (
        job.way.split("-") if not job.way.startswith("triton-ascend") else ("triton-ascend", *job.way.split("-")[2:])
    )
    if job.smoke:
        sizes = {name: SMOKE.get(name, value) for name, value in sizes.items()}
    if way == "liger":
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # type: ignore[import-not-found]

        MODEL_TYPE_TO_APPLY_LIGER_FN[kind]()
    config = transformers.AutoConfig.for_model(kind, use_cache=False, attn_implementation="sdpa", **sizes)
    with torch.device(job.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    code: Any = sys.modules[type(model).__module__]
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if hasattr(code, name):
            setattr(code, name, lambda *args, **kwargs: None)
    if way not in ("plain", "compile", "liger"):
        import liger_core
        import liger_transformers

        liger_transformers.apply(model, **({"lean": True} if "lean" in extras else {}))
        liger_core.use(way)  # not before: swaps are proved on the CPU
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, sizes["vocab_size"], (job.batch, job.length), generator=generator).to(job.device)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    run = torch.compile(loss_of) if "compile" in (way, *extras) else loss_of

    def finish(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: run(tokens), finish, sum(parameter.numel() for parameter in model.parameters())


def places(step: Callable[[], object], synchronize: Callable[[], None]) -> dict[str, Any]:
    """The device's milliseconds of one step by what took them; the kernels that took most are printed to the error stream."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize()
    spent = dict.fromkeys(PLACES, 0.0)
    kernels: list[tuple[float, str]] = []
    for event in profiler.key_averages():
        ms = event.self_device_time_total / 1e3
        place = place_of(event.key)
        if place is not None:
            spent[place] += ms
        kernels.append((ms, f"{event.count} x {event.key[:60]} [{place or 'rest'}]"))
    for ms, name in sorted(kernels, reverse=True)[:25]:
        print(f"#   {ms:8.2f} ms  {name}", file=sys.stderr)
    row = {f"{place}_ms": f"{ms:.1f}" for place, ms in spent.items()}
    return row | {"device_ms": f"{sum(ms for ms, _ in kernels):.1f}"}


def place_of(kernel: str) -> str | None:
    """The place that a kernel's time is added to, or None for the rest."""
    name = kernel.lower()
    return next((place for place, words in PLACES.items() if any(word in name for word in words)), None)


def in_its_process(job: Job) -> dict[str, Any]:
    """What `measure` returns in a process of its own, or a note that says why it ended."""
    if job.smoke:
        return measure(job)
    words = [sys.executable, __file__, "--one", json.dumps(job)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"note": f"ended with {done.returncode}"}
    return json.loads(lines[-1])


def row_of(job: Job, found: dict[str, Any], plain: Sequence[float] | None) -> dict[str, Any]:
    """A row of the record. `plain` are the losses of the first way, which the others are held to."""
    losses: list[float] = found.pop("losses", [])
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {"model": job.model, "way": job.way, "tokens": f"{job.batch} x {job.length}"}
    row["checkpointing"] = "yes" if job.checkpointing else ""
    if losses:
        row |= {"first_loss": f"{losses[0]:.4f}", "last_loss": f"{losses[-1]:.4f}"}
    if losses and plain:
        row["loss_off"] = f"{max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True)):.1e}"
    return row | found


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a name that doesn't exist ends the program with those that do."""
    languages = ["torch", *(backend.language for backend in backends())]
    kinds = [
        f"{language}{lean}{extra}" for language in languages for lean in ("", "-lean") for extra in ("", "-compile")
    ]
    command = Command(__doc__, smoke="of the reference")
    command.add_names("models", [*MODELS], default=[next(iter(MODELS))])
    command.add_names("ways", ["plain", "compile", "liger", *kinds])
    command.add_argument("--batch", type=int, default=8, help="sequences in a step")
    command.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    command.add_argument("--steps", type=int, default=8, help="that are timed")
    command.add_argument("--checkpointing", action="store_true", help="keep each layer's input alone, and run it again")
    command.add_argument("--name", default="end-to-end", help="of the record")
    command.add_argument(
        "--render", type=Path, nargs="+", metavar="CSV", help="measure nothing: make one record of these"
    )
    options = command.parse_args(words)
    able = [b.language for b in backends() if b.missing(options.device) is None]
    ours = [f"{language}{kind}" for language in able for kind in ("", "-lean", "-compile", "-lean-compile")]
    if options.smoke:
        options.device, options.batch, options.length, options.steps = "cpu", 2, 16, 1
        options.ways = options.ways or ["plain", "torch", "torch-lean"]
    options.ways = options.ways or ["plain", "compile", "liger", *ours]
    command.check(options, measures=not options.render)
    return options


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print as it goes, and write the record. Returns the rows."""
    if words and words[0] == "--one":
        print(json.dumps(measure(Job(*json.loads(words[1])))), flush=True)
        return []
    options = parse(words)
    if options.render:
        heads, tables = zip(*map(records.read_csv, options.render), strict=True)
        head = heads[0] | {"commit": os.environ.get("LIGER_COMMIT", heads[0]["commit"])}
        rows = [{column: row.get(column, "") for column in COLUMNS} for table in tables for row in table]
        write(head, rows, options)
        return rows
    head = records.head_of(options.device)
    print(records.comment(head) + ",".join(COLUMNS), flush=True)
    rows = []
    for model in options.models:
        first: list[float] | None = None
        for way in options.ways:
            size = options.batch, options.length, options.steps
            job = Job(model, way, *size, options.checkpointing, options.device, options.smoke)
            found = in_its_process(job)
            losses = found.get("losses")
            rows.append(row_of(job, found, first))
            first = first or losses
            print(",".join(map(str, rows[-1].values())), flush=True)
    if not options.smoke:
        write(head, rows, options)
    return rows


def write(head: records.Head, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the record, its page without the columns that hold nothing."""
    shown = [column for column in COLUMNS if any(str(row[column]) for row in rows)]
    lines = [[str(row[column]) for column in shown] for row in rows]
    body = records.table(shown, lines)
    records.write(options.name, head, rows, COLUMNS, "Training steps of whole models", body, options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
