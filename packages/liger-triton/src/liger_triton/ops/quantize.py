"""Quantization by tiles of 128 by 128: each is read once, and written as rows and, transposed, as columns.

Where a block is larger than a tile, a first kernel writes the largest magnitude of each tile's part of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import quantize
from liger_core.contract import Needs, Saved, implements
from liger_core.ops.quantize import Quantized
from liger_triton.ops._device import has_float8
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import in_vectors

TILE = 128
"""Rows and columns of a tile."""
PARTS = 32
"""Parts of a block whose largest magnitudes a program compares at a time."""


@triton.jit
def _load(x, m, k, tiles_k, x_row, x_column, TILE: tl.constexpr):
    """This program's tile in float32, which of its numbers are finite, its rows and its columns."""
    tile = tl.program_id(0)
    row = (tile // tiles_k).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tile % tiles_k).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < m)[:, None] & (column < k)[None, :]
    values = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
    return values, tl.abs(values) < float("inf"), row, column


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
def _rounded(values, finite, scale, POWER: tl.constexpr):
    quotient = values * (1.0 / scale) if POWER else tl.math.div_rn(values, tl.broadcast_to(scale, values.shape))
    return tl.where(finite, quotient, float("nan")).to(tl.float8e4nv)


@triton.jit
def _join(parts, at, count, PARTS: tl.constexpr):
    """The largest of `count` numbers each, which start at ``parts + at``."""
    lane = tl.arange(0, PARTS)[None, :]
    largest = tl.zeros_like(at).to(tl.float32)
    for first in range(0, count, PARTS):
        some = tl.load(parts + at[:, None] + first + lane, lane < count - first, other=0.0)
        largest = tl.maximum(largest, tl.max(some, 1))
    return largest


@kernel
def _largest(
    row_parts, column_parts, x, m, k, tiles_m, tiles_k, x_row, x_column, WHOLE: tl.constexpr, TILE: tl.constexpr
):
    """The largest finite magnitude of each row of a tile, and of each column; or that of the tile."""
    values, finite, row, column = _load(x, m, k, tiles_k, x_row, x_column, TILE)
    magnitudes = tl.where(finite, tl.abs(values), 0.0)
    tile = tl.program_id(0)
    if WHOLE:  # both are the same memory
        tl.store(row_parts + tile, tl.max(tl.max(magnitudes, 1), 0))
    else:
        if row_parts is not None:
            tl.store(row_parts + row * tiles_k + tile % tiles_k, tl.max(magnitudes, 1), row < m)
        if column_parts is not None:
            tl.store(column_parts + column * tiles_m + tile // tiles_k, tl.max(magnitudes, 0), column < k)


@triton.jit
def _write(
    result, scales, values, finite, parts, line, across, lines, length, tile_line, tile_across, tiles_line, tiles_across,
    AXIS: tl.constexpr, BLOCK: tl.constexpr, POWER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of the matrix, or of its transpose: lines of the result, which lie along AXIS, and their scales."""
    magnitudes = tl.where(finite, tl.abs(values), 0.0)
    if BLOCK == "128x128":
        scale = _scale(tl.max(tl.max(magnitudes, 1), 0), POWER)
        tl.store(scales + tile_line * tiles_across + tile_across, scale)
    elif BLOCK == "tensor":
        scale = _scale(tl.max(_join(parts, tl.zeros((1,), tl.int64), tiles_line * tiles_across, PARTS), 0), POWER)
        tl.store(scales, scale, (tile_line == 0) & (tile_across == 0))
    elif BLOCK == "row":
        each = _scale(_join(parts, tl.where(line < lines, line, 0) * tiles_across, tiles_across, PARTS), POWER)
        tl.store(scales + line, each, (line < lines) & (tile_across == 0))
        scale = tl.expand_dims(each, AXIS)
    else:
        each = _scale(tl.max(magnitudes, AXIS), POWER)
        tl.store(scales + tile_across * lines + line, each, line < lines)
        scale = tl.expand_dims(each, AXIS)
    quantized = _rounded(values, finite, scale, POWER)
    if AXIS == 0:
        quantized = tl.trans(quantized)
    inside = (line < lines)[:, None] & (across < length)[None, :]
    tl.store(result + line[:, None] * length + across[None, :], quantized, inside)


@kernel
def _quantize(
    rows, row_scales, columns, column_scales, x, row_parts, column_parts, m, k, tiles_m, tiles_k, x_row, x_column,
    BLOCK: tl.constexpr, POWER: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    values, finite, row, column = _load(x, m, k, tiles_k, x_row, x_column, TILE)
    tile = tl.program_id(0)
    tile_m, tile_k = (tile // tiles_k).to(tl.int64), (tile % tiles_k).to(tl.int64)
    if rows is not None:
        _write(
            rows, row_scales, values, finite, row_parts, row, column, m, k, tile_m, tile_k, tiles_m, tiles_k,
            1, BLOCK, POWER, PARTS,
        )  # fmt: skip
    if columns is not None:
        _write(
            columns, column_scales, values, finite, column_parts, column, row, k, m, tile_k, tile_m, tiles_k, tiles_m,
            0, BLOCK, POWER, PARTS,
        )  # fmt: skip


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
    tiles_m, tiles_k = -(-m // TILE), -(-k // TILE)
    both = (*_results(x, block, tiles_k, m, k, rows), *_results(x, block, tiles_m, k, m, columns))
    row_parts = column_parts = None
    if block == "tensor":
        row_parts = column_parts = x.new_empty(tiles_m * tiles_k, dtype=torch.float32)
    elif block == "row":
        row_parts = x.new_empty(m, tiles_k, dtype=torch.float32) if rows else None
        column_parts = x.new_empty(k, tiles_m, dtype=torch.float32) if columns else None
    # Where threads load and store one element after another, each has an address and a mask in registers.
    warps = 8 if in_vectors(m, k, *(stride for stride in x.stride() if stride != 1)) else 16
    inputs, grid = (m, k, tiles_m, tiles_k, *x.stride()), (tiles_m * tiles_k,)
    if row_parts is not None or column_parts is not None:
        _largest[grid](row_parts, column_parts, x, *inputs, WHOLE=block == "tensor", TILE=TILE, num_warps=warps)
    _quantize[grid](
        *both, x, row_parts, column_parts, *inputs,
        BLOCK=block, POWER=scales == "power_of_two", TILE=TILE, PARTS=PARTS, num_warps=warps,
    )  # fmt: skip
    return Quantized(*both), ()


def _results(
    x: Tensor, block: str, tiles: int, rows: int, columns: int, wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Memory for a matrix of so many rows and columns, and for its scales."""
    if not wanted:
        return None, None
    tall = {"1x128": (tiles, rows), "128x128": (-(-rows // TILE), tiles), "row": (1, rows), "tensor": (1, 1)}[block]
    return x.new_empty(rows, columns, dtype=torch.float8_e4m3fn), x.new_empty(tall, dtype=torch.float32)
