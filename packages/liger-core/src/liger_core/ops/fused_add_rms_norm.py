"""Residual addition followed by root mean square normalisation."""

from torch import Tensor

from liger_core import checks
from liger_core.contract import Recompute, op
from liger_core.ops.rms_norm import CASTING_MODES, rms_norm


@op(
    differentiable=("x", "residual", "weight"),
    dimensions="x: ... H, residual: ... H, weight: H -> ... H, ... H",
    # y is recomputed from h. Its residual is −0, which adds nothing.
    recompute=Recompute("weight", x=lambda results: results[1], residual=lambda results: _negative_zeros(results[1])),
)
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise the sum: h = x + residual, y = rms_norm(h, weight).

    x and residual have the same gradient: the one through y, plus the incoming gradient of h. Either incoming
    gradient may be absent.

    Args:
        x: ``[..., H]``; float32, bfloat16 or float16.
        residual: of x's shape and dtype.
        weight: ``[H]``; of any of those dtypes.
        eps: added to the mean square.
        offset: added to the weight; 1.0 in Gemma.
        casting_mode: ``"llama"``, ``"gemma"`` or ``"none"``, as in `rms_norm`.

    Returns:
        ``(y, h)``, each ``[..., H]`` in x's dtype. The sum is rounded to x's dtype before it is normalised.

    Raises:
        TypeError: a dtype or type that is not accepted, or a residual of another dtype than x's.
        ValueError: shapes that don't fit together, an unknown `casting_mode`, or tensors on different devices.

    Source:
        The normalisation before each block of Llama, with the residual addition that precedes it. Zhang and Sennrich,
        Root Mean Square Layer Normalization, arXiv 1910.07467.

    >>> import torch
    >>> fused_add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.ones(2))[1]
    tensor([[3., 4.]])
    """
    h = x + residual
    return rms_norm.reference(h, weight, eps, offset=offset, casting_mode=casting_mode), h


@fused_add_rms_norm.checks
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, casting_mode: str) -> None:
    checks.floating("fused_add_rms_norm", x=x, residual=residual, weight=weight)
    checks.same_dtype("fused_add_rms_norm", x=x, residual=residual)
    checks.ndim("fused_add_rms_norm", 1, x=x)
    checks.shape("fused_add_rms_norm", "residual", residual, x.shape, "x's shape")
    checks.shape("fused_add_rms_norm", "weight", weight, x.shape[-1:], "x's last dimension")
    checks.number("fused_add_rms_norm", eps=eps, offset=offset)
    checks.one_of("fused_add_rms_norm", CASTING_MODES, casting_mode=casting_mode)


def _negative_zeros(like: Tensor) -> Tensor:
    return like.new_full(like.shape[-1:], -0.0).expand_as(like)
