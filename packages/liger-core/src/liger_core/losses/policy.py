"""Policy-gradient losses of token log-probabilities."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import upcast

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence")
REDUCTIONS = ("mean", "none")
MASK_DTYPES = (torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
LEAST_RATIO = 1e-8
"""vespo: the least importance weight whose logarithm is taken as it is."""


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


def policy_loss(
    logprobs: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    *,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    delta: float | None = None,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    num_items_in_batch: int | float | Tensor | None = None,
    use_bias_correction_kl: bool = False,
    importance_sampling_ratio: Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    reduction: str = "mean",
) -> GRPOOutput:
    """`grpo_loss` of log-probabilities lp that are there already, such as `fused_linear_token_logprobs` makes.

    It has `grpo_loss`'s options but the temperature, an advantage per token, and one more `loss_type`:

    - ``"vespo"``: −φ A lp, where φ = exp(λ + k log w − λ w) is taken as a constant; w is the row's importance weight,
      log w = Σ over unmasked tokens of clamp(lp − old_logps, −20, 20), plus Σ log importance_sampling_ratio, clamped to
      [log 1e-8, 20]; k and λ are vespo_k_pos and vespo_lambda_pos if A ≥ 0, else those of neg. A φ that is not finite
      is 0. importance_sampling_ratio, each logarithm clamped to [log 1e-8, 20], is in w and multiplied no second time.

    A masked token has loss and gradient 0, whatever its log-probabilities, except in the mean of ``"luspo"``.

    Args:
        logprobs: ``[B, L]``, log-probabilities of the completions' tokens; a float dtype. The only one with a gradient.
        old_logps: ``[B, L]``, log-probabilities under the policy that sampled; None: logprobs, taken as a constant.
        ref_logps: ``[B, L]``, log-probabilities under the reference policy. None only when `beta` is 0.
        advantages: ``[B]``, or ``[B, L]``, an advantage per token (not with ``"vespo"``).
        completion_mask: ``[B, L]``, bool, int or float, 0 at masked tokens; None masks nothing.
        vespo_k_pos, vespo_k_neg: at least 0.
        vespo_lambda_pos, vespo_lambda_neg: at least 0; below 1e-4 they are taken as 1e-4.
        beta, eps_low, eps_high, delta, loss_type, importance_sampling_level, max_completion_length: as in `grpo_loss`.
        num_items_in_batch: as in `grpo_loss`, for ``"vespo"`` too: this process's share of the tokens of the batch.
        use_bias_correction_kl, importance_sampling_ratio, sapo_temperature_pos, sapo_temperature_neg: as in
            `grpo_loss`.
        reduction: as in `grpo_loss`; the mean of ``"vespo"`` is that of ``"dapo"``.

    Returns:
        `GRPOOutput`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together; no `ref_logps` beside a `beta` that is not 0; `delta` or sequence
            level with a loss_type that has none; an option out of its range.

    Source:
        as `grpo_loss`; VESPO arXiv 2602.10693; names and means as in TRL's GRPOTrainer.

    >>> policy_loss(torch.tensor([[-0.5, -1.5]]), None, None, torch.ones(1), beta=0.0)
    GRPOOutput(loss=tensor(-1.), kl=None, clip_ratio=tensor(0.))
    """
    _check(
        logprobs,
        old_logps,
        ref_logps,
        advantages,
        completion_mask,
        importance_sampling_ratio,
        vespo_k_pos=vespo_k_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_lambda_neg=vespo_lambda_neg,
        loss_type=loss_type,
        beta=beta,
        eps_low=eps_low,
        eps_high=eps_high,
        delta=delta,
        importance_sampling_level=importance_sampling_level,
        max_completion_length=max_completion_length,
        num_items_in_batch=num_items_in_batch,
        use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        reduction=reduction,
    )
    rows, length = logprobs.shape
    mask = torch.ones_like(logprobs, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    used = torch.ones_like(mask) if loss_type == "luspo" and reduction == "mean" else mask

    lp = upcast(logprobs).masked_fill(~used, 0.0)
    old = lp.detach() if old_logps is None else upcast(old_logps.detach()).masked_fill(~used, 0.0)
    log_ratio = lp - old
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.masked_fill(~mask, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()

    advantage = upcast(advantages.detach())
    advantage = advantage[:, None] if advantage.dim() == 1 else advantage.masked_fill(~used, 0.0)
    importance = None
    if importance_sampling_ratio is not None:
        importance = upcast(importance_sampling_ratio.detach())
        importance = importance[:, None] if importance.dim() == 1 else importance
    clipped = torch.zeros_like(mask)
    if loss_type == "vespo":
        log_weight = log_ratio.detach().clamp(-20, 20).masked_fill(~mask, 0.0).sum(-1, keepdim=True)
        if importance is not None:
            log_importance = importance.log().clamp(math.log(LEAST_RATIO), 20)
            if log_importance.shape[1] == length and length != 1:
                log_importance = log_importance.masked_fill(~mask, 0.0)
            log_weight = log_weight + log_importance.sum(-1, keepdim=True)
        log_weight = log_weight.clamp(math.log(LEAST_RATIO), 20)
        k = torch.full_like(advantage, vespo_k_neg).masked_fill(advantage >= 0, vespo_k_pos)
        rate = torch.full_like(advantage, vespo_lambda_neg).masked_fill(advantage >= 0, vespo_lambda_pos)
        rate = rate.clamp(min=1e-4)
        loss = -(rate + k * log_weight - rate * log_weight.exp()).exp().nan_to_num(0.0, 0.0, 0.0) * advantage * lp
    elif loss_type == "cispo":
        loss = -ratio.clamp(max=eps_high).detach() * advantage * lp
        clipped = (ratio > eps_high) & (advantage > 0)
    elif loss_type == "sapo":
        tau = torch.full_like(advantage, sapo_temperature_neg).masked_fill(advantage > 0, sapo_temperature_pos)
        loss = -4 * advantage * torch.sigmoid(tau * (ratio - 1)) / tau
    else:
        limited = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.minimum(limited * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage)
        clipped = ((ratio < 1 - eps_low) & (advantage < 0)) | ((ratio > 1 + eps_high) & (advantage > 0))
    if importance is not None and loss_type != "vespo":
        loss = loss * importance
    kl = None
    if beta != 0 and ref_logps is not None:
        difference = upcast(ref_logps.detach()).masked_fill(~used, 0.0) - lp
        kl = difference.exp() - difference - 1
        if use_bias_correction_kl:
            kl = kl * ratio
        loss = loss + beta * kl
        kl = kl.detach().masked_fill(~mask, 0.0)

    masked = loss.masked_fill(~mask, 0.0)
    clip = clipped.to(loss.dtype)
    if reduction == "none":
        return GRPOOutput(masked, kl, clip.masked_fill(~mask, 0.0))
    row_tokens, tokens = mask.sum(-1), mask.sum().clamp(min=1)
    if loss_type in ("grpo", "sapo"):
        mean = (masked.sum(-1) / row_tokens.clamp(min=1)).sum() / max(rows, 1)
    elif loss_type == "bnpo":
        mean = masked.sum() / tokens
    elif loss_type == "dr_grpo":
        mean = masked.sum() / max(rows * (max_completion_length or length), 1)
    elif loss_type == "luspo":
        mean = (loss * row_tokens[:, None]).expand(rows, length).sum() / max(rows * length, 1)
    elif num_items_in_batch is None:
        mean = masked.sum() / tokens
    elif isinstance(num_items_in_batch, Tensor):
        mean = masked.sum() / num_items_in_batch.detach().to(masked.dtype).clamp(min=1)
    else:
        mean = masked.sum() / max(num_items_in_batch, 1)
    if importance_sampling_level == "sequence" and clipped.shape[1] == 1:
        clip_ratio = clip.sum() / max(rows, 1)
    else:
        clip_ratio = clip.masked_fill(~mask, 0.0).sum() / tokens
    return GRPOOutput(mean, None if kl is None else kl.sum() / tokens, clip_ratio)


def _check(
    logprobs: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor | None,
    importance_sampling_ratio: Tensor | None,
    *,
    vespo_k_pos: float,
    vespo_k_neg: float,
    vespo_lambda_pos: float,
    vespo_lambda_neg: float,
    **options: Any,
) -> None:
    name = "policy_loss"
    checks.floating(name, logprobs=logprobs, old_logps=old_logps, ref_logps=ref_logps, advantages=advantages)
    checks.floating(name, importance_sampling_ratio=importance_sampling_ratio)
    checks.dtypes(name, MASK_DTYPES, completion_mask=completion_mask)
    checks.ndim(name, 2, 2, logprobs=logprobs)
    tokens = tuple(logprobs.shape)
    for which, tensor in (
        ("old_logps", old_logps),
        ("ref_logps", ref_logps),
        ("completion_mask", completion_mask),
    ):
        checks.shape(name, which, tensor, tokens, "the shape of logprobs")
    if tuple(advantages.shape) not in (tokens[:1], tokens):
        raise ValueError(f"{name}: advantages has shape {tuple(advantages.shape)}; it takes {tokens[:1]} or {tokens}")
    check_options(name, tokens, ref_logps, importance_sampling_ratio, **options)
    checks.number(name, least=0, vespo_k_pos=vespo_k_pos, vespo_k_neg=vespo_k_neg)
    checks.number(name, least=0, vespo_lambda_pos=vespo_lambda_pos, vespo_lambda_neg=vespo_lambda_neg)
    if options["loss_type"] == "vespo" and advantages.dim() == 2:
        raise ValueError(f"{name}: advantages has shape {tokens}; it takes {tokens[:1]} when loss_type is 'vespo'")


def check_options(
    op: str,
    tokens: tuple[int, ...],
    ref_logps: Tensor | None,
    importance_sampling_ratio: Tensor | None,
    *,
    beta: float,
    eps_low: float,
    eps_high: float,
    delta: float | None,
    loss_type: str,
    importance_sampling_level: str,
    max_completion_length: int | None,
    num_items_in_batch: int | float | Tensor | None,
    use_bias_correction_kl: bool,
    sapo_temperature_pos: float,
    sapo_temperature_neg: float,
    reduction: str,
    loss_types: tuple[str, ...] = LOSS_TYPES,
) -> None:
    """The options that a policy-gradient loss of ``[B, L]`` `tokens` has are of their types and in their ranges."""
    if importance_sampling_ratio is not None:
        got, accepted = tuple(importance_sampling_ratio.shape), (tokens[:1], (tokens[0], 1), tokens)
        if all(got != shape for shape in accepted):  # Dynamo gets `in` wrong for sizes that change
            takes = "{}, {} or {}".format(*accepted)
            raise ValueError(f"{op}: importance_sampling_ratio has shape {got}; it takes {takes}")
    checks.one_of(op, loss_types, loss_type=loss_type)
    checks.one_of(op, LEVELS, importance_sampling_level=importance_sampling_level)
    checks.one_of(op, REDUCTIONS, reduction=reduction)
    checks.number(op, above=0, sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg)
    checks.number(op, least=0, beta=beta, eps_low=eps_low, eps_high=eps_high)
    checks.flag(op, use_bias_correction_kl=use_bias_correction_kl)
    if beta != 0 and ref_logps is None:
        raise ValueError(f"{op}: ref_logps is None; it takes a tensor when beta is not 0, and beta is {beta!r}")
    if delta is not None:
        checks.number(op, above=0, delta=delta)
    if max_completion_length is not None:
        checks.integer(op, least=1, max_completion_length=max_completion_length)
    if isinstance(num_items_in_batch, Tensor):
        checks.dtypes(op, (*checks.INTEGERS, *checks.FLOATS), num_items_in_batch=num_items_in_batch)
        checks.ndim(op, 0, 0, num_items_in_batch=num_items_in_batch)
    elif num_items_in_batch is not None:
        checks.number(op, num_items_in_batch=num_items_in_batch)
    if loss_type in ("cispo", "sapo", "vespo"):
        if delta is not None:
            raise ValueError(f"{op}: delta is {delta!r}; it takes None when loss_type is {loss_type!r}")
        if importance_sampling_level != "token":
            raise ValueError(
                f"{op}: importance_sampling_level is {importance_sampling_level!r}; it takes 'token' when loss_type "
                f"is {loss_type!r}"
            )
