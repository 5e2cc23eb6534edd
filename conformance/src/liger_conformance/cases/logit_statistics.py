"""Cases of logit_statistics."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary

KIND = "log-probabilities, entropy"

ALL: dict[str, Any] = {
    "return_entropy": True,
    "return_total": True,
    "return_log_sum_squares": True,
    "return_best": True,
}


def targets(
    make: Make,
    rows: int,
    vocabulary: int,
    *,
    each: int | None = None,
    shared: bool = False,
    first: int = 0,
    ignored: float = 0.0,
    elsewhere: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Global ids of which shares are `ignore_index` and `elsewhere`, no columns of this call.

    ``[rows]``, or `each` per row, that repeat in a row where there are more of them than columns; `shared`: one list
    for all rows, expanded.
    """
    shape = (rows,) if each is None else (rows, each)
    target = make.integers(0, vocabulary, *shape) + first
    if each is not None and each > 1:
        target[:, -1] = target[:, 0]
    side = torch.where(make.mask(0.5, *shape), vocabulary, -vocabulary)
    target = torch.where(make.mask(elsewhere, *shape), target + side, target)
    target = target.masked_fill(make.mask(ignored, *shape), ignore_index)
    return target[:1].expand(shape) if shared else target


def build(
    make: Make,
    *,
    rows: int,
    vocabulary: int,
    scale: float = 1.0,
    each: int | None = None,
    shared: bool = False,
    ignored: float = 0.0,
    elsewhere: float = 0.0,
    garbage: bool = False,
    masked: float = 0.0,
    weight: bool = False,
    weight_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`masked` is the probability that a logit is −inf, which is no row's first; ignored rows hold NaN with `garbage`."""
    ignore_index, first = options.get("ignore_index", -100), options.get("first", 0)
    logits = make.randn(rows, vocabulary) * scale
    target = targets(
        make,
        rows,
        vocabulary,
        each=each,
        shared=shared,
        first=first,
        ignored=ignored,
        elsewhere=elsewhere,
        ignore_index=ignore_index,
    )
    if masked:
        hidden = make.mask(masked, rows, vocabulary)
        hidden[:, 0] = False
        logits = logits.masked_fill(hidden, -torch.inf)
        target = target * 0 + first
    if garbage:
        of_row = (target == ignore_index).view(rows, -1).all(1)
        logits = logits.masked_fill(of_row[:, None], torch.nan)
    return {
        "logits": logits,
        "target": target,
        "weight": make.uniform(vocabulary, dtype=weight_dtype) + 0.25 if weight else None,
        **options,
    }


VARY = Vary(
    sizes={"rows": Size(most=1 << 20), "vocabulary": Size()},
    tensors=("rows vocabulary",),
    values={
        "each": (None, 1, 2, 5),
        "shared": (False, True),
        "ignored": (0.0, Number(0.0, 1.0)),
        "elsewhere": (0.0, Number(0.0, 1.0)),
        "first": (0, 64, 1 << 20),
        "ignore_index": (-100, -1, 3),
        "weight": (False, True),
        "weight_dtype": ANY_DTYPE,
        "softcap": (None, Number(1.0, 100.0)),
        "temperature": (1.0, Number(0.1, 10.0)),
        "return_entropy": (False, True),
        "return_total": (False, True),
        "return_log_sum_squares": (False, True),
        "return_best": (False, True),
    },
)

CASES = (
    Case("odd", "odd", rows=5, vocabulary=123, ignored=0.3, weight=True, **ALL),
    Case("plain", "odd", rows=7, vocabulary=65),
    Case("many-rows", "odd", rows=133, vocabulary=17, ignored=0.1, return_entropy=True),
    Case("long-row", "odd", rows=2, vocabulary=5000, weight=True, softcap=5.0, temperature=0.7, **ALL),
    Case("several", "odd", rows=5, vocabulary=77, each=4, ignored=0.3, return_entropy=True),
    Case("shared-targets", "option", rows=5, vocabulary=77, each=3, shared=True),
    Case("one-of-several", "edge", rows=4, vocabulary=33, each=1),
    Case("one-class", "edge", rows=3, vocabulary=1, **ALL),
    Case("all-ignored", "edge", rows=3, vocabulary=33, ignored=1.0, weight=True, **ALL),
    Case("ignored-class", "edge", rows=6, vocabulary=33, ignored=0.3, ignore_index=3),
    Case("garbage-in-ignored-rows", "edge", rows=6, vocabulary=33, ignored=0.5, garbage=True, softcap=9.0, **ALL),
    Case("equal-logits", "edge", rows=5, vocabulary=70, scale=0.0, **ALL),
    Case("masked-vocabulary", "edge", rows=5, vocabulary=70, masked=0.5, return_entropy=True, return_best=True),
    Case("shard", "option", rows=9, vocabulary=96, first=192, elsewhere=0.6, ignored=0.2, **ALL),
    Case("shard-several", "option", rows=9, vocabulary=96, first=400, each=2, elsewhere=0.5, ignored=0.2, **ALL),
    Case("colliding-shard", "edge", rows=9, vocabulary=200, first=500, elsewhere=0.5, return_best=True),
    Case("entropy", "option", rows=5, vocabulary=96, return_entropy=True),
    Case("total", "option", rows=5, vocabulary=96, return_total=True),
    Case("total-weight-float32", "option", rows=5, vocabulary=96, weight=True, weight_dtype=torch.float32, **ALL),
    Case("log-sum-squares", "option", rows=5, vocabulary=96, return_log_sum_squares=True),
    Case("best-softcap", "option", rows=5, vocabulary=96, softcap=4.0, return_best=True),
    Case("temperature", "option", rows=5, vocabulary=96, temperature=0.5, return_entropy=True),
    Case("softcap-temperature", "option", rows=6, vocabulary=97, softcap=30.0, temperature=0.7, **ALL),
    Case("uneven-rows", "extreme", rows=6, vocabulary=77, return_entropy=True, by_row=("incoming",)),
    Case("softcap-one", "extreme", rows=5, vocabulary=77, scale=3.0, softcap=1.0, return_entropy=True),
    Case("big-values", "extreme", rows=4, vocabulary=64, scale=1e4, **ALL),
    Case("cold", "extreme", rows=4, vocabulary=64, temperature=1e-3, **ALL),
    Case("small", "small", rows=2048, vocabulary=32000, return_entropy=True),
    Case("medium", "medium", rows=4096, vocabulary=128256, return_entropy=True),
    Case("large", "large", rows=8192, vocabulary=151936, return_entropy=True),
)

HUGE = Case("huge", "large", rows=(1 << 14) + 3, vocabulary=1 << 17, return_best=True)

MOVES = Moves({"logits": 1}, {"logits": 2})


def eager(logits: Tensor, target: Tensor, return_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.float()
    lse = z.logsumexp(-1)
    log_p = z - lse[:, None]
    return lse, z.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


liger = None
