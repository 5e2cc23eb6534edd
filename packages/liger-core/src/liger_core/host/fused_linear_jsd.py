"""Jensen-Shannon divergence of two linear layers: the host code, to which a language adds its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.linear import LinearLoss, LinearLossPass, TeacherLayer, layer_of
from liger_core.host.rows import Logits


class DivergenceInputs(NamedTuple):
    """The inputs of the rows' divergences, except their logits.

    Attributes:
        labels: int64 ``[N]``, contiguous, or None: all rows count.
        ignore_index: the label of rows that don't count.
        temperature: the divisor of logits.
        beta: the teacher's weight in the mixture.
    """

    labels: Tensor | None
    ignore_index: int
    temperature: float
    beta: float


class DivergenceResults(NamedTuple):
    """The results per row that `DivergenceKernels.rows` writes.

    Attributes:
        losses: float32 ``[N]``.
        statistics: float32 ``[5, N]``, which the gradient needs; or None.
    """

    losses: Tensor
    statistics: Tensor | None


class DivergenceKernels:
    """A language's kernels of the divergence of logits."""

    def rows(
        self,
        losses: Tensor,
        statistics: Tensor | None,
        student: Logits,
        teacher: Logits,
        inputs: DivergenceInputs,
        first: int,
    ) -> None:
        """Write the losses of the rows from `first` on, as many as there are logits, and what their gradient needs.

        Args:
            losses: float32 ``[N]``.
            statistics: float32 ``[5, N]``, or None.
            student, teacher: logits; `memory` is contiguous.
            given: the rest.
            first: the first row.
        """
        raise NotImplementedError

    def gradient(
        self,
        dstudent: Logits,
        student: Logits | None,
        teacher: Logits,
        inputs: DivergenceInputs,
        statistics: Tensor,
        incoming: Any,
        first: int,
    ) -> None:
        """Write the gradient of the student's logits. If `student` is None, `dstudent` holds them. For `incoming` see there."""
        raise NotImplementedError

    def incoming(self, dloss: Tensor | None, count: Tensor) -> Any:
        """The factors of `gradient`: here the gradient of the loss, and the number of rows to divide it by.

        Without a `dloss` the gradient is that of Σ losses.
        """
        return dloss, count

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        """The number of rows of x that count, or 1 if none does; float32, one element."""
        raise NotImplementedError

    def mean(self, losses: Tensor, count: Tensor) -> Tensor:
        """Σ losses / count, a scalar."""
        raise NotImplementedError


class FusedLinearJSD(LinearLoss):
    """`fused_linear_jsd` by a language's kernels: logits are made in chunks, which share one memory."""

    kernels: DivergenceKernels
    inputs, results = DivergenceInputs, DivergenceResults

    def write(self, inputs: DivergenceInputs, results: DivergenceResults, first: int, *logits: Logits) -> None:
        student, teacher = logits
        self.kernels.rows(*results, student, teacher, inputs, first)

    def incoming(
        self, inputs: DivergenceInputs, dloss: Tensor | None, divisor: Tensor | None, device: torch.device
    ) -> Any:
        assert divisor is not None
        return self.kernels.incoming(dloss, divisor)

    def gradient(
        self,
        inputs: DivergenceInputs,
        dlogits: Logits,
        logits: tuple[Logits | None, ...],
        statistics: Tensor,
        incoming: Any,
        first: int,
        first_column: int,
    ) -> None:
        student, teacher = logits
        assert teacher is not None
        self.kernels.gradient(dlogits, student, teacher, inputs, statistics, incoming, first)

    def forward(
        self,
        needs: Needs,
        student_x: Tensor,
        student_weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        labels: Tensor | None = None,
        *,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
    ) -> tuple[Tensor, Saved]:
        """The contract's forward, for a kernel file."""
        n, differentiable = student_x.shape[0], any(needs)
        labels = None if labels is None else labels.contiguous()
        inputs = DivergenceInputs(labels, ignore_index, temperature, beta)
        losses = torch.empty(n, dtype=torch.float32, device=student_x.device)
        statistics = losses.new_empty((5, n)) if differentiable else None
        count = self.kernels.count(student_x, labels, ignore_index)
        own = (*needs, False), student_x, student_weight, None
        layer = layer_of(*own, accum_dtype, memory_budget, teacher_x=teacher_x)
        teacher = TeacherLayer(teacher_x, teacher_weight, memory_budget is not None)
        results = DivergenceResults(losses, statistics)
        logits_or_grads = LinearLossPass(self, layer, inputs, results, divisor=count, teacher=teacher).forward()
        mean = self.kernels.mean(losses, count)
        if not differentiable:
            return mean, ()
        return mean, (student_x, student_weight, teacher_x, teacher_weight, labels, statistics, count, *logits_or_grads)

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dloss: Tensor,
        *,
        beta: float,
        ignore_index: int,
        temperature: float,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward, for a kernel file."""
        student_x, student_weight, teacher_x, teacher_weight, labels, statistics, count, *logits_or_grads = saved
        own = (*needs, False), student_x, student_weight, None
        layer = layer_of(*own, accum_dtype, memory_budget, teacher_x=teacher_x)
        teacher = TeacherLayer(teacher_x, teacher_weight, memory_budget is not None)
        inputs = DivergenceInputs(labels, ignore_index, temperature, beta)
        call = LinearLossPass(self, layer, inputs, statistics=statistics, divisor=count, teacher=teacher)
        dx, dweight, _ = call.backward(tuple(logits_or_grads), dloss)
        return dx, dweight
