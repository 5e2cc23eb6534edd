"""Log-probabilities of chosen tokens, and what trainers make of them before a loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import checks, torch_state
from liger_core.ops.fused_linear_logit_statistics import fused_linear_logit_statistics
from liger_core.ops.logit_statistics import LogitStatistics, logit_statistics, logprobs_of_statistics


class TokenLogprobsOutput(NamedTuple):
    """Log-probabilities of chosen tokens and what was asked for beside them; the rest is None.

    Attributes:
        logprobs: float32, of target's shape; 0 where target is `ignore_index`, NaN where it is no token.
        entropy: float32 ``[N]``, in nats; 0 in an ignored row.
        lse: float32 ``[N]``, log Σ e^z; 0 in an ignored row.
        predicted_tokens: int64 ``[N]``, the first column with the largest logit; -1 in an ignored row.

    logprobs, entropy and lse have gradients.
    """

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    predicted_tokens: Tensor | None


def token_logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | TokenLogprobsOutput:
    """Log-probabilities of chosen tokens under softmax(z), in float32, with `logit_statistics`' kernels.

    z is logits / temperature, or softcap · tanh(logits / softcap) / temperature.

    Args:
        logits: ``[N, V]``; float32, bfloat16 or float16.
        target: int64 ``[N]``, or ``[N, K]``: K tokens per row. May be expanded.
        temperature: what logits are divided by; greater than 0.
        softcap: bound of the logits' magnitude before the temperature, or None.
        ignore_index: the target that doesn't count. A row of nothing else has gradient 0, whatever its logits.
        return_entropy, return_lse, return_predicted_tokens: also return that field.

    Returns:
        The log-probabilities, of target's shape, or a `TokenLogprobsOutput` when any `return_*` flag is set.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, or tensors on different devices.
        IndexError: a token out of range, on the CPU.

    Source:
        `logit_statistics`.

    >>> token_logprobs(torch.zeros(2, 4), torch.tensor([1, -100]))
    tensor([-1.3863,  0.0000])
    """
    _check_flags("token_logprobs", return_entropy, return_lse, return_predicted_tokens)
    statistics = logit_statistics(
        logits,
        target,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        return_entropy=return_entropy,
        return_best=return_predicted_tokens,
    )
    _check_tokens("token_logprobs", target, logits.shape[-1], ignore_index)
    return _output(statistics, target, logits.shape[-1], ignore_index, return_lse)


def fused_linear_token_logprobs(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_predicted_tokens: bool = False,
    accum_dtype: torch.dtype = torch.float32,
    memory_budget: int | None = None,
) -> Tensor | TokenLogprobsOutput:
    """`token_logprobs` of x @ linear_weightᵀ + bias, whose logits are float32 and never held at once.

    Score the sampled tokens and the trained ones with this same function: both sides of a ratio e^(lp − old) then
    round alike.

    Args:
        x: ``[N, H]``; float32, bfloat16 or float16.
        linear_weight: ``[V, H]``, in x's dtype.
        target: int64 ``[N]`` or ``[N, K]``, as in `token_logprobs`.
        bias: ``[V]``, or None.
        temperature, softcap, ignore_index: as in `token_logprobs`.
        return_entropy, return_lse, return_predicted_tokens: as in `token_logprobs`.
        accum_dtype, memory_budget: as in `fused_linear_logit_statistics`.

    Returns:
        As `token_logprobs`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `memory_budget` below the least, or
            tensors on different devices.
        IndexError: a token out of range, on the CPU.

    Source:
        `fused_linear_logit_statistics`.

    >>> fused_linear_token_logprobs(torch.ones(1, 2), torch.zeros(4, 2), torch.tensor([3]))
    tensor([-1.3863])
    """
    _check_flags("fused_linear_token_logprobs", return_entropy, return_lse, return_predicted_tokens)
    statistics = fused_linear_logit_statistics(
        x,
        linear_weight,
        target,
        bias,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        return_entropy=return_entropy,
        return_best=return_predicted_tokens,
        accum_dtype=accum_dtype,
        memory_budget=memory_budget,
    )
    _check_tokens("fused_linear_token_logprobs", target, linear_weight.shape[0], ignore_index)
    return _output(statistics, target, linear_weight.shape[0], ignore_index, return_lse)


def _check_flags(name: str, return_entropy: bool, return_lse: bool, return_predicted_tokens: bool) -> None:
    checks.flag(
        name,
        return_entropy=return_entropy,
        return_lse=return_lse,
        return_predicted_tokens=return_predicted_tokens,
    )


def _check_tokens(name: str, target: Tensor, vocabulary: int, ignore_index: int) -> None:
    """An accelerator would have to wait for the values: there such a token's log-probability is NaN."""
    if target.device.type == "cpu" and not torch_state.compiling() and not torch_state.without_values([target]):
        checks.indices_below(name, "target", target, vocabulary, ignore_index)


def _output(
    statistics: LogitStatistics, target: Tensor, vocabulary: int, ignore_index: int, return_lse: bool
) -> Tensor | TokenLogprobsOutput:
    logprobs = logprobs_of_statistics(statistics, target, vocabulary, ignore_index)
    if not (return_lse or statistics.entropy is not None or statistics.best_index is not None):
        return logprobs
    return TokenLogprobsOutput(
        logprobs, statistics.entropy, statistics.lse if return_lse else None, statistics.best_index
    )


def sequence_logprobs(
    logprobs: Tensor, mask: Tensor | None = None, *, lengths: Tensor | None = None, average: bool = False
) -> Tensor:
    """The sum of each sequence's token log-probabilities, in float32; masked tokens may hold anything, NaN too.

    Args:
        logprobs: ``[B, T]``, or ``[N]`` with `lengths`; a float dtype.
        mask: of logprobs' shape, bool, int or float: 1, and 0 at tokens that don't count; None counts all.
        lengths: int64 ``[B]``, tokens of each sequence of a packed row, in order. Tokens behind the last count nowhere.
        average: divide by the number of tokens that count, at least 1: an empty sequence gives 0.

    Returns:
        ``[B]``, at least float32.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together; on the CPU, a mask of other values.

    >>> sequence_logprobs(torch.tensor([[-1.0, -2.0], [-4.0, 0.0]]), torch.tensor([[1, 1], [1, 0]]))
    tensor([-3., -4.])
    """
    name = "sequence_logprobs"
    checks.floating(name, logprobs=logprobs)
    checks.flag(name, average=average)
    checks.ndim(name, 2 if lengths is None else 1, 2 if lengths is None else 1, logprobs=logprobs)
    checks.shape(name, "mask", mask, tuple(logprobs.shape), "the shape of logprobs")
    if torch_state.readable(mask):
        checks.mask_values(name, mask=mask)
    counted = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask != 0
    values = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)).masked_fill(~counted, 0.0)
    if lengths is None:
        total, tokens = values.sum(-1), counted.sum(-1)
    else:
        checks.dtypes(name, (torch.int64,), lengths=lengths)
        checks.ndim(name, 1, 1, lengths=lengths)
        ends = lengths.cumsum(0)
        place = torch.arange(values.shape[0], device=values.device)
        # A row per sequence: a sum in a fixed order, whose length doesn't have to be known on the host.
        inside = (place < ends[:, None]) & (place >= (ends - lengths)[:, None])
        total = values.expand(len(lengths), -1).masked_fill(~inside, 0.0).sum(-1)
        tokens = (inside & counted).sum(-1)
    return total / tokens.clamp(min=1) if average else total


def topk_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor | None = None, *, tail: bool = False) -> Tensor:
    """KL(teacher ‖ student) of each row over the teacher's K most likely tokens, for teachers kept as data.

    Over K tokens it is Σ e^t (t − lp); with `tail`, all other tokens count as one more, of the rest of each
    probability.

    Args:
        logprobs: ``[N, K]``, the student's at the teacher's tokens: `token_logprobs` with those as its target.
        teacher_logprobs: ``[N, K]``; −inf where there is no token. Gets no gradient.
        mask: ``[N]``, bool, int or float: 1, and 0 at rows that don't count; None counts all.
        tail: add the tokens that aren't among the K.

    Returns:
        ``[N]``, at least float32; 0 in a row that doesn't count.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together; on the CPU, a mask of other values.

    >>> topk_kl(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.5, 0.25]]).log(), tail=True)
    tensor([0.])
    """
    name = "topk_kl"
    checks.floating(name, logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    checks.ndim(name, 2, 2, logprobs=logprobs)
    checks.flag(name, tail=tail)
    checks.shape(name, "teacher_logprobs", teacher_logprobs, tuple(logprobs.shape), "the shape of logprobs")
    checks.shape(name, "mask", mask, tuple(logprobs.shape[:1]), "a value per row of logprobs")
    if torch_state.readable(mask):
        checks.mask_values(name, mask=mask)
    counted = torch.ones_like(logprobs[:, 0], dtype=torch.bool) if mask is None else mask != 0
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    teacher = teacher_logprobs.detach().to(wide).masked_fill(~counted[:, None], -torch.inf)
    absent = teacher == -torch.inf
    student = logprobs.to(wide).masked_fill(absent, 0.0)
    rows = (teacher.exp() * (teacher.masked_fill(absent, 0.0) - student)).sum(-1)
    if tail:
        rest = (1 - teacher.exp().sum(-1)).clamp(min=0)
        student_rest = (1 - student.exp().masked_fill(absent, 0.0).sum(-1)).clamp(min=torch.finfo(wide).tiny)
        rows = rows + torch.xlogy(rest, rest) - rest * student_rest.log()
    return rows.masked_fill(~counted, 0.0)
