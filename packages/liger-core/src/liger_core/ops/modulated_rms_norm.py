"""Adaptive normalisation: RMS norm, scaled and shifted by a condition."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast
from liger_core.ops.rms_norm import CASTING_MODES, rms_norm


@op(
    differentiable=("x", "weight", "scale", "shift"),
    dimensions="x: ... H, weight: H, scale: ... H, shift: ... H -> ... H",
)
def modulated_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    """Modulate the RMS norm of each row: y = rms_norm(x, weight) · (1 + scale) + shift.

    The norm is rounded to x's dtype as `rms_norm` rounds it. The rest is computed in float32 in every mode, and rounded
    once. 1 + scale is never rounded to half precision, in which a small scale would vanish.

    scale and shift broadcast to x by PyTorch's rules, independently of each other. If x is ``[B, S, H]``, a scale of
    ``[B, 1, H]`` costs no copy, and its gradient is summed over S in float32 and rounded once.

    Args:
        x: ``[..., H]``; float32, bfloat16 or float16.
        weight: ``[H]``, or None for no weight.
        scale: ``[..., H]``, whose other dimensions are x's, 1 or absent. It may be float32 beside a half-precision x.
        shift: as scale, with a shape of its own; or None for no shift.
        eps: added to the mean square.
        offset: added to the weight; 1.0 in Gemma.
        casting_mode: that of the norm, as in `rms_norm`.

    Returns:
        ``[..., H]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `weight` is not ``[H]``; a `scale` or `shift` that doesn't broadcast to x; an unknown `casting_mode`; or
            tensors on different devices.

    Source:
        Peebles and Xie, Scalable Diffusion Models with Transformers, arXiv 2212.09748, on the norm of Zhang and Sennrich,
        arXiv 1910.07467.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> modulated_rms_norm(x, None, torch.tensor([0.0, 1.0]), torch.tensor([0.5]).expand(2))
    tensor([[1.3485, 2.7627]])
    """
    y = upcast(rms_norm.reference(x, weight, eps, offset=offset, casting_mode=casting_mode)) * (1 + upcast(scale))
    return (y if shift is None else y + upcast(shift)).to(x.dtype)


@modulated_rms_norm.checks
def _(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
) -> None:
    checks.floating("modulated_rms_norm", x=x, weight=weight, scale=scale, shift=shift)
    checks.ndim("modulated_rms_norm", 1, x=x)
    checks.shape("modulated_rms_norm", "weight", weight, x.shape[-1:], "x's last dimension")
    _broadcasts("scale", scale, x.shape)
    if shift is not None:
        _broadcasts("shift", shift, x.shape)
    checks.number("modulated_rms_norm", eps=eps, offset=offset)
    checks.one_of("modulated_rms_norm", CASTING_MODES, casting_mode=casting_mode)


def _broadcasts(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless the tensor has x's last dimension, and before it x's dimensions, 1 or none."""
    sizes, fits = tensor.shape, 1 <= tensor.dim() <= len(shape)
    if fits:
        pairs = zip(sizes[:-1], shape[len(shape) - len(sizes) : -1], strict=True)
        fits = sizes[-1] == shape[-1] and all(size in (1, whole) for size, whole in pairs)
    if not fits:
        takes = f"what broadcasts to x's {tuple(shape)} and ends in {shape[-1]}"
        raise ValueError(f"modulated_rms_norm: {name} has shape {tuple(sizes)}; it takes {takes}")
