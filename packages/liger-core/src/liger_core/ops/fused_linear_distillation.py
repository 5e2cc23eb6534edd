"""Distillation of a teacher into a student, from the hidden states of both, without their logits."""

from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.budget import check_accum_dtype, check_memory_budget
from liger_core.contract import op
from liger_core.ops.cross_entropy import check_labels
from liger_core.ops.distillation import (
    DistillationOutput,
    check_distillation_options,
    distillation_of_logits,
    with_gradients,
)


@op(
    differentiable=("student_x", "student_weight", "student_bias"),
    result=DistillationOutput,
    grad_results=with_gradients,
    autocast=("student_x", "student_weight", "teacher_x", "teacher_weight", "student_bias", "teacher_bias"),
    dimensions="student_x: n H, student_weight: V H, teacher_x: n K, teacher_weight: V K, labels: n, student_bias: V, "
    "teacher_bias: V -> n, n, n",
)
def fused_linear_distillation(
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
) -> DistillationOutput:
    """`distillation` of x @ weightᵀ + bias of a student and its teacher.

    A kernel makes the N × V logits a chunk of rows at a time, the student's only once for both losses. Logits are computed in
    x's dtype, the rest in float32. The gradients of student_weight and student_bias are summed over rows in
    `accum_dtype` and float32, and rounded once. The teacher gets no gradient.

    Args:
        student_x: ``[N, Hs]``; float32, bfloat16 or float16.
        student_weight: ``[V, Hs]``, in student_x's dtype.
        teacher_x: ``[N, Ht]``; float32, bfloat16 or float16; the student may have another dtype.
        teacher_weight: ``[V, Ht]``, in teacher_x's dtype. If its vocabulary is longer, pass the view ``weight[:V]``.
        labels: as in `distillation`.
        student_bias, teacher_bias: ``[V]``, or None.
        divergence, beta, temperature, soft_weight, hard_weight: as in `distillation`.
        student_softcap, teacher_softcap, ignore_index, reduction, num_items_in_batch: as in `distillation`.
        accum_dtype, memory_budget: as in `fused_linear_cross_entropy`, including the teacher's logits of a chunk.

    Returns:
        `DistillationOutput`. Forward makes the gradient of a reduced loss, and backward takes no product. The logits of a loss
        per row are made in forward and again in backward.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `hard_weight` without labels, a
            `memory_budget` below the least, or tensors on different devices.
        IndexError: a label out of range, on the CPU, if there is a hard loss.

    Source:
        `distillation`; chunks of rows: Hsu et al., Liger Kernel, arXiv 2410.10989.

    >>> x, teacher = torch.ones(1, 2), torch.tensor([[99.0, 0.0], [0.0, 0.0]])
    >>> fused_linear_distillation(x, torch.zeros(2, 2), x, teacher, beta=0.0).loss
    tensor(0.6931)
    """
    student, teacher = student_x @ student_weight.T, teacher_x @ teacher_weight.T
    return distillation_of_logits(
        student if student_bias is None else student + student_bias,
        teacher if teacher_bias is None else teacher + teacher_bias,
        labels,
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        soft_weight=soft_weight,
        hard_weight=hard_weight,
        student_softcap=student_softcap,
        teacher_softcap=teacher_softcap,
        ignore_index=ignore_index,
        reduction=reduction,
        num_items_in_batch=num_items_in_batch,
    )


@fused_linear_distillation.checks
def _(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
    **options: Any,
) -> None:
    name = "fused_linear_distillation"
    student = {"student_x": student_x, "student_weight": student_weight}
    teacher = {"teacher_x": teacher_x, "teacher_weight": teacher_weight}
    checks.floating(name, **student, **teacher, student_bias=student_bias, teacher_bias=teacher_bias)
    checks.ndim(name, 2, 2, **student, **teacher)
    checks.same_dtype(name, **student)
    checks.same_dtype(name, **teacher)
    vocabulary, rows = student_weight.shape[0], student_x.shape[0]
    if vocabulary == 0:
        raise ValueError(f"{name}: student_weight has shape {tuple(student_weight.shape)}; it takes at least one row")
    checks.shape(name, "student_weight", student_weight, (vocabulary, student_x.shape[1]), "student_x's columns")
    checks.shape(name, "teacher_x", teacher_x, (rows, teacher_x.shape[1]), "a row per row of student_x")
    because = "rows of student_weight, columns of teacher_x: of a longer vocabulary pass teacher_weight[:V]"
    checks.shape(name, "teacher_weight", teacher_weight, (vocabulary, teacher_x.shape[1]), because)
    check_labels(name, labels, rows, "a label per row of student_x", "labels")
    for which, bias in (("student_bias", student_bias), ("teacher_bias", teacher_bias)):
        checks.shape(name, which, bias, (vocabulary,), "student_weight's first dimension")
    check_distillation_options(name, labels, **options)
    check_accum_dtype(name, accum_dtype)
    check_memory_budget(name, memory_budget, student_x, student_weight, accum_dtype, teacher_x)


@fused_linear_distillation.checks_values
def _(student_weight: Tensor, labels: Tensor | None, hard_weight: float, ignore_index: int, **others: Any) -> None:
    if labels is not None and hard_weight:
        checks.indices_below("fused_linear_distillation", "labels", labels, student_weight.shape[0], ignore_index)
