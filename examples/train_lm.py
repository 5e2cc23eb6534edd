"""Train a small Llama on the source of Python's standard library: once with liger_core's ops, once with plain PyTorch.

Both trainings start from the same weights and see the same batches, so only rounding tells them apart. The script
checks that their gradients and loss curves agree, prints what each cost and draws the curves.

Under torchrun, with --fsdp, --tp or both, the two are the model divided among all processes and the model in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import liger_core as liger

console = Console()


class Plain:
    """The ops of the model under liger_core's names, as one writes them without kernels."""

    embedding = staticmethod(F.embedding)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps=1e-6)

    @staticmethod
    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return Plain.rms_norm(h, weight), h

    @staticmethod
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def rotate(x: Tensor) -> Tensor:
            x1, x2 = x.chunk(2, -1)
            return (x * cos + torch.cat((-x2, x1), -1) * sin).to(x.dtype)

        return rotate(q), rotate(k)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def fused_moe(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, expert_indices: Tensor, expert_weights: Tensor
    ) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(gate_up_weight.shape[0]):
            token, slot = torch.where(expert_indices == expert)
            gate, up = F.linear(x[token], gate_up_weight[expert]).chunk(2, -1)
            z = F.linear(Plain.swiglu(gate, up), down_weight[expert])
            y = y.index_add(0, token, (z * expert_weights[token, slot, None]).to(y.dtype))
        return y

    @staticmethod
    def fused_linear_cross_entropy(x: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, linear_weight).float(), target)


@dataclass(frozen=True)
class Preset:
    """Sizes of the model and of its training."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    context: int  # tokens
    batch: int  # sequences
    steps: int
    learning_rate: float
    bytes_per_token: int  # 2: every pair of bytes is a token, for a vocabulary as large as that of a language model
    mixed: bool = False  # float32 weights, bfloat16 autocast
    tied: bool = True
    # Pictures keep the settings that they were drawn with as text, which these are left out of.
    experts: int = field(default=0, repr=False)  # 0: one network for all tokens
    per_token: int = field(default=2, repr=False)  # experts of a token


PRESETS = {
    "tiny": Preset(128, 4, 4, 2, 344, context=128, batch=16, steps=300, learning_rate=1e-3, bytes_per_token=1),
    "moe": Preset(64, 2, 4, 2, 64, context=64, batch=8, steps=100, learning_rate=2e-3, bytes_per_token=1, experts=8),
    "100m": Preset(768, 8, 12, 4, 2048, 1024, 16, steps=300, learning_rate=6e-4, bytes_per_token=2, mixed=True),
}


class FeedForward(nn.Module):
    """A SwiGLU network."""

    def __init__(self, size: Preset, ops: Any) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up = nn.Linear(size.hidden, 2 * size.feed_forward, bias=False)
        self.down = nn.Linear(size.feed_forward, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.ops.swiglu(gate, up))


class Experts(nn.Module):
    """SwiGLU networks, of which a router gives each token a few."""

    def __init__(self, size: Preset, ops: Any) -> None:
        super().__init__()
        self.ops, self.per_token = ops, size.per_token
        self.router = nn.Linear(size.hidden, size.experts, bias=False)
        self.gate_up_weight = nn.Parameter(torch.empty(size.experts, 2 * size.feed_forward, size.hidden))
        self.down_weight = nn.Parameter(torch.empty(size.experts, size.hidden, size.feed_forward))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shares, indices = self.router(rows).float().softmax(-1).topk(self.per_token)
        shares = shares / shares.sum(-1, keepdim=True)
        return self.ops.fused_moe(rows, self.gate_up_weight, self.down_weight, indices, shares).view_as(x)


class Block(nn.Module):
    """Causal attention with grouped queries, then a SwiGLU network, or several. Its input is normalised already."""

    def __init__(self, size: Preset, ops: Any) -> None:
        super().__init__()
        self.ops, self.width, self.heads = ops, size.hidden // size.heads, (size.heads, size.kv_heads, size.kv_heads)
        self.qkv = nn.Linear(size.hidden, sum(self.heads) * self.width, bias=False)
        self.attention_out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.mlp = (Experts if size.experts else FeedForward)(size, ops)
        self.mlp_norm = nn.Parameter(torch.ones(size.hidden))
        self.next_norm = nn.Parameter(torch.ones(size.hidden))

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # Transposed and split views, with no copy: the ops take any strides.
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2).split(self.heads, dim=1)
        q, k = self.ops.rope(q, k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.attention_out(attended.transpose(1, 2).flatten(2))
        x, residual = self.ops.fused_add_rms_norm(x, residual, self.mlp_norm)
        return self.ops.fused_add_rms_norm(self.mlp(x), residual, self.next_norm)


class Llama(nn.Module):
    """A decoder of the Llama family. Calling it gives the mean loss of predicting `target` from `tokens`.

    `ops` is the namespace that its ops come from: `liger_core` itself, or `Plain`.
    """

    def __init__(self, size: Preset, ops: Any) -> None:
        super().__init__()
        self.size, self.ops = size, ops
        self.embedding = nn.Parameter(torch.empty(256**size.bytes_per_token, size.hidden))
        self.first_norm = nn.Parameter(torch.ones(size.hidden))
        self.blocks = nn.ModuleList(Block(size, ops) for _ in range(size.layers))
        self.head = self.embedding if size.tied else nn.Parameter(torch.empty_like(self.embedding))
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                into_residual = name.endswith(("attention_out.weight", "down.weight", "down_weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers) if into_residual else 0.02)
        width = size.hidden // size.heads
        frequency = 10_000.0 ** -(torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(size.context), frequency).repeat(1, 2)
        self.rotation = nn.Buffer(torch.stack((angle.cos(), angle.sin())), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        cos, sin = self.rotation[:, : tokens.shape[1]]
        residual = self.ops.embedding(tokens, self.embedding)
        if self.size.mixed:
            residual = residual.bfloat16()  # autocast alone would leave the stream between the blocks in float32
        x = self.ops.rms_norm(residual, self.first_norm)
        for block in self.blocks:
            x, residual = block(x, residual, cos, sin)
        return x

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return self.ops.fused_linear_cross_entropy(self.hidden(tokens).flatten(0, 1), self.head, target.flatten())

    @torch.no_grad()
    def sample(self, text: bytes, tokens: int) -> bytes:
        """Continue `text`, a whole number of tokens, by tokens drawn at temperature 0.7."""
        for _ in range(tokens):
            context = tokenise(text, self.size)[-self.size.context :].to(self.head.device)
            logits = F.linear(self.hidden(context[None])[0, -1], self.head).float()
            token = torch.multinomial((logits / 0.7).softmax(0), 1)
            text += int(token).to_bytes(self.size.bytes_per_token, "big")
        return text


def tokenise(text: bytes, size: Preset) -> Tensor:
    """``int64[len(text) // size.bytes_per_token]``: each token is one byte, or a pair with the first byte high."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data if size.bytes_per_token == 1 else data[: len(data) // 2 * 2].view(-1, 2) @ torch.tensor([256, 1])


def standard_library() -> tuple[bytes, bytes]:
    """Text to train on, and to validate on: every module of this Python that is no test, in the order of a hash.

    The hash is that of its path, and also makes the split: a module in twenty, the same ones everywhere, is held back.
    """
    root = Path(sysconfig.get_path("stdlib"))
    apart = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    files = sorted((zlib.crc32(n.as_posix().encode()), n.as_posix()) for n in names if apart.isdisjoint(n.parts))
    if not files:
        raise FileNotFoundError(f"{root} holds no Python source to train on")
    train, validation = bytearray(), bytearray()
    for number, name in files:
        (validation if number % 20 == 0 else train).extend((root / name).read_bytes())
    return bytes(train), bytes(validation)


def batches(data: Tensor, size: Preset, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` pairs ``int64[batch, context]``: windows of `data` at random places, and the tokens that follow."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        start = torch.randint(len(data) - size.context, (size.batch, 1), generator=generator)
        tokens = data[(start + torch.arange(size.context + 1)).to(data.device)]
        yield tokens[:, :-1], tokens[:, 1:]


def make_model(size: Preset, ops: Any, device: torch.device, seed: int) -> Llama:
    """A model whose weights depend on `seed` alone: they are drawn on the CPU."""
    torch.manual_seed(seed)
    return Llama(size, ops).to(device)


def autocast(size: Preset, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=size.mixed)


class Alone:
    """A training in one process, with the ops of a namespace."""

    def __init__(self, name: str, ops: Any) -> None:
        self.name, self.ops = name, ops

    def divide(self, model: Llama) -> None:
        """Not at all."""

    def rows(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        """This process's part of a batch: all of it."""
        return batch

    def mean(self, losses: Tensor) -> Tensor:
        """Mean losses of all processes."""
        return losses

    def gradients(self, model: Llama) -> dict[str, Tensor]:
        """Each parameter's gradient."""
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def train(
    way: Any, model: Llama, data: Tensor, validation_data: Tensor, seed: int, compiled: bool
) -> tuple[list[float], dict[str, str]]:
    """Train `model`, with the same batches for the same `seed`. Returns each step's loss, and rows for the report.

    `way` is an `Alone`, or `parallel.Processes`.
    """
    size, device = model.size, data.device
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), fused=True)
    up_and_down = LambdaLR(optimizer, lambda step: min(10 * (step + 1), size.steps - step) / size.steps)
    if accelerated := device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)

    losses: list[Tensor] = []
    untimed = size.steps // 10  # the first steps compile kernels
    began = time.perf_counter()
    for tokens, target in track(batches(data, size, size.steps, seed), f"{way.name:<13}", size.steps, console=console):
        if len(losses) == untimed:
            if accelerated:
                torch.accelerator.synchronize(device)
            began = time.perf_counter()
        with autocast(size, device):
            loss = call(*way.rows((tokens, target)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        up_and_down.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # its value is read at the end: reading it here would wait for the device
    curve = way.mean(torch.stack(losses)).tolist()
    speed = (size.steps - untimed) * size.batch * size.context / (time.perf_counter() - began)
    memory = f"{torch.accelerator.max_memory_allocated(device) / 2**20:,.0f}" if accelerated else "not measured"
    with torch.no_grad(), autocast(size, device):
        pairs = batches(validation_data, size, 8, seed)
        held_back = way.mean(torch.stack([call(*way.rows(pair)) for pair in pairs])).mean()
    rows = {"last loss, nats per token": f"{curve[-1]:.4f}", "validation loss": f"{held_back:.4f}"}
    return curve, rows | {"tokens per second": f"{speed:,.0f}", "peak memory, MiB": memory}


# Two correct trainings differ by rounding, in units of the activations' dtype. In the tiny model that moves a first
# gradient by 1.4e-7 of its norm in float32 and 2.7e-3 in bfloat16, and 300 steps carry it to 2e-6 of the loss in
# float32 (on a CPU). The bounds leave room for other orders of summation, and for bfloat16 in a long training. A wrong
# formula shows in the first gradients, unless its effect is below bfloat16's rounding.
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def first_gradients(size: Preset, way: Any, data: Tensor, seed: int) -> dict[str, Tensor]:
    """Each parameter's gradient on the first batch."""
    model = make_model(size, way.ops, data.device, seed)
    way.divide(model)
    with autocast(size, data.device):
        loss = model(*way.rows(next(batches(data, size, 1, seed))))
    loss.backward()
    return {f"gradient of {name}": gradient for name, gradient in way.gradients(model).items()}


def mean_losses(curve: list[float]) -> dict[str, Tensor]:
    """The means over ten parts of the training: the noise of single steps averages out."""
    return {f"mean loss of part {i}": tenth.mean() for i, tenth in enumerate(torch.tensor(curve).chunk(10), 1)}


def disagreements(both: Sequence[dict[str, Tensor]], allowed: float) -> list[str]:
    """Gradients that differ by more than `allowed`: the norm of the difference over that of the second, plain one."""
    ours, plain = both
    distance = {name: ((ours[name] - plain[name]).norm() / plain[name].norm()).item() for name in plain}
    wrong = {name: d for name, d in distance.items() if not d <= allowed}  # NaN is wrong too
    return [f"{name} differs by {d:.1e}, and {allowed:.0e} is allowed" for name, d in wrong.items()]


BODY = ("embedding", "rms_norm", "fused_add_rms_norm", "rope", "swiglu")


def kernels_table(device: torch.device, ops: Sequence[str] = (*BODY, "fused_linear_cross_entropy")) -> Table:
    """Which kernel each op runs on a device, as `liger_core.explain` tells it."""
    table = Table("language", "kernel of the op", title=f"liger_core on {device.type}")
    for name in ops:
        chosen = liger.explain(name, device=device.type).chosen
        if chosen is None:
            raise liger.Unsupported(f"{name}: {liger.explain(name, device=device.type)}")
        table.add_row(chosen.language, "/".join(Path(chosen.source or "").parts[-3:]))
    return table


def draw(names: Sequence[str], curves: Sequence[list[float]], path: Path) -> None:
    """Both curves above, and the distance between them below, as a PNG file."""
    ours, plain = curves
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot(plain, label=names[1], linewidth=3, alpha=0.5)
    above.plot(ours, label=names[0], linewidth=1)
    above.set_ylabel("loss, nats per token")
    above.legend()
    below.plot([a - b for a, b in zip(ours, plain, strict=True)], linewidth=1)
    below.set(xlabel="step", ylabel="difference")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 when the trainings agree, 1 when they don't, 2 when they can't run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="sizes: tiny, and moe with experts, for a CPU; 100m for a GPU"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of each training (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, help="such as cuda:1 (default: the accelerator, else cpu)")
    parser.add_argument("--language", help="demand a kernel language, such as triton (default: the best installed)")
    parser.add_argument("--tied", action="store_true", default=True, help="embedding and head are one matrix (default)")
    parser.add_argument("--untied", dest="tied", action="store_false", help="embedding and head are two matrices")
    parser.add_argument("--output", type=Path, default=Path("report/train_lm.png"), help="the picture of the curves")
    parser.add_argument("--curves", type=Path, help="write the losses of each step there, as JSON")
    parser.add_argument("--compile", action="store_true", help="torch.compile both models")
    parser.add_argument("--fsdp", action="store_true", help="under torchrun: divide weights and batches by FSDP2")
    parser.add_argument("--tp", type=int, default=1, help="under torchrun: processes that divide each matrix product")
    options = parser.parse_args(arguments)
    size = replace(PRESETS[options.preset], tied=options.tied, **({"steps": options.steps} if options.steps else {}))
    device, seed = options.device or torch.device(liger.infer_device()), options.seed
    ways: list[Any] = [Alone("liger_core", liger), Alone("plain PyTorch", Plain)]
    if device.type == "cpu":
        torch.set_num_threads(min(2, torch.get_num_threads()))  # the tiny model gains nothing from more
    try:
        if "LOCAL_RANK" in os.environ:
            import parallel

            device = parallel.device_of(device.type)
            console.quiet = os.environ["RANK"] != "0"
            ways = [parallel.Processes(device, options.fsdp, options.tp), Alone("one process", liger)]
        elif options.fsdp or options.tp > 1:
            raise ValueError(
                "--fsdp and --tp take several processes: torchrun --nproc-per-node 2 examples/train_lm.py --fsdp"
            )
        liger.use(options.language)
        body = tuple("fused_moe" if size.experts and name == "swiglu" else name for name in BODY)
        console.print(kernels_table(device, (*body, "fused_linear_cross_entropy")))
    except (liger.Unsupported, ValueError) as error:
        print(error, file=sys.stderr)
        return 2

    texts = standard_library()
    console.print(f"{len(texts[0]):,} bytes of the standard library to train on, {len(texts[1]):,} to validate on")
    data, validation_data = (tokenise(text, size).to(device) for text in texts)
    dtype = torch.bfloat16 if size.mixed else torch.float32
    wrong = disagreements([first_gradients(size, way, data, seed) for way in ways], GRADIENT_TOLERANCE[dtype])

    curves, columns, sample = [], [], b""
    for way in ways:
        model = make_model(size, way.ops, device, seed)
        parameters = sum(p.numel() for p in model.parameters())
        way.divide(model)
        curve, rows = train(way, model, data, validation_data, seed, options.compile)
        curves.append(curve)
        columns.append(rows)
        if way.ops is liger and isinstance(way, Alone) and not console.quiet:
            with autocast(size, device):
                sample = model.sample(b"class ", 200)
    wrong += disagreements([mean_losses(curve) for curve in curves], LOSS_TOLERANCE[dtype])
    names = [way.name for way in ways]
    table = Table("", *names, title=f"{parameters:,} parameters")
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    readable = "".join(c if c.isprintable() or c == "\n" else "·" for c in sample.decode(errors="replace"))
    console.print(table, "The model trained with liger_core in one process writes:")
    console.print(readable, markup=False, highlight=False, style="dim")
    if not console.quiet:
        draw(names, curves, options.output)
        if options.curves:
            options.curves.write_text(json.dumps(dict(zip(names, curves, strict=True))), "utf-8")
    console.print(f"The curves are in {options.output}.")
    for difference in wrong:
        print(f"The trainings disagree: the {difference}.", file=sys.stderr)
    if not wrong:
        bounds = f"{GRADIENT_TOLERANCE[dtype]:.0e}, mean losses within {LOSS_TOLERANCE[dtype]:.0e}"
        console.print(f"The trainings agree: first gradients within {bounds}, relatively.")
    return 1 if wrong else 0


if __name__ == "__main__":
    status = main()
    if "LOCAL_RANK" in os.environ:
        import parallel

        parallel.leave(status)
    sys.exit(status)
