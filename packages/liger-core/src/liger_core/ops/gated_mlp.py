"""A gated multilayer perceptron: three linear layers, and the activation between them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_core import checks
from liger_core.budget import least_chunk
from liger_core.contract import op
from liger_core.ops.geglu import geglu
from liger_core.ops.swiglu import swiglu

ACTIVATIONS = ("silu", "gelu_tanh")


@op(
    differentiable=("x", "gate_weight", "up_weight", "down_weight"),
    autocast=("x", "gate_weight", "up_weight", "down_weight"),
    dimensions="x: ... H, gate_weight: i H, up_weight: i H, down_weight: o i -> ... o",
)
def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    activation: str = "silu",
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    memory_budget: int | None = None,
) -> Tensor:
    """Apply y = (act(x·gate_weightᵀ·gate_multiplier) · (x·up_weightᵀ))·down_weightᵀ · down_multiplier.

    The products are in x's dtype with float32 accumulation, under autocast in its dtype. The gate and up branches are rounded
    to x's dtype, and the activation is computed in float32 and rounded once, as by `swiglu` and `geglu`.

    Without a budget, or if everything fits it, the two branches are saved for backward. Otherwise only x is saved, and the
    branches are computed twice: that is the work of 22 products instead of 18. Then the forward goes by rows. The backward goes
    by columns of the branches with all rows at a time: each weight's gradient is made in one piece, and x's gradient is added
    up, in float32. Or it goes by rows, if that moves less memory: x's gradient is made in one piece, and the weights' are added
    up.

    In activation checkpointing without reentrance, only x is saved, with any budget, and before the forward runs. If nothing in
    the region keeps a tensor after this op, its forward isn't run again: the branches are computed twice, as by any other code.

    Args:
        x: ``[..., H]``; float32, bfloat16 or float16.
        gate_weight: ``[I, H]``, of x's dtype. Halves of one tensor of ``[2·I, H]`` are taken as they are.
        up_weight: ``[I, H]``, of x's dtype.
        down_weight: ``[O, I]``, of x's dtype.
        activation: ``"silu"`` or ``"gelu_tanh"``.
        gate_multiplier: scales the gate before SiLU.
        down_multiplier: scales the result, with SiLU.
        memory_budget: bytes that may be allocated beyond inputs, the result and gradients; at least `least_memory`. None keeps
            the branches. Less memory costs time, never accuracy. The reference ignores it.

    Returns:
        ``[..., O]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or a weight of another dtype than x's.
        ValueError: shapes that don't fit together, an unknown `activation`, a multiplier with ``"gelu_tanh"``, a
            `memory_budget` below the least, or tensors on different devices.

    Source:
        Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202; pieces of the sequence: Bekman et al., Arctic Long
        Sequence Training, arXiv 2506.13996. The multipliers are those of the Falcon-H1 model.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.eye(2)
    >>> gated_mlp(x, weight, weight, weight)
    tensor([[0.7311, 3.5232]])
    """
    gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
    if activation == "silu":
        y = swiglu.reference(gate, up, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    else:
        y = geglu.reference(gate, up)
    return F.linear(y, down_weight)


def accumulator_memory(x: Tensor, x_grad: bool) -> int:
    """Bytes of the accumulator of x's gradient, a sum over columns; none if the gradient is float32 itself."""
    return 4 * x.numel() if x_grad and x.dtype is not torch.float32 else 0


def whole_memory(x: Tensor, gate_weight: Tensor, grad: bool) -> int:
    """Bytes of all rows and columns at once.

    These are both branches and their product; in backward both branches, their gradients and the product's.
    """
    rows = x.numel() // max(1, x.shape[-1])
    return rows * gate_weight.shape[0] * x.dtype.itemsize * (5 if grad else 3)


def least_memory(x: Tensor, gate_weight: Tensor, *, x_grad: bool, grad: bool) -> int:
    """Bytes below which a `memory_budget` is refused.

    That is one row in forward, and in backward `least_chunk` columns beside the accumulator of x's gradient; or everything at
    once, if that is less.

    Args:
        x: the op's.
        gate_weight: the op's.
        x_grad: whether x wants a gradient.
        grad: whether anything does.
    """
    rows, inner = x.numel() // max(1, x.shape[-1]), gate_weight.shape[0]
    least = 3 * inner * x.dtype.itemsize
    if grad:
        least = max(least, accumulator_memory(x, x_grad) + 5 * rows * least_chunk(inner) * x.dtype.itemsize)
    return max(1, min(least, whole_memory(x, gate_weight, grad)))


@gated_mlp.checks
def _(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    activation: str,
    gate_multiplier: float,
    down_multiplier: float,
    memory_budget: int | None,
) -> None:
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    checks.floating("gated_mlp", x=x, **weights)
    checks.same_dtype("gated_mlp", x=x, **weights)
    checks.ndim("gated_mlp", 1, x=x)
    checks.ndim("gated_mlp", 2, 2, gate_weight=gate_weight, down_weight=down_weight)
    inner = gate_weight.shape[0]
    checks.shape("gated_mlp", "gate_weight", gate_weight, (inner, x.shape[-1]), "with x's last dimension")
    checks.shape("gated_mlp", "up_weight", up_weight, gate_weight.shape, "gate_weight's shape")
    checks.shape("gated_mlp", "down_weight", down_weight, (down_weight.shape[0], inner), "with gate_weight's rows")
    checks.one_of("gated_mlp", ACTIVATIONS, activation=activation)
    checks.number("gated_mlp", gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    if activation != "silu":
        for name, value in (("gate_multiplier", gate_multiplier), ("down_multiplier", down_multiplier)):
            if value != 1.0:
                raise ValueError(f"gated_mlp: {name} is {value!r}; with activation {activation!r} it takes 1.0")
    if memory_budget is not None:
        tensors = (x, gate_weight, up_weight, down_weight)
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        least = least_memory(x, gate_weight, x_grad=grad and x.requires_grad, grad=grad)
        checks.integer("gated_mlp", least=least, memory_budget=memory_budget)
