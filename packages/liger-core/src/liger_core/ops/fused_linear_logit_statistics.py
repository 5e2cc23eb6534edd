"""Statistics of a linear layer's logits, with a chunk of the logits at most."""

from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.budget import check_accum_dtype, least_chunk, padded_columns
from liger_core.contract import op, upcast
from liger_core.ops.logit_statistics import (
    DIFFERENTIABLE,
    LogitStatistics,
    check_statistics_options,
    check_targets,
    statistics_of_logits,
)


@op(
    differentiable=("x", "linear_weight", "bias"),
    result=LogitStatistics,
    grad_results=DIFFERENTIABLE,
    autocast=("x", "linear_weight", "bias"),
    dimensions="x: n H, linear_weight: V H, target: n *, bias: V, class_weight: V -> n, n *, n, n, n, n, n",
)
def fused_linear_logit_statistics(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    first: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_total: bool = False,
    return_log_sum_squares: bool = False,
    return_best: bool = False,
    accum_dtype: torch.dtype = torch.float32,
    memory_budget: int | None = None,
) -> LogitStatistics:
    """`logit_statistics` of x @ linear_weightᵀ + bias. A kernel holds at most a chunk of the N × V logits.

    Logits are float32: products of the given values are added up in float32 and not rounded to x's dtype. Log-probabilities
    get exponentiated: with bfloat16 logits near 11, the ratio of equal policies would be off by up to 3 %. The gradient of a
    logit is rounded once to x's dtype. Gradients of linear_weight and bias are summed over rows in `accum_dtype` and rounded
    once. The gradient of x is summed over columns in float32.

    Args:
        x: ``[N, H]``; float32, bfloat16 or float16.
        linear_weight: ``[V, H]``, in x's dtype.
        target: int64 ``[N]`` or ``[N, K]``, global ids, as in `logit_statistics`.
        bias: ``[V]``, or None.
        class_weight: ``[V]``, `logit_statistics`' weight, or None.
        first, ignore_index, softcap, temperature: as in `logit_statistics`.
        return_entropy, return_total, return_log_sum_squares, return_best: as in `logit_statistics`.
        accum_dtype: the dtype in which gradients are summed over chunks of rows: float32, bfloat16 or float16.
        memory_budget: bytes that a kernel may allocate beyond its inputs and gradients; at least
            `least_statistics_memory`. None takes a tile as large as linear_weight. Less memory costs time, never
            accuracy. The reference ignores it and holds all logits.

    Returns:
        `LogitStatistics`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `memory_budget` below the least, or
            tensors on different devices.

    Source:
        `logit_statistics`; float32 head: ScaleRL, arXiv 2510.13786; chunks: Hsu et al., Liger Kernel, arXiv 2410.10989.

    >>> statistics = fused_linear_logit_statistics(torch.ones(1, 2), torch.zeros(2, 2), torch.tensor([1]))
    >>> statistics.picked - statistics.lse
    tensor([-0.6931])
    """
    logits = _with_gradient_in(upcast(x) @ upcast(linear_weight).T, x.dtype)
    return statistics_of_logits(
        logits if bias is None else logits + upcast(bias),
        target,
        class_weight,
        first=first,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        return_entropy=return_entropy,
        return_total=return_total,
        return_log_sum_squares=return_log_sum_squares,
        return_best=return_best,
    )


def _with_gradient_in(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits, with their gradient rounded to `dtype`: it passes through an added zero of that dtype."""
    if logits.dtype is dtype:
        return logits
    return logits.detach() + upcast((logits - logits.detach()).to(dtype))


def least_statistics_memory(x: Tensor, linear_weight: Tensor, *, accum_dtype: torch.dtype, weight_grad: bool) -> int:
    """Bytes below which a `memory_budget` is refused.

    The least is the memory of a tile of all rows and `least_chunk` columns, of `least_chunk` rows and all columns, or of
    all logits at once, whichever is least. The last two have `padded_columns`. Each logit of the tile takes 4 bytes and its
    gradient in x's dtype, each class 4 for bias's gradient, and each row 32. All rows and some columns take a float32 sum
    of x's gradient as well. Some rows take an accumulator of linear_weight's gradient in `accum_dtype` as well, unless that
    is the gradient's dtype. All logits take no sum, and a float32 gradient takes the place of its logit.
    """
    rows, hidden = x.shape
    vocabulary = linear_weight.shape[0]
    element, row = 4 + x.dtype.itemsize, padded_columns(vocabulary)
    by_columns = least_chunk(vocabulary) * rows * element + 4 * rows * hidden
    by_rows = least_chunk(rows) * row * element
    if weight_grad and rows > 1 and accum_dtype != linear_weight.dtype:
        by_rows += vocabulary * hidden * accum_dtype.itemsize
    at_once = rows * row * (4 if x.dtype is torch.float32 else element)
    return 4 * vocabulary + 32 * rows + min(by_columns, by_rows, at_once)


def most_statistics_memory(rows: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Bytes of a `memory_budget` with which the logits of some rows are all held, so that backward doesn't make them again.

    For an x of half precision it is the least of such budgets. For float32 it is the same, since autocast may make x half
    precision. Terms are as in `least_statistics_memory`.
    """
    element = 12 if dtype is torch.float64 else 6
    return rows * padded_columns(vocabulary) * element + 4 * vocabulary + 32 * rows


@fused_linear_logit_statistics.checks
def _(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
    **options: Any,
) -> None:
    name = "fused_linear_logit_statistics"
    checks.floating(name, x=x, linear_weight=linear_weight, bias=bias, class_weight=class_weight)
    checks.ndim(name, 2, 2, x=x, linear_weight=linear_weight)
    checks.same_dtype(name, x=x, linear_weight=linear_weight)
    vocabulary = linear_weight.shape[0]
    if vocabulary == 0:
        raise ValueError(f"{name}: linear_weight has shape {tuple(linear_weight.shape)}; it takes at least one row")
    checks.shape(name, "linear_weight", linear_weight, (vocabulary, x.shape[1]), "x's last dimension")
    check_targets(name, target, x.shape[0], "x")
    checks.shape(name, "bias", bias, (vocabulary,), "linear_weight's first dimension")
    checks.shape(name, "class_weight", class_weight, (vocabulary,), "linear_weight's first dimension")
    check_statistics_options(name, **options)
    check_accum_dtype(name, accum_dtype)
    if memory_budget is not None:
        checks.integer(name, least=1, memory_budget=memory_budget)
        weight_grad = torch.is_grad_enabled() and linear_weight.requires_grad
        least = least_statistics_memory(x, linear_weight, accum_dtype=accum_dtype, weight_grad=weight_grad)
        if memory_budget < least:
            raise ValueError(
                f"{name}: memory_budget is {memory_budget}; it takes at least {least} bytes for these shapes"
            )
