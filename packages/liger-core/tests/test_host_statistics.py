"""Host code of the statistics, with kernels that are PyTorch: by rows, columns or at once, and with a frozen weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core.budget import padded_columns
from liger_core.contract import Needs, SavedOnce
from liger_core.host.fused_linear_logit_statistics import LEAST_TILE, FusedLinearStatistics, plan_of
from liger_core.host.linear import Linear
from liger_core.host.logit_statistics import StatisticsGrads, StatisticsInputs, StatisticsKernels, StatisticsResults
from liger_core.host.rows import Logits
from liger_core.ops.fused_linear_logit_statistics import fused_linear_logit_statistics, least_statistics_memory

ROWS, HIDDEN, VOCABULARY = 48, 16, 96
ODD = 459
"""A vocabulary whose rows of logits are padded to 464 columns."""
ALL = (True, True, True)
FROZEN = (True, False, False)


class TorchLinear(Linear):
    """Counts the products that make logits."""

    products = 0

    def logits(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Logits:
        self.products += 1
        return super().logits(x, weight, dtype)


class TorchKernels(StatisticsKernels):
    """Kernels of statistics without softcap and temperature. They note the bytes of each tile of logits and gradient.

    Like a language's, they write to the columns behind those of the logits: here NaN, which nobody may read.
    """

    def __init__(self) -> None:
        self.alone: list[int] = []
        self.tiles: list[int] = []

    def rows(self, results: StatisticsResults, logits: Logits, inputs: StatisticsInputs, first_row: int) -> None:
        self.alone.append(logits.memory.untyped_storage().nbytes())
        row_slice = slice(first_row, first_row + logits.memory.shape[0])
        z = logits.tensor() if inputs.bias is None else logits.tensor() + inputs.bias.float()
        target = inputs.target[row_slice]
        counts = target != inputs.options.ignore_index
        results.lse[row_slice] = z.logsumexp(1).masked_fill(~counts.any(1), 0.0)
        results.picked[row_slice] = z.gather(1, target.clamp(min=0)).masked_fill(~counts, 0.0)
        log_p = z - z.logsumexp(1, keepdim=True)
        if results.entropy is not None:
            results.entropy[row_slice] = -(log_p.exp() * log_p).sum(1).masked_fill(~counts.any(1), 0.0)
        if results.kept is not None:
            top = z.amax(1)
            results.kept[0, row_slice] = top
            results.kept[1, row_slice] = torch.exp(z - top[:, None]).sum(1).masked_fill(~counts.any(1), -1.0)
            if results.entropy is not None:
                results.kept[2, row_slice] = results.entropy[row_slice]

    def gradient(
        self,
        dlogits: Logits,
        logits: Logits | None,
        inputs: StatisticsInputs,
        kept: Tensor,
        incoming: StatisticsGrads,
        first_row: int,
        first_column: int,
    ) -> None:
        self.tiles.append(sum(both.memory.untyped_storage().nbytes() for both in (dlogits, logits) if both is not None))
        z = (logits or dlogits).tensor()
        rows, columns = slice(first_row, first_row + z.shape[0]), slice(first_column, first_column + z.shape[1])
        z = z if inputs.bias is None else z + inputs.bias.float()[columns]
        log_p = z - kept[0, rows, None] - kept[1, rows, None].log()
        dz = torch.zeros_like(z)
        if incoming.lse is not None:
            dz += incoming.lse[rows, None] * log_p.exp()
        if incoming.entropy is not None:
            dz -= incoming.entropy[rows, None] * log_p.exp() * (log_p + kept[2, rows, None])
        if incoming.picked is not None:
            column = torch.arange(columns.start, columns.stop)
            for k in range(inputs.target.shape[1]):
                dz += incoming.picked[rows, k, None] * (column == inputs.target[rows, k, None])
        dlogits.tensor().copy_(torch.where(kept[1, rows, None] == -1.0, 0.0, dz))
        dlogits.memory[:, dlogits.columns :] = torch.nan


def arguments(
    dtype: torch.dtype, *, rows: int = ROWS, each: int | None = None, vocabulary: int = VOCABULARY
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(-1, vocabulary, (rows,) if each is None else (rows, each), generator=generator)
    return {
        "x": torch.randn(rows, HIDDEN, generator=generator).to(dtype),
        "linear_weight": torch.randn(vocabulary, HIDDEN, generator=generator).to(dtype),
        "target": target,
        "bias": torch.randn(vocabulary, generator=generator).to(dtype),
    }


OPTIONS: dict[str, Any] = {
    "ignore_index": -1,
    "first": 0,
    "softcap": None,
    "temperature": 1.0,
    "return_log_sum_squares": False,
    "return_best": False,
    "accum_dtype": torch.float32,
}


class StatisticsRun:
    """A forward and two backwards of the host code, beside the reference's in float64."""

    def __init__(
        self,
        given: dict[str, Any],
        needs: Needs,
        memory_budget: int | None,
        wanted: tuple[str, ...] = ("lse", "picked", "entropy"),
    ) -> None:
        self.kernels, self.linear = TorchKernels(), TorchLinear()
        host = FusedLinearStatistics(self.kernels, self.linear)
        flags = {"return_entropy": "entropy" in wanted, "return_total": False}
        options = {**OPTIONS, **flags, "memory_budget": memory_budget}
        self.result, self.saved = host.forward(needs, **given, **options)
        self.forward_products = self.linear.products
        leaves = {name: t.double().requires_grad_() if t.is_floating_point() else t for name, t in given.items()}
        truth = fused_linear_logit_statistics.reference(**leaves, **options)
        generator = torch.Generator().manual_seed(1)
        incoming, outputs = [], []
        for name in ("lse", "picked", "entropy", "total"):
            output = getattr(truth, name)
            gradient = None
            if name in wanted:
                gradient = torch.randn(output.shape, generator=generator)
                outputs.append((output, gradient.double()))
                torch.testing.assert_close(getattr(self.result, name).double(), output, rtol=1e-5, atol=1e-5)
            incoming.append(gradient)
        self.gradients = [host.backward(needs, self.saved, *incoming, **options) for _ in range(2)]
        # Backward may make logits anew, by products that add up in another order: a probability then errs as its logit does.
        self.largest = (leaves["x"] @ leaves["linear_weight"].T).abs().max().detach()
        names = [name for name, need in zip(("x", "linear_weight", "bias"), needs, strict=True) if need]
        exact = torch.autograd.grad([o for o, _ in outputs], [leaves[n] for n in names], [g for _, g in outputs])
        self.exact = dict(zip(names, exact, strict=True))

    def check(self) -> None:
        for first, again, name in zip(*self.gradients, ("x", "linear_weight", "bias"), strict=True):
            assert (first is not None) == (name in self.exact)
            if first is not None:
                assert again is not None
                assert torch.equal(first, again)
                right = self.exact[name]
                units = 2 * (torch.finfo(first.dtype).eps + torch.finfo(torch.float32).eps * self.largest)
                assert (first.double() - right).abs().max() <= units * right.abs().max() + 1e-5


def plan(given: dict[str, Any], needs: Needs, memory_budget: int | None, picked_alone: bool = False) -> Any:
    x, weight = given["x"], given["linear_weight"]
    return plan_of(needs, x, weight, accum_dtype=torch.float32, memory_budget=memory_budget, picked_alone=picked_alone)


# Rows, classes, and a budget. Of x's gradient and of the weight's, the smaller is summed.
KINDS = {
    "whole": (ROWS, VOCABULARY, None),
    "rows": (200, VOCABULARY, 30_000),
    "columns": (ROWS, VOCABULARY, 8_000),
    "odd-whole": (ROWS, ODD, None),
    "odd-rows": (1500, ODD, 800_000),
    "odd-columns": (ROWS, ODD, 83_000),  # chunks of 256 and 203 columns
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each", [None, 3])
@pytest.mark.parametrize("needs", [ALL, (False, True, False), (True, False, True), FROZEN], ids=str)
def test_gradients_of_statistics(kind: str, each: int | None, needs: Needs) -> None:
    rows, vocabulary, budget = KINDS[kind]
    inputs = arguments(torch.bfloat16, rows=rows, each=each, vocabulary=vocabulary)
    if all(needs):
        planned = plan(inputs, needs, budget)
        assert (planned.whole, planned.by_columns) == (kind.endswith("whole"), kind.endswith("columns"))
    StatisticsRun(inputs, needs, budget).check()


@pytest.mark.parametrize("accum_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weight_gradient_of_many_chunks_is_as_exact_as_that_of_one(accum_dtype: torch.dtype) -> None:
    """It is summed in float32 and rounded once. Summed in bfloat16, its error grows with the chunks."""
    inputs = arguments(torch.bfloat16, rows=512)
    x, weight = inputs["x"], inputs["linear_weight"]
    options = {**OPTIONS, "accum_dtype": accum_dtype, "return_entropy": False, "return_total": False}
    needs = (False, True, False)
    incoming = torch.randn(512, generator=torch.Generator().manual_seed(1))
    leaves = {name: t.double().requires_grad_() if t.is_floating_point() else t for name, t in inputs.items()}
    lse = fused_linear_logit_statistics.reference(**leaves, **options).lse
    (exact,) = torch.autograd.grad(lse, leaves["linear_weight"], incoming.double())
    errors = []
    beside = 4 * VOCABULARY + 32 * 512 + 4 * VOCABULARY * HIDDEN
    for chunk in (512, 32, 4):
        budget = beside + chunk * 6 * VOCABULARY
        how: dict[str, Any] = {"accum_dtype": accum_dtype, "memory_budget": budget, "picked_alone": True}
        assert chunk == 512 or not plan_of(needs, x, weight, **how).whole
        host = FusedLinearStatistics(TorchKernels(), TorchLinear())
        _, saved = host.forward(needs, **inputs, **options, memory_budget=budget)
        _, dweight, _ = host.backward(needs, saved, incoming, None, None, None, **options, memory_budget=budget)
        assert dweight is not None
        errors.append(((dweight.double() - exact).norm() / exact.norm()).item())
    assert errors[0] < 0.005
    if accum_dtype is torch.float32:
        assert max(errors) < 1.1 * errors[0]
    else:
        assert errors[-1] > 2 * errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_float32(kind: str) -> None:
    """The gradient of logits takes their memory."""
    rows, vocabulary, budget = KINDS[kind]
    run = StatisticsRun(arguments(torch.float32, rows=rows, vocabulary=vocabulary), ALL, budget)
    run.check()
    assert all(size <= 4 * rows * padded_columns(vocabulary) for size in run.kernels.tiles)


def test_logits_that_are_kept_are_given_away_once() -> None:
    run = StatisticsRun(arguments(torch.bfloat16), ALL, None)
    assert isinstance(run.saved[-1], SavedOnce)
    assert run.forward_products == 1
    assert run.linear.products == 2  # the second backward makes them again


@pytest.mark.parametrize("wanted", [("lse",), ("picked",), ("lse", "picked")], ids=str)
@pytest.mark.parametrize("budget", [None, 6_500])
def test_a_frozen_weight_takes_no_product_in_backward(wanted: tuple[str, ...], budget: int | None) -> None:
    inputs = arguments(torch.bfloat16)
    assert plan(inputs, FROZEN, budget, picked_alone=True).frozen
    run = StatisticsRun(inputs, FROZEN, budget, wanted)
    run.check()
    assert run.linear.products == run.forward_products
    assert not any(saved is inputs["x"] for saved in run.saved)


def test_a_frozen_weight_has_the_digits_of_confident_rows() -> None:
    """Where p of the target is near 1, or near 0, of each gradient by itself and of their difference."""
    inputs = arguments(torch.bfloat16)
    inputs["x"] = (inputs["linear_weight"][inputs["target"].clamp(min=0)] * 0.9).to(torch.bfloat16)
    inputs["bias"] = None
    x, weight, target = inputs["x"], inputs["linear_weight"], inputs["target"]
    host = FusedLinearStatistics(TorchKernels(), TorchLinear())
    options = {**OPTIONS, "return_entropy": False, "return_total": False, "memory_budget": None}
    _, saved = host.forward(FROZEN, **inputs, **options)
    p = torch.softmax(x.double() @ weight.double().T, 1)
    counts = (target != -1)[:, None]
    one = torch.nn.functional.one_hot(target.clamp(min=0), VOCABULARY).double()
    for lse, picked in ((1.0, 0.0), (1.0, -1.0), (0.25, 1.0)):
        incoming = [torch.full((ROWS,), value) for value in (lse, picked)]
        dx, *_ = host.backward(FROZEN, saved, *incoming, None, None, **options)
        assert dx is not None
        exact = ((lse * p + picked * one) @ weight.double()).masked_fill(~counts, 0.0)
        error = (dx.double() - exact).norm(dim=1)
        assert (error <= 0.02 * exact.norm(dim=1) + 1e-6).all()


def test_entropies_are_not_of_a_frozen_weight() -> None:
    inputs = arguments(torch.bfloat16)
    run = StatisticsRun(inputs, FROZEN, None)
    run.check()
    assert run.saved[0] is inputs["x"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("needs", [ALL, FROZEN, (False, True, False)], ids=str)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, ODD])
def test_tiles_fit_a_budget(dtype: torch.dtype, needs: Needs, vocabulary: int) -> None:
    inputs = arguments(dtype, vocabulary=vocabulary)
    least = least_statistics_memory(
        inputs["x"], inputs["linear_weight"], accum_dtype=torch.float32, weight_grad=needs[1]
    )
    outputs = ("lse", "picked") if needs == FROZEN else ("lse", "entropy")
    for budget in (least, *(budget for budget in (8_000, 30_000, 60_000, 83_000) if budget > least)):
        run = StatisticsRun(inputs, needs, budget, outputs)
        run.check()
        used = plan(inputs, needs, budget, needs == FROZEN)
        beside = 4 * vocabulary + 32 * ROWS
        if used.frozen:
            beside += run.saved[0].nbytes
        elif used.by_columns:
            beside += 4 * ROWS * HIDDEN if needs[0] and dtype is not torch.float32 else 0
        elif needs[1] and not used.whole and dtype is not torch.float32:
            beside += 4 * vocabulary * HIDDEN
        assert max(run.kernels.tiles) + beside <= budget
        if not used.frozen:
            assert max(run.kernels.alone) + 32 * ROWS <= budget


def test_without_a_budget_memory_does_not_grow_with_rows() -> None:
    """As many rows as weigh more than the weight's gradient go by rows."""
    weight = torch.empty(151936, 4096, dtype=torch.bfloat16, device="meta")
    for rows in (1, 1000, 8192, 1 << 17, 1 << 22):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
        planned = plan({"x": x, "linear_weight": weight}, ALL, None)
        tile = (rows * planned.columns if planned.by_columns else min(rows, planned.rows) * weight.shape[0]) * 6
        assert tile <= weight.nbytes
        assert min(rows, planned.alone) * weight.shape[0] * 4 <= weight.nbytes
        assert not planned.by_columns or planned.columns >= LEAST_TILE
        assert planned.by_columns == (1365 < rows < 1 << 18)
