"""Losses of logits whose columns, the vocabulary, are divided among the processes of a group.

The rows are the same on all processes, and so is the result, to the bit. Forward sends one all-gather of 8 bytes per row and
process, and 4 more. Label smoothing and entropy add 4 bytes a row each; predicted tokens or accuracy add 8. Backward sends
nothing but the sum of x's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from liger_core import checks, torch_state
from liger_core.losses.logprobs import TokenLogprobsOutput
from liger_core.ops.cross_entropy import CrossEntropyOutput, check_options, loss_of_statistics
from liger_core.ops.fused_linear_logit_statistics import fused_linear_logit_statistics
from liger_core.ops.logit_statistics import LogitStatistics, logit_statistics, logprobs_of_statistics
from liger_distributed.vocabulary import VocabularyShard, combined, empty_statistics, in_step, shard_of, sum_gradient


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    group: ProcessGroup,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """`liger_core.cross_entropy` of logits of which this process has some columns.

    Args:
        logits: ``[N, columns]``, this process's. They aren't copied in another dtype.
        target: int64 ``[N]``, global ids.
        weight: ``[V]``, a weight per class of the whole vocabulary, or None.
        group: the processes that have the vocabulary, in the order of their columns.
        vocabulary: V, divided as torch.chunk does: the last processes may have fewer columns, or none. None: every process
            has as many as this one.
        ignore_index, label_smoothing, lse_square_scale, softcap, reduction: as in `liger_core.cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: as there.

    Returns:
        The result of `liger_core.cross_entropy`, on every process.

    Raises:
        TypeError, ValueError, IndexError: as there; ValueError for a number of columns that doesn't fit.
    """
    name = "cross_entropy"
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
        "reduction": reduction,
        "return_z_loss": return_z_loss,
        "return_token_accuracy": return_token_accuracy,
        "return_predicted_tokens": return_predicted_tokens,
    }

    def prepare() -> tuple[VocabularyShard, LogitStatistics]:
        shard = shard_of(name, group, logits.shape[-1], vocabulary)
        of_columns = {
            "weight": _local_weight(name, weight, shard),
            "softcap": softcap,
            "return_total": bool(label_smoothing),
            "return_best": return_token_accuracy or return_predicted_tokens,
        }
        local = local_statistics_of_logits(logits, target, shard, ignore_index, of_columns)
        _check_loss(name, target, shard, softcap=softcap, **options)
        return shard, local

    shard, local = in_step(name, group, logits, prepare)
    statistics = combined(local, target, shard, ignore_index)
    return loss_of_statistics(statistics, target, weight, vocabulary=shard.vocabulary, token_scaling=False, **options)


def fused_linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup,
    vocabulary: int | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    token_scaling: bool = False,
    accum_dtype: torch.dtype = torch.float32,
    memory_budget: int | None = None,
) -> Tensor | CrossEntropyOutput:
    """`liger_core.fused_linear_cross_entropy` of a weight of which this process has some rows.

    Logits are float32, as in `liger_core.fused_linear_logit_statistics`, whose kernels never hold those of all rows.

    Args:
        x: ``[N, H]``, the same on every process; its gradient is that of the whole vocabulary.
        linear_weight: ``[columns, H]``, this process's rows.
        target: int64 ``[N]``, global ids.
        bias: ``[columns]``, this process's, or None.
        group, vocabulary: as in `cross_entropy`.
        class_weight: ``[V]``, a weight per class of the whole vocabulary, or None.
        ignore_index, label_smoothing, lse_square_scale, softcap, reduction: as in `liger_core.cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: as there.
        token_scaling: as in `liger_core.fused_linear_cross_entropy`.
        accum_dtype, memory_budget: as in `liger_core.fused_linear_logit_statistics`, for this process.

    Returns:
        The result of `liger_core.fused_linear_cross_entropy`, on every process.

    Raises:
        TypeError, ValueError, IndexError: as there; ValueError for a number of rows that doesn't fit.
    """
    name = "fused_linear_cross_entropy"
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
        "reduction": reduction,
        "return_z_loss": return_z_loss,
        "return_token_accuracy": return_token_accuracy,
        "return_predicted_tokens": return_predicted_tokens,
    }

    def prepare() -> tuple[VocabularyShard, LogitStatistics]:
        checks.flag(name, token_scaling=token_scaling)
        shard = shard_of(name, group, linear_weight.shape[0], vocabulary)
        of_columns = {
            "class_weight": _local_weight(name, class_weight, shard),
            "softcap": softcap,
            "return_total": bool(label_smoothing),
            "return_best": return_token_accuracy or return_predicted_tokens,
            "accum_dtype": accum_dtype,
            "memory_budget": memory_budget,
        }
        summed = sum_gradient(x, group)
        local = local_statistics_of_linear(summed, linear_weight, target, bias, shard, ignore_index, of_columns)
        _check_loss(name, target, shard, softcap=softcap, **options)
        return shard, local

    shard, local = in_step(name, group, x, prepare)
    statistics = combined(local, target, shard, ignore_index)
    return loss_of_statistics(
        statistics, target, class_weight, vocabulary=shard.vocabulary, token_scaling=token_scaling, **options
    )


def token_logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup,
    vocabulary: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | TokenLogprobsOutput:
    """`liger_core.losses.token_logprobs` of logits of which this process has some columns.

    Args:
        logits: ``[N, columns]``, this process's.
        target: int64 ``[N]`` or ``[N, K]``, global ids.
        group, vocabulary: as in `cross_entropy`.
        temperature, softcap, ignore_index: as in `liger_core.losses.token_logprobs`.
        return_entropy, return_lse, return_predicted_tokens: as there.

    Returns:
        The result of `liger_core.losses.token_logprobs`, on every process.

    Raises:
        TypeError, ValueError, IndexError: as there; ValueError for a number of columns that doesn't fit.
    """
    name = "token_logprobs"
    options = {
        "temperature": temperature,
        "softcap": softcap,
        "return_entropy": return_entropy,
        "return_best": return_predicted_tokens,
    }

    def prepare() -> tuple[VocabularyShard, LogitStatistics]:
        checks.flag(name, return_lse=return_lse)
        shard = shard_of(name, group, logits.shape[-1], vocabulary)
        local = local_statistics_of_logits(logits, target, shard, ignore_index, options)
        check_tokens(name, target, shard, ignore_index)
        return shard, local

    shard, local = in_step(name, group, logits, prepare)
    return _logprobs_output(combined(local, target, shard, ignore_index), target, shard, ignore_index, return_lse)


def fused_linear_token_logprobs(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup,
    vocabulary: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_predicted_tokens: bool = False,
    accum_dtype: torch.dtype = torch.float32,
    memory_budget: int | None = None,
) -> Tensor | TokenLogprobsOutput:
    """`liger_core.losses.fused_linear_token_logprobs` of a weight of which this process has some rows.

    Args:
        x: ``[N, H]``, the same on every process; its gradient is that of the whole vocabulary.
        linear_weight: ``[columns, H]``, this process's rows.
        target: int64 ``[N]`` or ``[N, K]``, global ids.
        bias: ``[columns]``, this process's, or None.
        group, vocabulary: as in `cross_entropy`.
        temperature, softcap, ignore_index: as in `liger_core.losses.token_logprobs`.
        return_entropy, return_lse, return_predicted_tokens: as there.
        accum_dtype, memory_budget: as in `liger_core.fused_linear_logit_statistics`, for this process.

    Returns:
        The result of `liger_core.losses.token_logprobs`, on every process.

    Raises:
        TypeError, ValueError, IndexError: as there; ValueError for a number of rows that doesn't fit.
    """
    name = "fused_linear_token_logprobs"
    options = {
        "temperature": temperature,
        "softcap": softcap,
        "return_entropy": return_entropy,
        "return_best": return_predicted_tokens,
        "accum_dtype": accum_dtype,
        "memory_budget": memory_budget,
    }

    def prepare() -> tuple[VocabularyShard, LogitStatistics]:
        checks.flag(name, return_lse=return_lse)
        shard = shard_of(name, group, linear_weight.shape[0], vocabulary)
        summed = sum_gradient(x, group)
        local = local_statistics_of_linear(summed, linear_weight, target, bias, shard, ignore_index, options)
        check_tokens(name, target, shard, ignore_index)
        return shard, local

    shard, local = in_step(name, group, x, prepare)
    return _logprobs_output(combined(local, target, shard, ignore_index), target, shard, ignore_index, return_lse)


def local_statistics_of_logits(
    logits: Tensor, target: Tensor, shard: VocabularyShard, ignore_index: int, options: dict[str, Any]
) -> LogitStatistics:
    """`logit_statistics` of this process's columns, for `combined`."""
    if shard.columns == 0:
        return empty_statistics(logits, target, shard, options)
    return logit_statistics(logits, target, first=shard.first, ignore_index=ignore_index, **options)


def local_statistics_of_linear(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    shard: VocabularyShard,
    ignore_index: int,
    options: dict[str, Any],
) -> LogitStatistics:
    """`fused_linear_logit_statistics` of this process's columns, for `combined`. So is the gradient of x."""
    if shard.columns == 0:
        logits = x @ linear_weight.T
        return empty_statistics(logits if bias is None else logits + bias, target, shard, options)
    return fused_linear_logit_statistics(
        x, linear_weight, target, bias, first=shard.first, ignore_index=ignore_index, **options
    )


def _local_weight(op: str, weight: Tensor | None, shard: VocabularyShard) -> Tensor | None:
    """The class weights of this process's columns."""
    checks.shape(op, "weight", weight, (shard.vocabulary,), "a weight per class of the whole vocabulary")
    return None if weight is None else weight[shard.first : shard.first + shard.columns]


def _check_loss(op: str, target: Tensor, shard: VocabularyShard, **options: Any) -> None:
    check_options(op, **options)
    checks.ndim(op, 1, 1, target=target)
    check_tokens(op, target, shard, options["ignore_index"])


def _logprobs_output(
    statistics: LogitStatistics, target: Tensor, shard: VocabularyShard, ignore_index: int, return_lse: bool
) -> Tensor | TokenLogprobsOutput:
    logprobs = logprobs_of_statistics(statistics, target, shard.vocabulary, ignore_index)
    if not (return_lse or statistics.entropy is not None or statistics.best_index is not None):
        return logprobs
    return TokenLogprobsOutput(
        logprobs, statistics.entropy, statistics.lse if return_lse else None, statistics.best_index
    )


def check_tokens(op: str, target: Tensor, shard: VocabularyShard, ignore_index: int, name: str = "target") -> None:
    """Raise IndexError for a token out of range, on the CPU.

    An accelerator would have to wait for the values: there such a token's loss is NaN.
    """
    if target.device.type == "cpu" and not torch_state.compiling() and not torch_state.without_values([target]):
        checks.indices_below(op, name, target, shard.vocabulary, ignore_index)
