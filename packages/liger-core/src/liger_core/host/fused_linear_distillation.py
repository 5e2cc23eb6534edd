"""Distillation of two linear layers: the host code, to which a language adds its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.distillation import (
    DistillationFactors,
    DistillationInputs,
    DistillationKernels,
    DistillationResults,
    divisor_of,
    factors_of,
    inputs_of,
    new_results,
    options_of,
    result_of,
)
from liger_core.host.linear import LinearLoss, LinearLossPass, TeacherLayer, layer_of
from liger_core.host.rows import Logits
from liger_core.ops.distillation import DistillationOutput


class FusedDistillationInputs(NamedTuple):
    """Inputs of each chunk of a call, except its logits.

    Attributes:
        rows: what the kernels take.
        soft_weight, hard_weight: the weights of both losses in `loss`, whose gradient forward makes at once.
        factors: those of the rows' gradients in backward.
    """

    rows: DistillationInputs
    soft_weight: float
    hard_weight: float
    factors: DistillationFactors = DistillationFactors(None, None)


class FusedLinearDistillation(LinearLoss):
    """`fused_linear_distillation` by a language's kernels: logits are made in chunks, which share one memory."""

    kernels: DistillationKernels
    inputs, results = FusedDistillationInputs, DistillationResults

    def write(self, inputs: FusedDistillationInputs, results: DistillationResults, first: int, *logits: Logits) -> None:
        student, teacher = logits
        self.kernels.rows(results, student, teacher, inputs.rows, first)

    def incoming(
        self, inputs: FusedDistillationInputs, dloss: Tensor | None, divisor: Tensor | None, device: torch.device
    ) -> DistillationFactors:
        if dloss is not None:
            return inputs.factors
        one = torch.ones(1, dtype=torch.float32, device=device)
        hard = one * inputs.hard_weight if inputs.rows.options.hard else None
        return DistillationFactors(one * inputs.soft_weight, hard)

    def gradient(
        self,
        inputs: FusedDistillationInputs,
        dlogits: Logits,
        logits: tuple[Logits | None, ...],
        statistics: Tensor,
        incoming: DistillationFactors,
        first: int,
        first_column: int,
    ) -> None:
        student, teacher = logits
        assert teacher is not None
        self.kernels.gradient(dlogits, student, teacher, inputs.rows, statistics, incoming, first, first_column)

    def forward(
        self,
        needs: Needs,
        student_x: Tensor,
        student_weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        labels: Tensor | None = None,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        soft_weight: float = 1.0,
        hard_weight: float = 0.0,
        reduction: str = "mean",
        num_items_in_batch: int | float | Tensor | None = None,
        accum_dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
        **options: Any,
    ) -> tuple[DistillationOutput, Saved]:
        """The contract's forward."""
        rows = inputs_of(labels, student_bias, teacher_bias, options_of(hard_weight=hard_weight, **options))
        results = new_results(student_x, rows.options.hard)
        reduced, own = reduction != "none", (student_x, student_weight, student_bias)
        layer = layer_of(needs, *own, accum_dtype, memory_budget, reduced=reduced, teacher_x=teacher_x)
        teacher = TeacherLayer(teacher_x, teacher_weight, memory_budget is not None)
        inputs = FusedDistillationInputs(rows, float(soft_weight), float(hard_weight))
        divisor = divisor_of(self.kernels, student_x, rows, reduction, num_items_in_batch)
        logits_or_grads = LinearLossPass(self, layer, inputs, results, teacher=teacher).forward()
        result = result_of(self.kernels, results, divisor, reduction, soft_weight, hard_weight)
        if not any(needs):
            return result, ()
        saved = student_x, student_weight, teacher_x, teacher_weight, rows.labels, student_bias, rows.teacher_bias
        return result, (*saved, results.statistics, divisor, *logits_or_grads)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dloss: Tensor | None,
        dsoft: Tensor | None = None,
        dhard: Tensor | None = None,
        *,
        soft_weight: float,
        hard_weight: float,
        reduction: str,
        num_items_in_batch: object = None,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward."""
        x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias, statistics, divisor, *logits_or_grads = saved
        rows = inputs_of(labels, bias, teacher_bias, options_of(hard_weight=hard_weight, **options))
        reduced = reduction != "none"
        layer = layer_of(needs, x, weight, bias, accum_dtype, memory_budget, reduced=reduced, teacher_x=teacher_x)
        teacher = TeacherLayer(teacher_x, teacher_weight, memory_budget is not None)
        inputs = FusedDistillationInputs(rows, float(soft_weight), float(hard_weight))
        if not layer.plan.at_once:
            factors = factors_of(dloss, dsoft, dhard, divisor, soft_weight, hard_weight)
            inputs = inputs._replace(factors=factors)
        call = LinearLossPass(self, layer, inputs, statistics=statistics, divisor=divisor, teacher=teacher)
        return call.backward(tuple(logits_or_grads), next(grad for grad in (dloss, dsoft, dhard) if grad is not None))
