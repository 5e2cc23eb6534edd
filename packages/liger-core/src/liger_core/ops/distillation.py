"""Distillation of a teacher into a student, from the logits of both."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast
from liger_core.ops.cross_entropy import REDUCTIONS, check_labels
from liger_core.ops.jsd import check_beta, jsd_of_rows

DIVERGENCES = ("jsd", "tvd", "cosine")


class DistillationOutput(NamedTuple):
    """The result of a distillation: float32 scalars, or ``[N]`` if `reduction` is ``"none"``. Then all have gradients.

    Otherwise `loss` alone has one. The other two are for logs; `soft_weight` and `hard_weight` weigh them.

    Attributes:
        loss: soft_weight · soft_loss + hard_weight · hard_loss.
        soft_loss: the divergence from the teacher.
        hard_loss: the cross-entropy of the labels; None if `hard_weight` is 0.
    """

    loss: Tensor
    soft_loss: Tensor
    hard_loss: Tensor | None


def with_gradients(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that have a gradient. With a reduction this is `loss` alone, whose gradient forward computes."""
    return ("loss", "soft_loss", "hard_loss") if options["reduction"] == "none" else ("loss",)


@op(
    differentiable=("student_logits",),
    result=DistillationOutput,
    grad_results=with_gradients,
    dimensions="student_logits: n V, teacher_logits: n V, labels: n -> n, n, n",
)
def distillation(
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
) -> DistillationOutput:
    """Weighted sum of a student's divergence from its teacher and the cross-entropy of the labels, in float32.

    s and t are the logits of student and teacher, or softcap · tanh(logits / softcap). With Q = softmax(s / temperature)
    and P = softmax(t / temperature), the soft loss of a row is, by `divergence`,

    - ``"jsd"``: beta KL(P‖M) + (1 − beta) KL(Q‖M), M = beta P + (1 − beta) Q; KL(P‖Q) at beta = 0, KL(Q‖P) at 1;
    - ``"tvd"``: ½ Σ abs(Q − P), with gradient 0 where the two are equal;
    - ``"cosine"``: 1 − s·t / (‖s‖ ‖t‖), of logits: temperature has no effect. 1, with gradient 0, if one is all 0.

    The hard loss of a row is the cross-entropy of its label under softmax(s): there the temperature has no effect. Some
    definitions multiply the soft loss by temperature²: put that factor into `soft_weight`.

    Args:
        student_logits: ``[N, V]``; float32, bfloat16 or float16. The only tensor that gets a gradient.
        teacher_logits: ``[N, V]``; float32, bfloat16 or float16; the student may have another dtype. Slice away the
            padding of a longer vocabulary: P is over the shared tokens.
        labels: int64 ``[N]``, or None: all rows count. A row whose label is `ignore_index` has losses 0 and gradient 0,
            whatever its logits. One that is neither that nor in [0, V) has a NaN hard loss and a NaN gradient.
        divergence: one of ``DIVERGENCES``.
        beta: 0 to 1, for ``"jsd"``.
        temperature: greater than 0.
        soft_weight: at least 0.
        hard_weight: at least 0; if it is 0, the hard loss is not computed.
        student_softcap, teacher_softcap: bounds of the logits' magnitudes, or None.
        ignore_index: the label of rows that don't count.
        reduction: ``"mean"`` divides by the number of rows that count, or by `num_items_in_batch`, and by at least 1.
            ``"sum"`` adds up. ``"none"`` gives a loss per row.
        num_items_in_batch: an int, a float or a 0-d tensor. If gradients are accumulated over a batch, it is this process's
            share of the rows that count in the whole batch.

    Returns:
        `DistillationOutput`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `hard_weight` without labels, or tensors
            on different devices.
        IndexError: a label out of range, on the CPU, if there is a hard loss.

    Source:
        Hinton et al., arXiv 1503.02531; jsd: Agarwal et al., arXiv 2306.13649; tvd: Wen et al., arXiv 2307.15190.

    >>> output = distillation(torch.zeros(1, 2), torch.tensor([[99.0, 0.0]]), torch.tensor([0]), beta=0.0, hard_weight=0.5)
    >>> output.loss, output.hard_loss
    (tensor(1.0397), tensor(0.6931))
    """
    return distillation_of_logits(
        student_logits,
        teacher_logits,
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


def distillation_of_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
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
    num_items_in_batch: int | float | Tensor | None,
) -> DistillationOutput:
    """The reference of `distillation` and `fused_linear_distillation`."""
    rows, vocabulary = student_logits.shape
    ignored = torch.zeros(rows, dtype=torch.bool, device=student_logits.device)
    if labels is not None:
        ignored = labels == ignore_index
    student = _capped(upcast(student_logits).masked_fill(ignored[:, None], 0.0), student_softcap)
    teacher = _capped(upcast(teacher_logits.detach()).masked_fill(ignored[:, None], 0.0), teacher_softcap)
    if divergence == "cosine":
        soft = _cosine(student, teacher.to(student.dtype))
    elif divergence == "tvd":
        q, p = (student / temperature).softmax(-1), (teacher / temperature).softmax(-1)
        soft = 0.5 * (q - p).abs().sum(-1)
    else:
        soft = jsd_of_rows((student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1), beta)
    losses = [soft.masked_fill(ignored, 0.0)]
    if hard_weight and labels is not None:
        in_range = (labels >= 0) & (labels < vocabulary)
        label = labels.clamp(0, vocabulary - 1)[:, None]
        hard = -student.log_softmax(-1).gather(-1, label)[:, 0]
        no_label = torch.ones_like(hard).masked_fill(~(in_range | ignored), torch.nan)
        losses.append((hard * no_label).masked_fill(ignored, 0.0))
    if reduction != "none":
        losses = [loss.sum() for loss in losses]
    if reduction == "mean":
        items = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
        divisor = items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1)
        losses = [loss / divisor for loss in losses]
    soft, hard = losses[0], losses[1] if len(losses) > 1 else None
    loss = soft_weight * soft if hard is None else soft_weight * soft + hard_weight * hard
    if reduction != "none":
        soft, hard = soft.detach(), None if hard is None else hard.detach()
    return DistillationOutput(loss, soft, hard)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """1 − s·t / (‖s‖ ‖t‖) of each row."""
    squares = student.square().sum(-1), teacher.square().sum(-1)
    zero = (squares[0] == 0) | (squares[1] == 0)
    # The gradient of the root of 0 is infinite.
    norms = [square.masked_fill(zero, 1.0).sqrt() for square in squares]
    return 1 - ((student * teacher).sum(-1) / norms[0] / norms[1]).masked_fill(zero, 0.0)


@distillation.checks
def _(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None, **options: Any) -> None:
    name = "distillation"
    checks.floating(name, student_logits=student_logits, teacher_logits=teacher_logits)
    checks.ndim(name, 2, 2, student_logits=student_logits)
    if student_logits.shape[1] == 0:
        raise ValueError(
            f"{name}: student_logits has shape {tuple(student_logits.shape)}; it takes at least one column"
        )
    shape = tuple(student_logits.shape)
    checks.shape(name, "teacher_logits", teacher_logits, shape, "student_logits's shape: slice away other columns")
    check_labels(name, labels, shape[0], "a label per row of student_logits", "labels")
    check_distillation_options(name, labels, **options)


def check_distillation_options(
    op: str,
    labels: Tensor | None,
    divergence: str,
    beta: float,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    student_softcap: float | None,
    teacher_softcap: float | None,
    ignore_index: int,
    reduction: str,
    num_items_in_batch: int | float | Tensor | None,
) -> None:
    """The options of a distillation are of their types and in their ranges."""
    checks.one_of(op, DIVERGENCES, divergence=divergence)
    check_beta(op, beta)
    checks.number(op, above=0, temperature=temperature)
    checks.number(op, least=0, soft_weight=soft_weight, hard_weight=hard_weight)
    if hard_weight and labels is None:
        raise ValueError(f"{op}: hard_weight is {hard_weight!r} without labels; it takes 0")
    for name, softcap in (("student_softcap", student_softcap), ("teacher_softcap", teacher_softcap)):
        if softcap is not None:
            checks.number(op, above=0, **{name: softcap})
    checks.label(op, ignore_index=ignore_index)
    checks.one_of(op, REDUCTIONS, reduction=reduction)
    check_num_items(op, num_items_in_batch)


def check_num_items(op: str, num_items_in_batch: object) -> None:
    """Raise TypeError unless it is a number or a tensor of numbers; ValueError if the tensor has dimensions."""
    if isinstance(num_items_in_batch, Tensor):
        checks.dtypes(op, (*checks.INTEGERS, *checks.FLOATS), num_items_in_batch=num_items_in_batch)
        checks.ndim(op, 0, 0, num_items_in_batch=num_items_in_batch)
    elif num_items_in_batch is not None:
        checks.number(op, num_items_in_batch=num_items_in_batch)


@distillation.checks_values
def _(student_logits: Tensor, labels: Tensor | None, hard_weight: float, ignore_index: int, **others: Any) -> None:
    if labels is not None and hard_weight:
        checks.indices_below("distillation", "labels", labels, student_logits.shape[1], ignore_index)
