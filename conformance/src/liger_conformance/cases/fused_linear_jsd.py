"""Cases of fused_linear_jsd."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import CallMode, Case, Make, Product
from liger_conformance.cases import jsd
from liger_conformance.cases.cross_entropy import labels
from liger_conformance.cases.fused_linear_cross_entropy import few_chunks
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary
from liger_core.budget import least_chunk, padded_columns

KIND = "loss"


def build(
    make: Make,
    *,
    rows: int,
    hidden: int,
    vocabulary: int,
    teacher_hidden: int | None = None,
    scale: float = 1.0,
    ignored: float | None = None,
    nan_teacher: bool = False,
    own_accum_dtype: bool = False,
    teacher_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`ignored` is the share of ignored rows; None: no labels.

    With `nan_teacher` the teacher's first row has a NaN. With `own_accum_dtype` the accumulator has the student's dtype.
    """
    teacher_hidden = teacher_hidden or 2 * hidden
    if own_accum_dtype:
        options["accum_dtype"] = make.dtype
    target = None
    if ignored is not None:
        target = labels(make, rows, vocabulary, ignored, options.get("ignore_index", -100))
    arguments: dict[str, Any] = {
        "student_x": make.randn(rows, hidden) * scale,
        "student_weight": make.randn(vocabulary, hidden) * hidden**-0.5,
        "teacher_x": make.randn(rows, teacher_hidden, dtype=teacher_dtype) * scale,
        "teacher_weight": make.randn(vocabulary, teacher_hidden, dtype=teacher_dtype) * teacher_hidden**-0.5,
        "labels": target,
        **options,
    }
    if nan_teacher:
        arguments["teacher_x"][0, 0] = torch.nan
    return arguments


def budgets(rows: int, hidden: int, vocabulary: int) -> tuple[int | None, ...]:
    """Room for all rows, and, beside an accumulator in float32, for half of them, and for the least and three times as many."""
    one, least = 12 * padded_columns(vocabulary), least_chunk(rows)
    rest = 4 * vocabulary + 32 * rows
    row_counts = rows // 2 + 1, 3 * least, least
    return None, rows * one + rest, *(4 * vocabulary * hidden + n * one + rest for n in row_counts)


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
        "teacher_dtype": ANY_DTYPE,
        "ignored": (None, 0.0, Number(0.0, 1.0)),
        "ignore_index": (-100, -1, 3),
        "beta": (0.0, 0.5, 1.0, Number(0.0001, 0.9999)),
        "temperature": (1.0, Number(0.3, 10.0)),
        "accum_dtype": lambda: (torch.float32,),
        "own_accum_dtype": few_chunks,
        "memory_budget": budgets,
    },
)

# With this budget, 48 rows of 16 by 96 take several chunks in each dtype.
CHUNKS: dict[str, Any] = {"rows": 48, "hidden": 16, "vocabulary": 96, "memory_budget": 12_000}

# Rows of logits are padded to 464 columns. With the budget, there are several chunks of them in each dtype.
PADDED: dict[str, Any] = {"rows": 20, "hidden": 24, "vocabulary": 459, "memory_budget": 55_000}

CASES = (
    Case("odd", "odd", rows=5, hidden=24, teacher_hidden=37, vocabulary=67, ignored=0.2, beta=0.3, temperature=2.0),
    Case("plain", "odd", rows=7, hidden=17, vocabulary=45),
    Case("many-rows", "odd", rows=133, hidden=8, vocabulary=33, ignored=0.1),
    Case("long-vocabulary", "odd", rows=2, hidden=16, vocabulary=3001, beta=0.1),
    Case("padded", "option", rows=20, hidden=24, vocabulary=459, ignored=0.1),
    Case("padded-chunks", "option", **PADDED, beta=0.0),
    Case("wide", "odd", rows=3, hidden=517, teacher_hidden=130, vocabulary=40),
    Case("one-row", "edge", rows=1, hidden=16, vocabulary=40),
    Case("two-classes", "edge", rows=3, hidden=16, vocabulary=2),
    Case("all-ignored", "edge", rows=3, hidden=16, vocabulary=33, ignored=1.0),
    Case("ignored-class", "edge", rows=6, hidden=16, vocabulary=33, ignored=0.3, ignore_index=3, beta=1.0),
    Case("nan-teacher", "edge", rows=5, hidden=16, vocabulary=33, nan_teacher=True, beta=0.3),
    Case("forward", "option", rows=5, hidden=32, vocabulary=96, ignored=0.2, beta=0.0, temperature=0.7),
    Case("reverse", "option", rows=5, hidden=32, vocabulary=96, beta=1.0, temperature=1.5),
    Case("beta-0.9", "option", rows=5, hidden=32, vocabulary=97, beta=0.9),
    Case("beta-near-0", "edge", rows=20, hidden=32, vocabulary=20, beta=1e-4, scale=10.0),
    # Scaled to logits that neither make a row's largest probability 1 nor leave the divergence to their rounding.
    Case("cold", "option", rows=5, hidden=32, vocabulary=97, temperature=0.1, ignored=0.2, scale=0.2),
    Case("hot", "option", rows=5, hidden=32, vocabulary=97, temperature=10, beta=0, scale=5.0),
    Case("chunks", "option", **CHUNKS, ignored=0.1, temperature=2.0),
    Case("chunks-forward", "option", **CHUNKS, ignored=0.1, beta=0.0),
    Case("chunks-reverse", "option", **CHUNKS, beta=1.0),
    Case("own-accum-dtype", "option", rows=6, hidden=32, vocabulary=33, own_accum_dtype=True),
    Case("float32-teacher", "option", rows=6, hidden=32, vocabulary=33, teacher_dtype=torch.float32),
    Case("bfloat16-teacher", "option", rows=6, hidden=32, vocabulary=33, teacher_dtype=torch.bfloat16, beta=0.0),
    # Under autocast from float16, which holds gradients near 1e-6 with three digits: the kernel's have bfloat16's.
    Case(
        "random-21-105",
        "extreme",
        mode=CallMode(autocast=True),
        rows=1,
        hidden=1,
        vocabulary=129,
        teacher_hidden=1,
        scale=0.01,
    ),
    Case("big-values", "extreme", rows=4, hidden=32, vocabulary=65, scale=8.0),
    Case("tiny-values", "extreme", rows=4, hidden=32, vocabulary=65, scale=1e-2),
    Case("small", "small", rows=1024, hidden=1024, teacher_hidden=2048, vocabulary=32000),
    Case("medium", "medium", rows=4096, hidden=2048, teacher_hidden=4096, vocabulary=128256),
    Case("large", "large", rows=8192, hidden=2048, teacher_hidden=4096, vocabulary=128256),
)

PRODUCTS = (Product("student_x", "student_weight", 1, 2), Product("teacher_x", "teacher_weight", 1, 0))


def eager(student_x: Tensor, student_weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    student = torch.log_softmax((student_x @ student_weight.T).float(), -1)
    return jsd.eager(student, torch.log_softmax((teacher_x @ teacher_weight.T).float(), -1))


def liger(ops: Any, student_x: Tensor, student_weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Any:
    return ops.LigerFusedLinearJSDFunction.apply(student_x, student_weight, teacher_x, teacher_weight)
