"""A training step of a whole model: time, memory, loss and the kernels' time, per way of running it.

    python benchmarks/end_to_end.py --models llama-1b --ways plain,compile,liger,triton,triton-lean
    python benchmarks/end_to_end.py --models llama-1b,llama-8b-lora --ways liger,triton-lean --longest
    python benchmarks/end_to_end.py --ways liger,triton-lean,triton-lean-mlp --batch 32 --checkpointing
    python benchmarks/end_to_end.py --render first.csv second.csv
    python benchmarks/end_to_end.py --smoke

A model is transformers' own, in bfloat16, with random weights from its configuration and random tokens; the optimizer is AdamW
with fused kernels. Each way is a process of its own:

- `plain`, `compile`: transformers' code, and torch.compile of it.
- `liger`: liger-kernel's patch of the model.
- `trl`: transformers' code under the head of TRL's trainers, which never holds the logits; TRL 1.16.
- `LANGUAGE`: `liger_transformers.apply` with kernels of that language; `LANGUAGE-lean`: with ``lean=True``; `LANGUAGE-mlp` and
  `LANGUAGE-lean-mlp`: with ``mlp=True``, which differs with ``--checkpointing`` alone; `LANGUAGE-fp8`, also after these: with
  ``precision="fp8"``. Each may end in `-compile`.
  `triton+rms_norm.swiglu-compile` leaves these ops to the reference. `default` demands none.

`plain` comes first, then ours, then the others, each with all models in turn. The record is written after each of them, so that a
run which is cut off has what it measured.

With ``--together 4``, four ways start at once and compile side by side; each is timed alone.

With ``--longest``, a way's row has the longest sequence whose step fits the device's memory, one sequence a step.

Attention is causal in all of them and gets no mask: compiled code would otherwise build one, and take a slower kernel. Gemma 2
has transformers' own attention, with its mask.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
"""Parts of kernels' names, by the column that their time is added to. The rest of `device_ms` is norms, activations, rope, the
loss, additions, copies and attention's small kernels."""

COLUMNS = (
    "model", "way", "tokens", "checkpointing", "parameters", "ms", "tokens_per_s", "peak_gb", "forward_peak_gb", "kept_gb",
    "start_s", "first_loss", "last_loss", "loss_off", "device_ms", *(f"{place}_ms" for place in PLACES), "longest", "note",
)  # fmt: skip
"""`longest` is in tokens. `kept_gb` is what a forward leaves for its backward, `start_s` the first steps, which compile.
`loss_off` is the largest relative difference of a step's loss from that of the first way."""

WARM = 4
"""Steps before the first that is timed: they compile, and fill the optimizer's state."""


class Model(NamedTuple):
    """A model by its configuration.

    Attributes:
        vision: the configuration of its tower, if it sees images.
        rank: of its adapters, if they alone are trained.
        attention: transformers' name for it. Only that of PyTorch is causal without a mask.
    """

    kind: str
    sizes: dict[str, Any]
    vision: dict[str, Any] | None = None
    rank: int = 0
    attention: str = "sdpa"


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
    }, attention="eager"),
    # Llama 3.1 8B with LoRA on every linear layer; Qwen2.5-VL 3B with fewer layers.
    "llama-8b-lora": Model("llama", LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False,
    }, rank=16),
    "qwen2.5-vl-3b-8-layers": Model("qwen2_5_vl", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }, vision={
        "depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
        "fullatt_block_indexes": [7],
    }),
}  # fmt: skip

PATCHES, FEW_PATCHES = (1, 16, 16), (1, 4, 4)
"""Frames, rows and columns of the image at the beginning of each sequence. Four patches are a token."""

SMOKE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}  # fmt: skip


class Job(NamedTuple):
    """The measurement of one process."""

    model: str
    way: str
    batch: int
    length: int
    steps: int
    checkpointing: bool
    device: str
    smoke: bool
    warm: int = WARM
    longest: bool = False


def measure(job: Job, gate: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Train a few steps, and return what a row holds but for `loss_off`, with all losses.

    `gate` stands before the steps that are timed.
    """
    torch.manual_seed(0)
    forward, finish, parameters = trainer(job)
    device = torch.get_device_module(job.device)

    def step() -> torch.Tensor:
        loss = forward()
        finish(loss)
        return loss.detach()

    start = time.perf_counter()
    losses = [step().item() for _ in range(1 if job.smoke else job.warm)]
    device.synchronize()
    started = time.perf_counter() - start
    if job.device != "cpu":
        device.empty_cache()
    gate()
    if job.device != "cpu":
        step()  # takes its memory back
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


SHORT, FINER = 8192, 1024
"""The first length that `longest` tries, and what its lengths are multiples of."""

FEWER = 0.98
"""Each length that `longest` tries over the one before, which did not fit."""


def longest(job: Job) -> dict[str, Any]:
    """Find the longest sequence whose step fits, within `FEWER`.

    Memory grows with the length in proportion. So two short steps tell about which length is the longest; from a little above
    it, each shorter one is tried until one fits. The second of the two did fit: if it doesn't afterwards, something keeps the
    memory of a step that failed, and the row says so.
    """
    device = torch.get_device_module(job.device)

    def step(tokens: int) -> tuple[int, float]:
        gc.collect()  # of a step that didn't fit, an exception may be part of a cycle, with all that its frames hold
        device.empty_cache()
        device.reset_peak_memory_stats()
        start = time.perf_counter()
        finish(forward(tokens))
        device.synchronize()
        return device.max_memory_allocated(), (time.perf_counter() - start) * 1e3

    forward, finish, parameters = trainer(job._replace(batch=1, length=SHORT))
    step(SHORT)  # the optimizer's state
    (first, _), (second, _) = step(SHORT), step(2 * SHORT)
    device.empty_cache()
    room = device.mem_get_info()[0] + device.memory_reserved() - first
    tokens = max(2 * SHORT, floor_to(1.04 * (SHORT + room / ((second - first) / SHORT)), FINER))
    while True:
        try:
            peak, ms = step(tokens)
        except torch.OutOfMemoryError:
            if tokens == 2 * SHORT:
                return {"note": f"{tokens} tokens fit, but not after a step that didn't: memory is kept"}
            tokens = max(2 * SHORT, floor_to(FEWER * tokens, FINER))
        else:
            columns = {"ms": f"{ms:.0f}", "tokens_per_s": f"{tokens / ms * 1e3:.0f}", "peak_gb": _gb(peak)}
            return {"longest": tokens, "parameters": parameters, **columns}


def floor_to(number: float, step: int) -> int:
    """The largest multiple of `step` that is not larger."""
    return int(number) // step * step


def trainer(job: Job) -> tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor], None], int]:
    """A function that returns a step's loss, one that does the rest of the step, and the number of parameters.

    The first takes an optional length, in place of the job's.
    """
    import transformers

    kind, sizes, vision, rank, attention = MODELS[job.model]
    way, *extras = (
        job.way.split("-") if not job.way.startswith("triton-ascend") else ("triton-ascend", *job.way.split("-")[2:])
    )
    way, _, left = way.partition("+")
    if job.smoke:
        sizes, vision = (full and {name: SMOKE.get(name, full[name]) for name in full} for full in (sizes, vision))
    if way == "liger":
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # type: ignore[import-not-found]

        MODEL_TYPE_TO_APPLY_LIGER_FN[kind]()
    last = sizes["vocab_size"] - 1
    parts = {"text_config": sizes, "vision_config": vision, "image_token_id": last} if vision else sizes
    config = transformers.AutoConfig.for_model(kind, use_cache=False, attn_implementation=attention, **parts)
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    with torch.device(job.device):
        model = auto.from_config(config, dtype=torch.bfloat16)
    code: Any = sys.modules[type(model).__module__]
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if hasattr(code, name) and attention == "sdpa":
            setattr(code, name, lambda *args, **kwargs: None)
    if way == "trl":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)
    if way not in ("plain", "compile", "liger", "trl"):
        import liger_core
        import liger_transformers

        switches = {name: name in extras for name in ("lean", "mlp")}
        liger_transformers.apply(model, **switches, precision="fp8" if "fp8" in extras else None)
        # Not before: swaps are proved on the CPU.
        liger_core.use(None if way == "default" else way, **dict.fromkeys(filter(None, left.split(".")), "torch"))
    if rank:
        add_adapters(model, rank)
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, last, (job.batch, job.length), generator=generator).to(job.device)
    image: dict[str, torch.Tensor] = {}
    if vision:
        grid = FEW_PATCHES if job.smoke else PATCHES
        count = math.prod(grid)
        tokens[:, : count // 4] = last
        pixels = torch.randn(job.batch * count, 3 * 2 * 14 * 14, generator=generator)
        image = {"pixel_values": pixels.to(job.device, torch.bfloat16)}
        image["image_grid_thw"] = torch.tensor([grid] * job.batch, device=job.device)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens, **image, **({"fused_lm_head": True} if way == "trl" else {})).loss

    run = torch.compile(loss_of) if "compile" in (way, *extras) else loss_of

    def finish(loss: torch.Tensor) -> None:
        try:
            loss.backward()
            optimizer.step()
        finally:
            optimizer.zero_grad()  # also of a step that doesn't fit

    def forward(length: int = job.length) -> torch.Tensor:
        return run(tokens if length == job.length else tokens.repeat(1, math.ceil(length / job.length))[:, :length])

    return forward, finish, sum(parameter.numel() for parameter in model.parameters())


class Adapted(torch.nn.Module):
    """A linear layer that is not trained, and the product of two narrow ones that is added to it."""

    def __init__(self, layer: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        place = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.layer = layer
        self.down = torch.nn.Linear(layer.in_features, rank, bias=False, **place)
        self.up = torch.nn.Linear(rank, layer.out_features, bias=False, **place)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def add_adapters(model: torch.nn.Module, rank: int) -> None:
    """LoRA on every linear layer but the head; nothing else is trained."""
    model.requires_grad_(False)
    for module in [*model.get_decoder().modules()]:  # pyright: ignore[reportCallIssue]
        for name, layer in [*module.named_children()]:
            if isinstance(layer, torch.nn.Linear):
                setattr(module, name, Adapted(layer, rank))


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


READY, ROW = "#ready", "#row "
"""Words that a process prints: when it waits to be timed, and before its row at the end."""

LATE = "#late"
"""In place of a line of a process that was ended, since it took too long."""


def in_their_processes(jobs: Sequence[Job], limit: float) -> Iterator[dict[str, Any]]:
    """Results of `measure` for each job, in a process of its own, or a note that says why that ended.

    All start at once. When the last of them is ready, each is timed while the others wait. One that isn't ready after `limit`
    seconds, or that takes so long afterwards, is ended. So are all, where the caller stops.
    """
    words = [sys.executable, __file__, "--one"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*words, json.dumps(job)], **pipes) for job in jobs]
    try:
        until = time.monotonic() + limit
        notes = [line_of(process, until - time.monotonic()) for process in started]
        for process, line in zip(started, notes, strict=True):
            if line == READY:
                process.stdin.write("go\n")
                process.stdin.flush()
                line = line_of(process, limit)
            yield result_of(process, line, limit)
    finally:
        for process in started:
            process.kill()


def line_of(process: subprocess.Popen[str], limit: float) -> str | None:
    """The next line for us that a process writes. `LATE`: it was ended after `limit` seconds, one at least; None: it ended."""
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    watch = threading.Timer(max(1.0, limit), end)  # who is ready in time has written it by now
    watch.start()
    try:
        assert process.stdout is not None
        line = next((line.rstrip("\n") for line in process.stdout if line.startswith((READY, ROW))), None)
    finally:
        watch.cancel()
    return LATE if line is None and late.is_set() else line


def result_of(process: subprocess.Popen[str], line: str | None, limit: float) -> dict[str, Any]:
    try:
        code = process.wait(60.0)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if line is not None and line.startswith(ROW):
        return json.loads(line.removeprefix(ROW))
    return {"note": f"took longer than {limit:g} s" if line == LATE else f"ended with {code}"}


def one(job: Job) -> dict[str, Any]:
    """Row of a job, by `measure`, which waits for its turn."""

    def gate() -> None:
        print(READY, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody waits for this way any more")

    try:
        return longest(job) if job.longest else measure(job, gate)
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}


def row_of(job: Job, result: dict[str, Any], plain: Sequence[float] | None) -> dict[str, Any]:
    """A row of the record. `plain` are the losses of the first way, which the others are held to."""
    losses: list[float] = result.pop("losses", [])
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {"model": job.model, "way": job.way, "tokens": "" if job.longest else f"{job.batch} x {job.length}"}
    row["checkpointing"] = "yes" if job.checkpointing else ""
    if losses:
        row |= {"first_loss": f"{losses[0]:.4f}", "last_loss": f"{losses[-1]:.4f}"}
    if losses and plain:
        row["loss_off"] = f"{max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True)):.1e}"
    return row | result


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a name that doesn't exist ends the program with those that do."""
    languages = ["default", "torch", *(backend.language for backend in backends())]
    extras = itertools.product(("", "-lean"), ("", "-mlp"), ("", "-fp8"), ("", "-compile"))
    kinds = [f"{language}{''.join(extra)}" for extra in extras for language in languages]
    command = Command(__doc__, smoke="of the reference")
    command.add_names("models", [*MODELS], default=[next(iter(MODELS))])
    command.add_names("ways", ["plain", "compile", "liger", "trl", *kinds])
    command.add_argument("--batch", type=int, default=8, help="sequences in a step")
    command.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    command.add_argument("--steps", type=int, default=8, help="that are timed")
    command.add_argument("--warm", type=int, default=WARM, help="steps before them")
    command.add_argument("--together", type=int, default=1, help="ways that start at once; each is timed alone")
    command.add_argument(
        "--limit", type=float, default=600.0, help="seconds that a way may take to start, and again to run"
    )
    command.add_argument("--checkpointing", action="store_true", help="keep each layer's input alone, and run it again")
    command.add_argument("--longest", action="store_true", help="find the longest sequence whose step fits, instead")
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
    options.ways = sorted(options.ways or ["plain", *ours, "compile", "liger"], key=_turn)
    if options.longest and options.together > 1:
        command.error("--longest takes --together 1: each way has the device's memory for itself")
    asked, options.ways = options.ways, [re.sub(r"\+[a-z0-9_.]+", "", way) for way in options.ways]
    command.check(options, measures=not options.render)
    options.ways = asked
    return options


def _turn(way: str) -> int:
    """When a way's turn comes: what a run that is cut off should have comes first."""
    return 0 if way == "plain" else 2 if way in ("compile", "liger", "trl") else 1


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print as it goes, and write the record. Returns the rows."""
    if words and words[0] == "--one":
        print(f"{ROW}{json.dumps(one(Job(*json.loads(words[1]))))}", flush=True)
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
    rows: list[dict[str, Any]] = []
    first: dict[str, list[float]] = {}
    size = options.batch, options.length, options.steps
    rest = options.checkpointing, options.device, options.smoke, options.warm, options.longest
    groups = [options.ways[i : i + options.together] for i in range(0, len(options.ways), options.together)]
    for group, model in itertools.product(groups, options.models):
        jobs = [Job(model, way, *size, *rest) for way in group]
        results = map(measure, jobs) if options.smoke else in_their_processes(jobs, options.limit)
        for job, result in zip(jobs, results, strict=True):
            losses = result.get("losses")
            row = row_of(job, result, first.get(model))
            if losses:
                first.setdefault(model, losses)
            print(",".join(map(str, row.values())), flush=True)
            rows = sorted([*rows, row], key=lambda row: options.models.index(row["model"]))
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
