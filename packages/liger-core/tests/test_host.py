"""Host code that all languages share, with kernels that are PyTorch: by chunks, columns or at once, the reference's gradients."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from liger_core.budget import least_memory
from liger_core.contract import SavedOnce
from liger_core.host.cross_entropy import CrossEntropyInputs, CrossEntropyKernels, CrossEntropyResults
from liger_core.host.fused_linear_cross_entropy import FusedLinearCrossEntropy
from liger_core.host.linear import Linear, chunks, plan_of
from liger_core.host.rows import Logits
from liger_core.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_core.resolve import source_of

ROWS = 48


class Size(NamedTuple):
    """Sizes of a linear layer, with memory budgets for chunks of rows and for chunks of columns."""

    hidden: int
    vocabulary: int
    budgets: dict[str, int | None]


SIZES = {
    "even": Size(16, 96, {"whole": None, "chunks": 10_000, "columns": 5_000}),
    # Rows of logits take 464 columns. Chunks of columns have 256 and 203.
    "odd": Size(24, 459, {"whole": None, "chunks": 60_500, "columns": 30_000}),
}


class TorchLinear(Linear):
    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        y.copy_(x.float() * (dloss if divisor is None else dloss / divisor[0]))


class TorchKernels(CrossEntropyKernels):
    """Kernels of a loss without options. They note a gradient's dtype, whether it overwrites logits, and both sizes.

    Like a language's, they write to the columns behind those of the logits: here NaN, which nobody may read.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[torch.dtype, bool, int]] = []

    def _logits(self, logits: Logits, inputs: CrossEntropyInputs, first: int) -> Tensor:
        x = logits.tensor().float()
        return x if inputs.bias is None else x + inputs.bias.float()[first : first + logits.columns]

    def rows(self, results: CrossEntropyResults, logits: Logits, inputs: CrossEntropyInputs, first: int) -> None:
        rows = slice(first, first + logits.memory.shape[0])
        x = self._logits(logits, inputs, 0)
        target = inputs.target[rows]
        picked = x.gather(1, target.clamp(min=0)[:, None])[:, 0]
        results.losses[rows] = (x.logsumexp(1) - picked).masked_fill(target < 0, 0.0)
        if results.statistics is not None:
            top = x.amax(1)
            results.statistics[0, rows] = top
            results.statistics[1, rows] = torch.exp(x - top[:, None]).sum(1)

    def gradient(
        self,
        dlogits: Logits,
        logits: Logits | None,
        inputs: CrossEntropyInputs,
        statistics: Tensor,
        incoming: Any,
        first: int,
        first_column: int,
    ) -> None:
        memory = dlogits.memory
        held = 0 if logits is None else logits.memory.untyped_storage().nbytes()
        self.seen.append((memory.dtype, logits is None, memory.untyped_storage().nbytes() + held))
        dloss, totals = incoming
        rows = slice(first, first + memory.shape[0])
        x = self._logits(dlogits if logits is None else logits, inputs, first_column)
        top, exp_sum = statistics[:, rows, None]
        target = inputs.target[rows, None]
        column = torch.arange(first_column, first_column + x.shape[1])
        d = torch.exp(x - top) / exp_sum - (column == target).float()
        dloss = torch.ones(()) if dloss is None else dloss
        d = d * (dloss[rows, None] if dloss.dim() else dloss)
        dlogits.tensor().copy_(torch.where(target < 0, 0.0, d if totals is None else d / totals[0]))
        memory[:, dlogits.columns :] = torch.nan

    def sums(
        self,
        loss: Tensor | None,
        z_loss: Tensor | None,
        accuracy: Tensor | None,
        totals: Tensor | None,
        results: CrossEntropyResults | None,
        inputs: CrossEntropyInputs,
    ) -> None:
        count = (inputs.target >= 0).sum().clamp(min=1).float()
        if totals is not None:
            totals.copy_(count.repeat(2))
        if loss is not None and results is not None:
            loss.copy_(results.losses.sum() / (count if inputs.options.reduction == "mean" else 1.0))


def arguments(size: Size, dtype: torch.dtype, bias_dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(ROWS, size.hidden, generator=generator).to(dtype),
        "linear_weight": torch.randn(size.vocabulary, size.hidden, generator=generator).to(dtype),
        "target": torch.randint(-1, size.vocabulary, (ROWS,), generator=generator).clamp(min=-1),
        "bias": torch.randn(size.vocabulary, generator=generator).to(bias_dtype),
    }


OPTIONS = {
    "ignore_index": -1,
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,
    "softcap": None,
    "return_z_loss": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
    "token_scaling": False,
}


def run(
    given: dict[str, Tensor], reduction: str, memory_budget: int | None, accum_dtype: torch.dtype = torch.float32
) -> tuple[TorchKernels, Tensor, list[tuple[Tensor | None, ...]], Tensor]:
    """The kernels, the loss, the gradients of two backwards, and the gradient of the loss."""
    kernels = TorchKernels()
    host = FusedLinearCrossEntropy(kernels, TorchLinear())
    options = {"reduction": reduction, "memory_budget": memory_budget, "accum_dtype": accum_dtype, **OPTIONS}
    needs = (True, True, True)
    loss, saved = host.forward(needs, **given, **options)  # type: ignore[arg-type]
    assert isinstance(loss, Tensor)
    dloss = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1))
    grads = [host.backward(needs, saved, dloss, **options) for _ in range(2)]  # type: ignore[arg-type]
    return kernels, loss, grads, dloss


def expected(given: dict[str, Tensor], reduction: str, dloss: Tensor) -> tuple[Tensor, ...]:
    leaves = {name: t.double().requires_grad_() if t.is_floating_point() else t for name, t in given.items()}
    loss = fused_linear_cross_entropy.reference(**leaves, reduction=reduction, ignore_index=-1)  # type: ignore[arg-type]
    differentiable = [leaves[name] for name in ("x", "linear_weight", "bias")]
    assert isinstance(loss, Tensor)
    return (loss, *torch.autograd.grad(loss, differentiable, dloss.double()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["whole", "chunks", "columns"])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_gradients_of_a_linear_loss(size: Size, kind: str, reduction: str, bias_dtype: torch.dtype) -> None:
    inputs = arguments(size, torch.bfloat16, bias_dtype)
    plan = plan_of(
        (True, True, True),
        inputs["x"],
        inputs["linear_weight"],
        accum_dtype=torch.float32,
        memory_budget=size.budgets[kind],
        reduced=reduction != "none",
    )
    assert (plan.whole, plan.columns is not None) == (kind == "whole", kind == "columns")
    assert plan.at_once == (kind != "whole" and reduction != "none")
    kernels, loss, grads, dloss = run(inputs, reduction, size.budgets[kind])
    truth, *gradients = expected(inputs, reduction, dloss)
    torch.testing.assert_close(loss.double(), truth, rtol=2e-2, atol=2e-2)
    for gradient, again, right in zip(*grads, gradients, strict=True):
        assert gradient is not None
        assert again is not None
        assert torch.equal(gradient, again)
        assert (gradient.double() - right).abs().max() < 2e-2 * right.abs().max()
    assert any(dtype is torch.float32 for dtype, *_ in kernels.seen) == (bias_dtype is torch.float32)
    in_place = [overwrites for dtype, overwrites, _ in kernels.seen if dtype is torch.bfloat16]
    assert all(in_place) == (kind != "whole")


def test_the_gradient_of_a_wide_bias_is_summed_before_it_is_rounded() -> None:
    size = SIZES["even"]
    inputs = arguments(size, torch.bfloat16, torch.float32)
    inputs["target"][3:] = -1
    for budget in size.budgets.values():
        _, _, grads, dloss = run(inputs, "sum", budget)
        logits = (inputs["x"] @ inputs["linear_weight"].T).float() + inputs["bias"]
        gradient = torch.softmax(logits, 1)[:3] - torch.nn.functional.one_hot(inputs["target"][:3], size.vocabulary)
        torch.testing.assert_close(grads[0][2], gradient.sum(0) * dloss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["chunks", "columns"])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_logits_and_what_is_made_beside_them_fit_a_budget(size: Size, kind: str, bias_dtype: torch.dtype) -> None:
    budget = size.budgets[kind]
    assert budget is not None
    inputs = arguments(size, torch.bfloat16, bias_dtype)
    assert budget >= least_memory(inputs["x"], inputs["linear_weight"], accum_dtype=torch.float32, weight_grad=True)
    kernels, *_ = run(inputs, "mean", budget)
    accumulator = 4 * size.vocabulary * size.hidden if kind == "chunks" else 0
    room = budget - accumulator - 4 * size.vocabulary - 32 * ROWS
    assert room // 2 < max(size for *_, size in kernels.seen) <= room


def test_gradients_made_in_forward_are_given_away_once() -> None:
    inputs = arguments(SIZES["even"], torch.bfloat16, torch.bfloat16)
    options = {
        "reduction": "mean",
        "memory_budget": SIZES["even"].budgets["chunks"],
        "accum_dtype": torch.float32,
        **OPTIONS,
    }
    host = FusedLinearCrossEntropy(TorchKernels(), TorchLinear())
    _, saved = host.forward((True, True, True), **inputs, **options)  # type: ignore[arg-type]
    assert isinstance(saved[-1], SavedOnce)
    assert host.forward((False, False, False), **inputs, **options)[1] == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("aligned", [1, 128])
def test_chunks_cover_all_and_are_aligned(aligned: int) -> None:
    for size in (1, 2, 127, 128, 129, 1000, 128256):
        for most in (1, 3, 128, 200, 1000, 8551, 200000):
            ends = chunks(size, most, aligned)
            assert [first for first, _ in ends] == [0, *(last for _, last in ends[:-1])]
            assert ends[-1][1] == size
            assert all(0 < last - first <= most for first, last in ends)
            if most >= aligned:
                assert all(first % aligned == 0 for first, _ in ends)


def test_compiled_chunks_are_added_up_in_one_place() -> None:
    """A weight's float32 gradient takes a gigabyte and more: one, and not one for each chunk."""

    def compute(a: Tensor, b: Tensor) -> Tensor:
        total = None
        for first, last in chunks(12, 4, 1):
            total = Linear().add_product(total, a[first:last], b[first:last], torch.float32)
        assert total is not None
        return total.to(torch.bfloat16)

    a, b = torch.randn(12, 16).bfloat16(), torch.randn(12, 8).bfloat16()
    product, (code,) = run_and_get_code(torch.compile(compute, fullgraph=True), a, b)
    assert torch.equal(product, compute(a, b))
    assert code.count("empty_strided_cpu((16, 8), (8, 1), torch.float32)") == 1


def test_a_kernel_file_is_the_source_of_what_core_runs_for_it() -> None:
    module = ModuleType("liger_toy.ops.fused_linear_cross_entropy")
    module.__file__ = "/toy/ops/fused_linear_cross_entropy.py"
    host = FusedLinearCrossEntropy(TorchKernels(), TorchLinear())
    assert source_of(host.forward, module) == "/toy/ops/fused_linear_cross_entropy.py:1"
