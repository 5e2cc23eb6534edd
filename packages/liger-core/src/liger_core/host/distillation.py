"""Distillations of rows of logits: the host code, to which a language adds its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.rows import Logits
from liger_core.ops.distillation import DistillationOutput


class DistillationKernelOptions(NamedTuple):
    """The options of a row's losses.

    Attributes:
        divergence: ``"forward"``, ``"reverse"`` or ``"mixture"`` of `beta`; ``"tvd"`` or ``"cosine"``. ``"given"`` and
            ``"log"`` are `kl_div` from probabilities, or from their logarithms, which replace the teacher's logits. They may
            be any numbers, and need not add up to 1.
        beta: the teacher's weight in the mixture; for ``"given"``, the least probability whose logarithm is taken.
        temperature: the divisor of logits, except in the hard loss and in ``"cosine"``.
        student_softcap, teacher_softcap: bounds of logits, or None.
        ignore_index: the label of rows that don't count.
        hard: whether there is a hard loss.
    """

    divergence: str
    beta: float
    temperature: float
    student_softcap: float | None
    teacher_softcap: float | None
    ignore_index: int
    hard: bool


class DistillationInputs(NamedTuple):
    """The inputs of the rows' losses, except their logits.

    Attributes:
        labels: int64 ``[N]``, contiguous, or None: all rows count, and there is no hard loss.
        student_bias, teacher_bias: ``[V]``, contiguous, to add to logits; or None.
        options: the options.
    """

    labels: Tensor | None
    student_bias: Tensor | None
    teacher_bias: Tensor | None
    options: DistillationKernelOptions


class DistillationResults(NamedTuple):
    """The float32 results per row that `DistillationKernels.rows` writes.

    Attributes:
        soft, hard: the losses, ``[N]``; None for a hard loss that isn't wanted. 0 in a row that doesn't count.
        statistics: ``[6, N]``, which a language's `gradient` needs from its `rows`. They are written even if no gradient is
            wanted, so that the losses have the same bits: another compilation of `rows` doesn't promise that.
    """

    soft: Tensor
    hard: Tensor | None
    statistics: Tensor


class DistillationFactors(NamedTuple):
    """The factors of each row's gradients: float32 ``[N]``, or ``[1]`` for all rows; None for a loss without a gradient."""

    soft: Tensor | None
    hard: Tensor | None


def step_of(incoming: Tensor | None) -> int:
    """The distance in `DistillationFactors` between the factors of two adjacent rows."""
    return 0 if incoming is None or incoming.shape[0] == 1 else 1


class DistillationKernels:
    """A language's kernels of distillations."""

    def rows(
        self, results: DistillationResults, student: Logits, teacher: Logits, inputs: DistillationInputs, first: int
    ) -> None:
        """Write the results of the rows from `first` on, as many as there are logits. The logits may have any strides."""
        raise NotImplementedError

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
        """Write the gradient of the student's logits of the rows from `first` on, and of the columns from `first_column` on.

        Args:
            dstudent: to be written; `memory` is contiguous.
            student: None if `dstudent` holds them.
            teacher: the teacher's, of the same rows and columns.
            given: as `rows` got them: biases of all columns.
            statistics: those of `rows`, of all rows.
            incoming: of all rows.
            first: the first row.
            first_column: the first column.
        """
        raise NotImplementedError

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        """The number of rows of x that count, or 1 if none does; float32, one element."""
        raise NotImplementedError

    def total(self, losses: Tensor, divisor: Tensor | None) -> Tensor:
        """Σ losses / divisor, a scalar."""
        raise NotImplementedError


def options_of(
    *,
    divergence: str,
    beta: float,
    temperature: float,
    student_softcap: float | None,
    teacher_softcap: float | None,
    ignore_index: int,
    hard_weight: float,
) -> DistillationKernelOptions:
    """The options, normalised."""
    if divergence == "jsd":
        divergence = "forward" if beta == 0 else "reverse" if beta == 1 else "mixture"
    student = None if student_softcap is None else float(student_softcap)
    teacher = None if teacher_softcap is None else float(teacher_softcap)
    return DistillationKernelOptions(
        divergence, float(beta), float(temperature), student, teacher, ignore_index, hard_weight != 0
    )


def inputs_of(
    labels: Tensor | None, student_bias: Tensor | None, teacher_bias: Tensor | None, options: DistillationKernelOptions
) -> DistillationInputs:
    """The inputs of the losses, from tensors with any strides."""
    labels, student_bias, teacher_bias = (
        None if tensor is None else tensor.contiguous() for tensor in (labels, student_bias, teacher_bias)
    )
    return DistillationInputs(labels, student_bias, teacher_bias, options)


def new_results(like: Tensor, hard: bool) -> DistillationResults:
    """Memory for the results of all rows of a tensor."""
    soft = torch.empty(like.shape[0], dtype=torch.float32, device=like.device)
    return DistillationResults(soft, torch.empty_like(soft) if hard else None, soft.new_empty((6, like.shape[0])))


def divisor_of(
    kernels: DistillationKernels,
    like: Tensor,
    inputs: DistillationInputs,
    reduction: str,
    num_items_in_batch: float | Tensor | None,
) -> Tensor | None:
    """The divisor of the sum of the rows' losses, float32, one element; None if there is none."""
    if reduction != "mean":
        return None
    if num_items_in_batch is None:
        return kernels.count(like, inputs.labels, inputs.options.ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.detach().to(like.device, torch.float32).clamp(min=1).view(1)
    return torch.full((1,), max(float(num_items_in_batch), 1.0), dtype=torch.float32, device=like.device)


def result_of(
    kernels: DistillationKernels,
    rows: DistillationResults,
    divisor: Tensor | None,
    reduction: str,
    soft_weight: float,
    hard_weight: float,
) -> DistillationOutput:
    """The op's result."""
    soft, hard = rows.soft, rows.hard
    if reduction != "none":
        soft = kernels.total(soft, divisor)
        hard = None if hard is None else kernels.total(hard, divisor)
    loss = soft * soft_weight
    if hard is not None:
        loss = torch.add(loss, hard, alpha=hard_weight)
    return DistillationOutput(loss, soft, hard)


def factors_of(
    dloss: Tensor | None,
    dsoft: Tensor | None,
    dhard: Tensor | None,
    divisor: Tensor | None,
    soft_weight: float,
    hard_weight: float,
) -> DistillationFactors:
    """The gradients of rows' losses, from those of the results."""

    def sum_of(dpart: Tensor | None, weight: float) -> Tensor | None:
        total = dpart
        if dloss is not None and weight != 0:
            total = dloss * weight if dpart is None else torch.add(dpart, dloss, alpha=weight)
        if total is None:
            return None
        return (total.contiguous() if divisor is None else total / divisor.view(())).view(-1)

    soft, hard = sum_of(dsoft, soft_weight), sum_of(dhard, hard_weight)
    if soft is None and hard is None:
        soft = torch.zeros(1, dtype=torch.float32, device=None if dloss is None else dloss.device)
    return DistillationFactors(soft, hard)


class Distillation:
    """`distillation` by a language's kernels: forward reads the logits twice, backward once."""

    def __init__(self, kernels: DistillationKernels) -> None:
        self.kernels = kernels

    def forward(
        self,
        needs: Needs,
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor | None = None,
        *,
        soft_weight: float = 1.0,
        hard_weight: float = 0.0,
        reduction: str = "mean",
        num_items_in_batch: int | float | Tensor | None = None,
        **options: Any,
    ) -> tuple[DistillationOutput, Saved]:
        """The contract's forward."""
        inputs = inputs_of(labels, None, None, options_of(hard_weight=hard_weight, **options))
        results = new_results(student_logits, inputs.options.hard)
        divisor = divisor_of(self.kernels, student_logits, inputs, reduction, num_items_in_batch)
        self.kernels.rows(results, Logits.of(student_logits), Logits.of(teacher_logits), inputs, 0)
        result = result_of(self.kernels, results, divisor, reduction, soft_weight, hard_weight)
        saved = (student_logits, teacher_logits, inputs.labels, results.statistics, divisor) if needs[0] else ()
        return result, saved

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
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward."""
        student, teacher, labels, statistics, divisor = saved
        inputs = DistillationInputs(labels, None, None, options_of(hard_weight=hard_weight, **options))
        factors = factors_of(dloss, dsoft, dhard, divisor, soft_weight, hard_weight)
        dstudent = torch.empty_like(student, memory_format=torch.contiguous_format)
        logits = Logits.of(dstudent), Logits.of(student), Logits.of(teacher)
        self.kernels.gradient(*logits, inputs, statistics, factors, 0, 0)
        return (dstudent,)
