"""Host code of the linear losses that read a teacher's rows or given probabilities, with kernels that are PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core.contract import Needs, SavedOnce
from liger_core.host.distillation import (
    DistillationFactors,
    DistillationInputs,
    DistillationKernels,
    DistillationResults,
)
from liger_core.host.fused_linear_distillation import FusedLinearDistillation
from liger_core.host.fused_linear_kl_div import FusedLinearKLDiv
from liger_core.host.linear import Linear, plan_of
from liger_core.host.rows import Logits
from liger_core.ops.fused_linear_distillation import fused_linear_distillation
from liger_core.ops.fused_linear_kl_div import fused_linear_kl_div

ROWS, HIDDEN, VOCABULARY = 48, 16, 96
ALL = (True, True, True)
BUDGETS = {"whole": None, "chunks": 12_000, "columns": 5_000}


class TorchLinear(Linear):
    """Notes the dtypes of what it multiplies for the weight's gradient."""

    def __init__(self) -> None:
        self.added: list[tuple[torch.dtype, torch.dtype]] = []

    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        y.copy_(x.float() * (dloss if divisor is None else dloss / divisor.view(-1)[0]))

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype, adds: bool = True) -> Tensor:
        self.added.append((a.dtype, b.dtype))
        return super().add_product(total, a, b, dtype, adds)


class TorchKernels(DistillationKernels):
    """Kernels of the forward divergence from a teacher's logits or probabilities, without temperature and softcaps."""

    def _both(self, student: Logits, teacher: Logits, inputs: DistillationInputs, column: int) -> tuple[Tensor, Tensor]:
        z = student.tensor().float()
        if inputs.student_bias is not None:
            z = z + inputs.student_bias.float()[column : column + z.shape[1]]
        return (
            z,
            teacher.tensor().float() if inputs.options.divergence == "given" else teacher.tensor().float().softmax(1),
        )

    def _counts(self, inputs: DistillationInputs, first: int, rows: int) -> Tensor:
        labels = inputs.labels
        counts = torch.ones(rows, dtype=torch.bool)
        return counts if labels is None else labels[first : first + rows] != inputs.options.ignore_index

    def rows(
        self, results: DistillationResults, student: Logits, teacher: Logits, inputs: DistillationInputs, first: int
    ) -> None:
        row_slice = slice(first, first + student.memory.shape[0])
        z, p = self._both(student, teacher, inputs, 0)
        least = inputs.options.beta if inputs.options.divergence == "given" else 0.0
        losses = (p * (p.clamp(min=least).log() - z.log_softmax(1))).nan_to_num(0.0).sum(1)
        results.soft[row_slice] = losses.masked_fill(~self._counts(inputs, first, len(losses)), 0.0)
        results.statistics[0, row_slice], results.statistics[4, row_slice] = z.logsumexp(1), p.sum(1)

    def gradient(
        self,
        dstudent: Logits,
        student: Logits | None,
        teacher: Logits,
        inputs: DistillationInputs,
        statistics: Tensor,
        incoming: DistillationFactors,
        first: int,
        first_column: int,
    ) -> None:
        rows = slice(first, first + dstudent.memory.shape[0])
        z, p = self._both(dstudent if student is None else student, teacher, inputs, first_column)
        assert incoming.soft is not None
        by = incoming.soft.expand(statistics.shape[1])[rows, None]
        dz = by * (torch.exp(z - statistics[0, rows, None]) * statistics[4, rows, None] - p)
        dstudent.tensor().copy_(dz.masked_fill(~self._counts(inputs, first, len(dz))[:, None], 0.0))

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        return torch.tensor(float(len(x)) if labels is None else max((labels != ignore_index).sum().item(), 1.0))

    def total(self, losses: Tensor, divisor: Tensor | None) -> Tensor:
        return losses.sum() if divisor is None else losses.sum() / divisor


def arguments(dtype: torch.dtype = torch.bfloat16, bias_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    randn = torch.randn
    return {
        "x": randn(ROWS, HIDDEN, generator=generator).to(dtype),
        "linear_weight": randn(VOCABULARY, HIDDEN, generator=generator).to(dtype) * 0.5,
        "target": 0.8 * randn(ROWS, VOCABULARY, generator=generator).softmax(1),
        "labels": torch.randint(-1, 2, (ROWS,), generator=generator),
        "bias": randn(VOCABULARY, generator=generator).to(bias_dtype or dtype),
    }


OPTIONS: dict[str, Any] = {"log_target": False, "temperature": 1.0, "softcap": None, "eps": 1e-10, "ignore_index": -1}


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_kl_div(kind: str, reduction: str, bias_dtype: torch.dtype) -> None:
    """By chunks of rows, by blocks of columns or at once they are the reference's, twice the same; the target keeps its own."""
    inputs = arguments(bias_dtype=bias_dtype)
    budget = BUDGETS[kind]
    plan = plan_of(
        ALL,
        inputs["x"],
        inputs["linear_weight"],
        accum_dtype=torch.float32,
        memory_budget=budget,
        reduced=reduction != "none",
    )
    assert (plan.whole, plan.columns is not None) == (kind == "whole", kind == "columns")
    options = {**OPTIONS, "reduction": reduction, "accum_dtype": torch.float32, "memory_budget": budget}
    linear, before = TorchLinear(), inputs["target"].clone()
    host = FusedLinearKLDiv(TorchKernels(), linear)
    loss, saved = host.forward(ALL, **inputs, **options)
    dloss = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1))
    grads = [host.backward(ALL, saved, dloss, **options) for _ in range(2)]
    assert torch.equal(inputs["target"], before)
    assert saved[2] is inputs["target"]
    assert all(
        dtypes == (torch.bfloat16, torch.bfloat16) for dtypes in linear.added
    )  # 16-bit operands, never their copies
    leaves = {name: t.double().requires_grad_() if t.is_floating_point() else t for name, t in inputs.items()}
    truth = fused_linear_kl_div.reference(**leaves, **options)
    differentiable = [leaves[name] for name in ("x", "linear_weight", "bias")]
    torch.testing.assert_close(loss.double(), truth, rtol=2e-2, atol=2e-2)
    for one, again, right in zip(*grads, torch.autograd.grad(truth, differentiable, dloss.double()), strict=True):
        assert one is not None
        assert again is not None
        assert torch.equal(one, again)
        assert (one.double() - right).abs().max() < 2e-2 * right.abs().max()


def test_gradients_made_in_forward_are_given_away_once() -> None:
    inputs = arguments()
    options = {**OPTIONS, "reduction": "batchmean", "accum_dtype": torch.float32, "memory_budget": BUDGETS["chunks"]}
    host = FusedLinearKLDiv(TorchKernels(), TorchLinear())
    assert isinstance(host.forward(ALL, **inputs, **options)[1][-1], SavedOnce)
    assert host.forward((False, False, False), **inputs, **options)[1] == ()


def test_what_is_kept_of_an_unreduced_loss_is_no_gradient() -> None:
    inputs = arguments()
    options = {**OPTIONS, "reduction": "none", "accum_dtype": torch.float32, "memory_budget": BUDGETS["chunks"]}
    _, saved = FusedLinearKLDiv(TorchKernels(), TorchLinear()).forward(ALL, **inputs, **options)
    assert len(saved) == 7


@pytest.mark.parametrize("needs", [ALL, (True, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize("kind", ["whole", "chunks"])
def test_a_frozen_student_takes_no_product_of_its_weight(kind: str, needs: Needs) -> None:
    """Nor has it a gradient; that of the teacher has no product at all."""
    inputs = arguments()
    linear = TorchLinear()
    host = FusedLinearDistillation(TorchKernels(), linear)
    options: dict[str, Any] = {
        "divergence": "jsd",
        "beta": 0.0,
        "temperature": 1.0,
        "soft_weight": 1.0,
        "hard_weight": 0.0,
        "student_softcap": None,
        "teacher_softcap": None,
        "ignore_index": -1,
        "reduction": "mean",
        "accum_dtype": torch.float32,
        "memory_budget": None if kind == "whole" else 18_000,
    }
    tensors = (
        inputs["x"],
        inputs["linear_weight"],
        inputs["x"] * 2,
        inputs["linear_weight"] * 2,
        inputs["labels"],
        inputs["bias"],
    )
    result, saved = host.forward(needs, *tensors, **options)
    one = torch.ones(())
    gradients = host.backward(needs, saved, one, **options)
    assert [gradient is not None for gradient in gradients] == [*needs]
    assert bool(linear.added) == needs[1]
    truth = fused_linear_distillation.reference(
        *(t.double() if t.is_floating_point() else t for t in tensors), **options
    )
    torch.testing.assert_close(result.loss.double(), truth.loss, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["whole", "chunks"])
@pytest.mark.parametrize("soft_weight", [0.7, 0.0])
def test_forward_makes_the_gradient_of_the_loss(kind: str, soft_weight: float) -> None:
    """A second backward makes it again."""
    inputs = arguments(torch.float32)
    options: dict[str, Any] = {
        "divergence": "jsd",
        "beta": 0.0,
        "temperature": 1.0,
        "soft_weight": soft_weight,
        "hard_weight": 0.0,
        "student_softcap": None,
        "teacher_softcap": None,
        "ignore_index": -1,
        "reduction": "mean",
        "accum_dtype": torch.float32,
        "memory_budget": None if kind == "whole" else 36_000,
    }
    tensors = [inputs["x"], inputs["linear_weight"], inputs["x"] * 2, inputs["linear_weight"] * 2, inputs["labels"]]
    host = FusedLinearDistillation(TorchKernels(), TorchLinear())
    _, saved = host.forward((True, True, False), *tensors, **options)
    assert isinstance(saved[-1], SavedOnce) == (kind == "chunks")
    grads = [host.backward((True, True, False), saved, torch.tensor(2.0), **options) for _ in range(2)]
    leaves = [t.double().requires_grad_() for t in tensors[:2]]
    truth = fused_linear_distillation.reference(*leaves, *(t.double() for t in tensors[2:4]), tensors[4], **options)
    for found in grads:
        for one, wanted in zip(found, torch.autograd.grad(truth.loss * 2, leaves, retain_graph=True), strict=False):
            assert one is not None
            torch.testing.assert_close(one.double(), wanted, rtol=1e-4, atol=1e-6)
