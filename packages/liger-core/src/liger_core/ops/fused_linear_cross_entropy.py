"""Cross-entropy of a linear layer's logits, without the logits."""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_core import checks
from liger_core.contract import op
from liger_core.ops.cross_entropy import (
    CrossEntropyOptions,
    CrossEntropyOutput,
    check_labels,
    check_options,
    loss_of_logits,
)

ACCUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MOST_CHUNKS = 512
"""How many chunks of rows or columns a `memory_budget` may lead to: a float32 sum over 100,000 chunks was off by a thousandth."""


class FusedLinearCrossEntropyOptions(CrossEntropyOptions, total=False):
    """The options of `fused_linear_cross_entropy` that don't decide what it returns."""

    class_weight: Tensor | None
    token_scaling: bool
    accum_dtype: torch.dtype
    memory_budget: int | None


class FusedLinearCrossEntropyCall:
    """How `fused_linear_cross_entropy` is called, for type checkers: the flags decide what it returns."""

    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_z_loss: Literal[False] = False,
        return_token_accuracy: Literal[False] = False,
        return_predicted_tokens: Literal[False] = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_z_loss: Literal[True],
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_token_accuracy: Literal[True],
        return_z_loss: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_predicted_tokens: Literal[True],
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> CrossEntropyOutput: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[FusedLinearCrossEntropyOptions],
    ) -> Tensor | CrossEntropyOutput: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Exists for type checkers only: there are no instances."""
        raise NotImplementedError


@op(
    differentiable=("x", "linear_weight", "bias"),
    result=CrossEntropyOutput,
    grad_results=("loss",),
    autocast=("x", "linear_weight", "bias"),
    overloads=FusedLinearCrossEntropyCall,
    dimensions="x: n H, linear_weight: V H, target: n, bias: V, class_weight: V -> n, n, n, n",
)
def fused_linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
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
    """`cross_entropy` of x @ linear_weightᵀ + bias, whose N × V logits a kernel never holds at once.

    Logits are computed in x's dtype, the rest in float32. The gradients of linear_weight and bias are summed over rows
    in `accum_dtype` and rounded once.

    Args:
        x: ``[N, H]``; float32, bfloat16 or float16.
        linear_weight: ``[V, H]``, in x's dtype.
        target: int64 ``[N]``, the labels.
        bias: ``[V]``, or None.
        class_weight: ``[V]``, `cross_entropy`'s weight, or None.
        ignore_index, label_smoothing, lse_square_scale, softcap, reduction: as in `cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: as in `cross_entropy`.
        token_scaling: multiply each row's loss, z-loss and gradient by the probability of its label (after softcap),
            taken as a constant. The divisor of ``"mean"`` stays as it is.
        accum_dtype: the dtype in which gradients are summed over chunks of rows: float32, bfloat16 or float16.
        memory_budget: bytes that a kernel may allocate beyond its inputs and gradients, accumulators included; at least
            `least_memory`. None takes `chunk_rows` rows at a time. Less memory costs time, never accuracy. The reference
            ignores it and holds all logits.

    Returns:
        The loss, or a `CrossEntropyOutput` if any `return_*` flag is set.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `memory_budget` below the least, or
            tensors on different devices.
        IndexError: a label out of range, on the CPU.

    Source:
        `cross_entropy`; chunks of rows: Hsu et al., Liger Kernel, arXiv 2410.10989.

    >>> fused_linear_cross_entropy(torch.ones(1, 2), torch.zeros(2, 2), torch.tensor([1]))
    tensor(0.6931)
    """
    logits = x @ linear_weight.T
    if bias is not None:
        logits = logits + bias
    return loss_of_logits(
        logits,
        target,
        class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        reduction=reduction,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        token_scaling=token_scaling,
    )


def padded_columns(columns: int) -> int:
    """Columns that a row of logits takes in memory.

    Many columns are padded to the next multiple of 16, for matrix products, and for kernels that load 16 bytes at once.
    """
    return columns if columns < 128 else (columns + 15) // 16 * 16


def least_chunk(size: int) -> int:
    """The least rows, or columns, at a time that a `memory_budget` needs to have room for: one of MOST_CHUNKS chunks."""
    return max(1, -(-size // MOST_CHUNKS))


def temporary_memory(
    chunk: int,
    x: Tensor,
    linear_weight: Tensor,
    *,
    accum_dtype: torch.dtype,
    weight_grad: bool,
    teacher_x: Tensor | None = None,
) -> int:
    """Bytes that a kernel may allocate beyond inputs and gradients if it takes `chunk` rows at a time.

    They are for:

    - the chunk's logits and their gradient, in x's dtype, and those of a teacher, if there is one, in teacher_x's, each row of
      `padded_columns`;
    - an accumulator of linear_weight's gradient in `accum_dtype`, unless one chunk holds all rows or the gradient has that
      dtype itself;
    - a float32 accumulator of bias's gradient;
    - eight float32 numbers per row.
    """
    rows, hidden = x.shape
    vocabulary = linear_weight.shape[0]
    row = padded_columns(vocabulary) * (2 * x.dtype.itemsize + (0 if teacher_x is None else teacher_x.dtype.itemsize))
    size = chunk * row + 4 * vocabulary + 32 * rows
    if weight_grad and chunk < rows and accum_dtype != linear_weight.dtype:
        size += vocabulary * hidden * accum_dtype.itemsize
    return size


def least_memory(
    x: Tensor,
    linear_weight: Tensor,
    *,
    accum_dtype: torch.dtype,
    weight_grad: bool,
    teacher_x: Tensor | None = None,
) -> int:
    """Bytes below which a `memory_budget` is refused.

    That is the memory of all rows at once; or, if it is less, that of `least_chunk` rows of the logits and then one column. With
    a teacher the latter is that of these rows beside the accumulator.
    """
    rows = x.shape[0]
    by_columns = weight_grad and teacher_x is None and accum_dtype != linear_weight.dtype
    none, some, every = (
        temporary_memory(
            chunk,
            x,
            linear_weight,
            accum_dtype=accum_dtype,
            weight_grad=weight_grad and not by_columns,
            teacher_x=teacher_x,
        )
        for chunk in (0, least_chunk(rows), rows)
    )
    if by_columns:
        some = max(some, none + rows * 2 * x.dtype.itemsize)
    return min(some, every)


def chunk_columns(
    memory_budget: int | None, x: Tensor, linear_weight: Tensor, *, accum_dtype: torch.dtype, weight_grad: bool
) -> int | None:
    """The rows of linear_weight whose gradient a kernel makes at a time, from all of x; None: it adds up over rows of x.

    It is not None if a budget has no room for both an accumulator and enough logits to be worth it. It is then as many rows as
    the budget has room for.
    """
    if memory_budget is None or not weight_grad or accum_dtype == linear_weight.dtype:
        return None
    # Each chunk of rows reads and writes the accumulator.
    for rows in (x.shape[0], min(512, x.shape[0] // 16 + 1)):
        if temporary_memory(rows, x, linear_weight, accum_dtype=accum_dtype, weight_grad=True) <= memory_budget:
            return None
    none = temporary_memory(0, x, linear_weight, accum_dtype=accum_dtype, weight_grad=False)
    return min(padded_columns(linear_weight.shape[0]), (memory_budget - none) // (2 * x.shape[0] * x.dtype.itemsize))


def chunk_rows(
    memory_budget: int | None,
    x: Tensor,
    linear_weight: Tensor,
    *,
    accum_dtype: torch.dtype,
    weight_grad: bool,
    teacher_x: Tensor | None = None,
) -> int:
    """The most rows, 1 to N, that a kernel can take at a time within a budget that is at least `least_memory`.

    Without a budget it is H, but at least 1024: the chunk's logits are then about as large as linear_weight.
    """
    rows, hidden = x.shape
    if memory_budget is None:
        return min(rows, max(hidden, 1024))
    none, one, every = (
        temporary_memory(chunk, x, linear_weight, accum_dtype=accum_dtype, weight_grad=weight_grad, teacher_x=teacher_x)
        for chunk in (0, 1, rows)
    )
    return rows if every <= memory_budget else max(1, (memory_budget - none) // (one - none))


@fused_linear_cross_entropy.checks
def _(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_scaling: bool,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
    **options: Any,
) -> None:
    name = "fused_linear_cross_entropy"
    checks.floating(name, x=x, linear_weight=linear_weight, bias=bias, class_weight=class_weight)
    checks.ndim(name, 2, 2, x=x, linear_weight=linear_weight)
    checks.same_dtype(name, x=x, linear_weight=linear_weight)
    vocabulary = linear_weight.shape[0]
    if vocabulary == 0:
        raise ValueError(f"{name}: linear_weight has shape {tuple(linear_weight.shape)}; it takes at least one row")
    checks.shape(name, "linear_weight", linear_weight, (vocabulary, x.shape[1]), "x's last dimension")
    check_labels(name, target, x.shape[0], "a label per row of x")
    checks.shape(name, "bias", bias, (vocabulary,), "linear_weight's first dimension")
    checks.shape(name, "class_weight", class_weight, (vocabulary,), "linear_weight's first dimension")
    check_options(name, **options)
    checks.flag(name, token_scaling=token_scaling)
    check_accum_dtype(name, accum_dtype)
    check_memory_budget(name, memory_budget, x, linear_weight, accum_dtype)


def check_accum_dtype(op: str, accum_dtype: object) -> None:
    """Raise TypeError unless `accum_dtype` is a dtype, ValueError unless it is one of ACCUM_DTYPES."""
    if not isinstance(accum_dtype, torch.dtype):
        raise TypeError(f"{op}: accum_dtype is {accum_dtype!r}; it takes a torch.dtype")
    checks.one_of(op, ACCUM_DTYPES, accum_dtype=accum_dtype)


def check_memory_budget(
    op: str,
    memory_budget: int | None,
    x: Tensor,
    linear_weight: Tensor,
    accum_dtype: torch.dtype,
    teacher_x: Tensor | None = None,
) -> None:
    """Raise TypeError unless `memory_budget` is an int or None, ValueError if it is below `least_memory`."""
    if memory_budget is None:
        return
    checks.integer(op, least=1, memory_budget=memory_budget)
    weight_grad = torch.is_grad_enabled() and linear_weight.requires_grad
    least = least_memory(x, linear_weight, accum_dtype=accum_dtype, weight_grad=weight_grad, teacher_x=teacher_x)
    if memory_budget < least:
        raise ValueError(f"{op}: memory_budget is {memory_budget}; it takes at least {least} bytes for these shapes")


@fused_linear_cross_entropy.checks_values
def _(linear_weight: Tensor, target: Tensor, ignore_index: int, **others: Any) -> None:
    checks.indices_below("fused_linear_cross_entropy", "target", target, linear_weight.shape[0], ignore_index)
