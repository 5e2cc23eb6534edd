"""Distillation of two linear layers by a language's kernels: all but these.

The teacher's logits are no more than read, so they are computed for few rows of a chunk at a time: fewer chunks, each of
which reads and writes the accumulator of the weight's gradient, fit the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
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
from liger_core.host.linear import Gradients, Linear, LinearLoss, is_wide, plan_of
from liger_core.ops.distillation import DistillationOutput


class _Loss(LinearLoss):
    """A call. `results` are written in forward alone; `made` is what backward multiplies gradients of rows with."""

    def __init__(
        self,
        kernels: DistillationKernels,
        linear: Linear,
        needs: Needs,
        student_x: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        given: Given,
        weights: tuple[float, float],
        statistics: Tensor,
        reduction: str,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
    ) -> None:
        plan = plan_of(
            needs,
            student_x,
            student_weight,
            accum_dtype=accum_dtype,
            memory_budget=memory_budget,
            reduced=reduction != "none",
            teacher_x=teacher_x,
        )
        super().__init__(linear, needs, student_x, student_weight, student_bias, plan, accum_dtype)
        self.kernels, self.teacher_x, self.teacher_weight, self.given = kernels, teacher_x, teacher_weight, given
        self.weights, self.statistics = weights, statistics
        self.results: Rows | None = None
        self.made: Incoming | None = None
        self.teacher_rows = self.rows
        if not plan.whole:
            if memory_budget is not None and not (needs[2] and is_wide(student_bias, student_x)):
                # There is room for the student's logits beside their gradient, which here take the same memory; and for
                # the teacher's, half of which `add_product` may take instead.
                takes_memory = needs[1] and linear.takes_memory(student_x, accum_dtype)
                self.rows += plan.chunk // 2 if takes_memory else plan.chunk
            # Matmuls need a few hundred rows for their full speed.
            self.teacher_rows = min(plan.chunk, max(256, plan.chunk // 8))

    def visit(
        self, first: int, logits: Tensor, results: bool, gradients: Gradients | None, incoming: Any
    ) -> tuple[Tensor, ...]:
        teacher: Any = None
        for start, end in self.linear.chunks(logits.shape[0], self.teacher_rows):
            teacher = None
            teacher = self.teacher_x[first + start : first + end] @ self.teacher_weight.t()
            student = logits[start:end]
            if results:
                assert self.results is not None
                self.kernels.rows(self.results, student, teacher, self.given, first + start)
            if gradients is not None:
                self.add_wide_bias(gradients, (student, teacher), incoming, first + start)
                self.gradient(student, (None, teacher), incoming, first + start)
        return logits, teacher

    def incoming(self, dloss: Tensor | None) -> Incoming:
        if dloss is not None and self.made is not None:
            return self.made
        soft, hard = self.weights
        one = torch.ones(1, dtype=torch.float32, device=self.x.device)
        return Incoming(one * soft, one * hard if self.given.options.hard else None)

    def gradient(
        self, dlogits: Tensor, kept: tuple[Tensor | None, ...], incoming: Any, first: int = 0, first_column: int = 0
    ) -> None:
        student, teacher = kept
        assert teacher is not None
        self.kernels.gradient(dlogits, student, teacher, self.given, self.statistics, incoming, first, first_column)


class FusedLinearDistillation:
    """`fused_linear_distillation` by a language's kernels: chunks of logits, in memory used again for each."""

    def __init__(self, kernels: DistillationKernels, linear: Linear) -> None:
        self.kernels, self.linear = kernels, linear

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
        """The contract's, for a kernel file."""
        options = options_of(divergence, beta, temperature, student_softcap, teacher_softcap, ignore_index, hard_weight)
        given = given_of(labels, student_bias, teacher_bias, options)
        rows = new_rows(student_x, options.hard)
        loss = _Loss(
            self.kernels,
            self.linear,
            needs,
            student_x,
            student_weight,
            student_bias,
            teacher_x,
            teacher_weight,
            given,
            (soft_weight, hard_weight),
            rows.statistics,
            reduction,
            accum_dtype,
            memory_budget,
        )
        loss.results = rows
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
        dsoft: Tensor | None,
        dhard: Tensor | None,
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
        """The contract's, for a kernel file."""
        x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias, statistics, divisor, *kept = saved
        options = options_of(divergence, beta, temperature, student_softcap, teacher_softcap, ignore_index, hard_weight)
        given = given_of(labels, bias, teacher_bias, options)
        loss = _Loss(
            self.kernels,
            self.linear,
            needs,
            x,
            weight,
            bias,
            teacher_x,
            teacher_weight,
            given,
            (soft_weight, hard_weight),
            statistics,
            reduction,
            accum_dtype,
            memory_budget,
        )
        loss.divisor = divisor
        if loss.plan.at_once and dloss is not None and dsoft is None and dhard is None:
            return loss.backward(tuple(kept), dloss)
        loss.made = incoming_of(dloss, dsoft, dhard, divisor, soft_weight, hard_weight)
        any_of_them = next(gradient for gradient in (dloss, dsoft, dhard) if gradient is not None)
        return loss.backward(tuple(kept) if loss.plan.whole else (), any_of_them)
