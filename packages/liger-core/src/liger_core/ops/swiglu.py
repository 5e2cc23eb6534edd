"""Gated linear unit with SiLU."""

from torch import Tensor
from torch.nn import functional as F

from liger_core import checks
from liger_core.contract import Recompute, op, upcast


@op(differentiable=("gate", "up"), dimensions="gate: ..., up: ... -> ...", recompute=Recompute("gate", "up"))
def swiglu(gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """Scale one branch by the SiLU of the other: y = silu(gate · gate_multiplier) · up · down_multiplier.

    Computed in float32 and rounded once. Only gate and up are saved for backward.

    Args:
        gate: ``[..., H]``; float32, bfloat16 or float16.
        up: of gate's shape and dtype.
        gate_multiplier: scales the gate before SiLU.
        down_multiplier: scales the product.

    Returns:
        ``[..., H]``, in gate's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or an `up` of another dtype than gate's.
        ValueError: an `up` of another shape than gate's, or tensors on different devices.

    Source:
        Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202. The multipliers are those of the Falcon-H1 model.

    >>> import torch
    >>> swiglu(torch.tensor([0.0, 100.0]), torch.tensor([5.0, 2.0]))
    tensor([  0., 200.])
    """
    return (F.silu(upcast(gate) * gate_multiplier) * upcast(up) * down_multiplier).to(gate.dtype)


@swiglu.checks
def _(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> None:
    checks.floating("swiglu", gate=gate, up=up)
    checks.same_dtype("swiglu", gate=gate, up=up)
    checks.ndim("swiglu", 1, gate=gate)
    checks.shape("swiglu", "up", up, gate.shape, "gate's shape")
    checks.number("swiglu", gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
