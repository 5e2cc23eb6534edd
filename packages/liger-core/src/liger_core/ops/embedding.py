"""Look-up of embedding rows."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast


@op(differentiable=("weight",), dimensions="indices: ..., weight: V h -> ... h")
def embedding(indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Take one row of the weight for each index: y[...] = weight[indices[...]].

    The weight's gradient sums, in float32, the incoming rows that share an index, and is rounded once.

    Args:
        indices: ``[...]``; int64 or int32, in [0, V).
        weight: ``[V, H]``; float32, bfloat16 or float16.
        padding_idx: the row whose gradient is zero; a negative one counts from the end. The row itself is looked up like
            any other.

    Returns:
        ``[..., H]``, in weight's dtype. If the values can't be checked, on an accelerator or under torch.compile, the row of
        an index out of range is NaN and gives no gradient.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `weight` is not ``[V, H]`` or has no rows, `padding_idx` is outside [−V, V), or tensors on
            different devices.
        IndexError: an index out of range, on the CPU or with ``LIGER_KERNEL_CHECK=1``.

    Source:
        `torch.nn.functional.embedding`.

    >>> embedding(torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    tensor([[5., 6.],
            [1., 2.]])
    """
    rows = weight.shape[0]
    # Not by F.embedding: on CUDA, in torch 2.11, its gradient of 1025 to 3072 indices is wrong if one warp is late
    # (pytorch/pytorch#187687).
    vectors = upcast(weight)[indices.clamp(0, rows - 1).flatten()].to(weight.dtype)
    vectors = vectors.view(*indices.shape, weight.shape[1])  # Dynamo takes an index without dimensions for a number
    if padding_idx is not None:
        vectors = torch.where((indices == padding_idx % rows)[..., None], vectors.detach(), vectors)
    outside = (indices < 0) | (indices >= rows)
    return vectors.masked_fill(outside[..., None], torch.nan)


@embedding.checks
def _(indices: Tensor, weight: Tensor, padding_idx: int | None) -> None:
    checks.dtypes("embedding", checks.INTEGERS, indices=indices)
    checks.floating("embedding", weight=weight)
    checks.ndim("embedding", 2, 2, weight=weight)
    rows = weight.shape[0]
    if rows == 0:
        raise ValueError(f"embedding: weight has shape {tuple(weight.shape)}; it takes at least one row")
    if padding_idx is not None:
        checks.integer("embedding", padding_idx=padding_idx)
        if not -rows <= padding_idx < rows:
            raise ValueError(f"embedding: padding_idx is {padding_idx}; it takes None or {-rows} to {rows - 1}")


@embedding.checks_values
def _(indices: Tensor, weight: Tensor, padding_idx: int | None) -> None:
    checks.indices_below("embedding", "indices", indices, weight.shape[0])
