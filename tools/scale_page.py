"""Write docs/scale.md: what a step sends for the loss and the norms, on 8, 64 and 1024 devices.

uv run python tools/scale_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from liger_core.contract import ops

sys.path.insert(0, str(Path(__file__).resolve().parent))

import sharding_table

PAGE = Path(__file__).resolve().parent.parent / "docs/scale.md"


NOT_RUN = (
    (
        "the tests on NCCL, with the kernels of the GPUs' language",
        '`LIGER_TEST_DEVICE=cuda uv run pytest packages/liger-distributed -n 0 -k "not refused"`',
    ),
    (
        "a training on eight GPUs, whose collectives may overlap with kernels",
        "`uv run torchrun --nproc-per-node 8 examples/train_lm.py --preset 100m --fsdp --tp 2`",
    ),
    ("torchtitan, Accelerate and Megatron-Core on GPUs", "none: `tests/engines.py` starts CPU processes"),
    ("torchtitan's `spmd_types`, its chunked loss; pipeline and context parallelism; DeepSpeed's ZeRO-3", "none"),
)
"""What was not run for want of several GPUs, and what runs it."""


class Model(NamedTuple):
    """Sizes that decide what is sent."""

    name: str
    hidden: int
    vocabulary: int
    layers: int


class Link(NamedTuple):
    """What one device sends in one direction, in bytes per second, and the time that a collective takes at least."""

    name: str
    rate: float
    latency: float


MODELS = (Model("70 B (Llama 3)", 8192, 128_256, 80), Model("671 B (DeepSeek-V3)", 7168, 129_280, 61))
NVLINK = Link("NVLink 4", 450e9, 10e-6)
INFINIBAND = Link("InfiniBand NDR", 50e9, 20e-6)
TOKENS = 8192  # of one group of devices that divide the vocabulary
DEVICES = (8, 64, 1024)
TP = 8  # devices of one host
DTYPE, STATISTIC = 2, 4  # bytes: bfloat16 rows, float32 statistics


class Sent(NamedTuple):
    """A way to do it: its collectives, each with the bytes that a device sends."""

    way: str
    collectives: tuple[float, ...]

    def seconds(self, link: Link) -> float:
        return sum(link.latency + sent / link.rate for sent in self.collectives)


def gather(each: float, devices: int) -> float:
    """An all-gather of parts of so many bytes, as a ring: what a device sends. A reduce-scatter into them sends as many."""
    return each * (devices - 1)


def reduce(whole: float, devices: int) -> float:
    """An all-reduce, as a ring."""
    return 2 * whole * (devices - 1) / devices


def losses(model: Model, devices: int) -> list[Sent]:
    """The forward of a cross-entropy whose vocabulary is divided; backward sends nothing but x's gradient, in all of them.

    What ours sends is in the tests of liger-distributed: (lse, picked) of each row in one all-gather. Megatron-Core and
    liger-kernel's vocabulary-parallel loss send a row's largest logit, its logit of the label and its sum of exponentials.
    """
    statistic = TOKENS * STATISTIC
    logits = TOKENS * model.vocabulary * DTYPE
    return [
        Sent("liger-distributed: one all-gather", (gather(2 * statistic, devices),)),
        Sent(
            "Megatron-Core, liger-kernel's vocabulary-parallel loss: three all-reduces",
            (reduce(statistic, devices),) * 3,
        ),
        Sent("logits gathered", (gather(logits / devices, devices),)),
    ]


def norms(model: Model, devices: int) -> list[Sent]:
    """All norms of a forward and backward whose sequence is divided: two a layer and the last."""
    op = ops["rms_norm"]
    assert "..." in sharding_table.free(op), "rms_norm no longer divides its rows; this page needs another count"
    count = 2 * model.layers + 1
    rows, weight = TOKENS * model.hidden * DTYPE, model.hidden * STATISTIC
    return [
        Sent("liger-distributed: each weight's gradient", (reduce(weight, devices),) * count),
        Sent("Megatron-Core: all weights' gradients at once", (reduce(weight * count, devices),)),
        Sent(
            "liger-kernel on DTensors: rows gathered, their gradient scattered",
            (gather(rows / devices, devices),) * (2 * count),
        ),
    ]


def size(value: float) -> str:
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def table(model: Model, ways: list[Sent]) -> list[str]:
    rows = [
        "| " + model.name + " | collectives | bytes a device sends | NVLink | InfiniBand |",
        "|---|---|---|---|---|",
    ]
    for sent in ways:
        cells = [f"{sent.seconds(link) * 1e6:,.0f} µs" for link in (NVLINK, INFINIBAND)]
        rows.append(f"| {sent.way} | {len(sent.collectives)} | {size(sum(sent.collectives))} | {' | '.join(cells)} |")
    return [*rows, ""]


def global_count() -> list[str]:
    rows = ["| devices | bytes a device sends | InfiniBand |", "|---|---|---|"]
    for devices in DEVICES:
        sent = Sent("", (reduce(8, devices),))
        rows.append(f"| {devices} | {size(sum(sent.collectives))} | {sent.seconds(INFINIBAND) * 1e6:,.0f} µs |")
    return [*rows, ""]


def divided_weight() -> list[str]:
    rows = [
        "| model, devices | the head's weight, gathered | its gradient, scattered | InfiniBand |",
        "|---|---|---|---|",
    ]
    for model in MODELS:
        for devices in DEVICES:
            groups = devices // TP
            part = model.vocabulary * model.hidden * DTYPE / TP
            sent = Sent("", (gather(part / groups, groups), gather(2 * part / groups, groups)))
            of_both = " | ".join(size(one) for one in sent.collectives)
            took = f"{sent.seconds(INFINIBAND) * 1e3:,.2f} ms" if groups > 1 else "one group: nothing is sent"
            rows.append(f"| {model.name}, {devices} | {of_both} | {took} |")
    return [*rows, ""]


def page() -> str:
    lines = [
        "<!-- Written by tools/scale_page.py -->",
        "",
        "# Scale, on paper",
        "",
        "For whoever plans a training on 8, 64 or 1024 devices: what a step sends for the loss and the norms, and how long that",
        "takes at least. Nothing here was measured.",
        "",
        f"The vocabulary and, between matrix products, the sequence are divided among the {TP} devices of a host. Hosts are",
        f"data-parallel, by FSDP2. One host's step has {TOKENS} tokens, in bfloat16. A collective is a ring. Its time is its",
        "latency plus its bytes over the link's rate:",
        "",
        "| link | bytes per second and direction | latency of a collective, assumed |",
        "|---|---|---|",
        *[
            f"| {link.name} | {link.rate / 1e9:.0f} GB/s | {link.latency * 1e6:.0f} µs |"
            for link in (NVLINK, INFINIBAND)
        ],
        "",
        "## The loss, per host",
        "",
        "Each row's statistics are sent forward. These numbers don't depend on the number of hosts. InfiniBand is for a",
        "vocabulary that is divided among hosts.",
        "",
    ]
    for model in MODELS:
        lines += table(model, losses(model, TP))
    both = {devices: losses(MODELS[0], devices) for devices in (2, 4, 8, 16)}
    more = min(n for n, (ours, theirs, _) in both.items() if sum(ours.collectives) > sum(theirs.collectives))
    lines += [
        f"Ours sends more bytes than three all-reduces from {more} devices on, and pays one latency instead of three.",
        "",
        "| devices that divide the vocabulary | ours | three all-reduces |",
        "|---|---|---|",
    ]
    for devices, (ours, megatron, _) in both.items():
        lines.append(
            f"| {devices} | {size(sum(ours.collectives))}, {ours.seconds(NVLINK) * 1e6:.0f} µs "
            f"| {size(sum(megatron.collectives))}, {megatron.seconds(NVLINK) * 1e6:.0f} µs |"
        )
    lines += ["", "## The norms, per host", "", "All of a forward and backward, with a divided sequence.", ""]
    for model in MODELS:
        lines += table(model, norms(model, TP))
    lines += [
        "The rows that tensor parallelism itself gathers before a matrix product are not in these tables: every way sends them.",
        "",
        "## Among hosts",
        "",
        "A mean over all labels sends their count, once a step:",
        "",
        *global_count(),
        "FSDP2 gathers the head's weight for its forward, and scatters its gradient, in float32. A head that is a unit of its",
        "own (`LossHead`) is gathered once: no chunk of the loss gathers it again.",
        "",
        *divided_weight(),
        "## On two GPUs",
        "",
        "Two H100s of one host, by NCCL (torch 2.11, triton 3.6):",
        "",
        "- [the vocabulary-parallel loss](../benchmarks/records/2026-11-25-parallel-2-nvidia-h100-80gb-hbm3.md) beside one",
        "  GPU: time, memory, bytes and errors;",
        "- `torchrun --nproc-per-node 2 examples/train_lm.py --device cuda`, 60 steps, with `--fsdp` and with `--tp 2`:",
        "  both agree with one GPU, first gradients within 1e-5 and mean losses within 1e-3, relatively.",
        "",
        "## Not run",
        "",
        "All tests of liger-distributed pass on CPUs, by gloo. What did not run, or not to its end, with the command that runs",
        "it on a host of several GPUs, in a checkout:",
        "",
        "| | command |",
        "|---|---|",
        *[f"| {what} | {command} |" for what, command in NOT_RUN],
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
