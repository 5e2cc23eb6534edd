"""The square of a rectified linear unit, with or without a second factor."""

from torch import Tensor
from torch.nn import functional as F

from liger_core import checks
from liger_core.contract import Recompute, op, upcast


@op(differentiable=("x", "up"), dimensions="x: ..., up: ... -> ...", recompute=Recompute("x", "up"))
def relu_squared(x: Tensor, up: Tensor | None = None) -> Tensor:
    """Square the positive elements: y = max(x, 0)², times up if it is given.

    Computed in float32 and rounded once. Only x and up are saved for backward. A NaN stays one.

    Args:
        x: ``[..., H]``; float32, bfloat16 or float16.
        up: of x's shape and dtype, or None for no second factor.

    Returns:
        ``[..., H]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or an `up` of another dtype than x's.
        ValueError: an `up` of another shape than x's, or tensors on different devices.

    Source:
        So et al., Primer, arXiv 2109.08668. Nemotron has the plain form, BitNet b1.58 2B4T the gated one.

    >>> import torch
    >>> relu_squared(torch.tensor([-2.0, 3.0]))
    tensor([0., 9.])
    >>> relu_squared(torch.tensor([-2.0, 3.0]), torch.tensor([5.0, 0.5]))
    tensor([0.0000, 4.5000])
    """
    positive = F.relu(upcast(x))
    squared = positive * positive
    return (squared if up is None else squared * upcast(up)).to(x.dtype)


@relu_squared.checks
def _(x: Tensor, up: Tensor | None) -> None:
    checks.floating("relu_squared", x=x, up=up)
    checks.same_dtype("relu_squared", x=x, up=up)
    checks.ndim("relu_squared", 1, x=x)
    checks.shape("relu_squared", "up", up, x.shape, "x's shape")
