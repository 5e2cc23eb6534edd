"""Train a small Llama by preferences (DPO) and by rewards (GRPO): once with liger_core's losses, once with plain PyTorch.

Preferences and rewards are made up. DPO prefers how a file of Python's standard library goes on to the same tokens
shuffled. GRPO rewards lower-case letters. Both ways start from the same weights and see the same tokens, so only rounding
tells them apart. The script checks that their first gradients and loss curves agree, prints what a step of each cost and
draws the curves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import train_lm
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from train_lm import Llama, Preset

import liger_core as liger
from liger_core.losses import dpo_loss, fused_linear_token_logprobs, policy_loss, sequence_logprobs

console = Console()
DPO_BETA, GRPO_BETA = 0.1, 0.04
GROUP = 8  # completions of a prompt, whose rewards are compared
UPDATES = 2  # optimizer steps of GRPO with the same completions
# Losses of 30 steps. First gradients are held to train_lm's bounds.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class Fused:
    """liger_core's ops and losses. The logits of all tokens are never there at once where a kernel runs."""

    name = "liger_core"
    ops: Any = liger

    @staticmethod
    def logprobs(x: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        return fused_linear_token_logprobs(x, head.to(x.dtype), tokens)

    @staticmethod
    def dpo(logps: Tensor, ref_logps: Tensor) -> Tensor:
        chosen, rejected = sequence_logprobs(logps).chunk(2)
        return dpo_loss(chosen, rejected, *sequence_logprobs(ref_logps).chunk(2), beta=DPO_BETA).loss

    @staticmethod
    def grpo(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor) -> Tensor:
        return policy_loss(logps, old_logps, ref_logps, advantages, beta=GRPO_BETA).loss


class Plain:
    """The same as one writes it without kernels. The product with the head is in float32: see `logprobs`."""

    name = "plain PyTorch"
    ops: Any = train_lm.Plain

    @staticmethod
    def logprobs(x: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        # bfloat16 logits would put the ratio of two equal policies off by percents.
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), head.to(x.dtype).float())
        return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    @staticmethod
    def dpo(logps: Tensor, ref_logps: Tensor) -> Tensor:
        chosen, rejected = (logps - ref_logps).sum(-1).chunk(2)
        return -F.logsigmoid(DPO_BETA * (chosen - rejected)).mean()

    @staticmethod
    def grpo(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor) -> Tensor:
        ratio, advantage = (logps - old_logps).exp(), advantages[:, None]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        distance = ref_logps - logps
        return (loss + GRPO_BETA * (distance.exp() - distance - 1)).mean()


Way = type[Fused] | type[Plain]
WAYS: tuple[Way, ...] = (Fused, Plain)


class Batch(NamedTuple):
    """Sequences of a prompt and a completion: ``int64[sequences, prompt + completion]``, and how good they are.

    DPO's first half is preferred to the second. GRPO's rewards are ``[sequences]``, `GROUP` neighbours of one prompt.
    """

    tokens: Tensor
    prompt: int
    rewards: Tensor | None = None


@dataclass
class Learner:
    """A model in training, the frozen one that it started from, and what was seen of its steps."""

    way: Way
    size: Preset
    model: Llama
    reference: Llama
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: int = 0  # bytes

    def __post_init__(self) -> None:
        self.reference.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.size.learning_rate)

    def logprobs(self, model: Llama, batch: Batch) -> Tensor:
        """``[sequences, completion]``: the log-probability of each token of the completions."""
        x = model.hidden(batch.tokens[:, :-1])[:, batch.prompt - 1 :]
        return self.way.logprobs(x.flatten(0, 1), model.head, batch.tokens[:, batch.prompt :].flatten()).view(
            x.shape[:2]
        )

    def objective(self, batch: Batch) -> Callable[[], Tensor]:
        """The loss of a batch as a function of the model's weights at its call. What is constant is computed here."""
        with torch.no_grad(), train_lm.autocast(self.size, batch.tokens.device):
            ref_logps = self.logprobs(self.reference, batch)
            old_logps = ref_logps if batch.rewards is None else self.logprobs(self.model, batch)

        def loss() -> Tensor:
            with train_lm.autocast(self.size, batch.tokens.device):
                logps = self.logprobs(self.model, batch)
            if batch.rewards is None:
                return self.way.dpo(logps, ref_logps)
            return self.way.grpo(logps, old_logps, ref_logps, advantages_of(batch.rewards))

        return loss

    def step(self, batch: Batch, updates: int) -> None:
        """Update the weights, and remember what that cost."""
        device = batch.tokens.device
        accelerated = device.type != "cpu"
        if accelerated:
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)
        before, began = torch.accelerator.memory_allocated(device) if accelerated else 0, time.perf_counter()
        objective = self.objective(batch)
        for _ in range(updates):
            loss = objective()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
        if accelerated:
            torch.accelerator.synchronize(device)
            self.memory = max(self.memory, torch.accelerator.max_memory_allocated(device) - before)
        self.seconds.append(time.perf_counter() - began)

    def first_gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Each parameter's gradient on a batch, before any step."""
        self.objective(batch)().backward()
        named = {f"gradient of {name}": p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return named


def advantages_of(rewards: Tensor) -> Tensor:
    """Each completion's reward beside those of the same prompt: less their mean, divided by their deviation."""
    groups = rewards.view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def preferences(data: Tensor, size: Preset, count: int, seed: int) -> Iterator[Batch]:
    """`count` batches of pairs: windows of the text, then the same with their second half shuffled."""
    generator = torch.Generator().manual_seed(seed)
    for tokens, _ in train_lm.batches(data, size, count, seed):
        prompt = size.context // 2
        order = torch.randperm(size.context - prompt, generator=generator).to(data.device)
        shuffled = torch.cat((tokens[:, :prompt], tokens[:, prompt:][:, order]), 1)
        yield Batch(torch.cat((tokens, shuffled)), prompt)


@torch.no_grad()
def rollouts(model: Llama, data: Tensor, size: Preset, seed: int) -> Batch:
    """Completions that the model draws for prompts of the text, and the share of lower-case letters in each."""
    generator = torch.Generator().manual_seed(seed)
    prompt = size.context // 2
    prompts, _ = next(train_lm.batches(data, replace(size, context=prompt), 1, seed))
    tokens = prompts[: max(1, size.batch // GROUP)].repeat_interleave(GROUP, 0)
    for _ in range(size.context - prompt):
        with train_lm.autocast(size, tokens.device):
            logits = F.linear(model.hidden(tokens)[:, -1], model.head).float()
        drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), 1)
    return Batch(tokens, prompt, rewards=letters(tokens[:, prompt:], size).mean(1))


def letters(tokens: Tensor, size: Preset) -> Tensor:
    """The share of lower-case letters among the bytes of each token."""
    bytes_ = torch.stack([tokens >> 8 * place & 0xFF for place in range(size.bytes_per_token)])
    return ((bytes_ >= ord("a")) & (bytes_ <= ord("z"))).float().mean(0)


def learners(size: Preset, device: torch.device, seed: int, ways: Sequence[Way] = WAYS) -> list[Learner]:
    """A learner for each way, all with the same first weights."""
    return [Learner(way, size, *(train_lm.make_model(size, way.ops, device, seed) for _ in range(2))) for way in ways]


def compare(task: str, both: Sequence[Learner], batches: Iterator[Batch], steps: int, updates: int) -> list[str]:
    """Train each on the same batches. Returns in which way they disagree."""
    wrong: list[str] = []
    dtype = torch.bfloat16 if both[0].size.mixed else torch.float32
    for number, batch in enumerate(track(batches, f"{task:<4}", steps, console=console)):
        if number == 0:
            gradients = [learner.first_gradients(batch) for learner in both]
            wrong += train_lm.disagreements(gradients, train_lm.GRADIENT_TOLERANCE[dtype])
        for learner in both:
            learner.step(batch, updates)
    ours, plain = (torch.stack(learner.losses) for learner in both)
    # A loss of GRPO may be 0, so that the distance is not relative.
    distance, allowed = (ours - plain).abs().max().item(), LOSS_TOLERANCE[dtype]
    if not distance <= allowed:  # NaN is wrong too
        wrong.append(f"losses differ by {distance:.1e}, and {allowed:.0e} is allowed")
    return [f"{task}: {difference}" for difference in wrong]


def rewarded(both: Sequence[Learner], data: Tensor, steps: int, seed: int, rewards: list[float]) -> Iterator[Batch]:
    """Batches that the first learner draws, step by step; their mean rewards go into `rewards`."""
    for step in range(steps):
        batch = rollouts(both[0].model, data, both[0].size, seed + step)
        assert batch.rewards is not None
        rewards.append(batch.rewards.mean().item())
        yield batch


def draw(tasks: dict[str, Sequence[Learner]], rewards: Sequence[float], path: Path) -> None:
    """Both ways' losses of each task, and the rewards of GRPO, as a PNG file."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (task, both) in zip(figure.subplots(1, 3), [*tasks.items(), ("GRPO: mean reward", ())], strict=True):
        for learner in reversed(both):
            wide = learner.way is Plain
            curve = torch.stack(learner.losses).tolist()
            axes.plot(curve, label=learner.way.name, linewidth=3 if wide else 1, alpha=0.5 if wide else 1)
        if both:
            axes.legend()
        else:
            axes.plot(rewards)
        axes.set(title=task if not both else f"{task}: loss", xlabel="step" if not both else "update")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 when both ways agree, 1 when they don't, 2 when they can't run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--preset", choices=train_lm.PRESETS, default="tiny", help="sizes: tiny for a CPU, 100m for a GPU"
    )
    parser.add_argument("--steps", type=int, default=30, help="batches of each task")
    parser.add_argument(
        "--context", type=int, help="tokens of a prompt and its completion (default: tiny 32, 100m 1024)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, help="such as cuda:1 (default: the accelerator, else cpu)")
    parser.add_argument("--language", help="request a kernel language, such as triton (default: the best installed)")
    parser.add_argument("--output", type=Path, default=Path("report/preference.png"), help="the picture of the curves")
    options = parser.parse_args(arguments)
    size = train_lm.PRESETS[options.preset]
    size = replace(size, context=options.context or (32 if options.preset == "tiny" else size.context))
    device, seed = options.device or torch.device(liger.infer_device()), options.seed
    if device.type == "cpu":
        torch.set_num_threads(min(2, torch.get_num_threads()))  # the tiny model gains nothing from more
    try:
        liger.use(options.language)
        console.print(train_lm.kernels_table(device, (*train_lm.BODY, "fused_linear_logit_statistics")))
    except liger.Unsupported as error:
        print(error, file=sys.stderr)
        return 2

    data = train_lm.tokenise(train_lm.standard_library()[0], size).to(device)
    tasks = {task: learners(size, device, seed) for task in ("DPO", "GRPO")}
    wrong = compare("DPO", tasks["DPO"], preferences(data, size, options.steps, seed), options.steps, 1)
    rewards: list[float] = []
    drawn = rewarded(tasks["GRPO"], data, options.steps, seed, rewards)
    wrong += compare("GRPO", tasks["GRPO"], drawn, options.steps, UPDATES)

    parameters = sum(p.numel() for p in tasks["DPO"][0].model.parameters())
    table = Table("", *(way.name for way in WAYS), title=f"{parameters:,} parameters")
    for task, both in tasks.items():
        table.add_row(f"{task}: last loss", *(f"{learner.losses[-1]:.4f}" for learner in both))
        middle = [f"{1e3 * sorted(learner.seconds)[len(learner.seconds) // 2]:.0f}" for learner in both]
        table.add_row(f"{task}: median of a step, ms", *middle)
        memory = [f"{learner.memory / 2**20:,.0f}" if learner.memory else "not measured" for learner in both]
        table.add_row(f"{task}: peak memory of a step, MiB", *memory)
    console.print(table, f"Lower-case letters in completions: {rewards[0]:.0%} at first, {rewards[-1]:.0%} at the end.")
    draw(tasks, rewards, options.output)
    console.print(f"The curves are in {options.output}.")
    for difference in wrong:
        print(f"Both ways disagree: {difference}.", file=sys.stderr)
    if not wrong:
        console.print("Both ways agree.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
