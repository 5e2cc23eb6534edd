"""The product of a gated MLP's branches in 8 bits, without a tensor of it in more."""

from torch import Tensor
from torch.nn import functional as F

from liger_core import checks
from liger_core.contract import op, upcast
from liger_core.ops.gated_mlp import ACTIVATIONS
from liger_core.ops.quantize import Quantized, check_options, quantize


@op(differentiable=(), result=Quantized, grad_results=(), dimensions="gate: *, up: * -> *, *, *, *")
def quantize_gated(
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    scales: str = "power_of_two",
    rows: bool = True,
    columns: bool = False,
) -> Quantized:
    """`quantize` of act(gate) · up, with a scale for 128 columns of a row.

    act(gate) · up is computed in float32, and rounded to float8 alone: `swiglu` or `geglu` would round it to x's dtype before.
    A language's exponential decides where it lies next to the middle of two numbers of float8, or to a power of two times 448: so
    two languages may differ there by one step.

    Args:
        gate: ``[M, K]``; float32, bfloat16 or float16.
        up: ``[M, K]``, of gate's dtype.
        activation: ``"silu"`` or ``"gelu_tanh"``.
        scales: as of `quantize`.
        rows: whether the product is wanted.
        columns: whether its transpose is wanted.

    Returns:
        `Quantized`, which has no gradient: see `quantize_gated_gradients`.

    Raises:
        TypeError: a dtype or type that is not accepted, or another dtype than gate's.
        ValueError: gate is no matrix, up has another shape, an unknown activation or unknown scales, or neither rows nor columns
            are wanted.

    Source:
        The gate: Shazeer, arXiv 2002.05202; blocks: DeepSeek-V3, arXiv 2412.19437, section 3.3.

    >>> import torch
    >>> q = quantize_gated(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 100.0]]))
    >>> q.rows.float() * q.row_scales
    tensor([[  2.2500, 176.0000]])
    """
    product = activate(upcast(gate), activation) * upcast(up)
    return quantize.reference(product, scales=scales, rows=rows, columns=columns)


def activate(gate: Tensor, activation: str) -> Tensor:
    """act(gate), of a gate in float32 or more."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


@quantize_gated.checks
def _(gate: Tensor, up: Tensor, activation: str, scales: str, rows: bool, columns: bool) -> None:
    check("quantize_gated", activation, scales, rows, columns, gate=gate, up=up)


def check(op: str, activation: str, scales: str, rows: bool, columns: bool, **matrices: Tensor) -> None:
    """The arguments of an op on a gated MLP's branches, the first of which gives the others' shape and dtype."""
    checks.floating(op, **matrices)
    checks.same_dtype(op, **matrices)
    checks.ndim(op, 2, 2, **matrices)
    (first, leading), *others = matrices.items()
    for name, matrix in others:
        checks.shape(op, name, matrix, leading.shape, f"{first}'s shape")
    checks.one_of(op, ACTIVATIONS, activation=activation)
    check_options(op, scales, rows, columns)
