"""Cases of grpo_loss."""

from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary
from liger_core.ops.grpo_loss import LOSS_TYPES
from liger_core.policy import LEVELS, REDUCTIONS

KIND = "loss"


def build(
    make: Make,
    *,
    batch: int,
    length: int,
    vocabulary: int,
    scale: float = 1.0,
    spread: float = 0.4,
    drift: float = 0.0,
    ref_drift: float = 0.0,
    gain: float | None = None,
    off_policy: float = 0.0,
    old: bool = True,
    ref: bool = True,
    logps_dtype: torch.dtype | None = None,
    masked: float | None = None,
    mask_dtype: torch.dtype = torch.bool,
    masked_rows: int = 0,
    garbage: bool = False,
    hidden: float = 0.0,
    importance: tuple[int, ...] | None = None,
    items: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`masked` is the share of masked tokens, None: no mask; in the first `masked_rows` rows all are.

    Old and reference log-probabilities are the policy's plus noise of standard deviation `spread`, the former less
    `drift` and the latter plus `ref_drift`. With `gain` advantages have its sign. `off_policy` is the share of
    importances that are 0. With `garbage`,
    masked tokens have an id out of range, and NaN elsewhere, including an importance per token. `hidden` is the
    probability that a logit other than the token's is −inf. `importance` is the shape of importance_sampling_ratio;
    `items` is num_items_in_batch as a tensor.
    """
    wide = torch.promote_types(make.dtype, torch.float32)
    logits = make.randn(batch, length + 1, vocabulary) * scale
    ids = make.integers(0, vocabulary, batch, length)
    if hidden:
        absent = make.mask(hidden, batch, length + 1, vocabulary)
        absent[:, :-1].scatter_(2, ids[..., None], False)
        absent[:, -1] = False
        logits = logits.masked_fill(absent, -torch.inf)
    tempered = (row.to(wide) / options.get("temperature", 1.0) for row in logits[:, :-1])
    logps = torch.stack(
        [row.log_softmax(-1).gather(-1, i[:, None])[:, 0] for row, i in zip(tempered, ids, strict=True)]
    )

    def near(shift: float) -> Tensor:
        return (logps + spread * make.randn(batch, length, dtype=wide) + shift).to(logps_dtype or wide)

    old_logps, ref_logps = near(-drift) if old else None, near(ref_drift) if ref else None
    mask = None
    if masked is not None:
        mask = ~make.mask(masked, batch, length)
        mask[:masked_rows] = False
        if garbage:
            logits[:, :-1].masked_fill_(~mask[..., None], torch.nan)
            ids = ids.masked_fill(~mask, -100)
            old_logps, ref_logps = (
                None if t is None else t.masked_fill(~mask, torch.nan) for t in (old_logps, ref_logps)
            )
        mask = mask.to(mask_dtype)
    if items is not None:
        options["num_items_in_batch"] = torch.tensor(items, device=make.device)
    ratio = None
    if importance is not None:
        ratio = make.uniform(*importance, dtype=wide) + 0.5
        if off_policy:
            ratio = ratio.masked_fill(make.mask(off_policy, *importance), 0.0)
        if mask is not None and garbage and importance == (batch, length):
            ratio = ratio.masked_fill(mask == 0, torch.nan)
    advantages = make.randn(batch, dtype=wide)
    return {
        "logits": logits,
        "old_logps": old_logps,
        "ref_logps": ref_logps,
        "completion_ids": ids,
        "advantages": advantages if gain is None else advantages.abs() * gain,
        "completion_mask": mask,
        "importance_sampling_ratio": ratio,
        **options,
    }


PLAIN_RATIO = ("cispo", "sapo")
"""Loss types without delta."""

VARY = Vary(
    sizes={"batch": Size(most=64), "length": Size(least=0, most=1 << 14), "vocabulary": Size()},
    tensors=("batch length vocabulary",),
    values={
        "old": (True, False),
        "ref": (True, False),
        "logps_dtype": ANY_DTYPE,
        "masked": (None, 0.0, Number(0.0, 1.0)),
        "mask_dtype": (torch.bool, torch.int64, torch.float32, torch.bfloat16),
        "importance": lambda batch, length: (None, (batch,), (batch, 1), (batch, length)),
        "items": (None, Number(0.5, 1000.0)),
        "temperature": (1.0, Number(0.3, 3.0)),
        "beta": lambda ref: (0.0, 0.04, 0.5) if ref else (0.0,),
        "eps_low": Number(0.0, 0.5),
        "eps_high": Number(0.0, 3.0),
        "log_ratio_clip": (None, None, Number(0.1, 20.0)),
        "delta": lambda loss_type: (None,) if loss_type in PLAIN_RATIO else (None, None, 1.1, 2.5),
        "loss_type": LOSS_TYPES,
        "importance_sampling_level": LEVELS,
        "max_completion_length": (None, 1, 100),
        "num_items_in_batch": lambda items: (None, 7, 0.5) if items is None else (None,),
        "use_bias_correction_kl": (False, True),
        "sapo_temperature_pos": Number(0.3, 3.0),
        "sapo_temperature_neg": Number(0.3, 3.0),
        "reduction": REDUCTIONS,
    },
)

TINY: dict[str, Any] = {"batch": 3, "length": 5, "vocabulary": 37}
"""Three rows, so that advantages of both signs are likely."""

OVERFLOWING: dict[str, Any] = {
    "batch": 2,
    "length": 1,
    "vocabulary": 40,
    "scale": 1000.0,
    "mode": CallMode(layouts={"ref_logps": "expanded"}),
}
"""A divergence overflows, because all tokens have one reference log-probability."""

CASES = (
    Case("odd", "odd", **TINY, masked=0.3, eps_low=0.1, eps_high=0.15),
    Case("plain", "odd", **TINY, old=False, ref=False, beta=0.0),
    Case("many-tokens", "odd", batch=2, length=65, vocabulary=17, masked=0.2, loss_type="dapo", temperature=0.7),
    Case("long-row", "odd", batch=1, length=2, vocabulary=5000, temperature=1.3, logps_dtype=torch.bfloat16),
    Case("one-token", "edge", batch=1, length=1, vocabulary=3),
    Case("no-tokens", "edge", batch=2, length=0, vocabulary=9),
    Case("no-tokens-without-kl", "edge", batch=2, length=0, vocabulary=9, ref=False, beta=0.0),
    Case("all-masked", "edge", **TINY, masked=1.0, loss_type="bnpo"),
    Case("masked-row-sequence", "edge", **TINY, masked=0.3, masked_rows=1, importance_sampling_level="sequence"),
    Case("garbage-under-the-mask", "edge", **TINY, masked=0.4, garbage=True),
    Case(
        "garbage-under-the-mask-sequence",
        "edge",
        **TINY,
        masked=0.4,
        garbage=True,
        importance_sampling_level="sequence",
        use_bias_correction_kl=True,
        importance=(3, 5),
    ),
    Case(
        "garbage-under-the-mask-none",
        "edge",
        **TINY,
        masked=0.4,
        garbage=True,
        importance_sampling_level="sequence",
        importance=(3, 5),
        reduction="none",
    ),
    Case(
        "garbage-under-the-mask-luspo",
        "edge",
        **TINY,
        masked=0.4,
        garbage=True,
        loss_type="luspo",
        importance=(3, 5),
    ),
    Case("masked-vocabulary", "edge", **TINY, hidden=0.5, temperature=0.5),
    Case("bnpo-delta", "option", **TINY, masked=0.3, mask_dtype=torch.int32, loss_type="bnpo", delta=1.1),
    Case(
        "dr_grpo", "option", **TINY, masked=0.3, mask_dtype=torch.float32, loss_type="dr_grpo", max_completion_length=9
    ),
    Case("dapo-items", "option", **TINY, masked=0.3, loss_type="dapo", num_items_in_batch=7, importance=(3,)),
    Case("dapo-items-tensor", "option", **TINY, masked=0.3, loss_type="dapo", items=7.5, ref=False, beta=0.0),
    Case("dapo-few-items", "option", **TINY, loss_type="dapo", num_items_in_batch=0.5, use_bias_correction_kl=True),
    Case("cispo", "option", **TINY, masked=0.3, loss_type="cispo", eps_high=1.2, importance=(3, 5)),
    Case("cispo-items", "option", **TINY, loss_type="cispo", eps_high=5.0, items=3.0, old=False),
    Case("sapo", "option", **TINY, masked=0.3, loss_type="sapo", ref=False, beta=0.0),
    Case(
        "sapo-temperatures",
        "option",
        **TINY,
        loss_type="sapo",
        sapo_temperature_pos=2.0,
        sapo_temperature_neg=0.5,
        use_bias_correction_kl=True,
        importance=(3, 1),
    ),
    Case("luspo", "option", **TINY, masked=0.3, loss_type="luspo", delta=1.3),
    Case(
        "luspo-sequence",
        "option",
        **TINY,
        masked=0.3,
        loss_type="luspo",
        importance_sampling_level="sequence",
        ref=False,
        beta=0.0,
        importance=(3,),
    ),
    Case(
        "luspo-sequence-kl",
        "option",
        **TINY,
        masked=0.3,
        loss_type="luspo",
        importance_sampling_level="sequence",
        importance=(3, 5),
    ),
    Case(
        "sequence",
        "option",
        **TINY,
        masked=0.3,
        importance_sampling_level="sequence",
        eps_low=0.05,
        eps_high=0.05,
        delta=1.02,
        importance=(3, 1),
        use_bias_correction_kl=True,
    ),
    Case(
        "sequence-token",
        "option",
        **TINY,
        masked=0.3,
        importance_sampling_level="sequence_token",
        importance=(3, 5),
        use_bias_correction_kl=True,
    ),
    Case(
        "sequence-token-cispo",
        "option",
        **TINY,
        masked=0.3,
        loss_type="cispo",
        eps_high=1.1,
        importance_sampling_level="sequence_token",
        reduction="none",
    ),
    Case(
        "sequence-cispo",
        "option",
        **TINY,
        masked=0.3,
        masked_rows=1,
        loss_type="cispo",
        eps_high=0.9,
        gain=1.0,
        importance_sampling_level="sequence",
        use_bias_correction_kl=True,
    ),
    Case(
        "sequence-sapo",
        "option",
        **TINY,
        masked=0.3,
        loss_type="sapo",
        importance_sampling_level="sequence",
        importance=(3, 5),
    ),
    Case("sequence-on-policy", "option", **TINY, masked=0.3, old=False, importance_sampling_level="sequence"),
    Case("none", "option", **TINY, masked=0.3, delta=1.1, use_bias_correction_kl=True, reduction="none"),
    Case(
        "none-luspo",
        "option",
        **TINY,
        masked=0.3,
        loss_type="luspo",
        importance_sampling_level="sequence",
        reduction="none",
    ),
    Case("none-cispo", "option", **TINY, masked=0.3, loss_type="cispo", beta=0.0, eps_high=0.9, reduction="none"),
    Case("off-policy-mask", "option", **TINY, masked=0.3, off_policy=0.5, importance=(3, 5)),
    Case("log-ratio-clip", "option", **TINY, masked=0.3, spread=2.0, log_ratio_clip=1.5, use_bias_correction_kl=True),
    Case(
        "log-ratio-clip-sequence",
        "option",
        **TINY,
        masked=0.3,
        spread=1.0,
        log_ratio_clip=0.3,
        eps_low=0.5,
        eps_high=0.5,
        importance_sampling_level="sequence",
    ),
    Case("uneven-rows", "extreme", batch=4, length=5, vocabulary=33, reduction="none", by_row=("incoming",)),
    Case("big-values", "extreme", **TINY, scale=1e3, masked=0.3),
    Case("random-61-11", "extreme", **OVERFLOWING),
    # An exponential of the row whose divergence overflows is below 2^-126, and not 0.
    Case("overflow-26", "extreme", **OVERFLOWING),
    Case("infinite-advantage", "extreme", **TINY, loss_type="bnpo", holds={"advantages": torch.inf}),
    Case("infinite-ratio-cispo", "extreme", **TINY, loss_type="cispo", holds={"old_logps": -torch.inf}),
    Case("overflow-clipped", "extreme", **TINY, masked=0.3, drift=200.0, gain=1.0),
    Case("overflow-sequence", "extreme", **TINY, drift=200.0, gain=1.0, importance_sampling_level="sequence"),
    Case("overflow-delta", "extreme", **TINY, drift=200.0, delta=2.0, gain=-1.0),
    Case("overflow-sapo", "extreme", **TINY, drift=200.0, loss_type="sapo"),
    Case("overflow-no-advantage", "extreme", **TINY, drift=200.0, gain=0.0),
    Case("overflow-no-importance", "extreme", **TINY, drift=200.0, gain=-9.0, off_policy=1.0, importance=(3,)),
    Case("overflow-log-ratio-clip", "extreme", **TINY, drift=200.0, ref_drift=200.0, log_ratio_clip=20.0, gain=-1.0),
    Case("infinite-advantage-clipped", "extreme", **TINY, delta=0.5, eps_low=1e-3, holds={"advantages": torch.inf}),
    Case(
        "infinite-importance-clipped",
        "extreme",
        **TINY,
        delta=0.5,
        eps_low=1e-3,
        importance=(3, 5),
        holds={"importance_sampling_ratio": torch.inf},
    ),
    Case("small", "small", batch=4, length=512, vocabulary=32000, masked=0.1),
    Case("medium", "medium", batch=8, length=1024, vocabulary=128256, masked=0.1),
    Case("large", "large", batch=8, length=2048, vocabulary=151936, masked=0.1),
)

HUGE = Case("huge", "large", batch=17, length=1024, vocabulary=1 << 17, masked=0.1, reduction="none")

OUT_OF_RANGE = (
    Case("id-too-high", "edge", batch=2, length=3, vocabulary=8, holds={"completion_ids": 8}),
    Case("negative-id", "edge", batch=2, length=3, vocabulary=8, holds={"completion_ids": -100}),
)

MOVES = Moves({"logits": 1}, {"logits": 2})


def eager(
    logits: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
) -> Tensor:
    logps = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, completion_ids[..., None])[..., 0]
    ratio = (logps - old_logps).exp()
    loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    loss = loss + 0.04 * ((ref_logps - logps).exp() - (ref_logps - logps) - 1)
    return ((loss * completion_mask).sum(-1) / completion_mask.sum(-1)).mean()


def liger(
    ops: Any,
    logits: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
) -> Any:
    return ops.GrpoLossFunction.apply(
        logits, old_logps, ref_logps, completion_ids, advantages, completion_mask, 1.0, 0.04, 0.2, 0.2, False
    )[0]
