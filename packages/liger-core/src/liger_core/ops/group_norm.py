"""Group normalisation."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast


@op(differentiable=("x", "weight", "bias"), dimensions="x: n C *, weight: C, bias: C -> n C *")
def group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Normalise each sample's groups of channels, then scale and shift each channel: y = (x − μ)·rstd·weight + bias.

    μ and rstd = 1 / √(mean((x − μ)²) + eps) are those of one sample's group: C / num_groups neighbouring channels at
    every position. Computed in float32 and rounded once. The variance is that of the centred group, so a mean of a
    thousand standard deviations does no harm.

    Args:
        x: ``[N, C, ...]``; float32, bfloat16 or float16.
        num_groups: a divisor of C.
        weight: ``[C]``; of any of those dtypes. None for no scaling. An infinite one makes its group's gradient infinite
            or NaN.
        bias: ``[C]``; of any of those dtypes. None for no shift.
        eps: added to the variance.

    Returns:
        x's shape, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `num_groups` doesn't divide C, `weight` or `bias` is not ``[C]``, or tensors on different devices.

    Source:
        Wu and He, Group Normalization, arXiv 1803.08494; `torch.nn.functional.group_norm`.

    >>> group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2, None, None)
    tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """
    channels = x.shape[1]
    grouped = torch.unflatten(upcast(x), 1, (num_groups, channels // num_groups))
    each = tuple(range(2, grouped.dim()))
    centred = grouped - grouped.mean(each, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(each, keepdim=True) + eps)).flatten(1, 2)
    per_channel = (channels, *[1] * (x.dim() - 2))
    if weight is not None:
        y = y * upcast(weight).view(per_channel)
    if bias is not None:
        y = y + upcast(bias).view(per_channel)
    return y.to(x.dtype)


@group_norm.checks
def _(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    checks.floating("group_norm", x=x, weight=weight, bias=bias)
    checks.ndim("group_norm", 2, x=x)
    checks.integer("group_norm", least=1, num_groups=num_groups)
    channels = x.shape[1]
    if channels % num_groups:
        raise ValueError(f"group_norm: num_groups is {num_groups}; it takes a divisor of x's {channels} channels")
    checks.shape("group_norm", "weight", weight, (channels,), "x's channels")
    checks.shape("group_norm", "bias", bias, (channels,), "x's channels")
    checks.number("group_norm", eps=eps)
