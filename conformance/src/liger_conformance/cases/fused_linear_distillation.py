"""Cases of fused_linear_distillation."""

from typing import Any

import torch

from liger_conformance.case import BadCall, Case, Make
from liger_conformance.cases.cross_entropy import labels
from liger_conformance.cases.distillation import CAPPED, MIXED, OPTIONS, bad_options, items
from liger_conformance.cases.fused_linear_cross_entropy import few_chunks
from liger_conformance.cases.fused_linear_jsd import PADDED, budgets
from liger_conformance.vary import ANY_DTYPE, Size, Vary


def build(
    make: Make,
    *,
    rows: int,
    hidden: int,
    vocabulary: int,
    teacher_hidden: int | None = None,
    scale: float = 1.0,
    ignored: float | None = None,
    student_bias: bool = False,
    student_bias_dtype: torch.dtype | None = None,
    teacher_bias: bool = False,
    own_accum_dtype: bool = False,
    teacher_dtype: torch.dtype | None = None,
    num_items: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`ignored` is the share of ignored rows; None: no labels. With `own_accum_dtype` the accumulator has the student's dtype."""
    teacher_hidden = teacher_hidden or 2 * hidden
    if own_accum_dtype:
        options["accum_dtype"] = make.dtype
    target = None
    if ignored is not None:
        target = labels(make, rows, vocabulary, ignored, options.get("ignore_index", -100))
    return {
        "student_x": make.randn(rows, hidden) * scale,
        "student_weight": make.randn(vocabulary, hidden) * hidden**-0.5,
        "teacher_x": make.randn(rows, teacher_hidden, dtype=teacher_dtype) * scale,
        "teacher_weight": make.randn(vocabulary, teacher_hidden, dtype=teacher_dtype) * teacher_hidden**-0.5,
        "labels": target,
        "student_bias": make.randn(vocabulary, dtype=student_bias_dtype) * 0.5 if student_bias else None,
        "teacher_bias": make.randn(vocabulary, dtype=teacher_dtype) * 0.5 if teacher_bias else None,
        "num_items_in_batch": items(make, num_items),
        **options,
    }


VARY = Vary(
    sizes={
        "rows": Size(most=1 << 16),
        "hidden": Size(most=1 << 13),
        "teacher_hidden": Size(most=1 << 13),
        "vocabulary": Size(),
    },
    tensors=(
        "rows hidden",
        "rows teacher_hidden",
        "vocabulary hidden",
        "vocabulary teacher_hidden",
        "rows vocabulary",
    ),
    values={
        **OPTIONS,
        "student_bias": (False, True),
        "student_bias_dtype": ANY_DTYPE,
        "teacher_bias": (False, True),
        "num_items_in_batch": lambda: (None,),
        "accum_dtype": lambda: (torch.float32,),
        "own_accum_dtype": few_chunks,
        "memory_budget": budgets,
    },
)

# With this budget, 20 rows of 16 by 96 take several chunks in each dtype.
CHUNKS: dict[str, Any] = {"rows": 20, "hidden": 16, "vocabulary": 96, "memory_budget": 9_000}
BIASES: dict[str, Any] = {"student_bias": True, "teacher_bias": True}

CASES = (
    Case("odd", "odd", rows=5, hidden=24, teacher_hidden=37, vocabulary=67, **CAPPED, **BIASES, num_items="int"),
    Case("plain", "odd", rows=7, hidden=17, vocabulary=45),
    Case("many-rows", "odd", rows=33, hidden=8, vocabulary=33, **MIXED),
    Case("padded", "option", rows=20, hidden=24, vocabulary=459, **MIXED, **BIASES),
    Case("padded-chunks", "option", **PADDED, **BIASES, student_bias_dtype=torch.float32),
    Case("wide", "odd", rows=3, hidden=517, teacher_hidden=130, vocabulary=45),
    Case("one-row", "edge", rows=1, hidden=16, vocabulary=45),
    # On a GPU: a capped logit that is fused with a subtraction differs from itself, and its probability from 1.
    Case("random-21-144", "edge", rows=1, hidden=1, vocabulary=1, teacher_hidden=1, teacher_softcap=7.0),
    Case("all-ignored", "edge", rows=3, hidden=16, vocabulary=33, ignored=1.0, hard_weight=1.0),
    Case("ignored-class", "edge", rows=6, hidden=16, vocabulary=33, ignored=0.3, ignore_index=3, hard_weight=1.0),
    Case("none", "option", rows=5, hidden=32, vocabulary=96, **MIXED, **BIASES, reduction="none", divergence="tvd"),
    Case(
        "float32-bias", "option", rows=5, hidden=32, vocabulary=96, **CAPPED, **BIASES, student_bias_dtype=torch.float32
    ),
    Case("chunks", "option", **CHUNKS, **CAPPED, **BIASES),
    Case("chunks-none", "option", **CHUNKS, **MIXED, reduction="none"),
    Case("chunks-sum", "option", **CHUNKS, reduction="sum"),
    Case("chunks-float32-bias", "option", **CHUNKS, **CAPPED, **BIASES, student_bias_dtype=torch.float32),
    Case("own-accum-dtype", "option", rows=6, hidden=32, vocabulary=45, own_accum_dtype=True),
    Case("float32-teacher", "option", rows=6, hidden=32, vocabulary=45, teacher_dtype=torch.float32),
    Case("big-values", "extreme", rows=4, hidden=32, vocabulary=65, scale=8.0, **MIXED),
    Case(
        "uneven-rows",
        "extreme",
        rows=6,
        hidden=16,
        vocabulary=65,
        ignored=0.0,
        hard_weight=0.5,
        reduction="none",
        by_row=("incoming",),
    ),
    Case("small", "small", rows=1024, hidden=1024, teacher_hidden=2048, vocabulary=32000, ignored=0.0, hard_weight=0.5),
    Case(
        "medium", "medium", rows=4096, hidden=2048, teacher_hidden=4096, vocabulary=128256, ignored=0.0, hard_weight=0.5
    ),
    Case(
        "large", "large", rows=8192, hidden=2048, teacher_hidden=4096, vocabulary=128256, ignored=0.0, hard_weight=0.5
    ),
)


def _good(make: Make, **changed: Any) -> dict[str, Any]:
    return {
        "student_x": make.randn(3, 4),
        "student_weight": make.randn(8, 4),
        "teacher_x": make.randn(3, 5),
        "teacher_weight": make.randn(8, 5),
        "labels": make.integers(0, 8, 3),
        **changed,
    }


def _chunks(make: Make, memory_budget: object) -> dict[str, Any]:
    return {**_good(make), "student_weight": make.randn(8, 4).requires_grad_(), "memory_budget": memory_budget}


BAD = (
    *bad_options(_good),
    *(
        BadCall(
            f"integer-{name.replace('_', '-')}",
            TypeError,
            (name, "int64"),
            lambda make, name=name: _good(make, **{name: _good(make)[name].long()}),
        )
        for name in ("student_x", "student_weight", "teacher_x", "teacher_weight")
    ),
    BadCall(
        "student-weight-of-another-dtype",
        TypeError,
        ("student_weight", "float16", "student_x", "float32"),
        lambda make: _good(make, student_weight=make.randn(8, 4, dtype=torch.float16)),
    ),
    BadCall(
        "vector-teacher-x",
        ValueError,
        ("teacher_x", "1 dimensions"),
        lambda make: _good(make, teacher_x=make.randn(5)),
    ),
    BadCall(
        "narrow-student-weight",
        ValueError,
        ("student_weight", "(8, 3)", "(8, 4)"),
        lambda make: _good(make, student_weight=make.randn(8, 3)),
    ),
    BadCall(
        "no-classes",
        ValueError,
        ("student_weight", "(0, 4)"),
        lambda make: _good(make, student_weight=make.randn(0, 4)),
    ),
    BadCall(
        "teacher-of-a-longer-vocabulary",
        ValueError,
        ("teacher_weight", "(9, 5)", "(8, 5)", "teacher_weight[:V]"),
        lambda make: _good(make, teacher_weight=make.randn(9, 5)),
    ),
    BadCall(
        "short-teacher-x",
        ValueError,
        ("teacher_x", "(2, 5)", "(3, 5)"),
        lambda make: _good(make, teacher_x=make.randn(2, 5)),
    ),
    BadCall(
        "short-student-bias",
        ValueError,
        ("student_bias", "(7,)", "(8,)"),
        lambda make: _good(make, student_bias=make.randn(7)),
    ),
    BadCall(
        "integer-teacher-bias",
        TypeError,
        ("teacher_bias", "int64"),
        lambda make: _good(make, teacher_bias=make.integers(0, 8, 8)),
    ),
    BadCall(
        "label-too-large",
        IndexError,
        ("labels", "8", "0 to 7"),
        lambda make: _good(make, labels=make.integers(8, 9, 3), hard_weight=1.0),
    ),
    BadCall("accum-dtype-a-string", TypeError, ("accum_dtype", "'fp32'"), lambda make: _good(make, accum_dtype="fp32")),
    BadCall("budget-not-an-int", TypeError, ("memory_budget", "1000000.0"), lambda make: _chunks(make, 1e6)),
    # One row at a time: 3 · 8 · 4 bytes of logits, 4 · 8 and 32 · 3 as in fused_linear_cross_entropy.
    BadCall("budget-too-small", ValueError, ("memory_budget", "223", "at least 224"), lambda make: _chunks(make, 223)),
)
