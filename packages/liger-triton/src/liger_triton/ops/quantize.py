"""Quantization by tiles of 128 by 128: each is read once, and written as rows and, transposed, as columns.

Two programs of eight warps fit an SM if a thread has 128 registers. So what is not finite is NaN from the start, which a maximum
ignores. Where a block is larger than a tile, a first kernel finds its largest magnitude, or that of each tile's part of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import quantize
from liger_core.contract import Needs, Saved, implements
from liger_core.host.quantize import TILE, new_results, tiles
from liger_core.ops.quantize import Quantized
from liger_triton.ops._device import has_float8
from liger_triton.ops._launch import kernel

PARTS = 32
"""Parts of a block whose largest magnitudes a program compares at a time."""
WARPS = 8


@triton.jit
def _load(x, row, column, m, k, x_row, x_column):
    """Elements in float32, with NaN for what is not finite."""
    inside = (row < m)[:, None] & (column < k)[None, :]
    values = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
    return tl.where(tl.abs(values) < float("inf"), values, float("nan"))


@triton.jit
def _scale(largest, POWER: tl.constexpr):
    if POWER:
        # 448 is 1.75 · 2⁸. The exponent is one more for a mantissa above 1.75.
        bits = largest.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.math.div_rn(largest, 448.0), 2.0**-126)
    return tl.where(largest > 0.0, scale, 1.0)


@triton.jit
def _rounded(values, scale, POWER: tl.constexpr):
    if POWER:
        # The exponent of 1 / scale.
        inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        quotient = values * inverse
    else:
        quotient = tl.math.div_rn(values, tl.broadcast_to(scale, values.shape))
    return quotient.to(tl.float8e4nv)


@triton.jit
def _join(parts, at, count, PARTS: tl.constexpr):
    """The largest of `count` numbers each, which start at ``parts + at``."""
    lane = tl.arange(0, PARTS)[None, :]
    largest = tl.zeros((at.shape[0], PARTS), tl.float32)
    for first in range(0, count, PARTS):
        largest = tl.maximum(largest, tl.load(parts + at[:, None] + first + lane, lane < count - first, other=0.0))
    return tl.max(largest, 1)


@kernel
def _largest(
    row_parts, column_parts, x, m, k, tiles_m, tiles_k, x_row, x_column,
    WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each row of a tile, and of each column; or that of the matrix."""
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    row, column = tile_m * TILE + tl.arange(0, TILE), tile_k * TILE + tl.arange(0, TILE)
    magnitudes = tl.abs(_load(x, row, column, m, k, x_row, x_column))
    if WHOLE:  # both are the same number, 0 before
        tl.atomic_max(row_parts, tl.maximum(tl.max(tl.max(magnitudes, 1), 0), 0.0), sem="relaxed")
    else:
        if row_parts is not None:
            tl.store(row_parts + row * tiles_k + tile_k, tl.max(magnitudes, 1), row < m)
        if column_parts is not None:
            tl.store(column_parts + column * tiles_m + tile_m, tl.max(magnitudes, 0), column < k)


@triton.jit
def _scales(
    scales, values, parts, line, lines, tile_line, tile_across, tiles_across,
    AXIS: tl.constexpr, BLOCK: tl.constexpr, POWER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Scales of a tile's lines, which lie along AXIS: rows of the matrix or of its transpose."""
    if BLOCK == "128x128":
        one = _scale(tl.max(tl.max(tl.abs(values), 1), 0), POWER)
        tl.store(scales + tile_line * tiles_across + tile_across, one)
        return one
    elif BLOCK == "tensor":
        one = _scale(tl.load(parts), POWER)
        tl.store(scales, one, (tile_line == 0) & (tile_across == 0))
        return one
    elif BLOCK == "row":
        each = _scale(_join(parts, tl.where(line < lines, line, 0) * tiles_across, tiles_across, PARTS), POWER)
        tl.store(scales + line, each, (line < lines) & (tile_across == 0))
        return tl.expand_dims(each, AXIS)
    else:
        each = _scale(tl.max(tl.abs(values), AXIS), POWER)
        tl.store(scales + tile_across * lines + line, each, line < lines)
        return tl.expand_dims(each, AXIS)


@kernel
def _quantize(
    rows, row_scales, columns, column_scales, x, row_parts, column_parts, m, k, tiles_m, tiles_k, x_row, x_column,
    BLOCK: tl.constexpr, POWER: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    row, column = tile_m * TILE + tl.arange(0, TILE), tile_k * TILE + tl.arange(0, TILE)
    values = _load(x, row, column, m, k, x_row, x_column)
    if rows is not None:
        scale = _scales(row_scales, values, row_parts, row, m, tile_m, tile_k, tiles_k, 1, BLOCK, POWER, PARTS)
        inside = (row < m)[:, None] & (column < k)[None, :]
        tl.store(rows + row[:, None] * k + column[None, :], _rounded(values, scale, POWER), inside)
    if columns is not None:
        scale = _scales(column_scales, values, column_parts, column, k, tile_k, tile_m, tiles_m, 0, BLOCK, POWER, PARTS)
        inside = (column < k)[:, None] & (row < m)[None, :]
        tl.store(columns + column[:, None] * m + row[None, :], tl.trans(_rounded(values, scale, POWER)), inside)


def refuses(
    x: Tensor, *, block: str = "1x128", scales: str = "power_of_two", rows: bool = True, columns: bool = False
) -> str | None:
    if not has_float8(x.device):
        return "the device doesn't convert to float8_e4m3fn"
    return None


@implements(quantize)
def forward(
    needs: Needs,
    x: Tensor,
    *,
    block: str = "1x128",
    scales: str = "power_of_two",
    rows: bool = True,
    columns: bool = False,
) -> tuple[Quantized, Saved]:
    m, k = x.shape
    tiles_m, tiles_k = tiles(m), tiles(k)
    result = new_results(x, block, rows, columns)
    row_parts = column_parts = None
    if block == "tensor":
        row_parts = column_parts = x.new_zeros(1, dtype=torch.float32)
    elif block == "row":
        row_parts = x.new_empty(m, tiles_k, dtype=torch.float32) if rows else None
        column_parts = x.new_empty(k, tiles_m, dtype=torch.float32) if columns else None
    inputs, grid = (m, k, tiles_m, tiles_k, *x.stride()), (tiles_m * tiles_k,)
    if row_parts is not None or column_parts is not None:
        _largest[grid](row_parts, column_parts, x, *inputs, WHOLE=block == "tensor", TILE=TILE, num_warps=WARPS)
    _quantize[grid](
        *result, x, row_parts, column_parts, *inputs,
        BLOCK=block, POWER=scales == "power_of_two", TILE=TILE, PARTS=PARTS, num_warps=WARPS,
    )  # fmt: skip
    return result, ()
