"""Cases of jsd."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.cases.cross_entropy import labels
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary

KIND = "loss"


def logprobs(make: Make, rows: int, vocabulary: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Log-probabilities of random logits."""
    logits = make.randn(rows, vocabulary, dtype=torch.promote_types(make.dtype, torch.float32)) * scale
    return logits.log_softmax(-1).to(dtype or make.dtype)


def build(
    make: Make,
    *,
    rows: int,
    vocabulary: int,
    scale: float = 1.0,
    ignored: float | None = None,
    garbage: bool = False,
    absent: float = 0.0,
    absent_student: float = 0.0,
    absent_teacher: float = 0.0,
    nan_teacher: float = 0.0,
    far: float = 0.0,
    ends: bool = False,
    teacher_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`ignored` is the share of ignored rows (None: no labels), which hold NaN with `garbage`.

    `absent` is the probability that both log-probabilities of a class are −inf, `absent_student` and `absent_teacher`
    that one is, `nan_teacher` that the teacher's is NaN; `far` that both are −1e4. With `ends`, only the first and the
    last two rows count.
    """
    student = logprobs(make, rows, vocabulary, scale)
    teacher = logprobs(make, rows, vocabulary, scale, teacher_dtype)
    if far:
        hidden = make.mask(far, rows, vocabulary)
        student, teacher = student.masked_fill(hidden, -1e4), teacher.masked_fill(hidden, -1e4)
    if absent or absent_student or absent_teacher:
        hidden = make.mask(absent, rows, vocabulary)
        student = student.masked_fill(hidden | make.mask(absent_student, rows, vocabulary), -torch.inf)
        teacher = teacher.masked_fill(hidden | make.mask(absent_teacher, rows, vocabulary), -torch.inf)
    if nan_teacher:
        teacher = teacher.masked_fill(make.mask(nan_teacher, rows, vocabulary), torch.nan)
    target = None
    if ignored is not None:
        target = labels(make, rows, vocabulary, ignored, options.get("ignore_index", -100))
    if ends and target is not None:
        target[2:-2] = -100
    if garbage and target is not None:
        student = student.masked_fill((target == -100)[:, None], torch.nan)
        teacher = teacher.masked_fill((target == -100)[:, None], torch.nan)
    return {"student_logprobs": student, "teacher_logprobs": teacher, "labels": target, **options}


VARY = Vary(
    sizes={"rows": Size(most=1 << 20), "vocabulary": Size()},
    tensors=("rows vocabulary",),
    values={
        "teacher_dtype": ANY_DTYPE,
        "ignored": (None, 0.0, Number(0.0, 1.0)),
        "ignore_index": (-100, -1, 3),
        "beta": (0.0, 0.5, 1.0, Number(0.0001, 0.9999)),
    },
)

SHIFTED = {"student_logprobs": "shifted", "teacher_logprobs": "shifted"}

CASES = (
    Case("odd", "odd", rows=5, vocabulary=123, ignored=0.3, beta=0.3),
    Case("plain", "odd", rows=7, vocabulary=65),
    Case("many-rows", "odd", rows=133, vocabulary=17, ignored=0.1),
    Case("long-row", "odd", rows=2, vocabulary=5000, beta=0.1),
    # A thread can store these elements at once, but can't load them at once.
    Case("long-row-shifted", "odd", mode=CallMode(layouts=SHIFTED), rows=2, vocabulary=4096, beta=0.1),
    Case("one-row", "edge", rows=1, vocabulary=40),
    Case("one-class", "odd", rows=64, vocabulary=1, ignored=0.3),
    Case("two-classes", "edge", rows=3, vocabulary=2, beta=0.7),
    Case("all-ignored", "edge", rows=3, vocabulary=33, ignored=1.0),
    Case("ignored-class", "edge", rows=6, vocabulary=33, ignored=0.3, ignore_index=3, beta=1.0),
    Case("garbage-in-ignored-rows", "edge", rows=6, vocabulary=33, ignored=0.5, garbage=True),
    Case("absent", "edge", rows=5, vocabulary=70, absent=0.4),
    Case("absent-forward", "edge", rows=5, vocabulary=70, absent=0.4, beta=0.0),
    Case("absent-reverse", "edge", rows=5, vocabulary=70, absent=0.4, beta=1.0),
    Case("absent-on-one-side", "edge", rows=5, vocabulary=70, absent_student=0.4, absent_teacher=0.4, beta=0.3),
    Case("absent-student-reverse", "edge", rows=5, vocabulary=70, absent_student=0.4, beta=1.0),
    Case("nan-teacher", "edge", rows=5, vocabulary=70, nan_teacher=0.1, beta=0.3),
    # The mixture is nearly one of the two.
    Case("beta-near-0", "edge", rows=200, vocabulary=20, beta=1e-4, scale=10.0),
    Case("beta-near-1", "edge", rows=200, vocabulary=20, beta=0.9999, scale=10.0),
    Case("forward", "option", rows=5, vocabulary=96, ignored=0.2, beta=0.0),
    Case("reverse", "option", rows=5, vocabulary=96, ignored=0.2, beta=1),
    Case("float32-teacher", "option", rows=5, vocabulary=96, teacher_dtype=torch.float32),
    Case("bfloat16-teacher", "option", rows=5, vocabulary=96, teacher_dtype=torch.bfloat16, beta=0.0),
    Case("far", "extreme", rows=4, vocabulary=64, far=0.5),
    Case("far-forward", "extreme", rows=4, vocabulary=64, far=0.5, beta=0.0),
    Case("big-values", "extreme", rows=4, vocabulary=64, scale=3e3),
    Case("tiny-values", "extreme", rows=4, vocabulary=64, scale=1e-2),
    Case("infinite-student", "extreme", rows=4, vocabulary=64, holds={"student_logprobs": torch.inf}),
    Case("infinite-teacher", "extreme", rows=4, vocabulary=64, beta=0.3, holds={"teacher_logprobs": torch.inf}),
    Case("small", "small", rows=1024, vocabulary=32000),
    Case("medium", "medium", rows=2048, vocabulary=128256),
    Case("large", "large", rows=4096, vocabulary=128256),
)

FLOAT16_APART = True  # in float16 the gradient is made in backward, in bfloat16 in forward

HUGE = Case("huge", "large", rows=(1 << 14) + 3, vocabulary=1 << 17, ignored=0.0, ends=True)

MOVES = Moves({"student_logprobs": 1, "teacher_logprobs": 1}, {"student_logprobs": 1})


def eager(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    student, teacher = student_logprobs.float(), teacher_logprobs.float()
    mixture = torch.logaddexp(student, teacher) - math.log(2)
    divergence = (teacher.exp() * (teacher - mixture)).sum(-1) + (student.exp() * (student - mixture)).sum(-1)
    return 0.5 * divergence.mean()


def liger(ops: Any, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Any:
    return ops.LigerJSDFunction.apply(student_logprobs, teacher_logprobs, None, 0.5, -100)
