"""Euclidean projection on the simplex."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast


@op(differentiable=("x",), dimensions="x: ... V@dim -> ... V@dim")
def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """Project each row on the probability simplex: y = max(x − tau, 0), with the one tau for which y adds up to 1.

    In descending order, the support is x₁ to xₖ for the greatest k with k·xₖ > x₁ + … + xₖ − 1, and tau =
    (x₁ + … + xₖ − 1) / k. An element that equals tau is outside: its output and its gradient are 0. Computed in float32
    and rounded once. A row with NaN or +inf, or −inf everywhere, gives NaN, and gradient 0.

    Args:
        x: ``[..., V, ...]``; float32, bfloat16 or float16.
        dim: the dimension of V.

    Returns:
        x's shape, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `dim` is not one of x's dimensions, or has no elements.

    Source:
        Martins and Astudillo, From Softmax to Sparsemax, arXiv 1602.02068.

    >>> sparsemax(torch.tensor([2.0, 1.75, 0.0]))
    tensor([0.6250, 0.3750, 0.0000])
    """
    wide = upcast(x).movedim(dim, -1)
    # The projection of a shifted row is the same. With its maximum at 0, sums lose no digits to the row's size.
    shifted = wide - wide.amax(-1, keepdim=True).detach()
    ordered = shifted.sort(-1, descending=True).values
    support = torch.arange(1, x.shape[dim] + 1, device=x.device) * ordered > ordered.cumsum(-1) - 1
    tau = (torch.where(support, ordered, 0).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    above = shifted - tau
    # max(above, 0), but unlike torch.relu with gradient 0 for NaN.
    y = torch.where(above > 0, above, above.detach().clamp(min=0))
    return y.movedim(-1, dim).to(x.dtype)


@sparsemax.checks
def _(x: Tensor, dim: int) -> None:
    checks.floating("sparsemax", x=x)
    checks.ndim("sparsemax", 1, x=x)
    checks.integer("sparsemax", dim=dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"sparsemax: dim is {dim}; it takes {-x.dim()} to {x.dim() - 1}, a dimension of x")
    if x.shape[dim] == 0:
        raise ValueError(f"sparsemax: x has shape {tuple(x.shape)}; it takes at least one element along dim {dim}")
