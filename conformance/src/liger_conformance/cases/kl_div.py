"""Cases of kl_div."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
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
    absent: float = 0.0,
    absent_target: float = 0.0,
    far: float = 0.0,
    target_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`absent` is the probability that a class has probability 0 on both sides, `absent_target` in target only.

    `far` is the probability that both log-probabilities are −1e4.
    """
    wide = torch.promote_types(make.dtype, torch.float32)
    log_pred, target = logprobs(make, rows, vocabulary, scale), logprobs(make, rows, vocabulary, scale, wide)
    if far:
        hidden = make.mask(far, rows, vocabulary)
        log_pred, target = log_pred.masked_fill(hidden, -1e4), target.masked_fill(hidden, -1e4)
    if absent or absent_target:
        hidden = make.mask(absent, rows, vocabulary)
        log_pred = log_pred.masked_fill(hidden, -torch.inf)
        target = target.masked_fill(hidden | make.mask(absent_target, rows, vocabulary), -torch.inf)
    if not options.get("log_target", False):
        target = target.exp()
    return {"log_pred": log_pred, "target": target.to(target_dtype or make.dtype), **options}


VARY = Vary(
    sizes={"rows": Size(most=1 << 20), "vocabulary": Size()},
    tensors=("rows vocabulary",),
    values={
        "target_dtype": ANY_DTYPE,
        "log_target": (False, True),
        "reduction": REDUCTIONS,
        "eps": (0.0, Number(1e-10, 0.1)),
    },
)

CASES = (
    Case("odd", "odd", rows=5, vocabulary=123),
    Case("log-target", "odd", rows=7, vocabulary=65, log_target=True),
    Case("many-rows", "odd", rows=683, vocabulary=3, reduction="mean"),
    Case("long-row", "odd", rows=2, vocabulary=5000, log_target=True, reduction="sum"),
    Case("row-of-65537", "odd", rows=1, vocabulary=65537, log_target=True),
    Case("one-element", "edge", rows=1, vocabulary=1, reduction="none"),
    Case("one-row", "edge", rows=1, vocabulary=40, reduction="mean", log_target=True),
    Case("absent", "edge", rows=5, vocabulary=70, absent=0.4),
    Case("absent-log-target", "edge", rows=5, vocabulary=70, absent=0.4, log_target=True, reduction="none"),
    Case("absent-target", "edge", rows=5, vocabulary=70, absent_target=0.4, reduction="none"),
    Case("absent-log-of-target", "edge", rows=5, vocabulary=70, absent_target=0.4, log_target=True),
    Case("mean-log-target", "option", rows=5, vocabulary=96, reduction="mean", log_target=True),
    Case("sum", "option", rows=5, vocabulary=96, reduction="sum"),
    Case("none", "option", rows=5, vocabulary=97, reduction="none"),
    Case("none-log-target", "option", rows=5, vocabulary=96, reduction="none", log_target=True),
    Case("eps", "option", rows=5, vocabulary=96, eps=0.02),
    Case("eps-zero", "option", rows=5, vocabulary=96, eps=0.0, absent_target=0.3, reduction="sum"),
    Case("float32-target", "option", rows=5, vocabulary=96, target_dtype=torch.float32),
    Case("bfloat16-target", "option", rows=5, vocabulary=96, target_dtype=torch.bfloat16, log_target=True),
    Case("uneven-rows", "extreme", rows=6, vocabulary=64, reduction="none", by_row=("incoming",)),
    Case("far", "extreme", rows=4, vocabulary=64, far=0.5),
    Case("far-log-target", "extreme", rows=4, vocabulary=64, far=0.5, log_target=True, reduction="none"),
    Case("big-values", "extreme", rows=4, vocabulary=64, scale=3e3),
    Case("big-values-log-target", "extreme", rows=4, vocabulary=64, scale=3e3, log_target=True),
    Case("small", "small", rows=1024, vocabulary=32000, log_target=True),
    Case("medium", "medium", rows=2048, vocabulary=128256, log_target=True),
    Case("large", "large", rows=4096, vocabulary=128256, log_target=True),
)

FLOAT16_APART = True  # in float16 the gradient is made in backward, in bfloat16 in forward

HUGE = Case("huge", "large", rows=(1 << 14) + 3, vocabulary=1 << 17, log_target=True, reduction="none")

MOVES = Moves({"log_pred": 1, "target": 1}, {"log_pred": 1})


def eager(log_pred: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
    return F.kl_div(log_pred.float(), target.float(), reduction="batchmean", log_target=log_target)


def liger(ops: Any, log_pred: Tensor, target: Tensor, log_target: bool = False) -> Any:
    return ops.LigerKLDivLossFunction.apply(log_pred, target, "batchmean", log_target, 1e-10)
