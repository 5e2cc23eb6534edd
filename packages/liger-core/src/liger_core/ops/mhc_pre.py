"""Hyper-connections before a layer: its input, made from the residual streams, and the coefficients of each row."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, product, upcast


class MHCPre(NamedTuple):
    """A layer's input, the coefficients that made it, and those that `mhc_post` takes. All have a gradient.

    Attributes:
        h: ``[..., C]`` in x's dtype: the input of the layer.
        pre: float32 ``[..., n]``: how much of each stream is in h.
        post: float32 ``[..., n]``: how much of the layer's result each stream gets; None for the head.
        res: float32 ``[..., n, n]``, from stream to stream: how they are mixed; None for the head.
    """

    h: Tensor
    pre: Tensor
    post: Tensor | None
    res: Tensor | None


@op(
    differentiable=("x", "weight", "bias", "alpha"),
    result=MHCPre,
    dimensions="x: ... N C, weight: M K, bias: M, alpha: A -> ... C, ... N, ... N, ... N M",
)
def mhc_pre(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    alpha: Tensor,
    *,
    iterations: int = 20,
    norm_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    pre_eps: float = 0.0,
    post_multiplier: float = 2.0,
) -> MHCPre:
    """Make a layer's input from n residual streams: h = Σ pre_i · x_i. The coefficients are made from the streams as well.

    With v = x flattened to n·C, m = (v · weightᵀ) · rsqrt(mean(v²) + norm_eps) has M = n² + 2·n values in a row:

    - pre = σ(alpha₀ · m[:n] + bias[:n]) + pre_eps
    - post = post_multiplier · σ(alpha₁ · m[n:2n] + bias[n:2n])
    - res = Sinkhorn(alpha₂ · m[2n:] + bias[2n:], as n × n): softmax over the last dimension, + sinkhorn_eps, then the
      columns (sums over the dimension before), then `iterations` − 1 times rows and columns; each step divides by the
      sum + sinkhorn_eps.

    With M = n it is the head, which merges the streams after the last layer: it gives only h and pre. Everything is computed in
    float32, including the product of a bfloat16 x with a float32 weight.

    Args:
        x: ``[..., n, C]``; float32, bfloat16 or float16.
        weight: ``[n² + 2·n, n·C]``, or ``[n, n·C]`` for the head; of any of those dtypes.
        bias: ``[n² + 2·n]``, or ``[n]``; of any of those dtypes.
        alpha: ``[3]``, or ``[1]``; of any of those dtypes.
        iterations: Sinkhorn's iterations; at least 1.
        norm_eps: added to the mean square of v.
        sinkhorn_eps: added to the softmax, and to each sum; at least float32's smallest normal number. With 0, a column whose
            exponentials underflow would be 0 / 0.
        pre_eps: added to pre.
        post_multiplier: the upper bound of post.

    Returns:
        `MHCPre`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, `iterations` below 1, or tensors on different devices.

    Source:
        Xie et al., mHC, arXiv 2512.24880, after Zhu et al., Hyper-Connections, arXiv 2409.19606. In DeepSeek-V4.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> h, pre, post, res = mhc_pre(x, torch.zeros(8, 4), torch.zeros(8), torch.ones(3))
    >>> h, pre, post
    (tensor([2., 3.]), tensor([0.5000, 0.5000]), tensor([1., 1.]))
    """
    n, streams = x.shape[-2], upcast(x)
    v = streams.flatten(-2)
    rows, scale, shift = upcast(weight).to(v.dtype), upcast(alpha).to(v.dtype), upcast(bias).to(v.dtype)
    mixes = product(v.reshape(-1, v.shape[-1]), rows.T).view(*v.shape[:-1], rows.shape[0])
    m = mixes * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(scale[0] * m[..., :n] + shift[:n]) + pre_eps
    h = (pre.unsqueeze(-1) * streams).sum(-2).to(x.dtype)
    if weight.shape[0] == n:
        return MHCPre(h, pre, None, None)
    post = post_multiplier * torch.sigmoid(scale[1] * m[..., n : 2 * n] + shift[n : 2 * n])
    logits = scale[2] * m[..., 2 * n :] + shift[2 * n :]
    res = torch.softmax(logits.view(*x.shape[:-2], n, n), -1) + sinkhorn_eps
    res = res / (res.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(iterations - 1):
        res = res / (res.sum(-1, keepdim=True) + sinkhorn_eps)
        res = res / (res.sum(-2, keepdim=True) + sinkhorn_eps)
    return MHCPre(h, pre, post, res)


@mhc_pre.checks
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    alpha: Tensor,
    iterations: int,
    norm_eps: float,
    sinkhorn_eps: float,
    pre_eps: float,
    post_multiplier: float,
) -> None:
    name = "mhc_pre"
    checks.floating(name, x=x, weight=weight, bias=bias, alpha=alpha)
    checks.ndim(name, 2, x=x)
    checks.ndim(name, 2, 2, weight=weight)
    n, columns = x.shape[-2], x.shape[-2] * x.shape[-1]
    if columns == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it takes at least one stream, of one column")
    if weight.shape[0] not in (n, n * n + 2 * n):
        takes = f"{n * n + 2 * n} of them for {n} streams, or {n} for the head"
        raise ValueError(f"{name}: weight has {weight.shape[0]} rows {tuple(weight.shape)}; it takes {takes}")
    checks.shape(name, "weight", weight, (weight.shape[0], columns), "a column per element of x's last two dimensions")
    checks.shape(name, "bias", bias, weight.shape[:1], "a number per row of weight")
    head = weight.shape[0] == n
    checks.shape(name, "alpha", alpha, (1,) if head else (3,), "for the head" if head else "for pre, post and res")
    checks.integer(name, least=1, iterations=iterations)
    checks.number(name, least=0, norm_eps=norm_eps)
    checks.number(name, least=torch.finfo(torch.float32).tiny, sinkhorn_eps=sinkhorn_eps)
    checks.number(name, pre_eps=pre_eps, post_multiplier=post_multiplier)
