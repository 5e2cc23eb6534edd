"""Jensen-Shannon divergence of two linear layers' predictions, without their logits."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.budget import check_accum_dtype, check_memory_budget
from liger_core.contract import op, upcast
from liger_core.ops.cross_entropy import check_labels
from liger_core.ops.jsd import check_beta, jsd


@op(
    differentiable=("student_x", "student_weight"),
    autocast=("student_x", "student_weight", "teacher_x", "teacher_weight"),
    dimensions="student_x: n H, student_weight: V H, teacher_x: n K, teacher_weight: V K, labels: n -> /labels",
)
def fused_linear_jsd(
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
) -> Tensor:
    """`jsd` of log_softmax(x @ weightᵀ / temperature) of a student and its teacher.

    A kernel makes the N × V logits a chunk of rows at a time. Logits are computed in x's dtype, the rest in float32. The
    gradient of student_weight is summed over rows in `accum_dtype` and rounded once. The teacher gets no gradient.

    Args:
        student_x: ``[N, Hs]``; float32, bfloat16 or float16.
        student_weight: ``[V, Hs]``, in student_x's dtype.
        teacher_x: ``[N, Ht]``; float32, bfloat16 or float16; the student may have another dtype.
        teacher_weight: ``[V, Ht]``, in teacher_x's dtype.
        labels, beta, ignore_index: as in `jsd`.
        temperature: the divisor of both logits; greater than 0.
        accum_dtype, memory_budget: as in `fused_linear_cross_entropy`, including the teacher's logits of a chunk.

    Returns:
        float32 scalar: the sum over the rows that count, divided by their number; 0 if no row counts.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `memory_budget` below the least, or
            tensors on different devices.

    Source:
        `jsd`; chunks of rows: Hsu et al., Liger Kernel, arXiv 2410.10989.

    >>> x = torch.ones(1, 2)
    >>> fused_linear_jsd(x, torch.zeros(2, 2), x, torch.tensor([[99.0, 0.0], [0.0, 0.0]]), beta=0.0)
    tensor(0.6931)
    """
    student = upcast(student_x @ student_weight.T) / temperature
    teacher = upcast(teacher_x @ teacher_weight.T) / temperature
    if labels is not None:
        ignored = (labels == ignore_index)[:, None]
        student, teacher = student.masked_fill(ignored, 0.0), teacher.masked_fill(ignored, 0.0)
    logprobs = student.log_softmax(-1), teacher.log_softmax(-1)
    return jsd.reference(*logprobs, labels, beta=beta, ignore_index=ignore_index)


@fused_linear_jsd.checks
def _(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None,
    beta: float,
    ignore_index: int,
    temperature: float,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
) -> None:
    name = "fused_linear_jsd"
    student = {"student_x": student_x, "student_weight": student_weight}
    teacher = {"teacher_x": teacher_x, "teacher_weight": teacher_weight}
    checks.floating(name, **student, **teacher)
    checks.ndim(name, 2, 2, **student, **teacher)
    checks.same_dtype(name, **student)
    checks.same_dtype(name, **teacher)
    vocabulary = student_weight.shape[0]
    if vocabulary == 0:
        raise ValueError(f"{name}: student_weight has shape {tuple(student_weight.shape)}; it takes at least one row")
    rows = student_x.shape[0]
    checks.shape(name, "student_weight", student_weight, (vocabulary, student_x.shape[1]), "student_x's columns")
    checks.shape(name, "teacher_x", teacher_x, (rows, teacher_x.shape[1]), "a row per row of student_x")
    checks.shape(
        name,
        "teacher_weight",
        teacher_weight,
        (vocabulary, teacher_x.shape[1]),
        "rows of student_weight, columns of teacher_x",
    )
    check_labels(name, labels, rows, "a label per row of student_x", "labels")
    checks.label(name, ignore_index=ignore_index)
    check_beta(name, beta)
    checks.number(name, above=0, temperature=temperature)
    check_accum_dtype(name, accum_dtype)
    check_memory_budget(name, memory_budget, student_x, student_weight, accum_dtype, teacher_x)
