"""Policy-gradient losses of token log-probabilities: the formulas and options of `grpo_loss` and `losses.policy_loss`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import checks, torch_state
from liger_core.contract import upcast

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence", "sequence_token")
REDUCTIONS = ("mean", "none")
MASK_DTYPES = (torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
LEAST_RATIO = 1e-8
"""vespo: the least importance weight whose logarithm is taken as it is."""


class PolicyOptions(NamedTuple):
    """Options of a loss that are no tensors, by `grpo_loss`'s names."""

    beta: float
    eps_low: float
    eps_high: float
    delta: float | None
    log_ratio_clip: float | None
    loss_type: str
    importance_sampling_level: str
    max_completion_length: int | None
    use_bias_correction_kl: bool
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    reduction: str

    # Methods and not properties: Dynamo of torch 2.9 doesn't trace those of a NamedTuple.
    def row_ratio(self) -> bool:
        """Whether a ratio is that of a whole row."""
        return self.importance_sampling_level != "token"

    def by_sequence(self) -> bool:
        """Whether a ratio is that of a whole row, and its gradient too."""
        return self.importance_sampling_level == "sequence"

    def means_rows(self) -> bool:
        """Whether the mean is that of rows' means."""
        return self.loss_type in ("grpo", "sapo")

    def ratios(self) -> tuple[float, float]:
        """The least and the largest ratio that isn't clipped. ``"cispo"`` has no least one."""
        return 1.0 - self.eps_low, self.eps_high if self.loss_type == "cispo" else 1.0 + self.eps_high


class VespoOptions(NamedTuple):
    """Options of ``"vespo"`` alone, by `policy_loss`'s names."""

    k_pos: float
    lambda_pos: float
    k_neg: float
    lambda_neg: float


def loss_of_logprobs(
    logprobs: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor | None,
    importance_sampling_ratio: Tensor | None,
    num_items_in_batch: int | float | Tensor | None,
    options: PolicyOptions,
    vespo: VespoOptions | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`losses.policy_loss` without its checks: the fields of `GRPOOutput`."""
    rows = logprobs.shape[0]
    mask = torch.ones_like(logprobs, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    lp = upcast(logprobs).masked_fill(~mask, 0.0)
    old = lp.detach() if old_logps is None else upcast(old_logps.detach()).masked_fill(~mask, 0.0)
    log_ratio = lp - old
    if options.row_ratio():
        log_ratio = log_ratio.masked_fill(~mask, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio if options.by_sequence() else log_ratio.detach() + (lp - lp.detach())
    clip = options.log_ratio_clip
    log_ratio = log_ratio if clip is None else log_ratio.clamp(-clip, clip)

    advantage = upcast(advantages.detach())
    advantage = advantage[:, None] if advantage.dim() == 1 else advantage.masked_fill(~mask, 0.0)
    importance = None
    if importance_sampling_ratio is not None:
        importance = upcast(importance_sampling_ratio.detach())
        importance = importance[:, None] if importance.dim() == 1 else importance
        if importance.shape[1] == mask.shape[1]:
            importance = importance.masked_fill(~mask, 1.0)
    if options.loss_type == "vespo":
        assert vespo is not None
        loss, clipped = _vespo_loss(lp, log_ratio, advantage, importance, mask, vespo), torch.zeros_like(mask)
    else:
        loss, clipped = _ratio_loss(lp, log_ratio, advantage, importance, mask, options)
    kl = None
    if options.beta != 0 and ref_logps is not None:
        difference = upcast(ref_logps.detach()).masked_fill(~mask, 0.0) - lp
        difference = difference if clip is None else difference.clamp(-clip, clip)
        kl = difference.exp() - difference - 1
        if options.use_bias_correction_kl:
            kl = kl * log_ratio.exp()
        loss = loss + options.beta * kl
        kl = kl.detach().masked_fill(~mask, 0.0)

    share = clipped.to(loss.dtype)
    if options.reduction == "none":
        return loss.masked_fill(~mask, 0.0), kl, share.masked_fill(~mask, 0.0)
    tokens = mask.sum().clamp(min=1)
    if options.by_sequence() and share.shape[1] == 1:
        clip_ratio = (share.sum(-1) * mask.any(-1)).sum() / max(rows, 1)
    else:
        clip_ratio = share.masked_fill(~mask, 0.0).sum() / tokens
    return _mean(loss, mask, num_items_in_batch, options), None if kl is None else kl.sum() / tokens, clip_ratio


def _vespo_loss(
    lp: Tensor, log_ratio: Tensor, advantage: Tensor, importance: Tensor | None, mask: Tensor, options: VespoOptions
) -> Tensor:
    """The loss of each token for ``"vespo"``, without the KL term, ``[B, L]``."""
    log_weight = log_ratio.detach().clamp(-20, 20).masked_fill(~mask, 0.0).sum(-1, keepdim=True)
    if importance is not None:
        log_importance = importance.log().clamp(math.log(LEAST_RATIO), 20)
        log_weight = log_weight + log_importance.sum(-1, keepdim=True)
    log_weight = log_weight.clamp(math.log(LEAST_RATIO), 20)
    k = torch.full_like(advantage, options.k_neg).masked_fill(advantage >= 0, options.k_pos)
    rate = torch.full_like(advantage, options.lambda_neg).masked_fill(advantage >= 0, options.lambda_pos)
    rate = rate.clamp(min=1e-4)
    return -(rate + k * log_weight - rate * log_weight.exp()).exp().nan_to_num(0.0, 0.0, 0.0) * advantage * lp


def _ratio_loss(
    lp: Tensor, log_ratio: Tensor, advantage: Tensor, importance: Tensor | None, mask: Tensor, options: PolicyOptions
) -> tuple[Tensor, Tensor]:
    """The loss of each token from the policies' ratio, without the KL term, and which ratios are clipped: ``[B, L]``, or
    ``[B, 1]`` if neither of the ratio, the advantage and the importance is one per token.
    """
    low, high = options.ratios()
    actual = log_ratio.exp()
    ratio = _settled(log_ratio, actual.isinf(), advantage if importance is None else advantage * importance, options)
    ratio = ratio.exp()
    if options.loss_type == "cispo":
        loss, clipped = -ratio.clamp(max=high).detach() * advantage * lp, (actual > high) & (advantage > 0)
    elif options.loss_type == "sapo":
        tau = torch.full_like(advantage, options.sapo_temperature_neg)
        tau = tau.masked_fill(advantage > 0, options.sapo_temperature_pos)
        loss, clipped = -4 * advantage * torch.sigmoid(tau * (ratio - 1)) / tau, torch.zeros_like(mask)
    else:
        limited = ratio if options.delta is None else ratio.clamp(max=options.delta)
        loss = -torch.minimum(limited * advantage, ratio.clamp(low, high) * advantage)
        clipped = ((actual < low) & (advantage < 0)) | ((actual > high) & (advantage > 0))
    return loss if importance is None else loss * importance, clipped


def _settled(log_ratio: Tensor, overflows: Tensor, weight: Tensor, options: PolicyOptions) -> Tensor:
    """`log_ratio`, and a constant in place of one that overflows if the loss doesn't depend on it.

    The derivative of an infinite ratio would be 0 times infinity. `weight` is the loss's factor: with 0 there is no loss.
    """
    idle, most = weight == 0, (options.ratios()[1], math.inf if options.delta is None else options.delta)
    bounded = weight >= 0 if min(most) < math.inf else idle
    if options.loss_type == "sapo" or max(most) < math.inf:
        bounded = torch.ones_like(idle)
    largest = math.floor(math.log(torch.finfo(log_ratio.dtype).max))
    return log_ratio.masked_fill(overflows & bounded, largest).masked_fill(overflows & idle, 0.0)


def _mean(
    loss: Tensor, mask: Tensor, num_items_in_batch: int | float | Tensor | None, options: PolicyOptions
) -> Tensor:
    """The mean of the tokens' losses that `loss_type` takes."""
    rows, length = mask.shape
    row_tokens, tokens = mask.sum(-1), mask.sum().clamp(min=1)
    masked = loss.masked_fill(~mask, 0.0)
    if options.loss_type == "luspo":
        return masked.sum() / max(rows, 1)
    if options.means_rows():
        return (masked.sum(-1) / row_tokens.clamp(min=1)).sum() / max(rows, 1)
    if options.loss_type == "dr_grpo":
        return masked.sum() / max(rows * (options.max_completion_length or length), 1)
    if options.loss_type == "bnpo" or num_items_in_batch is None:
        return masked.sum() / tokens
    if isinstance(num_items_in_batch, Tensor):
        return masked.sum() / num_items_in_batch.detach().to(masked.dtype).clamp(min=1)
    return masked.sum() / max(num_items_in_batch, 1)


def check_options(
    op: str,
    tokens: tuple[int, ...],
    ref_logps: Tensor | None,
    importance_sampling_ratio: Tensor | None,
    num_items_in_batch: int | float | Tensor | None,
    options: PolicyOptions,
    loss_types: tuple[str, ...] = LOSS_TYPES,
) -> None:
    """The options that a policy-gradient loss of ``[B, L]`` `tokens` has are of their types and in their ranges."""
    if importance_sampling_ratio is not None:
        ratio_shape, accepted = tuple(importance_sampling_ratio.shape), (tokens[:1], (tokens[0], 1), tokens)
        if all(ratio_shape != shape for shape in accepted):  # Dynamo gets `in` wrong for sizes that change
            takes = "{}, {} or {}".format(*accepted)
            raise ValueError(f"{op}: importance_sampling_ratio has shape {ratio_shape}; it takes {takes}")
    beta, delta, loss_type, level = options.beta, options.delta, options.loss_type, options.importance_sampling_level
    taus = {
        "sapo_temperature_pos": options.sapo_temperature_pos,
        "sapo_temperature_neg": options.sapo_temperature_neg,
    }
    checks.one_of(op, loss_types, loss_type=loss_type)
    checks.one_of(op, LEVELS, importance_sampling_level=level)
    checks.one_of(op, REDUCTIONS, reduction=options.reduction)
    checks.number(op, above=0, **taus)
    checks.number(op, least=0, beta=beta, eps_low=options.eps_low, eps_high=options.eps_high)
    checks.flag(op, use_bias_correction_kl=options.use_bias_correction_kl)
    if beta != 0 and ref_logps is None:
        raise ValueError(f"{op}: ref_logps is None; it takes a tensor when beta is not 0, and beta is {beta!r}")
    if delta is not None:
        checks.number(op, above=0, delta=delta)
    if options.log_ratio_clip is not None:
        checks.number(op, above=0, log_ratio_clip=options.log_ratio_clip)
    if options.max_completion_length is not None:
        checks.integer(op, least=1, max_completion_length=options.max_completion_length)
    if isinstance(num_items_in_batch, Tensor):
        checks.dtypes(op, (*checks.INTEGERS, *checks.FLOATS), num_items_in_batch=num_items_in_batch)
        checks.ndim(op, 0, 0, num_items_in_batch=num_items_in_batch)
    elif num_items_in_batch is not None:
        checks.number(op, above=0, num_items_in_batch=num_items_in_batch)
    if loss_type in ("cispo", "sapo", "vespo") and delta is not None:
        raise ValueError(f"{op}: delta is {delta!r}; it takes None when loss_type is {loss_type!r}")
    if loss_type == "vespo" and level != "token":
        raise ValueError(
            f"{op}: importance_sampling_level is {level!r}; it takes 'token' when loss_type is {loss_type!r}"
        )


def check_values(op: str, completion_mask: Tensor | None, num_items_in_batch: int | float | Tensor | None) -> None:
    """The mask holds 0 and 1, and num_items_in_batch is above 0, if their data can be read."""
    if torch_state.readable(completion_mask):
        checks.mask_values(op, completion_mask=completion_mask)
    if isinstance(num_items_in_batch, Tensor) and torch_state.readable(num_items_in_batch):
        checks.number(op, above=0, num_items_in_batch=num_items_in_batch.item())
