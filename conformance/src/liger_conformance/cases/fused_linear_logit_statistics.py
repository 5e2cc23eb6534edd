"""Cases of fused_linear_logit_statistics."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import CallMode, Case, Make, Product
from liger_conformance.cases.fused_linear_cross_entropy import answers, few_chunks
from liger_conformance.cases.logit_statistics import ALL, targets
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary
from liger_core.budget import least_chunk, padded_columns

KIND = "log-probabilities, entropy"


def build(
    make: Make,
    *,
    rows: int,
    hidden: int,
    vocabulary: int,
    scale: float = 1.0,
    each: int | None = None,
    shared: bool = False,
    ignored: float = 0.0,
    elsewhere: float = 0.0,
    bias: bool = False,
    bias_dtype: torch.dtype | None = None,
    forbidden: bool = False,
    class_weight: bool = False,
    class_weight_dtype: torch.dtype | None = None,
    decided: bool = False,
    own_accum_dtype: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """`forbidden`: bias is −inf at the last column, which no target is.

    With `decided`, one logit of each row is far above the others, whatever the rounding. With `own_accum_dtype` the
    accumulators have x's dtype.
    """
    linear_weight = make.randn(vocabulary, hidden) * hidden**-0.5
    first = options.get("first", 0)
    target = targets(
        make,
        rows,
        vocabulary - forbidden,
        each=each,
        shared=shared,
        first=first,
        ignored=ignored,
        elsewhere=elsewhere,
        ignore_index=options.get("ignore_index", -100),
    )
    x = linear_weight[make.integers(0, vocabulary, rows)] * 4.0 if decided else make.randn(rows, hidden) * scale
    if own_accum_dtype:
        options["accum_dtype"] = make.dtype
    bias_tensor = make.randn(vocabulary, dtype=bias_dtype) * 0.5 if bias else None
    if bias_tensor is not None and forbidden:
        bias_tensor[-1] = -torch.inf
    return {
        "x": x,
        "linear_weight": linear_weight,
        "target": target,
        "bias": bias_tensor,
        "class_weight": make.uniform(vocabulary, dtype=class_weight_dtype) + 0.25 if class_weight else None,
        **options,
    }


def budgets(rows: int, hidden: int, vocabulary: int) -> tuple[int | None, ...]:
    """Room for all logits, for all rows beside the least columns and a third, and for the least rows and three times as many."""
    always = 4 * vocabulary + 32 * rows
    columns = [rows * 8 * n + 4 * rows * hidden for n in (least_chunk(vocabulary), vocabulary // 3 + 1)]
    row, least = 8 * padded_columns(vocabulary), least_chunk(rows)
    tiles = [rows * row, *columns, *(n * row + 4 * vocabulary * hidden for n in (least, 3 * least))]
    return None, *(always + tile for tile in tiles)


VARY = Vary(
    sizes={"rows": Size(most=1 << 16), "hidden": Size(most=1 << 13), "vocabulary": Size(least=2)},
    tensors=("rows hidden", "vocabulary hidden", "rows vocabulary"),
    values={
        "each": (None, 1, 2, 5),
        "shared": (False, True),
        "ignored": (0.0, Number(0.0, 1.0)),
        "elsewhere": (0.0, Number(0.0, 1.0)),
        "first": (0, 64, 1 << 20),
        "ignore_index": (-100, -1, 3),
        "bias": (False, True),
        "bias_dtype": ANY_DTYPE,
        "class_weight": (False, True),
        "class_weight_dtype": ANY_DTYPE,
        "softcap": (None, Number(1.0, 100.0)),
        "temperature": (1.0, Number(0.1, 10.0)),
        "return_entropy": (False, True),
        "return_total": (False, True),
        "return_log_sum_squares": (False, True),
        "decided": (False, True),
        "return_best": answers,
        "accum_dtype": lambda: (torch.float32,),
        "own_accum_dtype": few_chunks,
        "memory_budget": budgets,
    },
)

# With this budget, 48 rows of 16 by 96 take several tiles in each dtype.
TILES: dict[str, Any] = {"rows": 48, "hidden": 16, "vocabulary": 96, "memory_budget": 12_000}

CASES = (
    Case(
        "odd",
        "odd",
        rows=5,
        hidden=24,
        vocabulary=67,
        ignored=0.2,
        bias=True,
        class_weight=True,
        decided=True,
        **ALL,
    ),
    Case("plain", "odd", rows=7, hidden=17, vocabulary=45),
    Case("many-rows", "odd", rows=133, hidden=8, vocabulary=33, ignored=0.1, return_entropy=True),
    # So many rows that a kernel may make the logits' products, in less memory than they take.
    Case("hundreds-of-rows", "odd", rows=515, hidden=24, vocabulary=300, ignored=0.1, memory_budget=300_000),
    # All logits fit, or what a kernel leaves instead of them.
    Case("hundreds-of-rows-that-fit", "odd", rows=530, hidden=24, vocabulary=48, ignored=0.1),
    Case(
        "hundreds-of-rows-whose-terms-fit",
        "odd",
        rows=515,
        hidden=24,
        vocabulary=300,
        ignored=0.1,
        memory_budget=400_000,
    ),
    Case(
        "hundreds-of-rows-frozen",
        "odd",
        mode=CallMode(grads=("x",)),
        rows=515,
        hidden=24,
        vocabulary=300,
        ignored=0.1,
        bias=True,
        temperature=0.7,
        memory_budget=300_000,
    ),
    # A vocabulary that 16 divides, as those of models.
    Case(
        "hundreds-of-rows-frozen-aligned",
        "odd",
        mode=CallMode(grads=("x",)),
        rows=515,
        hidden=24,
        vocabulary=320,
        ignored=0.1,
        memory_budget=300_000,
    ),
    Case(
        "hundreds-of-rows-all",
        "odd",
        rows=515,
        hidden=24,
        vocabulary=300,
        each=2,
        ignored=0.5,
        bias=True,
        temperature=0.7,
        memory_budget=300_000,
        **ALL,
    ),
    Case("long-vocabulary", "odd", rows=2, hidden=16, vocabulary=3001, bias=True, softcap=5.0, return_entropy=True),
    # Rows of logits are padded to 464 columns. With the budget, tiles have 256 columns and 203 in bfloat16 and float16.
    Case("padded", "option", rows=48, hidden=16, vocabulary=459, return_entropy=True),
    Case(
        "padded-columns",
        "odd",
        rows=48,
        hidden=16,
        vocabulary=459,
        bias=True,
        return_entropy=True,
        memory_budget=83_000,
    ),
    Case("padded-frozen", "option", mode=CallMode(grads=("x",)), rows=48, hidden=16, vocabulary=459),
    Case("several", "odd", rows=6, hidden=16, vocabulary=40, each=4, ignored=0.3, return_entropy=True),
    Case("shared-targets", "option", rows=6, hidden=16, vocabulary=40, each=3, shared=True),
    Case("one-row", "edge", rows=1, hidden=16, vocabulary=40, bias=True),
    Case("one-column", "edge", rows=3, hidden=1, vocabulary=40),
    Case("one-class", "edge", rows=3, hidden=16, vocabulary=1, bias=True, return_entropy=True, return_total=True),
    Case("all-ignored", "edge", rows=3, hidden=16, vocabulary=33, ignored=1.0, bias=True, **ALL),
    Case("forbidden-token", "edge", rows=4, hidden=16, vocabulary=33, bias=True, forbidden=True, return_entropy=True),
    Case("shard", "option", rows=9, hidden=16, vocabulary=32, first=64, elsewhere=0.6, decided=True, **ALL),
    Case("total", "option", rows=5, hidden=32, vocabulary=96, return_total=True, bias=True),
    Case("float32-bias", "option", rows=5, hidden=32, vocabulary=96, bias=True, bias_dtype=torch.float32),
    Case(
        "float32-class-weight",
        "option",
        rows=5,
        hidden=32,
        vocabulary=96,
        class_weight=True,
        class_weight_dtype=torch.float32,
        return_total=True,
    ),
    Case("softcap-temperature", "option", rows=6, hidden=32, vocabulary=97, softcap=30.0, temperature=0.7),
    Case("temperature", "option", rows=6, hidden=32, vocabulary=97, temperature=0.5, return_entropy=True),
    Case("tiles", "option", **TILES, bias=True, ignored=0.2, return_entropy=True, return_total=True),
    Case("tiles-own-dtype", "option", **TILES, own_accum_dtype=True, softcap=7.0),
    # The gradient of x is the difference of two that nearly cancel, each rounded to x's dtype.
    Case(
        "random-5-0", "edge", rows=1, hidden=1, vocabulary=2, each=2, class_weight=True, decided=True, return_total=True
    ),
    Case("uneven-rows", "extreme", rows=6, hidden=16, vocabulary=64, return_entropy=True, by_row=("incoming",)),
    Case("big-values", "extreme", rows=4, hidden=16, vocabulary=64, scale=1e3, return_entropy=True),
    # Tensor cores add up these products to sums that they cut off; so few logits don't hide it.
    Case("deep-products", "odd", rows=3, hidden=4096, vocabulary=3),
    # Terms of one sign: the cut-off sums lose more, of float16 operands most. So an H100 did.
    Case("random-21-122", "edge", rows=1, hidden=2896, vocabulary=120, decided=True),
    Case("random-21-100", "edge", rows=1, hidden=704, vocabulary=8, decided=True),
    Case("random-91-38", "edge", rows=2, hidden=460, vocabulary=45, decided=True),
    Case("small", "small", rows=2048, hidden=2048, vocabulary=32000),
    Case("medium", "medium", rows=4096, hidden=4096, vocabulary=128256),
    Case("large", "large", rows=8192, hidden=4096, vocabulary=151936),
)

HUGE = Case("huge", "large", rows=(1 << 14) + 3, hidden=64, vocabulary=1 << 17)

PRODUCTS = (Product("x", "linear_weight", 1, 3),)


def eager(x: Tensor, linear_weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = (x @ linear_weight.T).float()
    return logits.logsumexp(-1), logits.gather(-1, target[:, None])[:, 0]


liger = None
