"""Layer normalisation."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import Recompute, op, upcast


@op(
    differentiable=("x", "weight", "bias"),
    dimensions="x: ... H, weight: H, bias: H -> ... H",
    recompute=Recompute("x", "weight", "bias"),
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Centre each row, divide it by its standard deviation, then scale and shift it: y = (x − μ)·rstd·weight + bias.

    rstd = 1 / √(mean((x − μ)²) + eps). Computed in float32 and rounded once; the statistics stay in float32. The
    variance is that of the centred row, so a mean of a thousand standard deviations does no harm.

    Args:
        x: ``[..., H]``; float32, bfloat16 or float16.
        weight: ``[H]``; of any of those dtypes. Where it is infinite, y is infinite or NaN, and so is a row's
            gradient.
        bias: ``[H]``; of any of those dtypes. None for no shift.
        eps: added to the variance.

    Returns:
        ``[..., H]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `weight` or `bias` is not ``[H]``, or tensors on different devices.

    Source:
        Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450; `torch.nn.functional.layer_norm` over the last
        dimension.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), None)
    tensor([[-1.0000,  1.0000]])
    """
    wide = upcast(x)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * upcast(weight)
    if bias is not None:
        y = y + upcast(bias)
    return y.to(x.dtype)


@layer_norm.checks
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    checks.floating("layer_norm", x=x, weight=weight, bias=bias)
    checks.ndim("layer_norm", 1, x=x)
    checks.shape("layer_norm", "weight", weight, x.shape[-1:], "x's last dimension")
    checks.shape("layer_norm", "bias", bias, x.shape[-1:], "x's last dimension")
    checks.number("layer_norm", eps=eps)
