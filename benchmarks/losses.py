"""Log-probabilities of tokens, DPO and GRPO on hidden states, without their logits: ours beside its peers.

    python benchmarks/losses.py --subjects logprobs,dpo --providers ours-triton,liger
    python benchmarks/losses.py --subjects length --lengths 1024,4096,16384,65536
    python benchmarks/losses.py --seconds 190
    python benchmarks/losses.py --smoke

Subjects:

- ``logprobs``: of 8192 rows, hidden size 4096, 151936 tokens, in bfloat16. Time beside that of the matrix products which a
  head that may hold no logits needs: one forward, four with the backward, two with the backward of a frozen head; and of
  ours with memory for all logits, three with the backward.
- ``dpo``, ``grpo``: 2 × 8 sequences of 4096 tokens. For DPO the reference model's head is computed too; for GRPO
  the old and the reference log-probabilities are given.
- ``length``: the most memory that DPO and GRPO of two sequences take, by their length.
- ``ratio``: how far e^(lp − old) is from 1, where old is the log-probability of the same policy: in float64, and by the same
  provider for an eighth of the rows at a time.

With ``--seconds`` what would start after that many is a row without numbers: a record is whole within a known time. Sizes of
one subject come before the next, and short lengths before long ones.

Providers are ``ours-LANGUAGE``, ``ours-LANGUAGE-grouped`` (DPO and GRPO by `fused_linear_grouped_loss`, a pair or a completion
after another), ``eager`` (PyTorch as its users write it), ``compile``, ``liger`` (liger-kernel's chunked losses and its
fused_linear_scaled_cross_entropy) and ``cce`` (cut-cross-entropy). A provider that fails is a row that says why.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import records
import torch
import torch.nn.functional as F
from command import Command
from compare import failures
from jobs import Row
from timing import peak_memory, release
from torch import Tensor

import liger_core
from liger_core.backend import backends
from liger_core.losses import (
    dpo_loss,
    fused_linear_grouped_loss,
    fused_linear_token_logprobs,
    policy_loss,
    sequence_logprobs,
)
from liger_core.ops.fused_linear_logit_statistics import most_statistics_memory

COLUMNS = (
    "subject",
    "mode",
    "rows",
    "hidden",
    "vocabulary",
    "provider",
    "ms",
    "of_products",
    "peak_mib",
    "error",
    "note",
)
SUBJECTS = ("logprobs", "dpo", "grpo", "ratio", "length")
PEERS = ("eager", "compile", "liger", "cce")
GROUPED = "-grouped"
PRODUCTS = {"forward": 1, "full": 4, "frozen": 2, "held": 3}
"""Matrix products of rows × hidden × vocabulary that a mode of ``logprobs`` needs."""

Logprobs = Callable[..., Tensor]


class Sizes(NamedTuple):
    """Sizes of the subjects: rows of `logprobs`, pairs and tokens of a sequence, the head, rows of `ratio`."""

    rows: int = 8192
    pairs: int = 8
    length: int = 4096
    hidden: int = 4096
    vocabulary: int = 151936
    exact: int = 256


SMOKE = Sizes(rows=6, pairs=1, length=5, hidden=8, vocabulary=24, exact=8)


def language_of(provider: str) -> str | None:
    """The language of a provider's kernels, if they are ours."""
    return provider[len("ours-") :].removesuffix(GROUPED) if provider.startswith("ours-") else None


def _logprobs_of_logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy((x @ weight.T).float(), target, reduction="none")


def logprobs_of(provider: str, any_length: bool = False) -> Logprobs:
    """The provider's function of x, weight and target, in float32. With `any_length` one compilation serves all rows."""
    if provider == "compile":
        if not any_length:
            torch.compiler.reset()
        return torch.compile(_logprobs_of_logits, dynamic=any_length)
    if provider == "liger":
        scaled = import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
        return lambda x, weight, target: -_first(scaled.apply(x, weight, target))
    if provider == "cce":
        function = import_module("cut_cross_entropy").linear_cross_entropy
        return lambda x, weight, target: -function(x, weight, target, reduction="none").float()
    return _logprobs_of_logits if provider == "eager" else _ours


def _ours(x: Tensor, weight: Tensor, target: Tensor, memory_budget: int | None = None) -> Tensor:
    logprobs = fused_linear_token_logprobs(x, weight, target, memory_budget=memory_budget)
    assert isinstance(logprobs, Tensor)
    return logprobs


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def dpo_of(provider: str, any_length: bool = False) -> Callable[..., Tensor]:
    """DPO's loss of x ``[2B, T, H]``, chosen first, by its head, and of the reference model by its own."""
    if provider == "liger":
        module = import_module("liger_kernel.chunked_loss").LigerFusedLinearDPOLoss()
        return lambda x, weight, target, ref_x, ref_weight: module(
            weight, x, target, ref_input=ref_x, ref_weight=ref_weight
        )[0]
    logprobs = logprobs_of(provider, any_length)

    def of_pair(tokens: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
        return dpo_loss(*sequence_logprobs(tokens).chunk(2), ref_chosen[None], ref_rejected[None]).loss

    def loss(x: Tensor, weight: Tensor, target: Tensor, ref_x: Tensor, ref_weight: Tensor) -> Tensor:
        def scored(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
            return sequence_logprobs(logprobs(x.flatten(0, 1), weight, target.flatten()).view(target.shape)).chunk(2)

        with torch.no_grad():
            reference = scored(ref_x, ref_weight)
        if provider.endswith(GROUPED):
            pairs = len(x) // 2
            policy = x.unflatten(0, (2, pairs)).transpose(0, 1), weight, target.unflatten(0, (2, pairs)).transpose(0, 1)
            return fused_linear_grouped_loss(of_pair, *policy, *reference) / pairs
        return dpo_loss(*scored(x, weight), *reference).loss

    return loss


def grpo_of(provider: str, any_length: bool = False) -> Callable[..., Tensor]:
    """GRPO's loss of x ``[B, L, H]`` by its head."""
    if provider == "liger":
        module = import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
            loss_type="grpo", use_ref_model=True
        )
        return lambda x, weight, target, mask, advantages, old, ref: module(
            x, weight, target, mask, advantages, ref_per_token_logps=ref, old_per_token_logps=old
        )[0]
    logprobs = logprobs_of(provider, any_length)

    def of_completion(tokens: Tensor, mask: Tensor, advantage: Tensor, old: Tensor, ref: Tensor) -> Tensor:
        return policy_loss(tokens[None], old[None], ref[None], advantage[None], mask[None], loss_type="grpo").loss

    def loss(
        x: Tensor, weight: Tensor, target: Tensor, mask: Tensor, advantages: Tensor, old: Tensor, ref: Tensor
    ) -> Tensor:
        if provider.endswith(GROUPED):
            return fused_linear_grouped_loss(of_completion, x, weight, target, mask, advantages, old, ref) / len(x)
        logps = logprobs(x.flatten(0, 1), weight, target.flatten()).view(target.shape)
        return policy_loss(logps, old, ref, advantages, mask, loss_type="grpo").loss

    return loss


class Bench:
    """The measurements, printed row by row as they are made."""

    def __init__(self, sizes: Sizes, device: str, seconds: float | None = None) -> None:
        self.sizes, self.device, self.rows = sizes, device, list[Row]()
        self.ends = None if seconds is None else time.monotonic() + seconds

    def is_late(self, subject: str, mode: str, rows: int, provider: str) -> bool:
        """Whether the time is up; then this is a row that says so."""
        late = self.ends is not None and time.monotonic() > self.ends
        if late:
            self.row(subject, mode, rows, provider, note="not run: the time was up")
        return late

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        """Values for bfloat16, the same for each provider."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)

    def head(self, seed: int = 1) -> Tensor:
        """The linear layer's weight, for logits of the scale of x."""
        return self.randn(self.sizes.vocabulary, self.sizes.hidden, seed=seed) * self.sizes.hidden**-0.5

    def targets(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(2)
        return torch.randint(self.sizes.vocabulary, shape, generator=generator, device=self.device)

    def row(self, subject: str, mode: str, rows: int, provider: str, **measured: object) -> None:
        """Add a row, and print it."""
        values = subject, mode, rows, self.sizes.hidden, self.sizes.vocabulary, provider
        row = dict.fromkeys(COLUMNS, "") | dict(zip(COLUMNS, values, strict=False)) | measured
        self.rows.append(row)
        print(",".join(map(str, row.values())), flush=True)

    def measure(
        self,
        subject: str,
        mode: str,
        rows: int,
        provider: str,
        make: Callable[[], Callable[[], Any]],
        timed: bool = True,
    ) -> float | None:
        """A row of the call that `make` prepares; its milliseconds, if it has any."""
        if self.is_late(subject, mode, rows, provider):
            return None
        try:
            with liger_core.use(language_of(provider)):
                call = make()
                peak = peak_memory(call, self.device)
                ms = milliseconds(call, self.device) if timed else None
        except failures() as error:
            lines = str(error).splitlines() or [""]
            self.row(subject, mode, rows, provider, note=f"{type(error).__name__}: {lines[0][:160]}".replace(",", ";"))
            ms = None
        else:
            share = f"{ms / (PRODUCTS[mode] * self.product(rows)):.3f}" if ms and subject == "logprobs" else ""
            shown = {} if ms is None else {"ms": f"{ms:.2f}", "of_products": share}
            self.row(subject, mode, rows, provider, peak_mib="" if peak is None else round(peak / 2**20), **shown)
        call = None
        release(self.device)
        return ms

    @functools.cached_property
    def products(self) -> dict[int, float]:
        return {}

    def product(self, rows: int) -> float:
        """Milliseconds of x · weightᵀ, by PyTorch."""
        if rows not in self.products:
            x, weight = self.randn(rows, self.sizes.hidden), self.head()
            self.products[rows] = milliseconds(lambda: x @ weight.T, self.device)
            self.row("logprobs", "product", rows, "matmul", ms=f"{self.products[rows]:.2f}")
        return self.products[rows]

    def logprobs(self, providers: Sequence[str]) -> None:
        rows = self.sizes.rows
        self.product(rows)
        for provider in providers:
            for mode in PRODUCTS:
                if mode == "held" and language_of(provider) is None:
                    continue  # "full" holds logits, or has no such choice
                self.measure("logprobs", mode, rows, provider, functools.partial(self._logprobs, provider, mode, rows))

    def _logprobs(self, provider: str, mode: str, rows: int) -> Callable[[], Any]:
        x, weight, target = self.randn(rows, self.sizes.hidden), self.head(), self.targets(rows)
        dlogprobs, function = self.randn(rows, seed=3).float(), logprobs_of(provider)
        if mode == "forward":
            return torch.no_grad()(lambda: function(x, weight, target))
        if mode == "held":
            budget = most_statistics_memory(rows, self.sizes.vocabulary, torch.bfloat16)
            function = functools.partial(function, memory_budget=budget)
        leaves = (x.requires_grad_(),) if mode == "frozen" else (x.requires_grad_(), weight.requires_grad_())
        return lambda: torch.autograd.grad(function(x, weight, target), leaves, dlogprobs)

    def dpo(self, providers: Sequence[str]) -> None:
        sizes = self.sizes
        for provider in providers:
            make = functools.partial(self._dpo, lambda p=provider: dpo_of(p), 2 * sizes.pairs, sizes.length)
            self.measure("dpo", "full", 2 * sizes.pairs * sizes.length, provider, make)

    def _dpo(self, loss_of: Callable[[], Callable[..., Tensor]], batch: int, length: int) -> Callable[[], Any]:
        shape = batch, length, self.sizes.hidden
        x, weight = self.randn(*shape).requires_grad_(), self.head().requires_grad_()
        ref_x, ref_weight, target = self.randn(*shape, seed=4), self.head(5), self.targets(batch, length)
        loss = loss_of()
        return lambda: torch.autograd.grad(loss(x, weight, target, ref_x, ref_weight), (x, weight))

    def grpo(self, providers: Sequence[str]) -> None:
        batch, length = 2 * self.sizes.pairs, self.sizes.length
        for provider in providers:
            make = functools.partial(self._grpo, lambda p=provider: grpo_of(p), batch, length)
            self.measure("grpo", "full", batch * length, provider, make)

    def _grpo(self, loss_of: Callable[[], Callable[..., Tensor]], batch: int, length: int) -> Callable[[], Any]:
        x, weight = self.randn(batch, length, self.sizes.hidden).requires_grad_(), self.head().requires_grad_()
        target, loss = self.targets(batch, length), loss_of()
        mask = torch.ones(batch, length, device=self.device)
        mask[:, length // 2 :] = (torch.arange(batch, device=self.device) % 2)[:, None].float()
        old, ref = (self.randn(batch, length, seed=seed).float() * 0.1 - 12 for seed in (6, 7))
        advantages = self.randn(batch, seed=8).float()
        return lambda: torch.autograd.grad(loss(x, weight, target, mask, advantages, old, ref), (x, weight))

    def length(self, providers: Sequence[str], lengths: Sequence[int]) -> None:
        torch.compiler.reset()
        ways = {"dpo": (self._dpo, functools.cache(dpo_of)), "grpo": (self._grpo, functools.cache(grpo_of))}
        for length in lengths:
            for mode, (prepare, loss_of) in ways.items():
                for provider in providers:
                    make = functools.partial(prepare, functools.partial(loss_of, provider, True), 2, length)
                    self.measure("length", mode, 2 * length, provider, make, timed=False)

    def ratio(self, providers: Sequence[str]) -> None:
        """Tokens are sampled from the policy; its logits are near 11 at scale 2.5, near 22 at 5."""
        rows, weight = self.sizes.exact, self.head()
        for scale in (2.5, 5.0):
            x = self.randn(rows, self.sizes.hidden) * scale
            log_p = (x.double() @ weight.double().T).log_softmax(-1)
            generator = torch.Generator(self.device).manual_seed(9)
            target = torch.multinomial(log_p.exp().float(), 1, generator=generator)
            old = log_p.gather(1, target)[:, 0]
            target, log_p = target[:, 0], None
            for provider in providers:
                if self.is_late("ratio", f"logits of {scale}", rows, provider):
                    continue
                try:
                    with torch.no_grad(), liger_core.use(language_of(provider)):
                        function = logprobs_of(provider)
                        logps = function(x, weight, target).double()
                        parts = [function(x[i::8], weight, target[i::8]).double() for i in range(8)]
                except failures() as error:
                    self.row("ratio", f"logits of {scale}", rows, provider, note=type(error).__name__)
                    continue
                beside = {"float64": old, "itself": torch.stack(parts, 1).flatten()}
                for name, other in beside.items():
                    off = (logps - other).expm1().abs().max().item()
                    self.row("ratio", f"logits of {scale}: {name}", rows, provider, error=f"{off:.2e}")


def milliseconds(call: Callable[[], Any], device: str) -> float:
    """The median of at least 3 calls, and more if they are short. What the first call does is not timed."""
    if device == "cpu":
        return 0.0
    module = torch.get_device_module(device)
    call()
    rounds, times = 1, list[float]()
    while len(times) < rounds:
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        module.synchronize()
        times.append(start.elapsed_time(end))
        rounds = min(30, max(3, int(500 / times[0])))
    return sorted(times)[len(times) // 2]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a name that doesn't exist ends the program with those that do."""
    command = Command(__doc__, smoke="our reference and eager PyTorch")
    ours = [f"ours-{language}" for language in ("torch", *(backend.language for backend in backends()))]
    command.add_names("subjects", SUBJECTS, default=SUBJECTS)
    command.add_names("providers", [*ours, *(f"{name}{GROUPED}" for name in ours), *PEERS])
    command.add_argument(
        "--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[1024, 4096, 16384, 65536]
    )
    command.add_argument("--seconds", type=float, help="what would start later is not run")
    command.add_argument("--name", default="losses", help="the record's name; default: losses")
    options = command.parse_args(words)
    if options.smoke:
        options.device, options.lengths = "cpu", [4, 6]
        options.providers = ["ours-torch", f"ours-torch{GROUPED}", "eager"]
    able = [f"ours-{b.language}" for b in backends() if b.missing(options.device) is None]
    options.providers = options.providers or [*able, *(f"{name}{GROUPED}" for name in able), *PEERS]
    command.check(options)
    return options


def main(words: Sequence[str] | None = None) -> list[Row]:
    """Measure, print as it goes, and write the record after each subject. Returns the rows."""
    options = parse(words)
    head = records.head_of(options.device)
    print(records.comment(head) + ",".join(COLUMNS), flush=True)
    bench = Bench(SMOKE if options.smoke else Sizes(), options.device, options.seconds)
    for subject in options.subjects:
        more = {"lengths": options.lengths} if subject == "length" else {}
        measure: Callable[..., None] = getattr(bench, subject)
        providers = [p for p in options.providers if subject not in ("logprobs", "ratio") or not p.endswith(GROUPED)]
        measure(providers, **more)
        if not options.smoke:
            write(options.name, head, bench.rows, options.out)
    return bench.rows


def write(name: str, head: records.Head, rows: Sequence[Row], out: Path) -> None:
    """Write the CSV and the Markdown of a record."""
    lines = [[str(row[column]) for column in COLUMNS] for row in rows]
    title = "Losses on log-probabilities, without logits"
    records.write(name, head, rows, COLUMNS, title, records.table(COLUMNS, lines), out)


if __name__ == "__main__":
    main(sys.argv[1:])
