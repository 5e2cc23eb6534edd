"""`fused_linear_jsd` of a vocabulary that is divided among the processes of a group.

The mixture of student and teacher needs both normalisers. So forward goes over the columns twice, a few rows at a time: once for
the normalisers, once for the divergence. Backward makes each chunk's logits again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from liger_core import checks
from liger_core import fused_linear_jsd as fused_linear_jsd_of_whole
from liger_core.contract import upcast
from liger_core.host.linear import Linear
from liger_core.ops.fused_linear_logit_statistics import fused_linear_logit_statistics
from liger_core.ops.jsd import above_mixture, kl_of_classes, times_probability
from liger_distributed.vocabulary import VocabularyShard, gather, in_step, shard_of, sum_gradient

NAME = "fused_linear_jsd"
COPIES = 10
"""Float32 tensors of the size of a chunk's logits that may exist at a time."""


def fused_linear_jsd(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    *,
    group: ProcessGroup,
    vocabulary: int | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype = torch.float32,
    memory_budget: int | None = None,
) -> Tensor:
    """`liger_core.fused_linear_jsd` of weights of which this process has some rows.

    Logits are float32, as in `liger_core.fused_linear_logit_statistics`.

    Args:
        student_x, teacher_x: ``[N, Hs]``, ``[N, Ht]``, the same on every process; the gradient of student_x is that of the
            whole vocabulary.
        student_weight, teacher_weight: ``[columns, Hs]``, ``[columns, Ht]``, this process's rows, the same ones of both weights.
        labels: int64 ``[N]``, or None.
        group, vocabulary: as in `cross_entropy`.
        beta, ignore_index, temperature: as in `liger_core.fused_linear_jsd`.
        accum_dtype: as there.
        memory_budget: bytes that this process may allocate beyond its inputs and gradients; at least as many as one row takes.

    Returns:
        The result of `liger_core.fused_linear_jsd`, on every process.

    Raises:
        TypeError, ValueError: as there; ValueError for a number of rows that doesn't fit.
    """
    options: dict[str, Any] = {"beta": beta, "ignore_index": ignore_index, "temperature": temperature}
    options["accum_dtype"] = accum_dtype
    inputs = student_weight, teacher_x, teacher_weight, labels

    def prepare() -> tuple[VocabularyShard, None]:
        shard = shard_of(NAME, group, student_weight.shape[0], vocabulary)
        check(shard, student_x, *inputs, **options)
        _rows_of_chunk(_cast(student_x), _cast(student_weight), accum_dtype, memory_budget)
        return shard, None

    shard, _ = in_step(NAME, group, student_x, prepare)
    x = sum_gradient(student_x, group)
    loss = divergence_of_linear(x, *inputs, shard, memory_budget=memory_budget, **options)
    counted = student_x.shape[0] if labels is None else (labels != ignore_index).sum()
    return loss / (max(counted, 1) if isinstance(counted, int) else counted.clamp(min=1))


def check(
    shard: VocabularyShard,
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None,
    **options: Any,
) -> None:
    """The checks of `liger_core.fused_linear_jsd`. A process without columns is checked as if it had one."""
    weights = {"student_weight": student_weight, "teacher_weight": teacher_weight}
    if shard.columns == 0:
        checks.ndim(NAME, 2, 2, **weights)
        checks.shape(NAME, "teacher_weight", teacher_weight, (0, teacher_weight.shape[1]), "rows of student_weight")
        weights = {name: weight.new_empty((1, weight.shape[1])) for name, weight in weights.items()}
    fused_linear_jsd_of_whole._checks(
        student_x=student_x, teacher_x=teacher_x, labels=labels, memory_budget=None, **weights, **options
    )


class _Options(NamedTuple):
    """The options of a chunk's divergence, and its number of rows."""

    beta: float
    temperature: float
    accum_dtype: torch.dtype
    rows: int


def divergence_of_linear(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None,
    shard: VocabularyShard,
    *,
    beta: float,
    ignore_index: int,
    temperature: float,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
) -> Tensor:
    """The sum of rows' divergences over the whole vocabulary. The gradient of student_x is that of this process's columns."""
    tensors = _cast(student_x), _cast(student_weight), _cast(teacher_x), _cast(teacher_weight)
    rows = _rows_of_chunk(tensors[0], tensors[1], accum_dtype, memory_budget)
    options = _Options(beta, temperature, accum_dtype, rows)
    with torch.no_grad(), torch.autocast(student_x.device.type, enabled=False):
        ignored = None if labels is None else labels == ignore_index
        target = torch.zeros(student_x.shape[0], dtype=torch.int64, device=student_x.device)
        if ignored is not None:
            target = target.masked_fill(ignored, ignore_index)
        head_options = {"ignore_index": ignore_index, "temperature": temperature, "memory_budget": memory_budget}
        pairs = (tensors[0], tensors[1]), (tensors[2], tensors[3])
        lse = gather(torch.stack([_lse(x, weight, target, shard, head_options) for x, weight in pairs]), shard)
        lse = lse.logsumexp(0)
        local = lse.new_zeros(student_x.shape[0] + 1)
        for chunk in _chunks(student_x.shape[0], rows):
            divergence, inner = _sums(*_logprobs(*tensors, lse, chunk, temperature), beta)
            if ignored is not None:
                divergence, inner = (sums.masked_fill(ignored[chunk], 0.0) for sums in (divergence, inner))
            local[chunk] = inner
            local[-1] += divergence.sum()
        summed = gather(local, shard).sum(0)
    return cast("Any", _Divergence).apply(*tensors, summed[-1], lse, summed[:-1], ignored, options)


class _Divergence(torch.autograd.Function):
    """The divergence, already computed, as a function of the student."""

    @staticmethod
    def forward(
        ctx: Any,
        student_x: Tensor,
        student_weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        divergence: Tensor,
        lse: Tensor,
        inner: Tensor,
        ignored: Tensor | None,
        options: _Options,
    ) -> Tensor:
        ctx.save_for_backward(student_x, student_weight, teacher_x, teacher_weight, lse, inner, ignored)
        ctx.options = options
        return divergence.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        student_x, student_weight, teacher_x, teacher_weight, lse, inner, ignored = ctx.saved_tensors
        options: _Options = ctx.options
        dtype = student_x.dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx = torch.zeros_like(student_x) if needs_x else None
        dweight: Tensor | None = None
        accum_dtype = dtype if dtype is torch.float64 else options.accum_dtype
        with torch.autocast(dloss.device.type, enabled=False):
            for chunk in _chunks(student_x.shape[0], options.rows):
                student, teacher = _logprobs(
                    student_x, student_weight, teacher_x, teacher_weight, lse, chunk, options.temperature
                )
                dlogits = _gradient(student, teacher, inner[chunk], options.beta) * (dloss / options.temperature)
                if ignored is not None:
                    dlogits = dlogits.masked_fill(ignored[chunk, None], 0.0)
                dlogits = dlogits.to(dtype)
                if dx is not None:
                    dx[chunk] = dlogits @ student_weight
                if needs_weight:
                    dweight = Linear().add_product(dweight, dlogits, student_x[chunk], accum_dtype)
        if needs_weight:
            dweight = torch.zeros_like(student_weight) if dweight is None else dweight.to(student_weight.dtype)
        return dx, dweight, *[None] * 7


def _cast(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that autocast would give it."""
    device = tensor.device.type
    if tensor.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _rows_of_chunk(x: Tensor, weight: Tensor, accum_dtype: torch.dtype, memory_budget: int | None) -> int:
    """The rows of a chunk, within a budget. Without one, a chunk's tensors together are about as large as the weight."""
    rows, hidden = x.shape
    columns = max(weight.shape[0], 1)
    if memory_budget is None:
        return min(max(rows, 1), max(hidden // COPIES, 256))
    checks.integer(NAME, least=1, memory_budget=memory_budget)
    per_row, fixed = 4 * COPIES * columns, 64 * rows
    if torch.is_grad_enabled() and weight.requires_grad and accum_dtype is not weight.dtype:
        fixed += columns * hidden * accum_dtype.itemsize
    if memory_budget < fixed + per_row:
        raise ValueError(
            f"{NAME}: memory_budget is {memory_budget}; it takes at least {fixed + per_row} bytes for these shapes"
        )
    return max(1, min(rows, (memory_budget - fixed) // per_row))


def _chunks(size: int, most: int) -> list[slice]:
    return [slice(first, min(first + most, size)) for first in range(0, size, most)]


def _lse(x: Tensor, weight: Tensor, target: Tensor, shard: VocabularyShard, options: dict[str, Any]) -> Tensor:
    """log Σ e^z of each row's logits in this process's columns; −inf if it has none."""
    if shard.columns == 0:
        return torch.full(x.shape[:1], -torch.inf, dtype=upcast(x).dtype, device=x.device)
    return fused_linear_logit_statistics(x, weight, target, **options).lse


def _logprobs(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    lse: Tensor,
    chunk: slice,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a chunk of rows in this process's columns, the student's and the teacher's."""

    def logprobs(x: Tensor, weight: Tensor, lse: Tensor) -> Tensor:
        half = x.dtype.itemsize < 4
        logits = Linear().product(x, weight.t()) if half else x @ weight.t()
        return logits.div_(temperature).sub_(lse[:, None])

    student = logprobs(student_x[chunk], student_weight, lse[0, chunk])
    return student, logprobs(teacher_x[chunk], teacher_weight, lse[1, chunk])


def _sums(q: Tensor, p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Each row's divergence, and the sum of its derivatives by the student's log-probabilities, over these columns."""
    if beta == 0:
        return kl_of_classes(p, q).sum(-1), -p.exp().sum(-1)
    if beta == 1:
        divergence = kl_of_classes(q, p).sum(-1)
        return divergence, divergence + q.exp().sum(-1)
    above_q, above_p = above_mixture(q, p, beta)
    inner = (1 - beta) * times_probability(q, above_q).sum(-1)
    return beta * times_probability(p, above_p).sum(-1) + inner, inner


def _gradient(q: Tensor, p: Tensor, inner: Tensor, beta: float) -> Tensor:
    """The derivative of a row's divergence by the student's logits. `inner` is the second sum of `_sums`, over all columns."""
    probability = q.exp()
    if beta == 0:
        by_logprob = -p.exp()
    elif beta == 1:
        by_logprob = kl_of_classes(q, p) + probability
    else:
        by_logprob = (1 - beta) * times_probability(q, above_mixture(q, p, beta)[0])
    return by_logprob.sub_(probability.mul_(inner[:, None]))
