"""Gated linear unit with GELU."""

from torch import Tensor
from torch.nn import functional as F

from liger_core import checks
from liger_core.contract import Recompute, op, upcast


@op(differentiable=("gate", "up"), dimensions="gate: ..., up: ... -> ...", recompute=Recompute("gate", "up"))
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Scale one branch by the GELU of the other: y = gelu(gate) · up, with the tanh approximation of GELU.

    Computed in float32 and rounded once.

    Args:
        gate: ``[..., H]``; float32, bfloat16 or float16.
        up: of gate's shape and dtype.

    Returns:
        ``[..., H]``, in gate's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or an `up` of another dtype than gate's.
        ValueError: an `up` of another shape than gate's, or tensors on different devices.

    Source:
        Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.

    >>> import torch
    >>> geglu(torch.tensor([0.0, 100.0]), torch.tensor([5.0, 2.0]))
    tensor([  0., 200.])
    """
    return (F.gelu(upcast(gate), approximate="tanh") * upcast(up)).to(gate.dtype)


@geglu.checks
def _(gate: Tensor, up: Tensor) -> None:
    checks.floating("geglu", gate=gate, up=up)
    checks.same_dtype("geglu", gate=gate, up=up)
    checks.ndim("geglu", 1, gate=gate)
    checks.shape("geglu", "up", up, gate.shape, "gate's shape")
