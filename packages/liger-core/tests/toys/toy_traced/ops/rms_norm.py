"""RMS norm: the textbook backward."""

import torch
from torch import Tensor

from liger_core import rms_norm
from liger_core.contract import Needs, Saved, implements


@implements(rms_norm)
def forward(
    needs: Needs,
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Saved]:
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scale = 1.0 if weight is None else offset + weight.float()
    return (wide * inverse_rms * scale).to(x.dtype), (x, weight, inverse_rms) if any(needs) else ()


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    x, weight, inverse_rms = saved
    needs_x, needs_weight = needs
    normed = x.float() * inverse_rms
    dx = dweight = None
    if needs_x:
        g = dy.float() * (1.0 if weight is None else offset + weight.float())
        dx = ((g - normed * (g * normed).mean(-1, keepdim=True)) * inverse_rms).to(x.dtype)
    if needs_weight:
        dweight = (dy.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)
    return dx, dweight


def refuses(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
) -> str | None:
    return "casting_mode 'none' is not written" if casting_mode == "none" else None
