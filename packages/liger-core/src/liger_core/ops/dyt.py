"""Dynamic tanh, a substitute for normalisation."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import Recompute, op, upcast


@op(
    differentiable=("x", "alpha", "gamma", "beta"),
    dimensions="x: ... h, alpha: A, gamma: h, beta: h -> ... h",
    recompute=Recompute("x", "alpha", "gamma", "beta"),
)
def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Squash each element, then scale and shift it: y = gamma · tanh(alpha · x) + beta.

    Computed in float32 and rounded once. alpha is clamped to ±1e30, so that an infinite one gives tanh 0 where x is 0.

    Args:
        x: ``[..., H]``; float32, bfloat16 or float16.
        alpha: ``[1]``; of any of those dtypes.
        gamma: ``[H]``; of any of those dtypes.
        beta: ``[H]``; of any of those dtypes. None for no shift.

    Returns:
        ``[..., H]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `alpha` is not ``[1]``, `gamma` or `beta` is not ``[H]``, or tensors on different devices.

    Source:
        Zhu et al., Transformers without Normalization, arXiv 2503.10622.

    >>> dyt(torch.tensor([[0.0, 100.0]]), torch.ones(1), torch.full((2,), 2.0), torch.ones(2))
    tensor([[1., 3.]])
    """
    y = upcast(gamma) * torch.tanh(upcast(alpha).clamp(-1e30, 1e30) * upcast(x))
    if beta is not None:
        y = y + upcast(beta)
    return y.to(x.dtype)


@dyt.checks
def _(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> None:
    checks.floating("dyt", x=x, alpha=alpha, gamma=gamma, beta=beta)
    checks.ndim("dyt", 1, x=x)
    checks.shape("dyt", "alpha", alpha, (1,))
    checks.shape("dyt", "gamma", gamma, x.shape[-1:], "x's last dimension")
    checks.shape("dyt", "beta", beta, x.shape[-1:], "x's last dimension")
