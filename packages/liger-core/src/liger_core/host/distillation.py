"""Distillations of rows of logits: the host code, to which a language adds its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.host.rows import Logits
from liger_core.ops.distillation import DistillationOutput


class Options(NamedTuple):
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


class Given(NamedTuple):
    """The inputs of the rows' losses, except their logits.

    Attributes:
        labels: int64 ``[N]``, contiguous, or None: all rows count, and there is no hard loss.
        student_bias, teacher_bias: ``[V]``, contiguous, to add to logits; or None.
        options: the options.
    """

    labels: Tensor | None
    student_bias: Tensor | None
    teacher_bias: Tensor | None
    options: Options


class Rows(NamedTuple):
    """The float32 results per row that `DistillationKernels.rows` writes.

    Attributes:
        soft, hard: the losses, ``[N]``; None for a hard loss that isn't wanted. 0 in a row that doesn't count.
        statistics: ``[6, N]``, which a language's `gradient` needs from its `rows`. They are written even if no gradient is
            wanted, so that the losses have the same bits: another compilation of `rows` doesn't promise that.
    """

    soft: Tensor
    hard: Tensor | None
    statistics: Tensor


class Incoming(NamedTuple):
    """The factors of each row's gradients: float32 ``[N]``, or ``[1]`` for all rows; None for a loss without a gradient."""

    soft: Tensor | None
    hard: Tensor | None


def step_of(incoming: Tensor | None) -> int:
    """The distance in `Incoming` between the factors of two adjacent rows."""
    return 0 if incoming is None or incoming.shape[0] == 1 else 1


class DistillationKernels:
    """A language's kernels of distillations."""

    def rows(self, results: Rows, student: Logits, teacher: Logits, given: Given, first: int) -> None:
        """Write the results of the rows from `first` on, as many as there are logits. The logits may have any strides."""
        raise NotImplementedError

    def gradient(
        self,
        dstudent: Logits,
        student: Logits | None,
        teacher: Logits,
        given: Given,
        statistics: Tensor,
        incoming: Incoming,
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
    divergence: str,
    beta: float,
    temperature: float,
    student_softcap: float | None,
    teacher_softcap: float | None,
    ignore_index: int,
    hard_weight: float,
) -> Options:
    """The options, normalised."""
    if divergence == "jsd":
        divergence = "forward" if beta == 0 else "reverse" if beta == 1 else "mixture"
    student = None if student_softcap is None else float(student_softcap)
    teacher = None if teacher_softcap is None else float(teacher_softcap)
    return Options(divergence, float(beta), float(temperature), student, teacher, ignore_index, hard_weight != 0)


def given_of(
    labels: Tensor | None, student_bias: Tensor | None, teacher_bias: Tensor | None, options: Options
) -> Given:
    """The inputs of the losses, from tensors with any strides."""
    labels, student_bias, teacher_bias = (
        None if tensor is None else tensor.contiguous() for tensor in (labels, student_bias, teacher_bias)
    )
    return Given(labels, student_bias, teacher_bias, options)


def new_rows(like: Tensor, hard: bool) -> Rows:
    """Memory for the results of all rows of a tensor."""
    soft = torch.empty(like.shape[0], dtype=torch.float32, device=like.device)
    return Rows(soft, torch.empty_like(soft) if hard else None, soft.new_empty((6, like.shape[0])))


def divisor_of(
    kernels: DistillationKernels,
    like: Tensor,
    given: Given,
    reduction: str,
    num_items_in_batch: float | Tensor | None,
) -> Tensor | None:
    """The divisor of the sum of the rows' losses, float32, one element; None if there is none."""
    if reduction != "mean":
        return None
    if num_items_in_batch is None:
        return kernels.count(like, given.labels, given.options.ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.detach().to(like.device, torch.float32).clamp(min=1).view(1)
    return torch.full((1,), max(float(num_items_in_batch), 1.0), dtype=torch.float32, device=like.device)


def result_of(
    kernels: DistillationKernels,
    rows: Rows,
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


def incoming_of(
    dloss: Tensor | None,
    dsoft: Tensor | None,
    dhard: Tensor | None,
    divisor: Tensor | None,
    soft_weight: float,
    hard_weight: float,
) -> Incoming:
    """The gradients of rows' losses, from those of the results."""

    def sum_of(own: Tensor | None, weight: float) -> Tensor | None:
        found = own
        if dloss is not None and weight != 0:
            found = dloss * weight if own is None else torch.add(own, dloss, alpha=weight)
        if found is None:
            return None
        return (found.contiguous() if divisor is None else found / divisor.view(())).view(-1)

    soft, hard = sum_of(dsoft, soft_weight), sum_of(dhard, hard_weight)
    if soft is None and hard is None:
        soft = torch.zeros(1, dtype=torch.float32, device=None if dloss is None else dloss.device)
    return Incoming(soft, hard)


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
    ) -> tuple[DistillationOutput, Saved]:
        """The contract's forward, for a kernel file."""
        options = options_of(divergence, beta, temperature, student_softcap, teacher_softcap, ignore_index, hard_weight)
        given = given_of(labels, None, None, options)
        rows = new_rows(student_logits, options.hard)
        divisor = divisor_of(self.kernels, student_logits, given, reduction, num_items_in_batch)
        self.kernels.rows(rows, Logits.of(student_logits), Logits.of(teacher_logits), given, 0)
        result = result_of(self.kernels, rows, divisor, reduction, soft_weight, hard_weight)
        saved = (student_logits, teacher_logits, given.labels, rows.statistics, divisor) if needs[0] else ()
        return result, saved

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
        **options: object,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward, for a kernel file."""
        student, teacher, labels, statistics, divisor = saved
        found = options_of(divergence, beta, temperature, student_softcap, teacher_softcap, ignore_index, hard_weight)
        incoming = incoming_of(dloss, dsoft, dhard, divisor, soft_weight, hard_weight)
        dstudent = torch.empty_like(student, memory_format=torch.contiguous_format)
        all_of_them = Logits.of(dstudent), Logits.of(student), Logits.of(teacher)
        self.kernels.gradient(*all_of_them, Given(labels, None, None, found), statistics, incoming, 0, 0)
        return (dstudent,)
