"""Residual addition and RMS norm in one pass: rms_norm's kernels, which add on their way in."""

from torch import Tensor

from liger_core import fused_add_rms_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops.rms_norm import launch_backward, launch_forward


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
    grad = True in needs
    y, h, inverse_rms = launch_forward(grad, x, residual, weight, eps, offset, casting_mode)
    return (y, h), (h, weight, inverse_rms) if grad else ()


def backward(
    needs: Needs, saved: Saved, dy: Tensor | None, dh: Tensor | None, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    needs_x, needs_residual, needs_weight = needs
    h, weight, inverse_rms = saved
    if dy is None:
        dsum, dweight = (None if dh is None else dh.clone()), None
    else:
        dsum, dweight = launch_backward(needs_x or needs_residual, needs_weight, dy, dh, h, weight, inverse_rms, offset)
    # Both gradients are one tensor: autograd adds in place only to a tensor that nobody else holds.
    return dsum if needs_x else None, dsum if needs_residual else None, dweight
