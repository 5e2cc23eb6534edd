"""A matrix in 8 bits: float8_e4m3fn values, and a scale for each block of them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_core import checks
from liger_core.contract import op, upcast

BLOCKS = ("1x128", "128x128", "row", "tensor")
SCALES = ("power_of_two", "float32")
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
LEAST_SCALE = 2.0**-126
"""The least normal number of float32."""


class Quantized(NamedTuple):
    """A matrix x of M rows and K columns, and its transpose, in 8 bits; None for what was not asked for.

    Attributes:
        rows: ``[M, K]``, float8_e4m3fn. x is about `rows` times the scales of its blocks.
        row_scales: float32. ``[⌈K/128⌉, M]`` with block ``"1x128"``, ``[⌈M/128⌉, ⌈K/128⌉]`` with ``"128x128"``, ``[1, M]`` with
            ``"row"``, ``[1, 1]`` with ``"tensor"``.
        columns: ``[K, M]``, the `rows` of the transpose of x.
        column_scales: the `row_scales` of the transpose of x.
    """

    rows: Tensor | None
    row_scales: Tensor | None
    columns: Tensor | None
    column_scales: Tensor | None


@op(differentiable=(), result=Quantized, grad_results=(), dimensions="x: * -> *, *, *, *")
def quantize(
    x: Tensor, *, block: str = "1x128", scales: str = "power_of_two", rows: bool = True, columns: bool = False
) -> Quantized:
    """Divide each block of a matrix by a scale, and round to float8_e4m3fn, to the nearest and of two to the even one.

    A block's scale s is made of its largest finite magnitude. ``"power_of_two"``: the least power of two with
    largest / s ≤ 448. The division by it is exact, so a number that is in range of two scales is the same with both.
    ``"float32"``: largest / 448, rounded; and x / s is rounded to float32 before float8. A scale is at least 2⁻¹²⁶, and that
    of a block of zeros is 1. The last blocks are smaller if their sizes are no multiples of 128. Every language gives the same
    bits.

    A NaN or an infinity becomes NaN, and other elements don't change by it.

    Args:
        x: ``[M, K]``; float32, bfloat16 or float16.
        block: elements that share a scale: ``"1x128"``, 128 columns of a row; ``"128x128"``, as many of 128 rows; ``"row"``;
            or ``"tensor"``.
        scales: ``"power_of_two"`` or ``"float32"``.
        rows: whether x is wanted.
        columns: whether the transpose of x is wanted, whose blocks are those of its own rows.

    Returns:
        `Quantized`, which has no gradient. `torch.nn.functional.scaled_mm` takes these scales, those of ``"1x128"`` and ``"row"``
        transposed.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: x is no matrix, another block or other scales than these, or neither rows nor columns are wanted.

    Source:
        Blocks: DeepSeek-V3, arXiv 2412.19437, section 3.3. The format: Micikevicius et al., arXiv 2209.05433.

    >>> q = quantize(torch.tensor([[0.3, 100.0], [900.0, -1000.0]]))
    >>> q.rows.float()
    tensor([[   1.2500,  384.0000],
            [ 224.0000, -256.0000]])
    >>> q.row_scales
    tensor([[0.2500, 4.0000]])
    """
    values, value_scales = _rows(x, block, scales) if rows else (None, None)
    return Quantized(values, value_scales, *(_rows(x.mT, block, scales) if columns else (None, None)))


def _rows(x: Tensor, block: str, scales: str) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    height, width = {"1x128": (1, 128), "128x128": (128, 128), "row": (1, max(1, k)), "tensor": (max(1, m), max(1, k))}[
        block
    ]
    values = upcast(x)
    finite = values.isfinite()
    tall, wide = -(-m // height), -(-k // width)
    magnitudes = F.pad(values.abs().where(finite, 0.0), (0, wide * width - k, 0, tall * height - m))
    scale = _scale(magnitudes.view(tall, height, wide, width).amax((1, 3)), scales)
    each = scale.repeat_interleave(height, 0)[:m].repeat_interleave(width, 1)[:, :k]
    result = (values / each).where(finite, torch.nan).to(torch.float8_e4m3fn)
    scale = scale.float()
    return result, scale.contiguous() if block == "128x128" else scale.mT.contiguous()


def _scale(largest: Tensor, scales: str) -> Tensor:
    if scales == "float32":
        scale = largest / torch.full_like(largest, LARGEST)  # CUDA multiplies by the reciprocal of a Python number
    else:
        mantissa, exponent = torch.frexp(largest)
        power = exponent - 9 + (mantissa > LARGEST / 512)
        scale = torch.ldexp(torch.ones_like(largest), power.clamp(min=-126))
    return scale.clamp(min=LEAST_SCALE).where(largest > 0, 1.0)


@quantize.checks
def _(x: Tensor, block: str, scales: str, rows: bool, columns: bool) -> None:
    checks.floating("quantize", x=x)
    checks.ndim("quantize", 2, 2, x=x)
    checks.one_of("quantize", BLOCKS, block=block)
    check_options("quantize", scales, rows, columns)


def check_options(op: str, scales: str, rows: bool, columns: bool) -> None:
    """The options that all ops with results in 8 bits have."""
    checks.one_of(op, SCALES, scales=scales)
    checks.flag(op, rows=rows, columns=columns)
    if not rows and not columns:
        raise ValueError(f"{op}: rows and columns are False; it takes True for one of them at least")
