"""RMS norm through NumPy, which stands for a compiler that Dynamo knows nothing about."""

import numpy as np
import torch
from torch import Tensor

from liger_core import rms_norm
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque


@opaque(writes=("y", "inverse_rms"))
def _launch_forward(
    y: Tensor, inverse_rms: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float
) -> None:
    rows = x.detach().numpy()
    np.divide(1.0, np.sqrt(np.square(rows).mean(-1, keepdims=True) + eps), out=inverse_rms.numpy())
    scale = 1.0 if weight is None else offset + weight.detach().numpy()
    np.multiply(rows * inverse_rms.numpy(), scale, out=y.numpy())


@opaque(writes=("dx", "dweight"))
def _launch_backward(
    dx: Tensor | None,
    dweight: Tensor | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    inverse_rms: Tensor,
    offset: float,
) -> None:
    normed = x.detach().numpy() * inverse_rms.numpy()
    g = dy.numpy() * (1.0 if weight is None else offset + weight.detach().numpy())
    if dx is not None:
        dx.numpy()[...] = (g - normed * (g * normed).mean(-1, keepdims=True)) * inverse_rms.numpy()
    if dweight is not None:
        dweight.numpy()[...] = (dy.numpy() * normed).reshape(-1, x.shape[-1]).sum(0)


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
    y = torch.empty_like(x)
    inverse_rms = x.new_empty(*x.shape[:-1], 1)
    _launch_forward(y, inverse_rms, x, weight, eps, offset)
    return y, (x, weight, inverse_rms) if any(needs) else ()


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    x, weight, inverse_rms = saved
    needs_x, needs_weight = needs
    dx = torch.empty_like(x) if needs_x else None
    dweight = torch.empty_like(weight) if needs_weight else None
    _launch_backward(dx, dweight, dy.contiguous(), x, weight, inverse_rms, offset)
    return dx, dweight


def refuses(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama"
) -> str | None:
    return None if x.dtype is torch.float32 else f"x is {x.dtype}; NumPy has float32 only"
