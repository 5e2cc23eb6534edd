"""Attention of each position to its neighbours."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast


@op(differentiable=("q", "k", "v"), dimensions="q: b h S D, k: b h S D, v: b h S D -> b h S D")
def fused_neighborhood_attention(
    q: Tensor, k: Tensor, v: Tensor, *, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Attend to a window of the sequence: y = softmax(q·kᵀ·scale)·v over the positions that each one sees.

    Position i sees j = i + o·dilation for o from −(kernel_size // 2) to kernel_size // 2, where 0 ≤ j < S; at the ends
    of the sequence the window is cut off, not shifted. Computed in float32 and rounded once. Cost and memory grow
    with S·kernel_size, never with S².

    Args:
        q: ``[B, H, S, D]``; float32, bfloat16 or float16.
        k: of q's shape and dtype.
        v: of q's shape and dtype.
        kernel_size: positions in a whole window; odd. It may be larger than S.
        dilation: the distance between the positions that are seen.
        scale: multiplies the scores; None is 1/√D.

    Returns:
        ``[B, H, S, D]``, in q's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or tensors of different dtypes.
        ValueError: tensors of different shapes or on different devices, a `kernel_size` that is not odd and positive,
            or a `dilation` that is not positive.

    Source:
        Hassani et al., Neighborhood Attention Transformer, arXiv 2204.07143, in one dimension; Hassani and Shi, Dilated
        Neighborhood Attention Transformer, arXiv 2209.15001.

    >>> v = torch.arange(4.0).view(1, 1, 4, 1)
    >>> fused_neighborhood_attention(torch.zeros_like(v), v, v, kernel_size=3).flatten()
    tensor([0.5000, 1.0000, 2.0000, 2.5000])
    """
    length, head = q.shape[-2:]
    reach = min(kernel_size // 2, max(length - 1, 0) // dilation)
    position = torch.arange(length, device=q.device).unsqueeze(1)
    neighbour = position + torch.arange(-reach, reach + 1, device=q.device) * dilation
    outside = (neighbour < 0) | (neighbour >= length)
    neighbour = neighbour.clamp(0, length - 1)
    # Not matrix products: if autocast is on in the backward, it would round their operands.
    scores = (upcast(q).unsqueeze(-2) * upcast(k)[:, :, neighbour]).sum(-1)
    scores = scores * (head**-0.5 if scale is None else scale)
    weights = scores.masked_fill(outside, -torch.inf).softmax(-1)
    return (weights.unsqueeze(-1) * upcast(v)[:, :, neighbour]).sum(-2).to(q.dtype)


@fused_neighborhood_attention.checks
def _(q: Tensor, k: Tensor, v: Tensor, kernel_size: int, dilation: int, scale: float | None) -> None:
    checks.floating("fused_neighborhood_attention", q=q, k=k, v=v)
    checks.same_dtype("fused_neighborhood_attention", q=q, k=k, v=v)
    checks.ndim("fused_neighborhood_attention", 4, 4, q=q)
    checks.shape("fused_neighborhood_attention", "k", k, q.shape, "q's shape")
    checks.shape("fused_neighborhood_attention", "v", v, q.shape, "q's shape")
    checks.integer("fused_neighborhood_attention", least=1, kernel_size=kernel_size, dilation=dilation)
    if kernel_size % 2 == 0:
        raise ValueError(f"fused_neighborhood_attention: kernel_size is {kernel_size}; it takes an odd int")
    if scale is not None:
        checks.number("fused_neighborhood_attention", scale=scale)
