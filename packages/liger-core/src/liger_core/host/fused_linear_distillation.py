"""Distillation of two linear layers: the host code, to which a language adds its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.custom_op import opaque
from liger_core.host.distillation import (
    DistillationKernels,
    Given,
    Incoming,
    Rows,
    divisor_of,
    given_of,
    incoming_of,
    new_rows,
    options_of,
    result_of,
)
from liger_core.host.linear import Layer, Linear, Made, Teacher, TeacherLoss, plan_of
from liger_core.host.rows import Logits
from liger_core.ops.distillation import DistillationOutput


class Weights(NamedTuple):
    """Of the two losses in `loss`."""

    soft: float
    hard: float


class _Loss(TeacherLoss):
    """A call. Only forward writes `results`. `factors` are those of rows' gradients in backward.

    What forward makes at once is the gradient of `loss`.
    """

    factors = Incoming(None, None)

    def __init__(
        self,
        host: FusedLinearDistillation,
        layer: Layer,
        teacher: Teacher,
        given: Given,
        weights: Weights,
        results: Rows | None,
        statistics: Tensor,
    ) -> None:
        super().__init__(host.linear, layer, teacher)
        self.host, self.kernels, self.given, self.weights = host, host.kernels, given, weights
        self.results, self.statistics = results, statistics

    def as_one(self, made: Made, results: bool, dloss: Tensor | None, by_columns: bool) -> None:
        written, statistics = (self.results, None) if results else (None, self.statistics)
        call = self.layer, self.teacher, self.given, self.weights
        self.host.go(made, written, *call, statistics, self.factors, dloss, by_columns)

    def write(self, first: int, *logits: Logits) -> None:
        student, teacher = logits
        assert self.results is not None
        self.kernels.rows(self.results, student, teacher, self.given, first)

    def incoming(self, dloss: Tensor | None) -> Incoming:
        if dloss is not None:
            return self.factors
        soft, hard = self.weights
        one = torch.ones(1, dtype=torch.float32, device=self.x.device)
        return Incoming(one * soft, one * hard if self.given.options.hard else None)

    def gradient(
        self, dlogits: Logits, kept: tuple[Logits | None, ...], incoming: Any, first: int = 0, first_column: int = 0
    ) -> None:
        student, teacher = kept
        assert teacher is not None
        self.kernels.gradient(dlogits, student, teacher, self.given, self.statistics, incoming, first, first_column)


class FusedLinearDistillation:
    """`fused_linear_distillation` by a language's kernels: logits are made in chunks, which share one memory."""

    def __init__(self, kernels: DistillationKernels, linear: Linear) -> None:
        self.kernels, self.linear = kernels, linear
        self.go = opaque(writes=("made", "results"), within=type(kernels).__module__)(self._go)

    def _go(
        self,
        made: Made,
        results: Rows | None,
        layer: Layer,
        teacher: Teacher,
        given: Given,
        weights: Weights,
        statistics: Tensor | None,
        factors: Incoming,
        dloss: Tensor | None,
        by_columns: bool,
    ) -> None:
        """`LinearLoss.go`. `statistics` are those that forward wrote; in forward they are among the results."""
        if results is not None:
            statistics = results.statistics
        assert statistics is not None
        loss = _Loss(self, layer, teacher, given, weights, results, statistics)
        loss.factors = factors
        loss.go(made, results is not None, dloss, by_columns)

    def _loss(
        self,
        needs: Needs,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        *,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        reduction: str,
        given: Given,
        weights: Weights,
        results: Rows | None,
        statistics: Tensor,
    ) -> _Loss:
        how: dict[str, Any] = {"accum_dtype": accum_dtype, "memory_budget": memory_budget, "teacher_x": teacher_x}
        plan = plan_of(needs, x, weight, reduced=reduction != "none", **how)
        layer = Layer(x, weight, bias, needs, accum_dtype, plan)
        teacher = Teacher(teacher_x, teacher_weight, memory_budget is not None)
        return _Loss(self, layer, teacher, given, weights, results, statistics)

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
        divergence: str = "jsd",
        beta: float = 0.5,
        temperature: float = 1.0,
        soft_weight: float = 1.0,
        hard_weight: float = 0.0,
        student_softcap: float | None = None,
        teacher_softcap: float | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        num_items_in_batch: int | float | Tensor | None = None,
        accum_dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
    ) -> tuple[DistillationOutput, Saved]:
        """The contract's forward, for a kernel file."""
        options = options_of(divergence, beta, temperature, student_softcap, teacher_softcap, ignore_index, hard_weight)
        given = given_of(labels, student_bias, teacher_bias, options)
        rows = new_rows(student_x, options.hard)
        loss = self._loss(
            *(needs, student_x, student_weight, student_bias, teacher_x, teacher_weight),
            accum_dtype=accum_dtype,
            memory_budget=memory_budget,
            reduction=reduction,
            given=given,
            weights=Weights(float(soft_weight), float(hard_weight)),
            results=rows,
            statistics=rows.statistics,
        )
        divisor = divisor_of(self.kernels, student_x, given, reduction, num_items_in_batch)
        kept = loss.forward()
        result = result_of(self.kernels, rows, divisor, reduction, soft_weight, hard_weight)
        if not any(needs):
            return result, ()
        saved = student_x, student_weight, teacher_x, teacher_weight, given.labels, student_bias, given.teacher_bias
        return result, (*saved, rows.statistics, divisor, *kept)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dloss: Tensor | None,
        dsoft: Tensor | None = None,
        dhard: Tensor | None = None,
        *,
        divergence: str,
        beta: float,
        temperature: float,
        soft_weight: float,
        hard_weight: float,
        student_softcap: float | None,
        teacher_softcap: float | None,
        ignore_index: int,
        reduction: str,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        **others: object,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward, for a kernel file."""
        x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias, statistics, divisor, *kept = saved
        options = options_of(divergence, beta, temperature, student_softcap, teacher_softcap, ignore_index, hard_weight)
        given = given_of(labels, bias, teacher_bias, options)
        loss = self._loss(
            *(needs, x, weight, bias, teacher_x, teacher_weight),
            accum_dtype=accum_dtype,
            memory_budget=memory_budget,
            reduction=reduction,
            given=given,
            weights=Weights(float(soft_weight), float(hard_weight)),
            results=None,
            statistics=statistics,
        )
        loss.divisor = divisor
        if not loss.plan.at_once:
            loss.factors = incoming_of(dloss, dsoft, dhard, divisor, soft_weight, hard_weight)
        return loss.backward(tuple(kept), next(gradient for gradient in (dloss, dsoft, dhard) if gradient is not None))
