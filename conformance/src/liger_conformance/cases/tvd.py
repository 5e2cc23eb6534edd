"""Cases of tvd."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import Case, Make, Moves
from liger_conformance.cases.cross_entropy import labels
from liger_conformance.cases.jsd import logprobs
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary
from liger_core.ops.kl_div import REDUCTIONS

KIND = "loss"


def build(
    make: Make,
    *,
    rows: int,
    vocabulary: int,
    scale: float = 1.0,
    ignored: float | None = None,
    garbage: bool = False,
    ties: float = 0.0,
    q_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`ignored` is the share of ignored rows (None: no labels), which hold NaN with `garbage`.

    `ties` is the probability that q is p.
    """
    wide = torch.promote_types(make.dtype, torch.float32)
    p = logprobs(make, rows, vocabulary, scale, wide).exp().to(make.dtype)
    q = logprobs(make, rows, vocabulary, scale, wide).exp().to(q_dtype or make.dtype)
    q = q.where(~make.mask(ties, rows, vocabulary), p.to(q.dtype)) if ties else q
    target = None
    if ignored is not None:
        target = labels(make, rows, vocabulary, ignored, options.get("ignore_index", -100))
        if garbage:
            p, q = (t.masked_fill((target == -100)[:, None], torch.nan) for t in (p, q))
    return {"p": p, "q": q, "labels": target, **options}


VARY = Vary(
    sizes={"rows": Size(most=1 << 20), "vocabulary": Size()},
    tensors=("rows vocabulary",),
    values={
        "q_dtype": ANY_DTYPE,
        "ignored": (None, 0.0, Number(0.0, 1.0)),
        "ignore_index": (-100, -1, 3),
        "ties": (0.0, 0.3),
        "reduction": REDUCTIONS,
    },
)

CASES = (
    Case("odd", "odd", rows=5, vocabulary=123, ignored=0.3),
    Case("plain", "odd", rows=7, vocabulary=65),
    Case("many-rows", "odd", rows=1025, vocabulary=3, ignored=0.1, reduction="mean"),
    Case("long-row", "odd", rows=2, vocabulary=5000, reduction="sum"),
    Case("rows-of-248", "option", rows=3, vocabulary=248, ignored=0.3),
    Case("rows-of-1024", "option", rows=21, vocabulary=1024),
    Case("one-element", "edge", rows=1, vocabulary=1, reduction="none"),
    Case("one-class", "odd", rows=64, vocabulary=1, ignored=0.3),
    Case("one-row", "edge", rows=1, vocabulary=40),
    Case("all-ignored", "edge", rows=3, vocabulary=33, ignored=1.0),
    Case("all-ignored-mean", "edge", rows=3, vocabulary=33, ignored=1.0, reduction="mean"),
    Case("ignored-class", "edge", rows=6, vocabulary=33, ignored=0.3, ignore_index=3),
    Case("garbage-in-ignored-rows", "edge", rows=6, vocabulary=33, ignored=0.5, garbage=True),
    Case("ties", "edge", rows=5, vocabulary=70, ties=0.4),
    Case("equal", "edge", rows=5, vocabulary=70, ties=1.0, reduction="none"),
    Case("mean", "option", rows=5, vocabulary=96, reduction="mean"),
    Case("sum-ignored", "option", rows=5, vocabulary=96, ignored=0.3, reduction="sum"),
    Case("none", "option", rows=5, vocabulary=97, reduction="none"),
    Case("none-ignored", "option", rows=5, vocabulary=96, ignored=0.3, reduction="none", garbage=True),
    Case("float32-q", "option", rows=5, vocabulary=96, q_dtype=torch.float32, ties=0.3),
    Case("bfloat16-q", "option", rows=5, vocabulary=96, q_dtype=torch.bfloat16),
    Case("rows-of-1024-float32-q", "option", rows=21, vocabulary=1024, q_dtype=torch.float32, reduction="none"),
    Case("uneven-rows", "extreme", rows=6, vocabulary=64, reduction="none", by_row=("incoming",)),
    Case("big-values", "extreme", rows=4, vocabulary=64, scale=1e4),
    Case("small", "small", rows=1024, vocabulary=32000),
    Case("medium", "medium", rows=2048, vocabulary=128256),
    Case("large", "large", rows=4096, vocabulary=128256),
)

HUGE = Case("huge", "large", rows=(1 << 14) + 3, vocabulary=1 << 17, reduction="none")

MOVES = Moves({"p": 1, "q": 1}, {"p": 1})


def eager(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p.float() - q.float()).abs().sum() / p.shape[0]


def liger(ops: Any, p: Tensor, q: Tensor) -> Any:
    return ops.LigerTVDLossFunction.apply(p, q)
