"""Linear layers and gated MLPs whose matrix products have operands in 8 bits: `quantize` around PyTorch's scaled product."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_core import checks, recompute
from liger_core.backend import Unsupported
from liger_core.ops.gated_mlp import ACTIVATIONS
from liger_core.ops.quantize import SCALES, Quantized, quantize
from liger_core.ops.quantize_gated import quantize_gated
from liger_core.ops.quantize_gated_gradients import quantize_gated_gradients
from liger_core.torch_state import compiling

MULTIPLE = 16
"""Sizes of a product's operands are multiples of so many elements."""
PRODUCTS = (9, 0)
"""The compute capability of the CUDA devices that multiply by scales of blocks."""


class _Operand(NamedTuple):
    """Rows in float8_e4m3fn, ``[N, K]``, which a product multiplies along K.

    Attributes:
        scales: those of `quantize`.
        block: the elements that share one.
    """

    values: Tensor
    scales: Tensor
    block: str


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: str = "power_of_two",
    quantized: Quantized | None = None,
) -> Tensor:
    """A linear layer with operands in 8 bits: y = Q(x) · Q(weight)ᵀ + bias.

    Both gradients are products of operands in 8 bits as well: dx = Q(dy) · Q(weight), and dweight = Q(dyᵀ) · Q(xᵀ)ᵀ, along
    tokens. Q is `quantize` with a scale for each 128 columns of a row, and for each 128 × 128 elements of a weight. A product is
    rounded once; an H200 adds 128 numbers with about 14 bits, and these sums in float32. For backward x is kept in 8 bits, if
    the weight needs a gradient, and the weight as it is. Inside of `lean`, x in 8 bits is not kept either if x can be recomputed.
    Nothing is kept from one call to the next.

    Args:
        x: ``[..., K]``; bfloat16, float16 or float32. K is a multiple of 16.
        weight: ``[N, K]``, in x's dtype. N is a multiple of 16.
        bias: ``[N]``, in x's dtype.
        scales: as of `quantize`.
        quantized: `quantize_input` of x, which several weights may share.

    Returns:
        ``[..., N]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or another dtype than x's.
        ValueError: shapes that don't fit together, a size that is no multiple of 16, or unknown scales. Or `quantized` is of
            another shape, device or block than `quantize_input(x)`, or lacks the columns that the weight's gradient takes.
        Unsupported: x is on a device that has no such product. On a CPU the product is of the same numbers in float32.

    Source:
        DeepSeek-V3, arXiv 2412.19437, section 3.3.

    >>> x, weight = torch.eye(16), torch.full((16, 16), 0.3)
    >>> scaled_linear(x, weight)[0, :2]
    tensor([0.3125, 0.3125])
    """
    _check(x, weight, bias, scales)
    rows = x.reshape(-1, x.shape[-1])
    columns = torch.is_grad_enabled() and weight.requires_grad
    if quantized is None:
        quantized = _quantized(rows, scales, columns)
    else:
        _check_quantized(quantized, rows, columns)
    y = cast("Any", _ScaledLinear).apply(x, weight, scales, quantized)
    return y if bias is None else y + bias


def scaled_gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    activation: str = "silu",
    scales: str = "power_of_two",
) -> Tensor:
    """A gated MLP with operands in 8 bits: y = Q(act(gate) · up) · Q(down_weight)ᵀ, where gate = Q(x) · Q(gate_weight)ᵀ.

    Q and the products are those of `scaled_linear`, also in backward. The branches gate and up are rounded to x's dtype. Their
    product and the branches' gradients are computed in float32 and rounded to float8 alone, by `quantize_gated` and
    `quantize_gated_gradients`: they never lie in memory in more. For backward both branches are kept, and x in 8 bits if one of
    their weights needs a gradient. Inside of `lean`, x in 8 bits is not kept if x can be recomputed.

    Args:
        x: ``[..., H]``; bfloat16, float16 or float32. H is a multiple of 16.
        gate_weight: ``[I, H]``, in x's dtype. I is a multiple of 16.
        up_weight: ``[I, H]``, in x's dtype.
        down_weight: ``[O, I]``, in x's dtype. O is a multiple of 16.
        activation: ``"silu"`` or ``"gelu_tanh"``.
        scales: as of `quantize`.

    Returns:
        ``[..., O]``, in x's dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or another dtype than x's.
        ValueError: shapes that don't fit together, a size that is no multiple of 16, an unknown activation or unknown scales.
        Unsupported: as of `scaled_linear`.

    Source:
        As of `scaled_linear`; the gate: Shazeer, arXiv 2002.05202.

    >>> x, weight = torch.eye(16), 4 * torch.eye(16)
    >>> scaled_gated_mlp(x, weight, weight, torch.eye(16))[0, :2]
    tensor([16.,  0.])
    """
    name = "scaled_gated_mlp"
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    _check_weights(name, x, scales, **weights)
    checks.shape(name, "gate_weight", gate_weight, (gate_weight.shape[0], x.shape[-1]), "x's columns")
    checks.shape(name, "up_weight", up_weight, gate_weight.shape, "gate_weight's shape")
    checks.shape(name, "down_weight", down_weight, (down_weight.shape[0], gate_weight.shape[0]), "gate_weight's rows")
    checks.one_of(name, ACTIVATIONS, activation=activation)
    columns = torch.is_grad_enabled() and (gate_weight.requires_grad or up_weight.requires_grad)
    quantized = _quantized(x.reshape(-1, x.shape[-1]), scales, columns)
    return cast("Any", _ScaledGatedMlp).apply(x, gate_weight, up_weight, down_weight, activation, scales, quantized)


def quantize_input(x: Tensor, *, scales: str = "power_of_two", columns: bool = True) -> Quantized:
    """x in 8 bits, for several calls of `scaled_linear` with the same x, such as those of q, k and v.

    Args:
        x: ``[..., K]``; bfloat16, float16 or float32.
        scales: as of `quantize`.
        columns: whether a weight needs a gradient.

    Returns:
        `quantize` of x as a matrix, with rows of zeros up to a multiple of 16.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: x has no dimension, or unknown scales.

    >>> x, gate, up = torch.eye(16), torch.full((16, 16), 0.3), torch.ones(16, 16)
    >>> once = quantize_input(x, columns=False)
    >>> scaled_linear(x, gate, quantized=once)[0, 0], scaled_linear(x, up, quantized=once)[0, 0]
    (tensor(0.3125), tensor(1.))
    """
    checks.floating("quantize_input", x=x)
    checks.ndim("quantize_input", 1, x=x)
    checks.one_of("quantize_input", SCALES, scales=scales)
    checks.flag("quantize_input", columns=columns)
    return _quantized(x.reshape(-1, x.shape[-1]), scales, columns)


def _quantized(x: Tensor, scales: str, columns: bool) -> Quantized:
    with torch.no_grad():
        quantized = quantize(_padded(x), scales=scales, columns=columns)
    if columns and not compiling() and (lean_hooks := recompute.active()) is not None:
        results = quantized.columns, quantized.column_scales
        lean_hooks.remember(_FROM_X, {"x": x}, {"scales": scales}, results, _columns_alone)
    return quantized


_FROM_X = recompute.Recompute()
"""Columns are recomputed only if x is: otherwise they take half of its memory."""


def _columns_alone(x: Tensor, scales: str) -> tuple[Tensor | None, Tensor | None]:
    return quantize(_padded(x), scales=scales, rows=False, columns=True)[2:]


def why_not(device: torch.device) -> str | None:
    """Why `scaled_linear` doesn't run on a device, or None."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return "it runs on NVIDIA GPUs of compute capability 9.0"
    if not hasattr(F, "scaled_mm"):
        return f"it takes torch 2.10 or later, and this is {torch.__version__}"
    capability = torch.cuda.get_device_capability(device)
    if capability != PRODUCTS:
        return f"it runs on compute capability 9.0, and this device has {capability[0]}.{capability[1]}"
    return None


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, scales: str) -> None:
    name = "scaled_linear"
    _check_weights(name, x, scales, weight=weight)
    checks.shape(name, "weight", weight, (weight.shape[0], x.shape[-1]), "x's columns")
    if bias is not None:
        checks.floating(name, bias=bias)
        checks.same_dtype(name, x=x, bias=bias)
        checks.shape(name, "bias", bias, (weight.shape[0],), "weight's rows")


def _check_weights(name: str, x: Tensor, scales: str, **weights: Tensor) -> None:
    """The dtypes, scales, device and numbers of dimensions of a product's operands, and sizes by multiples."""
    checks.floating(name, x=x, **weights)
    checks.same_dtype(name, x=x, **weights)
    checks.ndim(name, 1, x=x)
    checks.ndim(name, 2, 2, **weights)
    checks.one_of(name, SCALES, scales=scales)
    for argument, weight in weights.items():
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            raise ValueError(f"{name}: {argument} has shape {tuple(weight.shape)}; it takes multiples of {MULTIPLE}")
    if (reason := why_not(x.device)) is not None:
        raise Unsupported(f"{name} on {x.device}: {reason}")


def _check_quantized(quantized: Quantized, rows: Tensor, columns: bool) -> None:
    name, values = "scaled_linear", quantized.rows
    wanted = rows.shape[0] + -rows.shape[0] % MULTIPLE, rows.shape[1]
    if values is None or values.shape != wanted or values.device != rows.device:
        found = "no rows" if values is None else f"rows of shape {tuple(values.shape)} on {values.device}"
        raise ValueError(f"{name}: quantized has {found}; it takes quantize_input(x): {wanted} on {rows.device}")
    if (shape := cast("Tensor", quantized.row_scales).shape) != (-(-wanted[1] // 128), wanted[0]):
        raise ValueError(f"{name}: quantized has scales of shape {tuple(shape)}; it takes those of block '1x128'")
    if columns and quantized.columns is None:
        raise ValueError(
            f"{name}: quantized has no columns, which weight's gradient takes: quantize_input(x, columns=True)"
        )


class _ScaledLinear(torch.autograd.Function):
    """`scaled_linear` without a bias. Its result is no view: FSDP2's hooks on one are lost if it is changed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: str, qx: Quantized) -> Tensor:
        qw = quantize(weight, block="128x128", scales=scales)
        columns = (qx.columns, qx.column_scales) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(weight, *columns)
        ctx.scales, ctx.shape = scales, x.shape
        return _like(x.shape, _product(_rows(qx, "1x128"), _rows(qw, "128x128"), x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, x_columns, x_scales = ctx.saved_tensors
        dy = _padded(grads[0].reshape(-1, grads[0].shape[-1]))
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        qy = quantize(dy, scales=ctx.scales, rows=x_wanted, columns=weight_wanted)
        dx = dweight = None
        if x_wanted:
            qw = quantize(weight, block="128x128", scales=ctx.scales, rows=False, columns=True)
            dx = _like(ctx.shape, _product(_rows(qy, "1x128"), _columns(qw, "128x128"), dy.dtype))
        if weight_wanted:
            dweight = _product(_columns(qy, "1x128"), _Operand(x_columns, x_scales, "1x128"), dy.dtype)
        return dx, dweight, None, None


class _ScaledGatedMlp(torch.autograd.Function):
    """`scaled_gated_mlp`. Its result is no view, as that of `_ScaledLinear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str, scales: str,
        qx: Quantized,
    ) -> Tensor:  # fmt: skip
        rows = _rows(qx, "1x128")
        gate, up = (
            _product(rows, _rows(quantize(weight, block="128x128", scales=scales), "128x128"), x.dtype)
            for weight in (gate_weight, up_weight)
        )
        columns = (qx.columns, qx.column_scales) if ctx.needs_input_grad[1] or ctx.needs_input_grad[2] else (None, None)
        ctx.save_for_backward(gate_weight, up_weight, down_weight, gate, up, *columns)
        ctx.activation, ctx.scales, ctx.shape = activation, scales, x.shape
        product = quantize_gated(gate, up, activation=activation, scales=scales)
        qw = quantize(down_weight, block="128x128", scales=scales)
        return _like(x.shape, _product(_rows(product, "1x128"), _rows(qw, "128x128"), x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_weight, up_weight, down_weight, gate, up, x_columns, x_scales = ctx.saved_tensors
        x_wanted, gate_wanted, up_wanted, down_wanted = ctx.needs_input_grad[:4]
        dtype, options = gate.dtype, {"activation": ctx.activation, "scales": ctx.scales}
        dy = _padded(grads[0].reshape(-1, grads[0].shape[-1]))
        qy = quantize(dy, scales=ctx.scales, columns=down_wanted)
        dx = dgate = dup = ddown = None

        def columns_of(weight: Tensor) -> _Operand:
            return _columns(quantize(weight, block="128x128", scales=ctx.scales, rows=False, columns=True), "128x128")

        dproduct = _product(_rows(qy, "1x128"), columns_of(down_weight), dtype)
        columns = gate_wanted or up_wanted or down_wanted
        q: Any = quantize_gated_gradients(dproduct, gate, up, rows=x_wanted, columns=columns, **options)
        del dproduct
        if x_wanted:
            dx = _product(_Operand(q.gate_rows, q.gate_row_scales, "1x128"), columns_of(gate_weight), dtype)
            dx += _product(_Operand(q.up_rows, q.up_row_scales, "1x128"), columns_of(up_weight), dtype)
            dx = _like(ctx.shape, dx)
        if gate_wanted or up_wanted:
            x = _Operand(x_columns, x_scales, "1x128")
            dgate = _product(_Operand(q.gate_columns, q.gate_column_scales, "1x128"), x, dtype) if gate_wanted else None
            dup = _product(_Operand(q.up_columns, q.up_column_scales, "1x128"), x, dtype) if up_wanted else None
        if down_wanted:
            ddown = _product(_columns(qy, "1x128"), _columns(q, "1x128"), dtype)
        return dx, dgate, dup, ddown, None, None, None


def _like(shape: torch.Size, rows: Tensor) -> Tensor:
    """Rows of a result, which may have more for a multiple of 16, with the dimensions of x before the last. It is no view."""
    tokens = shape[:-1].numel()
    rows = rows if rows.shape[0] == tokens else rows[:tokens].clone()
    return torch.ops.aten._unsafe_view(rows, (*shape[:-1], rows.shape[1]))


def _padded(x: Tensor) -> Tensor:
    """x with rows of zeros, up to a multiple of 16: a weight's gradient is a product along rows."""
    lacking = -x.shape[0] % MULTIPLE
    return F.pad(x, (0, 0, 0, lacking)) if lacking else x


def _rows(quantized: Any, block: str) -> _Operand:
    return _Operand(quantized.rows, quantized.row_scales, block)


def _columns(quantized: Any, block: str) -> _Operand:
    return _Operand(quantized.columns, quantized.column_scales, block)


def _product(a: _Operand, b: _Operand, dtype: torch.dtype) -> Tensor:
    """a · bᵀ, ``[M, N]``, of what the operands stand for: added up in float32, and rounded to `dtype`."""
    if a.values.device.type == "cpu" or not a.values.numel():
        return (_dequantized(a) @ _dequantized(b).mT).to(dtype)
    scaling: Any = F.ScalingType
    recipes = {"1x128": scaling.BlockWise1x128, "128x128": scaling.BlockWise128x128}
    result = cast("Any", F).scaled_mm(
        a.values,
        b.values.t(),
        scale_a=_as_taken(a),
        scale_recipe_a=recipes[a.block],
        scale_b=_as_taken(b),
        scale_recipe_b=recipes[b.block],
        output_dtype=dtype if dtype == torch.bfloat16 else torch.float32,
        use_fast_accum=False,
    )
    return result.to(dtype)


def _as_taken(operand: _Operand) -> Tensor:
    """Scales as PyTorch's product takes them: transposed, and those of squares with a stride that is a multiple of 4."""
    if operand.block == "1x128":
        return operand.scales.t()
    lacking = -operand.scales.shape[1] % 4
    return (F.pad(operand.scales, (0, lacking)) if lacking else operand.scales).t()


def _dequantized(operand: _Operand) -> Tensor:
    rows, length = operand.values.shape
    scales = operand.scales.t() if operand.block == "1x128" else operand.scales.repeat_interleave(128, 0)[:rows]
    return operand.values.float() * scales.repeat_interleave(128, 1)[:, :length]
