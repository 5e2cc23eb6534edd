"""How many rows or columns of a linear layer's logits fit a `memory_budget`, the same for contracts and for host code."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_core import checks

ACCUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MOST_CHUNKS = 512
"""How many chunks of rows or columns a `memory_budget` may lead to: a float32 sum over 100,000 chunks was off by a thousandth."""


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

    The bound is the memory of all rows at once; or, if it is less, that of `least_chunk` rows of the logits and then one column.
    With a teacher the latter is that of these rows beside the accumulator.
    """
    rows = x.shape[0]
    by_columns = weight_grad and teacher_x is None and accum_dtype != linear_weight.dtype
    none, least, every = (
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
        least = max(least, none + rows * 2 * x.dtype.itemsize)
    return min(least, every)


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
