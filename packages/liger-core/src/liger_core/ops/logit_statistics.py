"""Statistics of rows of logits, from which losses are made: log-sum-exp, logits at chosen tokens, entropy."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast


class LogitStatistics(NamedTuple):
    """Statistics of each row of z, the logits after softcap and temperature. A field that wasn't requested is None.

    All are float32 ``[N]`` unless stated, and 0 in an ignored row. lse, picked, entropy and total have a gradient.

    Attributes:
        lse: log Σ e^z over the columns.
        picked: of target's shape; z at each target, or 0 if a target is ignored or is no column.
            picked − lse is the log-probability of a target.
        entropy: −Σ p log p in nats, with p = e^(z − lse); a column with p = 0 adds 0.
        total: Σ w z, with w = weight, or ones. Divided by V, without weight, it is the mean logit.
        log_sum_squares: log Σ p².
        best: the largest of the logits, before softcap and temperature.
        best_index: int64; the global id of the first column with that logit; -1 in an ignored row.
    """

    lse: Tensor
    picked: Tensor
    entropy: Tensor | None
    total: Tensor | None
    log_sum_squares: Tensor | None
    best: Tensor | None
    best_index: Tensor | None


DIFFERENTIABLE = ("lse", "picked", "entropy", "total")
"""The fields of `LogitStatistics` that have a gradient."""


@op(
    differentiable=("logits",),
    result=LogitStatistics,
    grad_results=DIFFERENTIABLE,
    dimensions="logits: n V, target: n *, weight: V -> n, n *, n, n, n, n, n",
)
def logit_statistics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    first: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_total: bool = False,
    return_log_sum_squares: bool = False,
    return_best: bool = False,
) -> LogitStatistics:
    """Statistics of each row of logits, in float32: simple arithmetic makes cross-entropies and log-probabilities of them.

    z is logits / temperature, or softcap · tanh(logits / softcap) / temperature. The columns may be a shard of a
    vocabulary: column 0 has the global id `first`, and targets are global ids. A target outside the shard is valid.

    A row is ignored if all of its targets are `ignore_index`: its statistics and gradient are 0, whatever its logits.
    If each field's gradient is g, the gradient of z is
    g_lse p + Σ_k g_picked_k [column = target_k] + g_total w − g_entropy p (log p + entropy).

    Args:
        logits: ``[N, V]``; float32, bfloat16 or float16.
        target: int64 ``[N]``, or ``[N, K]``: K tokens per row, which may repeat. It may be an expanded view.
        weight: ``[V]``, a weight per class, for `total`; or None. Gets no gradient.
        first: the global id of column 0; at least 0.
        ignore_index: the target that doesn't count.
        softcap: bound of the logits' magnitude before the temperature, or None.
        temperature: the divisor of logits; greater than 0.
        return_entropy, return_total, return_log_sum_squares: also return that field.
        return_best: also return `best` and `best_index`.

    Returns:
        `LogitStatistics`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, or tensors on different devices.

    Source:
        log-sum-exp of shards: Shoeybi et al., Megatron-LM, arXiv 1909.08053; softcap: Gemma 2, arXiv 2408.00118.

    >>> output = logit_statistics(torch.tensor([[0.0, 2.0], [1.0, 1.0]]), torch.tensor([1, -100]), return_best=True)
    >>> output.picked - output.lse
    tensor([-0.1269,  0.0000])
    >>> output.best_index
    tensor([ 1, -1])
    """
    return statistics_of_logits(
        logits,
        target,
        weight,
        first=first,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        return_entropy=return_entropy,
        return_total=return_total,
        return_log_sum_squares=return_log_sum_squares,
        return_best=return_best,
    )


def statistics_of_logits(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    first: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_total: bool = False,
    return_log_sum_squares: bool = False,
    return_best: bool = False,
) -> LogitStatistics:
    """The reference of `logit_statistics`, and of every op whose loss is made of statistics."""
    vocabulary = logits.shape[-1]
    counted = target != ignore_index
    row = counted if target.dim() == 1 else counted.any(-1)
    z = upcast(logits).masked_fill(~row[:, None], 0.0)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if temperature != 1.0:
        z = z / temperature
    lse = z.logsumexp(-1)
    here = counted & (target >= first) & (target < first + vocabulary)
    column = (target - first).masked_fill(~here, 0)
    picked = z.gather(-1, column if target.dim() == 2 else column[:, None]).view(target.shape).masked_fill(~here, 0.0)

    entropy = total = log_sum_squares = best = best_index = None
    log_p = z - lse[:, None]
    if return_entropy:
        p = log_p.exp()
        entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1).masked_fill(~row, 0.0)
    if return_total:
        weighted = z if weight is None else weight.detach().to(z.dtype) * z
        total = weighted.sum(-1).masked_fill(~row, 0.0)
    if return_log_sum_squares:
        log_sum_squares = (2 * log_p.detach()).logsumexp(-1).masked_fill(~row, 0.0)
    if return_best:
        best = upcast(logits.detach().amax(-1)).masked_fill(~row, 0.0)
        best_index = (logits.argmax(-1) + first).masked_fill(~row, -1)
    return LogitStatistics(lse.masked_fill(~row, 0.0), picked, entropy, total, log_sum_squares, best, best_index)


def logprobs_of_statistics(statistics: LogitStatistics, target: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """picked − lse: 0 where target is ignored, NaN, with a NaN gradient, where it is neither that nor in [0, V)."""
    counted = target != ignore_index
    no_token = counted & ((target < 0) | (target >= vocabulary))
    lse = statistics.lse if target.dim() == 1 else statistics.lse[:, None]
    logprobs = (statistics.picked - lse).masked_fill(~counted, 0.0)
    return logprobs * torch.ones_like(logprobs).masked_fill(no_token, torch.nan)


@logit_statistics.checks
def _(logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> None:
    name = "logit_statistics"
    checks.floating(name, logits=logits, weight=weight)
    checks.ndim(name, 2, 2, logits=logits)
    if logits.shape[1] == 0:
        raise ValueError(f"{name}: logits has shape {tuple(logits.shape)}; it takes at least one column")
    check_targets(name, target, logits.shape[0], "logits")
    checks.shape(name, "weight", weight, logits.shape[1:], "a weight per column of logits")
    check_statistics_options(name, **options)


def check_targets(op: str, target: Tensor, rows: int, of: str) -> None:
    """Raise TypeError unless targets are int64, ValueError unless ``[rows]`` or ``[rows, K]`` with K at least 1."""
    checks.dtypes(op, (torch.int64,), target=target)
    checks.ndim(op, 1, 2, target=target)
    shape = tuple(target.shape)
    if shape[0] != rows or shape[-1] == 0 < target.dim() - 1:
        raise ValueError(f"{op}: target has shape {shape}; it takes ({rows},) or ({rows}, K), a row per row of {of}")


def check_statistics_options(
    op: str,
    first: int,
    ignore_index: int,
    softcap: float | None,
    temperature: float,
    return_entropy: bool,
    return_total: bool,
    return_log_sum_squares: bool,
    return_best: bool,
) -> None:
    """The options of `logit_statistics` are of their types and in their ranges."""
    checks.label(op, first=first, ignore_index=ignore_index)
    checks.integer(op, least=0, first=first)
    if softcap is not None:
        checks.number(op, above=0, softcap=softcap)
    checks.number(op, above=0, temperature=temperature)
    checks.flag(
        op,
        return_entropy=return_entropy,
        return_total=return_total,
        return_log_sum_squares=return_log_sum_squares,
        return_best=return_best,
    )
