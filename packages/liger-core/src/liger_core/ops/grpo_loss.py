"""Policy-gradient losses of group relative policy optimisation."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks, policy
from liger_core.contract import op
from liger_core.ops.logit_statistics import logprobs_of_statistics, statistics_of_logits

LOSS_TYPES = tuple(name for name in policy.LOSS_TYPES if name != "vespo")
"""vespo's weight of a token depends on the whole row: compose `token_logprobs` and `policy_loss`."""

IGNORED = -1
"""Stands for the id of a masked token: no id that counts may be negative."""


class GRPOOutput(NamedTuple):
    """A policy-gradient loss and what is logged beside it, all float32.

    Attributes:
        loss: a scalar, or ``[B, L]`` when `reduction` is ``"none"``. The only field with a gradient.
        kl: mean over unmasked tokens of the divergence that `beta` multiplies; None when `beta` is 0.
        clip_ratio: share of the unmasked tokens, or of the rows at ``"sequence"`` level, whose ratio ρ is clipped to a
            side that changes the loss: above 1 + eps_high (``"cispo"``: eps_high) with a positive advantage, below
            1 − eps_low (not ``"cispo"``) with a negative one. 0 for ``"sapo"`` and ``"vespo"``.

    When `reduction` is ``"none"``, kl and clip_ratio are ``[B, L]``, with 0 at masked tokens.
    """

    loss: Tensor
    kl: Tensor | None
    clip_ratio: Tensor


@op(
    differentiable=("logits",),
    result=GRPOOutput,
    grad_results=("loss",),
    dimensions="logits: b S V, old_logps: b T, ref_logps: b T, completion_ids: b T, advantages: b, completion_mask: b T, "
    "importance_sampling_ratio: b * -> b T, b T, b T",
)
def grpo_loss(
    logits: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    delta: float | None = None,
    log_ratio_clip: float | None = None,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    num_items_in_batch: int | float | Tensor | None = None,
    use_bias_correction_kl: bool = False,
    importance_sampling_ratio: Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    reduction: str = "mean",
) -> GRPOOutput:
    """Loss of sampled completions under a policy, weighted by their advantages, in float32.

    lp is the log-probability of a token under softmax(logits[:, :-1] / temperature), ρ = exp(lp − old_logps), A the
    row's advantage. A token's loss is, by `loss_type`,

    - ``"grpo"``, ``"bnpo"``, ``"dr_grpo"``, ``"dapo"``, ``"luspo"``:
      −min(min(ρ, delta) A, clip(ρ, 1 − eps_low, 1 + eps_high) A);
    - ``"cispo"``: −min(ρ, eps_high) A lp, with ρ taken as a constant;
    - ``"sapo"``: −4 A σ(τ (ρ − 1)) / τ, with τ = sapo_temperature_pos if A > 0, else sapo_temperature_neg;

    times importance_sampling_ratio, plus beta (exp(ref_logps − lp) − (ref_logps − lp) − 1).

    A masked token has loss and gradient 0, whatever its logits, id and log-probabilities. A token whose id is not in
    [0, V) has loss and gradient NaN.

    ρ overflows if lp − old_logps is above 88. If its token's loss doesn't depend on ρ then, since it is clipped or
    limited by delta, by ``"sapo"``, or since A or the importance is 0, that loss is finite and its gradient 0.
    Otherwise both are infinite or NaN, as they are if exp(ref_logps − lp) overflows, or ρ under
    use_bias_correction_kl. With a log_ratio_clip below 44 nothing overflows.

    Args:
        logits: ``[B, L + 1, V]``; float32, bfloat16 or float16. Position i predicts token i; the last gets gradient 0.
        old_logps: ``[B, L]``, log-probabilities under the policy that sampled; None: lp, taken as a constant.
        ref_logps: ``[B, L]``, log-probabilities under the reference policy. None only if `beta` is 0.
        completion_ids: int64 ``[B, L]``, the tokens.
        advantages: ``[B]``. An infinite one makes a row's loss infinite or NaN, and the gradient of its tokens that
            aren't clipped.
        completion_mask: ``[B, L]``, bool, int or float: 1, and 0 at masked tokens; None masks nothing.
        temperature: the divisor of logits; greater than 0.
        beta: weight of the divergence from the reference policy; at least 0.
        eps_low, eps_high: how far ρ may go below and above 1; in ``"cispo"`` eps_high is the largest ρ. At least 0.
        delta: the largest ρ, or None. Not with ``"cispo"`` and ``"sapo"``.
        log_ratio_clip: bound of the magnitudes of lp − old_logps (or its mean over the row) and of ref_logps − lp before
            exp; greater than 0, or None. Beyond it their gradient is 0.
        loss_type: one of ``LOSS_TYPES``.
        importance_sampling_level: ``"token"``; ``"sequence"``: ρ is exp of the mean of lp − old_logps over the row's
            unmasked tokens; or ``"sequence_token"``: a token's ρ is that, taken as a constant, times exp(lp − lp'), where
            lp' is lp taken as a constant.
        max_completion_length: L in the mean of ``"dr_grpo"``, or None.
        num_items_in_batch: divisor in the mean of ``"dapo"`` and ``"cispo"``: a number, or a 0-d int or float
            tensor, greater than 0; below 1 it is 1. None is the number of unmasked tokens.
        use_bias_correction_kl: multiply the divergence by ρ, not limited by delta.
        importance_sampling_ratio: ``[B]``, ``[B, 1]`` or ``[B, L]``, or None.
        sapo_temperature_pos, sapo_temperature_neg: greater than 0.
        reduction: ``"none"`` gives ``[B, L]``. ``"mean"`` gives, by `loss_type` and with divisors of at least 1,
            ``"grpo"``, ``"sapo"``: the mean over rows of the row's mean over unmasked tokens; ``"bnpo"``: the mean over
            unmasked tokens; ``"dr_grpo"``: the sum divided by B · (max_completion_length or L); ``"dapo"``, ``"cispo"``:
            the sum divided by num_items_in_batch; ``"luspo"``: the sum divided by B.

    Returns:
        `GRPOOutput`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together; no `ref_logps` beside a `beta` that is not 0; `delta` with a
            loss_type that has none; an option out of its range; tensors on different devices; on the CPU, a mask of
            other values.
        IndexError: the id of a token that counts is out of range, on the CPU.

    Source:
        GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO (sequence levels) 2507.18071, CISPO 2506.13585,
        SAPO 2511.20347, LUSPO (Length-Unbiased Sequence Policy Optimization); names and means as in TRL's GRPOTrainer.

    >>> logits, ids = torch.zeros(1, 3, 4), torch.tensor([[1, 2]])
    >>> grpo_loss(logits, None, None, ids, torch.ones(1), beta=0.0)
    GRPOOutput(loss=tensor(-1.), kl=None, clip_ratio=tensor(0.))
    """
    vocabulary = logits.shape[-1]
    ids = ids_that_count(completion_ids, completion_mask, vocabulary).flatten()
    rows = logits[:, :-1].reshape(-1, vocabulary)
    statistics = statistics_of_logits(rows, ids, ignore_index=IGNORED, temperature=temperature)
    logprobs = logprobs_of_statistics(statistics, ids, vocabulary, IGNORED).view(completion_ids.shape)
    options = policy.PolicyOptions(
        beta=beta,
        eps_low=eps_low,
        eps_high=eps_high,
        delta=delta,
        log_ratio_clip=log_ratio_clip,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        max_completion_length=max_completion_length,
        use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        reduction=reduction,
    )
    inputs = old_logps, ref_logps, advantages, completion_mask, importance_sampling_ratio, num_items_in_batch
    return GRPOOutput(*policy.loss_of_logprobs(logprobs, *inputs, options))


def ids_that_count(completion_ids: Tensor, completion_mask: Tensor | None, vocabulary: int) -> Tensor:
    """`completion_ids`, with IGNORED for masked tokens."""
    # A negative id is out of range, and stays so: IGNORED, which is negative too, must not hide it.
    ids = completion_ids.masked_fill(completion_ids < 0, vocabulary)
    return ids if completion_mask is None else ids.masked_fill(completion_mask == 0, IGNORED)


@grpo_loss.checks
def _(
    logits: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None,
    temperature: float,
    importance_sampling_ratio: Tensor | None,
    num_items_in_batch: int | float | Tensor | None,
    **options: Any,
) -> None:
    name = "grpo_loss"
    floats = {"logits": logits, "old_logps": old_logps, "ref_logps": ref_logps, "advantages": advantages}
    checks.floating(name, **floats, importance_sampling_ratio=importance_sampling_ratio)
    checks.dtypes(name, (torch.int64,), completion_ids=completion_ids)
    checks.dtypes(name, policy.MASK_DTYPES, completion_mask=completion_mask)
    checks.ndim(name, 3, 3, logits=logits)
    rows, positions, vocabulary = logits.shape
    if positions == 0 or vocabulary == 0:
        raise ValueError(
            f"{name}: logits has shape {tuple(logits.shape)}; it takes at least one position and one column"
        )
    tokens = (rows, positions - 1)
    for which, tensor in (
        ("completion_ids", completion_ids),
        ("old_logps", old_logps),
        ("ref_logps", ref_logps),
        ("completion_mask", completion_mask),
    ):
        checks.shape(name, which, tensor, tokens, "the shape of logits[:, :-1]")
    checks.shape(name, "advantages", advantages, (rows,), "an advantage per row of logits")
    checks.number(name, above=0, temperature=temperature)
    inputs = ref_logps, importance_sampling_ratio, num_items_in_batch
    policy.check_options(name, tokens, *inputs, policy.PolicyOptions(**options), LOSS_TYPES)


@grpo_loss.checks_values
def _(
    logits: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor | None,
    num_items_in_batch: int | float | Tensor | None,
    **others: Any,
) -> None:
    checks.mask_values("grpo_loss", completion_mask=completion_mask)
    policy.check_values("grpo_loss", None, num_items_in_batch)
    ids = completion_ids if completion_mask is None else completion_ids.masked_fill(completion_mask == 0, 0)
    checks.indices_below("grpo_loss", "completion_ids", ids, logits.shape[-1])
