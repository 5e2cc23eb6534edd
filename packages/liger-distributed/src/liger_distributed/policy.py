"""`grpo_loss` of a vocabulary that is divided among the processes of a group."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from liger_core import grpo_loss as grpo_loss_of_whole
from liger_core.losses.policy import policy_loss
from liger_core.ops.grpo_loss import IGNORED, GRPOOutput, ids_that_count
from liger_core.ops.logit_statistics import logprobs_of_statistics
from liger_core.policy import check_values
from liger_distributed.losses import check_tokens, local_statistics_of_logits
from liger_distributed.vocabulary import VocabularyShard, combined, shard_of

NAME = "grpo_loss"


def grpo_loss(
    logits: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    *,
    group: ProcessGroup,
    vocabulary: int | None = None,
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
    """`liger_core.grpo_loss` of logits of which this process has some columns.

    Without logits, use `fused_linear_token_logprobs`: it makes the log-probabilities that `liger_core.losses.policy_loss` takes.

    Args:
        logits: ``[B, L + 1, columns]``, this process's.
        old_logps, ref_logps, completion_ids, advantages, completion_mask: as in `liger_core.grpo_loss`, the same on every
            process. Ids are global.
        group, vocabulary: as in `cross_entropy`.
        temperature, beta, eps_low, eps_high, delta, log_ratio_clip, loss_type: as in `liger_core.grpo_loss`.
        importance_sampling_level, max_completion_length, num_items_in_batch, use_bias_correction_kl: as there.
        importance_sampling_ratio: as there.
        sapo_temperature_pos, sapo_temperature_neg, reduction: as there.

    Returns:
        The result of `liger_core.grpo_loss`, on every process.

    Raises:
        TypeError, ValueError, IndexError: as there; ValueError for a number of columns that doesn't fit.
    """
    policy = old_logps, ref_logps, completion_ids, advantages, completion_mask
    return grpo_loss_of_shard(
        logits,
        *policy,
        shard_of(NAME, group, logits.shape[-1], vocabulary),
        temperature=temperature,
        beta=beta,
        eps_low=eps_low,
        eps_high=eps_high,
        delta=delta,
        log_ratio_clip=log_ratio_clip,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        max_completion_length=max_completion_length,
        num_items_in_batch=num_items_in_batch,
        use_bias_correction_kl=use_bias_correction_kl,
        importance_sampling_ratio=importance_sampling_ratio,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        reduction=reduction,
    )


def grpo_loss_of_shard(
    logits: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None,
    shard: VocabularyShard,
    *,
    temperature: float,
    **options: Any,
) -> GRPOOutput:
    """The loss of this process's columns, after checks of the arguments."""
    policy = old_logps, ref_logps, completion_ids, advantages, completion_mask
    checked = logits if shard.columns else logits.new_empty((*logits.shape[:-1], 1))
    grpo_loss_of_whole._checks(checked, *policy, temperature=temperature, **options)
    check_values(NAME, completion_mask, options["num_items_in_batch"])
    ids = ids_that_count(completion_ids, completion_mask, shard.vocabulary)
    check_tokens(NAME, ids, shard, IGNORED, "completion_ids")
    target = pad(ids, (0, 1), value=IGNORED)  # includes the last position, which predicts nothing, to copy no logits
    flat = target.flatten()
    local = local_statistics_of_logits(logits.flatten(0, 1), flat, shard, IGNORED, {"temperature": temperature})
    statistics = combined(local, flat, shard, IGNORED)
    logprobs = logprobs_of_statistics(statistics, flat, shard.vocabulary, IGNORED).view(target.shape)
    return policy_loss(logprobs[:, :-1], old_logps, ref_logps, advantages, completion_mask, **options)
