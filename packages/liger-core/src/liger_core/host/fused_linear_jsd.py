"""Jensen-Shannon divergence of two linear layers: the host code, to which a language adds its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.custom_op import opaque
from liger_core.host.linear import Layer, Linear, Made, Teacher, TeacherLoss, plan_of
from liger_core.host.rows import Logits


class Given(NamedTuple):
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


class Rows(NamedTuple):
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
        self, losses: Tensor, statistics: Tensor | None, student: Logits, teacher: Logits, given: Given, first: int
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
        given: Given,
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


class _Loss(TeacherLoss):
    """A call. Only forward writes `results`."""

    def __init__(
        self,
        host: FusedLinearJSD,
        layer: Layer,
        teacher: Teacher,
        given: Given,
        results: Rows | None,
        statistics: Tensor | None,
    ) -> None:
        super().__init__(host.linear, layer, teacher)
        self.host, self.kernels, self.given = host, host.kernels, given
        self.results, self.statistics = results, statistics

    def as_one(self, made: Made, results: bool, dloss: Tensor | None, by_columns: bool) -> None:
        written, statistics = (self.results, None) if results else (None, self.statistics)
        assert self.divisor is not None
        self.host.go(made, written, self.layer, self.teacher, self.given, statistics, self.divisor, dloss)

    def write(self, first: int, *logits: Logits) -> None:
        student, teacher = logits
        assert self.results is not None
        self.kernels.rows(*self.results, student, teacher, self.given, first)

    def incoming(self, dloss: Tensor | None) -> Any:
        assert self.divisor is not None
        return self.kernels.incoming(dloss, self.divisor)

    def gradient(
        self, dlogits: Logits, kept: tuple[Logits | None, ...], incoming: Any, first: int = 0, first_column: int = 0
    ) -> None:
        student, teacher = kept
        assert teacher is not None
        assert self.statistics is not None
        self.kernels.gradient(dlogits, student, teacher, self.given, self.statistics, incoming, first)


class FusedLinearJSD:
    """`fused_linear_jsd` by a language's kernels: logits are made in chunks, which share one memory."""

    def __init__(self, kernels: DivergenceKernels, linear: Linear) -> None:
        self.kernels, self.linear = kernels, linear
        self.go = opaque(writes=("made", "results"), within=type(kernels).__module__)(self._go)

    def _go(
        self,
        made: Made,
        results: Rows | None,
        layer: Layer,
        teacher: Teacher,
        given: Given,
        statistics: Tensor | None,
        divisor: Tensor,
        dloss: Tensor | None,
    ) -> None:
        """`LinearLoss.go`. `statistics` are those that forward wrote; in forward they are among the results."""
        loss = _Loss(self, layer, teacher, given, results, statistics if results is None else results.statistics)
        loss.divisor = divisor
        loss.go(made, results is not None, dloss, False)

    def _loss(
        self,
        needs: Needs,
        x: Tensor,
        weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        *,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        given: Given,
        results: Rows | None,
        statistics: Tensor | None,
    ) -> _Loss:
        needs = (*needs, False)
        how: dict[str, Any] = {"accum_dtype": accum_dtype, "memory_budget": memory_budget, "teacher_x": teacher_x}
        layer = Layer(x, weight, None, needs, accum_dtype, plan_of(needs, x, weight, **how))
        teacher = Teacher(teacher_x, teacher_weight, memory_budget is not None)
        return _Loss(self, layer, teacher, given, results, statistics)

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
        given = Given(None if labels is None else labels.contiguous(), ignore_index, temperature, beta)
        losses = torch.empty(n, dtype=torch.float32, device=student_x.device)
        statistics = losses.new_empty((5, n)) if differentiable else None
        loss = self._loss(
            *(needs, student_x, student_weight, teacher_x, teacher_weight),
            accum_dtype=accum_dtype,
            memory_budget=memory_budget,
            given=given,
            results=Rows(losses, statistics),
            statistics=statistics,
        )
        loss.divisor = count = self.kernels.count(student_x, given.labels, ignore_index)
        kept = loss.forward()
        mean = self.kernels.mean(losses, count)
        if not differentiable:
            return mean, ()
        return mean, (student_x, student_weight, teacher_x, teacher_weight, given.labels, statistics, count, *kept)

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
        student_x, student_weight, teacher_x, teacher_weight, labels, statistics, count, *kept = saved
        given = Given(labels, ignore_index, temperature, beta)
        loss = self._loss(
            *(needs, student_x, student_weight, teacher_x, teacher_weight),
            accum_dtype=accum_dtype,
            memory_budget=memory_budget,
            given=given,
            results=None,
            statistics=statistics,
        )
        loss.divisor = count
        dx, dweight, _ = loss.backward(tuple(kept), dloss)
        return dx, dweight
