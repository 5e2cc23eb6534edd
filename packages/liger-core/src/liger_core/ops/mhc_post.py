"""Hyper-connections after a layer: the residual streams are mixed, and each takes its part of the result."""

from torch import Tensor

from liger_core import checks
from liger_core.contract import op, product, upcast


@op(
    differentiable=("f", "x", "post", "res"),
    dimensions="f: ... c, x: ... N c, post: ... M, res: ... N M -> ... M c",
)
def mhc_post(f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """Mix n residual streams and add a layer's result to each: y_o = post_o · f + Σ_i res[i, o] · x_i.

    Computed in float32 and rounded once. With the coefficients of `mhc_pre`, Σ_i res[i, o] is 1, so each new stream is
    a convex combination of the old ones, and its part of the layer's result.

    Args:
        f: ``[..., C]``, the layer's result for `mhc_pre`'s h; of x's dtype.
        x: ``[..., n, C]``, the streams before the layer; float32, bfloat16 or float16.
        post: ``[..., n]``; of any of those dtypes.
        res: ``[..., n, n]``, from the old stream to the new one; of any of those dtypes.

    Returns:
        ``[..., n, C]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or an `f` of another dtype than x's.
        ValueError: shapes that don't fit together, or tensors on different devices.

    Source:
        Xie et al., mHC, arXiv 2512.24880. The order of res's dimensions is DeepSeek-V4's.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> mhc_post(torch.tensor([10.0, 20.0]), x, torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    tensor([[13., 24.],
            [ 1.,  2.]])
    """
    streams = upcast(x)
    mixed = product(upcast(res).to(streams.dtype).mT, streams)
    return (upcast(post).to(streams.dtype).unsqueeze(-1) * upcast(f).unsqueeze(-2) + mixed).to(x.dtype)


@mhc_post.checks
def _(f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> None:
    name = "mhc_post"
    checks.floating(name, f=f, x=x, post=post, res=res)
    checks.same_dtype(name, x=x, f=f)
    checks.ndim(name, 2, x=x)
    leading, n = x.shape[:-2], x.shape[-2]
    if n == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it takes at least one stream")
    checks.shape(name, "f", f, (*leading, x.shape[-1]), "x's shape without the streams")
    checks.shape(name, "post", post, (*leading, n), "a number per stream of x")
    checks.shape(name, "res", res, (*leading, n, n), "a number per pair of streams of x")
