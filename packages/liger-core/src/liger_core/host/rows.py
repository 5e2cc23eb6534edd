"""A tensor as rows, for kernels that work along the last dimension."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """A tensor whose rows lie at one distance from each other, each row's elements adjacent; and that distance.

    It is `x`, or a view of it, if x's strides allow: x is contiguous, or sliced or expanded in any dimension but the last.
    Otherwise it is a copy.

    Args:
        x: ``[..., H]``.

    Returns:
        The tensor, with as many rows of H elements as x, in x's order; and the distance of its rows, in elements.
    """
    columns = x.shape[-1]
    if x.is_contiguous():
        return x, columns
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)
