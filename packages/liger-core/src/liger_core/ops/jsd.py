"""Generalised Jensen-Shannon divergence."""

import math

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast
from liger_core.ops.cross_entropy import check_labels


@op(
    differentiable=("student_logprobs",),
    dimensions="student_logprobs: n v, teacher_logprobs: n v, labels: n -> /labels",
)
def jsd(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    labels: Tensor | None = None,
    *,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    """Mean over rows of the generalised Jensen-Shannon divergence of a student from its teacher, in float32.

    With teacher P, student Q and M = beta P + (1 − beta) Q, a row's divergence is beta KL(P‖M) + (1 − beta) KL(Q‖M);
    at beta = 0 it is KL(P‖Q), and at beta = 1 it is KL(Q‖P). A term of probability 0 is 0: log-probabilities may be −inf.
    +inf makes everything that it enters infinite or NaN.

    Args:
        student_logprobs: ``[N, V]``; float32, bfloat16 or float16. The only tensor that gets a gradient.
        teacher_logprobs: ``[N, V]``; float32, bfloat16 or float16; the student may have another dtype.
        labels: int64 ``[N]``, or None. A row whose label is `ignore_index` doesn't count, whatever its values are: its
            gradient is 0. Other labels have no effect.
        beta: 0 to 1.
        ignore_index: the label of rows that don't count.

    Returns:
        float32 scalar: the sum over the rows that count, divided by their number; 0 if no row counts.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, `beta` outside 0 to 1, an `ignore_index` of more than 64 bits, or
            tensors on different devices.

    Source:
        Agarwal et al., On-Policy Distillation of Language Models, arXiv 2306.13649.

    >>> jsd(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log(), beta=0.0)
    tensor(0.6931)
    """
    q, p = upcast(student_logprobs), upcast(teacher_logprobs.detach())
    counted = torch.ones(q.shape[0], dtype=torch.bool, device=q.device) if labels is None else labels != ignore_index
    q, p = q.masked_fill(~counted[:, None], 0.0), p.masked_fill(~counted[:, None], 0.0)
    return jsd_of_rows(q, p, beta).masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


def jsd_of_rows(q: Tensor, p: Tensor, beta: float) -> Tensor:
    """The divergence of each row of log-probabilities, the student's and the teacher's, ``[N, V]``."""
    if beta == 0:
        return kl_of_classes(p, q).sum(-1)
    if beta == 1:
        return kl_of_classes(q, p).sum(-1)
    above_q, above_p = above_mixture(q, p, beta)
    return (beta * times_probability(p, above_p) + (1 - beta) * times_probability(q, above_q)).sum(-1)


def above_mixture(q: Tensor, p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """q − m and p − m, where m = log(beta e^p + (1 − beta) e^q) and `beta` is neither 0 nor 1.

    Both are made from the difference of p and q. If `beta` is near 0 or 1, m is nearly p or q, and subtracting it would leave no
    digits.
    """
    # Finite, since the gradient of logaddexp(−inf, −inf) is NaN.
    difference = p.clamp(min=torch.finfo(p.dtype).min) - q.clamp(min=torch.finfo(q.dtype).min)
    log_beta = torch.full_like(difference, math.log(beta))
    log_rest = torch.full_like(difference, math.log1p(-beta))
    return -torch.logaddexp(difference + log_beta, log_rest), -torch.logaddexp(log_beta, log_rest - difference)


def kl_of_classes(p: Tensor, q: Tensor) -> Tensor:
    """Each class's term of KL(exp p ‖ exp q): exp(p)(p − q), or 0 if exp(p) is 0."""
    return times_probability(p, p - q)


def times_probability(logprob: Tensor, value: Tensor) -> Tensor:
    """exp(logprob) · value, or 0 if exp(logprob) is 0."""
    absent = logprob.exp() == 0
    logprob, value = logprob.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)
    return (logprob.exp() * value).masked_fill(absent, 0.0)


@jsd.checks
def _(
    student_logprobs: Tensor, teacher_logprobs: Tensor, labels: Tensor | None, beta: float, ignore_index: int
) -> None:
    checks.floating("jsd", student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    checks.ndim("jsd", 2, 2, student_logprobs=student_logprobs)
    checks.shape("jsd", "teacher_logprobs", teacher_logprobs, student_logprobs.shape, "student_logprobs's shape")
    check_labels("jsd", labels, student_logprobs.shape[0], "a label per row of student_logprobs", "labels")
    checks.label("jsd", ignore_index=ignore_index)
    check_beta("jsd", beta)


def check_beta(op: str, beta: float) -> None:
    """`beta` is a number from 0 to 1."""
    checks.number(op, least=0, beta=beta)
    if beta > 1:
        raise ValueError(f"{op}: beta is {beta!r}; it takes a number from 0 to 1")
