"""Residual addition and RMS norm in one pass, by rms_norm's kernels: a row stays in registers from the sum to the output."""

import torch
from torch import Tensor

from liger_core import fused_add_rms_norm
from liger_core.contract import Needs, Saved, implements
from liger_cutile.ops.rms_norm import launch_backward, launch_forward


@implements(fused_add_rms_norm)
def forward(
    needs: Needs,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[tuple[Tensor, Tensor], Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = torch.empty_like(x, memory_format=torch.contiguous_format)
    if True not in needs:
        launch_forward(y, h, None, x, residual, weight, eps, offset, casting_mode)
        return (y, h), ()
    inverse_rms = torch.empty((x.numel() // x.shape[-1], 1), dtype=torch.float32, device=x.device)
    launch_forward(y, h, inverse_rms, x, residual, weight, eps, offset, casting_mode)
    return (y, h), (h, weight, inverse_rms)


def backward(
    needs: Needs, saved: Saved, dy: Tensor | None, dh: Tensor | None, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    needs_x, needs_residual, needs_weight = needs
    h, weight, inverse_rms = saved
    if dy is None:
        dsum, dweight = (None if dh is None else dh.clone()), None
    else:
        needs_sum = needs_x or needs_residual
        dsum = torch.empty_like(h, memory_format=torch.contiguous_format) if needs_sum else None
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        launch_backward(dsum, dweight, dy, dh if needs_sum else None, h, weight, inverse_rms, offset)
    # Both gradients are one tensor: autograd adds in place only to a tensor that nobody else holds.
    return dsum if needs_x else None, dsum if needs_residual else None, dweight
