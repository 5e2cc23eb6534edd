"""Cases of fused_linear_distillation."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import Case, Make, Product
from liger_conformance.cases import distillation
from liger_conformance.cases.cross_entropy import labels
from liger_conformance.cases.distillation import CAPPED, MIXED, OPTIONS, items
from liger_conformance.cases.fused_linear_cross_entropy import few_chunks
from liger_conformance.cases.fused_linear_jsd import PADDED, budgets
from liger_conformance.vary import ANY_DTYPE, Size, Vary

KIND = "distillation"


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

OUT_OF_RANGE = (
    Case(
        "label-too-large",
        "edge",
        rows=3,
        hidden=4,
        teacher_hidden=5,
        vocabulary=8,
        ignored=0.0,
        hard_weight=1.0,
        holds={"labels": 8},
    ),
)

PRODUCTS = (
    Product("student_x", "student_weight", 1, 2),
    Product("teacher_x", "teacher_weight", 1, 0),
)


def eager(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    hard_weight: float,
) -> Tensor:
    return distillation.eager(student_x @ student_weight.T, teacher_x @ teacher_weight.T, labels, hard_weight)


def liger(
    ops: Any,
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    hard_weight: float,
) -> Any:
    """liger-kernel's chunked loss: plain PyTorch through torch.compile, whatever the language."""
    loss = import_module("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(hard_weight, 1.0)
    return loss(student_x, student_weight, teacher_x, teacher_weight, labels)
