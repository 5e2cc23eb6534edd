"""Gradients of a gated MLP's branches in 8 bits, and their product once more."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_core.contract import op, upcast
from liger_core.ops.quantize import quantize
from liger_core.ops.quantize_gated import activate, check


class QuantizedGradients(NamedTuple):
    """Fields as of `Quantized`; None for what was not asked for.

    Attributes:
        gate_rows: the gradient of gate.
        gate_row_scales: its scales.
        gate_columns: its transpose.
        gate_column_scales: the transpose's scales.
        up_rows: the gradient of up.
        up_row_scales: its scales.
        up_columns: its transpose.
        up_column_scales: the transpose's scales.
        columns: the transpose of act(gate) · up, as of `quantize_gated`.
        column_scales: its scales.
    """

    gate_rows: Tensor | None
    gate_row_scales: Tensor | None
    gate_columns: Tensor | None
    gate_column_scales: Tensor | None
    up_rows: Tensor | None
    up_row_scales: Tensor | None
    up_columns: Tensor | None
    up_column_scales: Tensor | None
    columns: Tensor | None
    column_scales: Tensor | None


@op(
    differentiable=(),
    result=QuantizedGradients,
    grad_results=(),
    dimensions="dy: *, gate: *, up: * -> *, *, *, *, *, *, *, *, *, *",
)
def quantize_gated_gradients(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    scales: str = "power_of_two",
    rows: bool = True,
    columns: bool = True,
) -> QuantizedGradients:
    """`quantize` of the gradients of y = act(gate) · up, and of y again, which the forward didn't keep.

    Everything is computed in float32 and rounded to float8 alone, as by `quantize_gated`.

    Args:
        dy: ``[M, K]``, the gradient of y; float32, bfloat16 or float16.
        gate: ``[M, K]``, of dy's dtype.
        up: ``[M, K]``, of dy's dtype.
        activation: ``"silu"`` or ``"gelu_tanh"``.
        scales: as of `quantize`.
        rows: whether the gradients are wanted, which x's gradient takes.
        columns: whether their transposes and y's are wanted, which the weights' gradients take.

    Returns:
        `QuantizedGradients`, which have no gradient.

    Raises:
        TypeError: a dtype or type that is not accepted, or another dtype than dy's.
        ValueError: dy is no matrix, gate or up has another shape, an unknown activation or unknown scales, or neither rows nor
            columns are wanted.

    Source:
        As of `quantize_gated`.

    >>> q = quantize_gated_gradients(torch.ones(1, 2), torch.tensor([[0.0, 9.0]]), torch.tensor([[3.0, 100.0]]), columns=False)
    >>> q.gate_rows.float() * q.gate_row_scales, q.up_rows.float() * q.up_row_scales
    (tensor([[  1.5000, 104.0000]]), tensor([[0., 9.]]))
    """
    gate, up, dy = upcast(gate), upcast(up), upcast(dy)
    if activation == "silu":
        dgate = torch.ops.aten.silu_backward(dy * up, gate)
    else:
        dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh")
    act = activate(gate, activation)
    wanted = {"scales": scales, "rows": rows, "columns": columns}
    product = quantize.reference(act * up, scales=scales, rows=False, columns=columns)
    return QuantizedGradients(
        *quantize.reference(dgate, **wanted),
        *quantize.reference(dy * act, **wanted),
        product.columns,
        product.column_scales,
    )


@quantize_gated_gradients.checks
def _(dy: Tensor, gate: Tensor, up: Tensor, activation: str, scales: str, rows: bool, columns: bool) -> None:
    check("quantize_gated_gradients", activation, scales, rows, columns, dy=dy, gate=gate, up=up)
