"""Root mean square normalisation."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import Recompute, op, upcast

CASTING_MODES = ("llama", "gemma", "none")


@op(differentiable=("x", "weight"), dimensions="x: ... H, weight: H -> ... H", recompute=Recompute("x", "weight"))
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """Divide each row by its root mean square, then scale it: y = x · rsqrt(mean(x²) + eps) · (offset + weight).

    Args:
        x: ``[..., H]``; float32, bfloat16 or float16.
        weight: ``[H]``, or None for no scaling.
        eps: added to the mean square.
        offset: added to the weight; 1.0 in Gemma.
        casting_mode: ``"llama"`` normalises in float32, rounds to x's dtype, then scales; ``"gemma"`` does all in
            float32 and rounds once; ``"none"`` does all in x's dtype.

    Returns:
        ``[..., H]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `weight` is not ``[H]``, an unknown `casting_mode`, or tensors on different devices.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467. The casting modes are those of the
        Llama and Gemma models.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2)).square().mean()
    tensor(1.0000)
    """
    wide = x if casting_mode == "none" else upcast(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting_mode == "gemma":
        return (normed * (offset + upcast(weight))).to(x.dtype)
    return (normed.to(x.dtype) * (offset + weight)).to(x.dtype)


@rms_norm.checks
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str) -> None:
    checks.floating("rms_norm", x=x, weight=weight)
    checks.ndim("rms_norm", 1, x=x)
    checks.shape("rms_norm", "weight", weight, x.shape[-1:], "x's last dimension")
    checks.number("rms_norm", eps=eps, offset=offset)
    checks.one_of("rms_norm", CASTING_MODES, casting_mode=casting_mode)
