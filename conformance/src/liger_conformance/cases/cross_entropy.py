"""Cases of cross_entropy."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary
from liger_core.ops.cross_entropy import REDUCTIONS

KIND = "loss"

ALL: dict[str, Any] = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def labels(make: Make, rows: int, vocabulary: int, ignored: float = 0.0, ignore_index: int = -100) -> Tensor:
    """Labels of which a share `ignored` is `ignore_index`."""
    return make.integers(0, vocabulary, rows).masked_fill(make.mask(ignored, rows), ignore_index)


def build(
    make: Make,
    *,
    rows: int,
    vocabulary: int,
    scale: float = 1.0,
    ignored: float = 0.0,
    garbage: bool = False,
    masked: float = 0.0,
    calm: bool = False,
    weight: bool = False,
    weight_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`ignored` is the share of ignored rows, which hold NaN with `garbage`.

    `masked` is the probability that a logit other than the label's is −inf. With `calm`, the logits of the first class
    are of size 1 whatever the scale. Where the accuracy is asked for, half of the labels have a large logit.
    """
    ignore_index = options.get("ignore_index", -100)
    logits = make.randn(rows, vocabulary) * scale
    if calm:
        logits[:, 0] /= scale
    target = labels(make, rows, vocabulary, ignored, ignore_index)
    if options.get("return_token_accuracy"):
        large = make.mask(0.5, rows).to(logits.dtype) * 6 * scale
        at = target.clamp(0, vocabulary - 1)[:, None]
        # Not scatter_add_, whose atomics on bfloat16 reach beyond the tensor: compute-sanitizer's memcheck stops there.
        logits.scatter_(1, at, logits.gather(1, at) + large[:, None])
    if masked:
        hidden = make.mask(masked, rows, vocabulary)
        hidden.scatter_(1, target.clamp(0, vocabulary - 1)[:, None], False)
        logits = logits.masked_fill(hidden, -torch.inf)
    if garbage:
        logits = logits.masked_fill((target == ignore_index)[:, None], torch.nan)
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
        "weight": (False, True),
        "weight_dtype": ANY_DTYPE,
        "ignored": (0.0, Number(0.0, 1.0)),
        "ignore_index": (-100, -1, 3),
        "label_smoothing": (0.0, Number(0.0, 1.0)),
        "lse_square_scale": (0.0, Number(1e-5, 1.0)),
        "softcap": (None, Number(1.0, 100.0)),
        "reduction": REDUCTIONS,
        "return_z_loss": (False, True),
        "return_token_accuracy": (False, True),
        "return_predicted_tokens": (False, True),
    },
)

CASES = (
    Case("odd", "odd", rows=5, vocabulary=123, ignored=0.3, weight=True, label_smoothing=0.1, **ALL),
    Case("plain", "odd", rows=7, vocabulary=65),
    Case("many-rows", "odd", rows=133, vocabulary=17, ignored=0.1),
    Case(
        "long-row", "odd", rows=2, vocabulary=5000, weight=True, label_smoothing=0.1, softcap=5.0, lse_square_scale=1e-2
    ),
    Case("row-of-262144", "odd", rows=1, vocabulary=262144),
    Case("one-class", "edge", rows=3, vocabulary=1, **ALL),
    Case("all-ignored", "edge", rows=3, vocabulary=33, ignored=1.0, weight=True, lse_square_scale=0.1, **ALL),
    Case("ignored-class", "edge", rows=6, vocabulary=33, ignored=0.3, ignore_index=3, weight=True),
    Case("garbage-in-ignored-rows", "edge", rows=6, vocabulary=33, ignored=0.5, garbage=True, softcap=9.0),
    Case("masked-vocabulary", "edge", rows=5, vocabulary=70, masked=0.5, lse_square_scale=0.1, weight=True, **ALL),
    Case("masked-vocabulary-softcap", "edge", rows=5, vocabulary=70, masked=0.5, softcap=20.0, label_smoothing=0.1),
    Case("equal-logits", "edge", rows=5, vocabulary=70, scale=0.0, **ALL),
    Case("weight", "option", rows=5, vocabulary=96, ignored=0.2, weight=True),
    Case("weight-float32", "option", rows=5, vocabulary=96, weight=True, weight_dtype=torch.float32, reduction="sum"),
    Case("smoothing", "option", rows=5, vocabulary=96, ignored=0.2, label_smoothing=0.2),
    Case("smoothing-one", "option", rows=5, vocabulary=96, label_smoothing=1.0, reduction="none"),
    Case("z-loss", "option", rows=5, vocabulary=96, ignored=0.2, lse_square_scale=0.1, return_z_loss=True),
    Case("z-loss-zero", "option", rows=5, vocabulary=96, return_z_loss=True),
    Case("accuracy", "option", rows=9, vocabulary=3, ignored=0.2, return_token_accuracy=True, reduction="sum"),
    Case("predicted-softcap", "option", rows=5, vocabulary=96, softcap=4.0, return_predicted_tokens=True),
    Case(
        "sum", "option", rows=5, vocabulary=96, ignored=0.2, weight=True, lse_square_scale=0.1, reduction="sum", **ALL
    ),
    Case(
        "none",
        "option",
        rows=6,
        vocabulary=96,
        ignored=0.3,
        weight=True,
        label_smoothing=0.1,
        lse_square_scale=0.1,
        softcap=7.0,
        reduction="none",
        **ALL,
    ),
    Case(
        "smoothing-softcap-z-loss",
        "option",
        rows=6,
        vocabulary=97,
        ignored=0.3,
        label_smoothing=0.1,
        lse_square_scale=0.1,
        softcap=7.0,
    ),
    Case("uneven-rows", "extreme", rows=6, vocabulary=77, reduction="none", by_row=("incoming",)),
    Case("softcap-one", "extreme", rows=5, vocabulary=77, scale=3.0, softcap=1.0),
    Case("big-values", "extreme", rows=4, vocabulary=64, scale=1e4),
    Case(
        "big-values-softcap",
        "extreme",
        rows=4,
        vocabulary=65,
        scale=5e3,
        calm=True,
        softcap=1.0,
        label_smoothing=0.1,
        **ALL,
    ),
    Case("infinite-weight", "extreme", rows=6, vocabulary=66, weight=True, holds={"weight": torch.inf}),
    Case(
        "infinite-weight-smoothing",
        "extreme",
        rows=6,
        vocabulary=66,
        weight=True,
        label_smoothing=0.1,
        reduction="none",
        holds={"weight": torch.inf},
    ),
    Case("small", "small", rows=2048, vocabulary=32000),
    Case("medium", "medium", rows=4096, vocabulary=128256),
    Case("large", "large", rows=8192, vocabulary=151936),
)

HUGE = Case("huge", "large", rows=(1 << 14) + 3, vocabulary=1 << 17, reduction="none")

OUT_OF_RANGE = (
    Case("label-too-high", "edge", rows=3, vocabulary=8, holds={"target": 8}),
    Case("negative-label", "edge", rows=3, vocabulary=8, holds={"target": -1}),
    Case("far-label", "edge", rows=3, vocabulary=8, holds={"target": 1 << 40}),
)

MOVES = Moves({"logits": 1}, {"logits": 2})


def eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def liger(ops: Any, logits: Tensor, target: Tensor) -> Any:
    return ops.LigerCrossEntropyFunction.apply(logits, target, None)[0]
