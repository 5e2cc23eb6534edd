"""Cases of fused_linear_cross_entropy."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Product
from liger_conformance.cases.cross_entropy import ALL
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary
from liger_core.budget import least_chunk, padded_columns
from liger_core.ops.cross_entropy import REDUCTIONS

KIND = "loss"


def build(
    make: Make,
    *,
    rows: int,
    hidden: int,
    vocabulary: int,
    scale: float = 1.0,
    ignored: float = 0.0,
    bias: bool = False,
    class_weight: bool = False,
    decided: bool = False,
    own_accum_dtype: bool = False,
    bias_dtype: torch.dtype | None = None,
    class_weight_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`ignored` is the share of ignored rows. With `own_accum_dtype` the accumulators have x's dtype.

    With `decided`, one logit of each row is far above the others, whatever the rounding: the label's in half of them.
    """
    linear_weight = make.randn(vocabulary, hidden) * hidden**-0.5
    target = make.integers(0, vocabulary, rows)
    if decided:
        x = linear_weight[target.where(make.mask(0.5, rows), make.integers(0, vocabulary, rows))] * 4.0
    else:
        x = make.randn(rows, hidden) * scale
    if own_accum_dtype:
        options["accum_dtype"] = make.dtype
    return {
        "x": x,
        "linear_weight": linear_weight,
        "target": target.masked_fill(make.mask(ignored, rows), options.get("ignore_index", -100)),
        "bias": make.randn(vocabulary, dtype=bias_dtype) * 0.5 if bias else None,
        "class_weight": make.uniform(vocabulary, dtype=class_weight_dtype) + 0.25 if class_weight else None,
        **options,
    }


def budgets(rows: int, hidden: int, vocabulary: int) -> tuple[int | None, ...]:
    """Room for all rows, and, beside an accumulator in float32, for half of them, and for the least and three times as many."""
    one, least = 8 * padded_columns(vocabulary), least_chunk(rows)
    rest = 4 * vocabulary + 32 * rows
    return (
        None,
        rows * one + rest,
        *(4 * vocabulary * hidden + n * one + rest for n in (rows // 2 + 1, 3 * least, least)),
        least * one + rest,
    )


def answers(hidden: int, decided: bool, bias: bool) -> tuple[bool, ...]:
    """Whether a return_* flag may be set: only where no rounding decides which logit is the largest."""
    return (False, True) if decided and hidden >= 256 and not bias else (False,)


def few_chunks(rows: int) -> tuple[bool, ...]:
    """Whether the accumulator may have x's dtype: its error grows with the chunks that are added to it, as users are told."""
    return (False, True) if rows <= 64 else (False,)


VARY = Vary(
    sizes={"rows": Size(most=1 << 16), "hidden": Size(most=1 << 13), "vocabulary": Size()},
    tensors=("rows hidden", "vocabulary hidden", "rows vocabulary"),
    values={
        "bias": (False, True),
        "bias_dtype": ANY_DTYPE,
        "class_weight": (False, True),
        "class_weight_dtype": ANY_DTYPE,
        "decided": (False, True),
        "ignored": (0.0, Number(0.0, 1.0)),
        "ignore_index": (-100, -1, 3),
        "label_smoothing": (0.0, Number(0.0, 1.0)),
        "lse_square_scale": (0.0, Number(1e-5, 1.0)),
        "softcap": (None, Number(1.0, 100.0)),
        "reduction": REDUCTIONS,
        "token_scaling": (False, True),
        "return_z_loss": (False, True),
        "return_token_accuracy": answers,
        "return_predicted_tokens": answers,
        "accum_dtype": lambda: (torch.float32,),
        "own_accum_dtype": few_chunks,
        "memory_budget": budgets,
    },
)

# With this budget, 48 rows of 16 by 96 take several chunks in each dtype.
CHUNKS: dict[str, Any] = {"rows": 48, "hidden": 16, "vocabulary": 96, "memory_budget": 10_000}

# With this one, bfloat16 and float16 have no room for an accumulator in float32.
COLUMNS: dict[str, Any] = CHUNKS | {"memory_budget": 5_000}

# Rows of logits are padded to 464 columns. With the budget, there are several chunks of them in each dtype.
PADDED: dict[str, Any] = {"rows": 48, "hidden": 24, "vocabulary": 459, "memory_budget": 60_500}

# With this one, bfloat16 and float16 have no room for an accumulator. Chunks of columns take 256 and 203.
PADDED_COLUMNS: dict[str, Any] = PADDED | {"memory_budget": 30_000}

CASES = (
    Case(
        "odd", "odd", rows=5, hidden=24, vocabulary=67, ignored=0.2, bias=True, class_weight=True, label_smoothing=0.1
    ),
    Case("plain", "odd", rows=7, hidden=17, vocabulary=45),
    Case("many-rows", "odd", rows=133, hidden=8, vocabulary=33, ignored=0.1),
    Case("long-vocabulary", "odd", rows=2, hidden=16, vocabulary=3001, bias=True, softcap=5.0),
    Case("padded", "option", rows=20, hidden=24, vocabulary=459, bias=True, label_smoothing=0.1, softcap=5.0),
    Case("padded-chunks", "option", **PADDED, bias=True, bias_dtype=torch.float32),
    Case("padded-columns", "option", **PADDED_COLUMNS, bias=True),
    Case("wide", "odd", rows=3, hidden=517, vocabulary=40),
    Case("one-row", "edge", rows=1, hidden=16, vocabulary=40, bias=True),
    Case("one-column", "edge", rows=3, hidden=1, vocabulary=40),
    Case("one-class", "edge", rows=3, hidden=16, vocabulary=1, bias=True),
    Case(
        "all-ignored",
        "edge",
        rows=3,
        hidden=16,
        vocabulary=33,
        ignored=1.0,
        bias=True,
        class_weight=True,
        lse_square_scale=0.1,
        **ALL,
    ),
    Case("ignored-class", "edge", rows=6, hidden=16, vocabulary=33, ignored=0.3, ignore_index=3, class_weight=True),
    Case("softcap", "option", rows=5, hidden=32, vocabulary=97, softcap=2.0, bias=True, ignored=0.2),
    Case("z-loss", "option", rows=5, hidden=32, vocabulary=96, ignored=0.2, lse_square_scale=0.1, return_z_loss=True),
    Case("predicted", "option", rows=9, hidden=64, vocabulary=32, ignored=0.2, decided=True, **ALL),
    Case("sum", "option", rows=5, hidden=32, vocabulary=96, class_weight=True, lse_square_scale=0.1, reduction="sum"),
    Case(
        "none",
        "option",
        rows=6,
        hidden=64,
        vocabulary=33,
        ignored=0.3,
        class_weight=True,
        label_smoothing=0.1,
        lse_square_scale=0.1,
        softcap=7.0,
        decided=True,
        reduction="none",
        **ALL,
    ),
    Case("token-scaling", "option", rows=6, hidden=32, vocabulary=33, ignored=0.3, token_scaling=True),
    Case(
        "token-scaling-weight",
        "option",
        rows=6,
        hidden=32,
        vocabulary=33,
        ignored=0.3,
        class_weight=True,
        lse_square_scale=0.1,
        return_z_loss=True,
        token_scaling=True,
    ),
    Case(
        "token-scaling-none",
        "option",
        rows=6,
        hidden=32,
        vocabulary=33,
        bias=True,
        label_smoothing=0.1,
        softcap=7.0,
        reduction="none",
        token_scaling=True,
    ),
    Case("chunks", "option", **CHUNKS, ignored=0.1, bias=True, class_weight=True, label_smoothing=0.1),
    Case("chunks-none", "option", **CHUNKS, ignored=0.1, bias=True, softcap=7.0, reduction="none"),
    Case("chunks-token-scaling", "option", **CHUNKS, ignored=0.1, lse_square_scale=0.1, token_scaling=True),
    Case("columns", "option", **COLUMNS, ignored=0.1, bias=True, class_weight=True, label_smoothing=0.1),
    Case("columns-none", "option", **COLUMNS, ignored=0.1, bias=True, softcap=7.0, reduction="none"),
    Case("columns-token-scaling", "option", **COLUMNS, lse_square_scale=0.1, token_scaling=True, reduction="sum"),
    Case("own-accum-dtype", "option", rows=6, hidden=32, vocabulary=33, bias=True, own_accum_dtype=True),
    Case(
        "float32-bias",
        "option",
        rows=6,
        hidden=32,
        vocabulary=33,
        bias=True,
        bias_dtype=torch.float32,
        class_weight=True,
        class_weight_dtype=torch.float32,
    ),
    Case(
        "float32-bias-few-rows",
        "option",
        rows=4,
        hidden=64,
        vocabulary=600,
        bias=True,
        bias_dtype=torch.float32,
        reduction="none",
    ),
    Case("float32-bias-chunks", "option", **CHUNKS, ignored=0.9, bias=True, bias_dtype=torch.float32),
    Case("float32-bias-columns", "option", **COLUMNS, ignored=0.9, bias=True, bias_dtype=torch.float32),
    Case(
        "token-scaling-few-rows",
        "option",
        rows=3,
        hidden=4,
        vocabulary=659,
        label_smoothing=0.1,
        softcap=7.0,
        reduction="none",
        token_scaling=True,
    ),
    Case("uneven-rows", "extreme", rows=6, hidden=32, vocabulary=65, reduction="none", by_row=("incoming",)),
    Case("big-values", "extreme", rows=4, hidden=32, vocabulary=65, scale=300.0, bias=True),
    Case("big-values-softcap", "extreme", rows=4, hidden=32, vocabulary=65, scale=300.0, softcap=1.0),
    Case("tiny-values", "extreme", rows=4, hidden=32, vocabulary=65, scale=1e-4),
    Case(
        "infinite-weight",
        "extreme",
        rows=6,
        hidden=16,
        vocabulary=65,
        class_weight=True,
        label_smoothing=0.1,
        holds={"class_weight": torch.inf},
    ),
    Case("small", "small", rows=2048, hidden=2048, vocabulary=32000),
    Case("medium", "medium", rows=8192, hidden=4096, vocabulary=128256),
    # GPT-2's vocabulary, which eight doesn't divide. A token that is added to a model's vocabulary makes it so too.
    Case("gpt2", "medium", rows=8192, hidden=1024, vocabulary=50257),
    Case("large", "large", rows=32768, hidden=4096, vocabulary=128256),
)

OUT_OF_RANGE = (
    Case("label-too-high", "edge", rows=3, hidden=4, vocabulary=8, holds={"target": 8}),
    Case("negative-label", "edge", rows=3, hidden=4, vocabulary=8, holds={"target": -1}),
)

PRODUCTS = (Product("x", "linear_weight", 1, 2),)


def eager(x: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((x @ linear_weight.T).float(), target)


def liger(ops: Any, x: Tensor, linear_weight: Tensor, target: Tensor) -> Any:
    return ops.LigerFusedLinearCrossEntropyFunction.apply(x, linear_weight, target)[0]
