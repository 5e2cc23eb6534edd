"""Mixture of experts: each token goes through the gated MLPs of the few experts that it is routed to."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_core import checks
from liger_core.budget import least_chunk
from liger_core.contract import op, upcast

ACTIVATIONS = ("silu", "gelu_tanh")


@op(
    differentiable=("x", "gate_up_weight", "down_weight", "expert_weights"),
    autocast=("x", "gate_up_weight", "down_weight"),
    dimensions="x: t H, gate_up_weight: E G H, down_weight: E H I, expert_indices: t k, expert_weights: t k -> t H",
)
def fused_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    expert_indices: Tensor,
    expert_weights: Tensor,
    *,
    activation: str = "silu",
    limit: float | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """Sum over a token's experts e: y = Σ weight · ((act(x · gate_eᵀ) · (x · up_eᵀ)) · down_eᵀ).

    The operands of the products have x's dtype and are summed in float32. The activation is float32 inside, and rounded
    once. The sum over a token's experts is float32, rounded once. The same expert twice in a row counts twice.

    Args:
        x: ``[T, H]``, the tokens; float32, bfloat16 or float16.
        gate_up_weight: ``[E, 2·I, H]``, in x's dtype; each expert has I rows of the gate, then I rows of the other factor.
        down_weight: ``[E, H, I]``, in x's dtype.
        expert_indices: int64 or int32 ``[T, K]``, in [0, E); -1 is no expert and adds 0.
        expert_weights: ``[T, K]``, any float dtype.
        activation: ``"silu"`` or ``"gelu_tanh"``.
        limit: or None. Before the activation, the gate is clamped to at most limit, and the other factor to ±limit. A
            clamped one gets no gradient. It is the float32 sum that is compared, before any rounding to x's dtype: for one
            within a float32 sum's rounding of the limit, its order decides.
        memory_budget: bytes that a kernel may allocate beyond its inputs, result and gradients, at least `least_memory`.
            None is `temporary_memory`, which includes both factors of all tokens, saved for backward. Less memory costs
            time: backward computes them again. The reference ignores it and holds all of them.

    Returns:
        ``[T, H]``, in x's dtype. If the values can't be checked, on an accelerator or under torch.compile, the row of
        a token with an index out of range is NaN and gives no gradient.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, an option out of its range, a `memory_budget` below the least, or
            tensors on different devices.
        IndexError: an index out of range, on the CPU or with ``LIGER_KERNEL_CHECK=1``.

    Source:
        Shazeer et al., arXiv 1701.06538; one launch over sorted tokens: Gale et al., MegaBlocks, arXiv 2211.15841;
        backward without the experts' results: SonicMoE, arXiv 2512.14080.

    >>> x, one = torch.tensor([[1.0], [2.0]]), torch.ones(3, 1, 1)
    >>> fused_moe(x, torch.ones(3, 2, 1), one, torch.tensor([[0, 2], [-1, -1]]), torch.ones(2, 2))
    tensor([[1.4621],
            [0.0000]])
    """
    experts = gate_up_weight.shape[0]
    y = torch.zeros_like(upcast(x))
    for e in range(experts):
        chosen = expert_indices == e
        taken = chosen.any(1, keepdim=True)
        rows = upcast(x).where(taken, 0.0)  # not multiplied by 0: a row that an expert doesn't get may be infinite
        gate, up = (rows @ upcast(gate_up_weight[e]).T).chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        z = upcast((gate * up).to(x.dtype)) @ upcast(down_weight[e]).T
        y = y + (upcast(expert_weights).where(chosen, 0.0).sum(1, keepdim=True) * z).where(taken, 0.0)
    outside = ((expert_indices < -1) | (expert_indices >= experts)).any(1, keepdim=True)
    return y.to(x.dtype).masked_fill(outside, torch.nan)


def temporary_memory(
    tokens: int, columns: int, x: Tensor, gate_up_weight: Tensor, expert_indices: Tensor, *, x_grad: bool
) -> int:
    """Bytes that a kernel may allocate beyond inputs, result and gradients.

    A token has a slot for each of its experts. The bytes are for the order of the slots, and for each slot:

    - in x's dtype, the gate, the other factor, both of their gradients and their weighted product;
    - sums for the weight's gradient;
    - a gathered row of H, in x's dtype;
    - a float32 row of H that is summed over a token's slots, in backward if x wants a gradient.

    Args:
        tokens: how many tokens' slots are held at a time.
        columns: how many of the I columns are held at a time.
        x: the tokens.
        gate_up_weight: the weight of the first products.
        expert_indices: the experts of the tokens.
        x_grad: whether the float32 row is needed.
    """
    experts, width = gate_up_weight.shape[:2]
    slots = tokens * expert_indices.shape[1]
    hidden, size = x.shape[1], x.dtype.itemsize
    row = 5 * columns * size + width // 8 + 4 + hidden * (size + 4 * x_grad)
    return slots * (row + 64) + 64 * (experts + 1)


def least_memory(
    x: Tensor, gate_up_weight: Tensor, expert_indices: Tensor, *, differentiable: bool, x_grad: bool
) -> int:
    """Bytes below which a `memory_budget` is refused: one token forward, and `least_chunk` columns of all tokens backward."""
    columns = gate_up_weight.shape[1] // 2
    forward = temporary_memory(1, columns, x, gate_up_weight, expert_indices, x_grad=True)
    if not differentiable:
        return forward
    least = least_chunk(columns)
    return max(forward, temporary_memory(x.shape[0], least, x, gate_up_weight, expert_indices, x_grad=x_grad))


@fused_moe.checks
def _(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    expert_indices: Tensor,
    expert_weights: Tensor,
    activation: str,
    limit: float | None,
    memory_budget: int | None,
) -> None:
    name = "fused_moe"
    checks.floating(name, x=x, gate_up_weight=gate_up_weight, down_weight=down_weight, expert_weights=expert_weights)
    checks.dtypes(name, checks.INTEGERS, expert_indices=expert_indices)
    checks.ndim(name, 2, 2, x=x)
    checks.ndim(name, 3, 3, gate_up_weight=gate_up_weight, down_weight=down_weight)
    checks.ndim(name, 2, 2, expert_indices=expert_indices)
    checks.same_dtype(name, x=x, gate_up_weight=gate_up_weight, down_weight=down_weight)
    experts, width, hidden = gate_up_weight.shape
    if width % 2:
        raise ValueError(
            f"{name}: gate_up_weight has shape {tuple(gate_up_weight.shape)}; it takes an even number of rows, gate and up"
        )
    checks.shape(name, "x", x, (x.shape[0], hidden), "gate_up_weight's last dimension")
    checks.shape(name, "down_weight", down_weight, (experts, hidden, width // 2), "as gate_up_weight is [E, 2·I, H]")
    if expert_indices.shape[0] != x.shape[0] or expert_indices.shape[1] == 0:
        raise ValueError(
            f"{name}: expert_indices has shape {tuple(expert_indices.shape)}; it takes ({x.shape[0]}, K), "
            "K of them for each row of x, at least one"
        )
    checks.shape(name, "expert_weights", expert_weights, expert_indices.shape, "expert_indices' shape")
    if experts == 0 and x.shape[0] > 0:
        raise ValueError(
            f"{name}: gate_up_weight has shape {tuple(gate_up_weight.shape)}; it takes at least one expert"
        )
    checks.one_of(name, ACTIVATIONS, activation=activation)
    if limit is not None:
        checks.number(name, above=0, limit=limit)
        if limit == math.inf:
            raise ValueError(f"{name}: limit is {limit!r}; it takes a finite number, or None")
    if memory_budget is not None:
        checks.integer(name, least=1, memory_budget=memory_budget)
        grad = torch.is_grad_enabled()
        tensors = (x, gate_up_weight, down_weight, expert_weights)
        least = least_memory(
            x,
            gate_up_weight,
            expert_indices,
            differentiable=grad and any(tensor.requires_grad for tensor in tensors),
            x_grad=grad and x.requires_grad,
        )
        if memory_budget < least:
            raise ValueError(
                f"{name}: memory_budget is {memory_budget}; it takes at least {least} bytes for these shapes"
            )


@fused_moe.checks_values
def _(gate_up_weight: Tensor, expert_indices: Tensor, **others: object) -> None:
    experts = gate_up_weight.shape[0]
    wrong = (expert_indices < -1) | (expert_indices >= experts)
    if wrong.any():
        first = int(expert_indices[wrong][0])
        raise IndexError(f"fused_moe: expert_indices holds {first}; it takes -1 (no expert) to {experts - 1}")
