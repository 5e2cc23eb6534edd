"""Polynomial of normalised powers, an activation."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import Recompute, op, upcast


@op(
    differentiable=("x", "weight", "bias"),
    dimensions="x: ... H, weight: K, bias: B -> ... H",
    recompute=Recompute("x", "weight", "bias"),
)
def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Combine a row's normalised powers: y = w₀·n(x³) + w₁·n(x²) + w₂·n(x) + bias, n(u) = u · rsqrt(mean(u²) + eps).

    Computed in float32 and rounded once.

    Args:
        x: ``[..., H]``; float32, bfloat16 or float16.
        weight: ``[3]``, for the third, second and first power; of any of those dtypes. An infinite one makes
            everything that it enters infinite or NaN.
        bias: ``[1]`` or ``[]``; of any of those dtypes. Its gradient has its shape.
        eps: added to each mean square.

    Returns:
        ``[..., H]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `weight` is not ``[3]`` or `bias` not ``[1]`` or ``[]``, or tensors on different devices.

    Source:
        Zhuo et al., Polynomial Composition Activations, arXiv 2411.03884.

    >>> poly_norm(torch.tensor([[2.0, -2.0]]), torch.tensor([1.0, 2.0, 4.0]), torch.zeros(1))
    tensor([[ 7.0000, -3.0000]])
    """
    wide = upcast(x)
    w0, w1, w2 = upcast(weight)
    return (w0 * _norm(wide**3, eps) + w1 * _norm(wide**2, eps) + w2 * _norm(wide, eps) + upcast(bias)).to(x.dtype)


def _norm(u: Tensor, eps: float) -> Tensor:
    return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)


@poly_norm.checks
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    checks.floating("poly_norm", x=x, weight=weight, bias=bias)
    checks.ndim("poly_norm", 1, x=x)
    checks.shape("poly_norm", "weight", weight, (3,), "one for each power")
    if bias.numel() != 1 or bias.dim() > 1:
        raise ValueError(f"poly_norm: bias has shape {tuple(bias.shape)}; it takes (1,) or ()")
    checks.number("poly_norm", eps=eps)
