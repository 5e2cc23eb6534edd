"""Cases of fused_linear_kl_div."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Product
from liger_conformance.cases.cross_entropy import labels
from liger_conformance.cases.fused_linear_cross_entropy import (
    CHUNKS,
    COLUMNS,
    PADDED,
    PADDED_COLUMNS,
    budgets,
    few_chunks,
)
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary
from liger_core.ops.kl_div import REDUCTIONS

KIND = "loss"


def build(
    make: Make,
    *,
    rows: int,
    hidden: int,
    vocabulary: int,
    scale: float = 1.0,
    mass: float = 1.0,
    absent: float = 0.0,
    ignored: float | None = None,
    garbage: bool = False,
    forbidden: bool = False,
    bias: bool = False,
    bias_dtype: torch.dtype | None = None,
    target_dtype: torch.dtype | None = None,
    own_accum_dtype: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """`mass` is what a row of the target adds up to, `absent` the share of its classes that have probability 0.

    `ignored` is the share of ignored rows, whose targets are NaN with `garbage`; None: no labels. `forbidden`: a bias of −inf
    and a probability of 0 in the last column. With `own_accum_dtype` the accumulators have x's dtype.
    """
    ignore_index = options.get("ignore_index", -100)
    if own_accum_dtype:
        options["accum_dtype"] = make.dtype
    wide = torch.promote_types(make.dtype, torch.float32)
    target = mass * (make.randn(rows, vocabulary, dtype=wide) * scale).softmax(-1)
    if absent:
        target = target.masked_fill(make.mask(absent, rows, vocabulary), 0.0)
    added = make.randn(vocabulary, dtype=bias_dtype) * 0.5 if bias or forbidden else None
    if added is not None and forbidden:
        target[:, -1], added[-1] = 0.0, -torch.inf
    of_rows = None if ignored is None else labels(make, rows, vocabulary, ignored, ignore_index)
    if of_rows is not None and garbage:
        target[of_rows == ignore_index] = torch.nan
    if options.get("log_target", False):
        target = target.log()
    return {
        "x": make.randn(rows, hidden) * scale,
        "linear_weight": make.randn(vocabulary, hidden) * hidden**-0.5,
        "target": target.to(target_dtype or make.dtype),
        "labels": of_rows,
        "bias": added,
        **options,
    }


VARY = Vary(
    sizes={"rows": Size(most=1 << 16), "hidden": Size(most=1 << 13), "vocabulary": Size()},
    tensors=("rows hidden", "vocabulary hidden", "rows vocabulary"),
    values={
        "log_target": (False, True),
        "temperature": (1.0, Number(0.3, 10.0)),
        "softcap": (None, Number(3.0, 100.0)),
        "eps": (0.0, Number(1e-10, 0.1)),
        "mass": (1.0, Number(0.1, 3.0)),
        "absent": (0.0, Number(0.0, 1.0)),
        "forbidden": lambda vocabulary: (False, vocabulary > 1),
        "ignored": (None, 0.0, Number(0.0, 1.0)),
        "ignore_index": (-100, -1, 3),
        "bias": (False, True),
        "bias_dtype": ANY_DTYPE,
        "target_dtype": ANY_DTYPE,
        "reduction": REDUCTIONS,
        "accum_dtype": lambda: (torch.float32,),
        "own_accum_dtype": few_chunks,
        "memory_budget": budgets,
    },
)

CAPPED: dict[str, Any] = {"ignored": 0.2, "bias": True, "softcap": 3.0, "temperature": 2.0, "mass": 0.7}
LOG: dict[str, Any] = {"log_target": True}

CASES = (
    Case("odd", "odd", rows=5, hidden=24, vocabulary=67, **CAPPED),
    Case("plain", "odd", rows=7, hidden=17, vocabulary=45),
    Case("log-target", "odd", rows=7, hidden=17, vocabulary=45, **LOG),
    Case("many-rows", "odd", rows=133, hidden=8, vocabulary=33, ignored=0.1, reduction="mean"),
    Case("long-vocabulary", "odd", rows=2, hidden=16, vocabulary=3001, **LOG, **CAPPED),
    Case("padded", "option", rows=20, hidden=24, vocabulary=459, **CAPPED),
    Case("padded-chunks", "option", **PADDED, **LOG),
    Case("padded-columns", "option", **PADDED_COLUMNS, reduction="mean"),
    Case("wide", "odd", rows=3, hidden=517, vocabulary=40, **LOG),
    Case("one-row", "edge", rows=1, hidden=16, vocabulary=45),
    Case("one-class", "edge", rows=3, hidden=16, vocabulary=1, bias=True),
    Case("all-ignored", "edge", rows=3, hidden=16, vocabulary=33, ignored=1.0, garbage=True, reduction="mean"),
    Case("ignored-class", "edge", rows=6, hidden=16, vocabulary=33, ignored=0.3, ignore_index=3, garbage=True),
    Case("garbage-log-target", "edge", rows=6, hidden=16, vocabulary=33, ignored=0.3, garbage=True, **LOG),
    Case("absent", "edge", rows=5, hidden=16, vocabulary=70, absent=0.4),
    Case("absent-log-target", "edge", rows=5, hidden=16, vocabulary=70, absent=0.4, **LOG, reduction="none"),
    Case("empty-target", "edge", rows=5, hidden=16, vocabulary=33, absent=1.0, eps=0.0),
    Case("forbidden-token", "edge", rows=4, hidden=16, vocabulary=33, forbidden=True),
    Case("forbidden-log-target", "edge", rows=4, hidden=16, vocabulary=33, forbidden=True, **LOG),
    Case("expanded-target", "edge", rows=4, hidden=16, vocabulary=33, mode=CallMode(layouts={"target": "expanded"})),
    Case(
        "transposed-target", "edge", rows=4, hidden=16, vocabulary=33, mode=CallMode(layouts={"target": "transposed"})
    ),
    Case("mean", "option", rows=5, hidden=32, vocabulary=96, ignored=0.2, reduction="mean", **LOG),
    Case("sum", "option", rows=5, hidden=32, vocabulary=96, reduction="sum", temperature=0.7),
    Case("none", "option", rows=5, hidden=32, vocabulary=96, **CAPPED, reduction="none"),
    Case("eps", "option", rows=5, hidden=32, vocabulary=96, eps=0.02),
    Case("eps-zero", "option", rows=5, hidden=32, vocabulary=96, eps=0.0, absent=0.3, mass=2.5),
    Case("softcap", "option", rows=5, hidden=32, vocabulary=97, softcap=2.0),
    Case("float32-bias", "option", rows=5, hidden=32, vocabulary=96, **CAPPED, bias_dtype=torch.float32),
    Case("chunks", "option", **CHUNKS, **CAPPED),
    Case("chunks-log-target", "option", **CHUNKS, **LOG, ignored=0.1, reduction="mean"),
    Case("chunks-none", "option", **CHUNKS, **CAPPED, reduction="none"),
    Case("chunks-float32-bias", "option", **CHUNKS, **CAPPED, bias_dtype=torch.float32),
    Case("columns", "option", **COLUMNS, **CAPPED),
    Case("columns-none", "option", **COLUMNS, **LOG, reduction="none"),
    Case("own-accum-dtype", "option", rows=6, hidden=32, vocabulary=33, own_accum_dtype=True),
    Case("float32-target", "option", rows=6, hidden=32, vocabulary=45, target_dtype=torch.float32),
    Case("bfloat16-target", "option", rows=6, hidden=32, vocabulary=45, target_dtype=torch.bfloat16, **LOG),
    Case("big-values", "extreme", rows=4, hidden=32, vocabulary=65, scale=8.0),
    Case("big-values-log-target", "extreme", rows=4, hidden=32, vocabulary=65, scale=8.0, **LOG),
    Case("tiny-values", "extreme", rows=4, hidden=32, vocabulary=65, scale=1e-2),
    Case("random-31-41", "extreme", rows=4, hidden=1, vocabulary=17, scale=0.01),
    # The sums of the rows are near 1. The error of each is small, but of one sign, and so in the mean.
    Case("near-one-41", "extreme", rows=64, hidden=7, vocabulary=33, scale=0.01),
    Case("near-one-177", "extreme", rows=64, hidden=7, vocabulary=33, scale=0.01),
    Case("uneven-rows", "extreme", rows=6, hidden=16, vocabulary=65, **CAPPED, reduction="none", by_row=("incoming",)),
    Case("uneven-targets", "extreme", rows=6, hidden=16, vocabulary=65, reduction="none", by_row=("target",)),
    Case("small", "small", rows=1024, hidden=1024, vocabulary=32000),
    Case("medium", "medium", rows=4096, hidden=2048, vocabulary=128256),
    Case("large", "large", rows=8192, hidden=2048, vocabulary=128256),
)

PRODUCTS = (Product("x", "linear_weight", 1, 2),)


def eager(x: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(torch.log_softmax((x @ linear_weight.T).float(), -1), target.float(), reduction="batchmean")


def liger(ops: Any, x: Tensor, linear_weight: Tensor, target: Tensor) -> Any:
    return ops.LigerFusedLinearKLDivFunction.apply(x, linear_weight, target)
