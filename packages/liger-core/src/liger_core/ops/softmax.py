"""Softmax over the last dimension."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast


@op(differentiable=("x",), dimensions="x: ... V -> ... V")
def softmax(x: Tensor) -> Tensor:
    """Exponentiate each row and divide it by its sum: y = exp(x − max(x)) / Σ exp(x − max(x)).

    Computed in float32 and rounded once. A row that is −inf everywhere gives NaN, as in PyTorch.

    Args:
        x: ``[..., V]``; float32, bfloat16 or float16. V is not limited.

    Returns:
        ``[..., V]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: `x` has no dimension.

    Source:
        `torch.nn.functional.softmax` with ``dim=-1``.

    >>> softmax(torch.tensor([[0.0, 0.0, -torch.inf]]))
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    return torch.softmax(upcast(x), dim=-1).to(x.dtype)


@softmax.checks
def _(x: Tensor) -> None:
    checks.floating("softmax", x=x)
    checks.ndim("softmax", 1, x=x)
