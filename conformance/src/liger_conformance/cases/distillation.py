"""Cases of distillation."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.cases import jsd
from liger_conformance.cases.cross_entropy import labels
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary

KIND = "distillation"


def items(make: Make, kind: str | None) -> Any:
    """`num_items_in_batch`: None, a number, or a tensor of one number."""
    return {None: None, "int": 7, "float": 2.5, "tensor": torch.tensor(9, device=make.device)}[kind]


def build(
    make: Make,
    *,
    rows: int,
    vocabulary: int,
    scale: float = 1.0,
    ignored: float | None = None,
    garbage: bool = False,
    zeros: bool = False,
    equal: bool = False,
    forbidden: bool = False,
    teacher_dtype: torch.dtype | None = None,
    num_items: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`ignored` is the share of ignored rows; None: no labels. `garbage`: the ignored ones hold NaN.

    `zeros`: the student's first row and the teacher's last are 0. `equal`: the first row is one for both. `forbidden`: the
    last column, which no label is, is −inf in both.
    """
    student = make.randn(rows, vocabulary) * scale
    teacher = make.randn(rows, vocabulary, dtype=teacher_dtype) * scale
    target = None
    if ignored is not None:
        target = labels(make, rows, vocabulary - forbidden, ignored, options.get("ignore_index", -100))
        if garbage:
            student[target == options.get("ignore_index", -100)] = torch.nan
    if zeros:
        student[0], teacher[-1] = 0.0, 0.0
    if equal:
        teacher[0] = student[0]
    if forbidden:
        student[:, -1], teacher[:, -1] = -torch.inf, -torch.inf
    return {
        "student_logits": student,
        "teacher_logits": teacher,
        "labels": target,
        "num_items_in_batch": items(make, num_items),
        **options,
    }


def hard_weights(ignored: float | None) -> tuple[Any, ...]:
    """Without labels there is no hard loss."""
    return (0.0,) if ignored is None else (0.0, 1.0, Number(0.1, 3.0))


OPTIONS: dict[str, Any] = {
    "ignored": (None, 0.0, Number(0.0, 1.0)),
    "ignore_index": (-100, -1, 3),
    "divergence": ("jsd", "jsd", "tvd", "cosine"),
    "beta": (0.0, 0.5, 1.0, Number(0.0001, 0.9999)),
    "temperature": (1.0, Number(0.3, 10.0)),
    "soft_weight": (1.0, Number(0.1, 3.0)),
    "hard_weight": hard_weights,
    "student_softcap": (None, Number(3.0, 100.0)),
    "teacher_softcap": (None, Number(3.0, 100.0)),
    "num_items": (None, "int", "float", "tensor"),
    "reduction": ("mean", "sum", "none"),
    "teacher_dtype": ANY_DTYPE,
}

VARY = Vary(
    sizes={"rows": Size(most=1 << 16), "vocabulary": Size(least=2)},
    tensors=("rows vocabulary",),
    values={**OPTIONS, "num_items_in_batch": lambda: (None,)},
)

MIXED: dict[str, Any] = {"ignored": 0.2, "hard_weight": 0.5, "soft_weight": 0.7}
CAPPED: dict[str, Any] = {**MIXED, "beta": 0.3, "temperature": 2.0, "student_softcap": 3.0, "teacher_softcap": 7.0}

CASES = (
    Case("odd", "odd", rows=5, vocabulary=67, **CAPPED),
    Case("plain", "odd", rows=7, vocabulary=45),
    Case("long-rows", "odd", rows=2, vocabulary=3001, **MIXED, divergence="tvd", temperature=0.7),
    Case("one-row", "edge", rows=1, vocabulary=40),
    Case("two-classes", "edge", rows=3, vocabulary=2, **MIXED),
    Case("all-ignored", "edge", rows=3, vocabulary=33, ignored=1.0, hard_weight=1.0, garbage=True),
    Case("ignored-class", "edge", rows=6, vocabulary=33, ignored=0.3, ignore_index=3, hard_weight=1.0, garbage=True),
    Case("forbidden-token", "edge", rows=4, vocabulary=33, **MIXED, forbidden=True),
    Case("equal-rows", "edge", rows=4, vocabulary=33, **MIXED, equal=True, divergence="tvd", temperature=0.7),
    Case("zero-rows", "edge", rows=4, vocabulary=33, **MIXED, zeros=True, divergence="cosine", student_softcap=5.0),
    # Probabilities of one class that differ by 4.6e-7 of themselves, and of two classes near a half.
    Case("close-2188", "edge", rows=4, vocabulary=1500, divergence="tvd", temperature=0.7),
    Case("random-21-41", "edge", rows=8, vocabulary=2, scale=0.01, divergence="tvd"),
    # A sum of exponentials whose logarithm is off by half a unit of rounding.
    Case("off-sum-5", "edge", rows=2, vocabulary=1500, divergence="tvd", scale=0.3, reduction="none"),
    Case("beta-near-0", "edge", rows=20, vocabulary=20, beta=1e-4, scale=10.0),
    Case("forward", "option", rows=5, vocabulary=96, ignored=0.2, beta=0.0, temperature=0.7, num_items="tensor"),
    Case("reverse", "option", rows=5, vocabulary=96, beta=1.0, temperature=1.5, reduction="sum"),
    Case("none", "option", rows=5, vocabulary=67, **CAPPED, reduction="none"),
    Case("items", "option", rows=5, vocabulary=33, **MIXED, num_items="float"),
    Case("float32-teacher", "option", rows=6, vocabulary=45, teacher_dtype=torch.float32),
    Case("big-values", "extreme", rows=4, vocabulary=65, scale=8.0, **MIXED),
    Case("tiny-values", "extreme", rows=4, vocabulary=65, scale=1e-2, **MIXED),
    Case(
        "uneven-rows",
        "extreme",
        rows=6,
        vocabulary=65,
        ignored=0.0,
        hard_weight=0.5,
        reduction="none",
        by_row=("incoming",),
    ),
    Case("small", "small", rows=2048, vocabulary=32000, ignored=0.0, hard_weight=0.5),
    Case("medium", "medium", rows=4096, vocabulary=128256, ignored=0.0, hard_weight=0.5),
    Case("large", "large", rows=8192, vocabulary=128256, ignored=0.0, hard_weight=0.5),
)

OUT_OF_RANGE = (
    Case("label-too-large", "edge", rows=3, vocabulary=8, ignored=0.0, hard_weight=1.0, holds={"labels": 8}),
)

MOVES = Moves({"student_logits": 1, "teacher_logits": 1}, {"student_logits": 2, "teacher_logits": 1})


def eager(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, hard_weight: float) -> Tensor:
    student, teacher = torch.log_softmax(student_logits.float(), -1), torch.log_softmax(teacher_logits.float(), -1)
    return jsd.eager(student, teacher) + hard_weight * F.nll_loss(student, labels)


liger = None
