"""Policy-gradient losses of group relative policy optimisation."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
LEVELS = ("token", "sequence")
REDUCTIONS = ("mean", "none")
MASK_DTYPES = (torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class GRPOOutput(NamedTuple):
    """A policy-gradient loss and what is logged beside it, all float32.

    Attributes:
        loss: a scalar, or ``[B, L]`` when `reduction` is ``"none"``. The only field with a gradient.
        kl: mean over unmasked tokens of the divergence that `beta` multiplies; None when `beta` is 0.
        clip_ratio: share of the unmasked tokens, or of the rows at ``"sequence"`` level, whose ratio ρ is clipped to a
            side that changes the loss: above 1 + eps_high (``"cispo"``: eps_high) with a positive advantage, below
            1 − eps_low (not ``"cispo"``) with a negative one. 0 for ``"sapo"``.

    When `reduction` is ``"none"``, kl and clip_ratio are ``[B, L]``, with 0 at masked tokens.
    """

    loss: Tensor
    kl: Tensor | None
    clip_ratio: Tensor


@op(differentiable=("logits",), result=GRPOOutput, grad_results=("loss",))
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
    - ``"cispo"``: −min(ρ, eps_high) A lp, where ρ is taken as a constant;
    - ``"sapo"``: −4 A σ(τ (ρ − 1)) / τ, where τ is sapo_temperature_pos if A > 0, else sapo_temperature_neg;

    times importance_sampling_ratio, plus beta (exp(ref_logps − lp) − (ref_logps − lp) − 1).

    A masked token has loss and gradient 0, whatever its logits, id and log-probabilities, except in the mean of
    ``"luspo"``. A token whose id is not in [0, V) has loss and gradient NaN.

    Args:
        logits: ``[B, L + 1, V]``; float32, bfloat16 or float16. Position i predicts token i; the last gets gradient 0.
        old_logps: ``[B, L]``, log-probabilities under the policy that sampled; None: lp, taken as a constant.
        ref_logps: ``[B, L]``, log-probabilities under the reference policy. None only when `beta` is 0.
        completion_ids: int64 ``[B, L]``, the tokens.
        advantages: ``[B]``.
        completion_mask: ``[B, L]``, bool, int or float, 0 at masked tokens; None masks nothing.
        temperature: what logits are divided by; greater than 0.
        beta: weight of the divergence from the reference policy; at least 0.
        eps_low, eps_high: how far ρ may go below and above 1; in ``"cispo"`` eps_high is the largest ρ. At least 0.
        delta: the largest ρ, or None. Not with ``"cispo"`` and ``"sapo"``.
        loss_type: one of ``LOSS_TYPES``.
        importance_sampling_level: ``"token"``; or ``"sequence"``, where ρ is exp of the mean over the row's unmasked
            tokens of lp − old_logps. Not with ``"cispo"`` and ``"sapo"``.
        max_completion_length: L in the mean of ``"dr_grpo"``, or None.
        num_items_in_batch: divisor in the mean of ``"dapo"`` and ``"cispo"``: a number, or a 0-d int or float
            tensor; None is the number of unmasked tokens.
        use_bias_correction_kl: multiply the divergence by ρ, not limited by delta.
        importance_sampling_ratio: ``[B]``, ``[B, 1]`` or ``[B, L]``, or None.
        sapo_temperature_pos, sapo_temperature_neg: greater than 0.
        reduction: ``"none"`` gives ``[B, L]``. ``"mean"`` gives, where a divisor below 1 is taken as 1,
            ``"grpo"``, ``"sapo"``: the mean over rows of the row's mean over unmasked tokens; ``"bnpo"``: the mean over
            unmasked tokens; ``"dr_grpo"``: the sum over B · (max_completion_length or L); ``"dapo"``, ``"cispo"``: the
            sum over num_items_in_batch; ``"luspo"``: the mean over all B · L tokens, masked ones too, of the loss times
            the row's number of unmasked tokens.

    Returns:
        `GRPOOutput`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together; no `ref_logps` beside a `beta` that is not 0; `delta` or sequence
            level with a loss_type that has none; an option out of its range; tensors on different devices.
        IndexError: the id of a token that counts is out of range, on the CPU.

    Source:
        GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO (sequence level) 2507.18071, CISPO 2506.13585,
        SAPO 2511.20347, LUSPO (Length-Unbiased Sequence Policy Optimization); names and means as in TRL's GRPOTrainer.

    >>> logits, ids = torch.zeros(1, 3, 4), torch.tensor([[1, 2]])
    >>> grpo_loss(logits, None, None, ids, torch.ones(1), beta=0.0)
    GRPOOutput(loss=tensor(-1.), kl=None, clip_ratio=tensor(0.))
    """
    rows, length = completion_ids.shape
    vocabulary = logits.shape[-1]
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    used = torch.ones_like(mask) if loss_type == "luspo" and reduction == "mean" else mask
    in_range = (completion_ids >= 0) & (completion_ids < vocabulary)
    ids = completion_ids.clamp(0, vocabulary - 1)

    x = upcast(logits[:, :-1]).masked_fill(~used[..., None], 0.0) / temperature
    lp = x.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    lp = lp * torch.ones_like(lp).masked_fill(used & ~in_range, torch.nan)
    old = lp.detach() if old_logps is None else upcast(old_logps.detach()).masked_fill(~used, 0.0)
    log_ratio = lp - old
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.masked_fill(~mask, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()

    advantage = upcast(advantages.detach())[:, None]
    if loss_type == "cispo":
        loss = -ratio.clamp(max=eps_high).detach() * advantage * lp
        clipped = (ratio > eps_high) & (advantage > 0)
    elif loss_type == "sapo":
        tau = torch.full_like(advantage, sapo_temperature_neg).masked_fill(advantage > 0, sapo_temperature_pos)
        loss = -4 * advantage * torch.sigmoid(tau * (ratio - 1)) / tau
        clipped = torch.zeros_like(mask)
    else:
        limited = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.minimum(limited * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage)
        clipped = ((ratio < 1 - eps_low) & (advantage < 0)) | ((ratio > 1 + eps_high) & (advantage > 0))
    if importance_sampling_ratio is not None:
        importance = upcast(importance_sampling_ratio.detach())
        loss = loss * (importance[:, None] if importance.dim() == 1 else importance)
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
    if importance_sampling_level == "sequence":
        clip_ratio = clip.sum() / max(rows, 1)
    else:
        clip_ratio = clip.masked_fill(~mask, 0.0).sum() / tokens
    return GRPOOutput(mean, None if kl is None else kl.sum() / tokens, clip_ratio)


@grpo_loss.checks
def _(
    logits: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None,
    temperature: float,
    beta: float,
    eps_low: float,
    eps_high: float,
    delta: float | None,
    loss_type: str,
    importance_sampling_level: str,
    max_completion_length: int | None,
    num_items_in_batch: int | float | Tensor | None,
    use_bias_correction_kl: bool,
    importance_sampling_ratio: Tensor | None,
    sapo_temperature_pos: float,
    sapo_temperature_neg: float,
    reduction: str,
) -> None:
    name = "grpo_loss"
    floats = {"logits": logits, "old_logps": old_logps, "ref_logps": ref_logps, "advantages": advantages}
    checks.floating(name, **floats, importance_sampling_ratio=importance_sampling_ratio)
    checks.dtypes(name, (torch.int64,), completion_ids=completion_ids)
    checks.dtypes(name, MASK_DTYPES, completion_mask=completion_mask)
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
    if importance_sampling_ratio is not None:
        got, accepted = tuple(importance_sampling_ratio.shape), ((rows,), (rows, 1), tokens)
        if all(got != shape for shape in accepted):  # Dynamo gets `in` wrong for sizes that change
            takes = "{}, {} or {}".format(*accepted)
            raise ValueError(f"{name}: importance_sampling_ratio has shape {got}; it takes {takes}")

    checks.one_of(name, LOSS_TYPES, loss_type=loss_type)
    checks.one_of(name, LEVELS, importance_sampling_level=importance_sampling_level)
    checks.one_of(name, REDUCTIONS, reduction=reduction)
    checks.number(name, above=0, temperature=temperature)
    checks.number(name, above=0, sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg)
    checks.number(name, least=0, beta=beta, eps_low=eps_low, eps_high=eps_high)
    checks.flag(name, use_bias_correction_kl=use_bias_correction_kl)
    if beta != 0 and ref_logps is None:
        raise ValueError(f"{name}: ref_logps is None; it takes a tensor when beta is not 0, and beta is {beta!r}")
    if delta is not None:
        checks.number(name, above=0, delta=delta)
    if max_completion_length is not None:
        checks.integer(name, least=1, max_completion_length=max_completion_length)
    if isinstance(num_items_in_batch, Tensor):
        checks.dtypes(name, (*checks.INTEGERS, *checks.FLOATS), num_items_in_batch=num_items_in_batch)
        checks.ndim(name, 0, 0, num_items_in_batch=num_items_in_batch)
    elif num_items_in_batch is not None:
        checks.number(name, num_items_in_batch=num_items_in_batch)
    if loss_type in ("cispo", "sapo"):
        if delta is not None:
            raise ValueError(f"{name}: delta is {delta!r}; it takes None when loss_type is {loss_type!r}")
        if importance_sampling_level != "token":
            raise ValueError(
                f"{name}: importance_sampling_level is {importance_sampling_level!r}; it takes 'token' when loss_type "
                f"is {loss_type!r}"
            )


@grpo_loss.checks_values
def _(
    logits: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor | None,
    loss_type: str,
    reduction: str,
    **others: Any,
) -> None:
    ids = completion_ids
    if completion_mask is not None and (loss_type != "luspo" or reduction != "mean"):
        ids = ids.masked_fill(completion_mask == 0, 0)
    checks.indices_below("grpo_loss", "completion_ids", ids, logits.shape[-1])
