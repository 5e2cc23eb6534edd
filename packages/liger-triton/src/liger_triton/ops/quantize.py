"""Quantization by tiles of 128 by 128: each is read once, and written as rows and, transposed, as columns.

A tile is four quarters, and a quarter has each fourth row. So a thread holds four neighbours of a column, which are a word: words
are transposed, four times fewer. Numbers that are not finite are NaN from the start, which a maximum ignores.

Where a block is larger than a tile, a first kernel finds its largest magnitude, or that of each tile's part of it.
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

LINES, PARTS = 32, 32
"""Lines of a program that joins the largest magnitudes of their parts, and parts that it compares at a time."""
WARPS = 8


@triton.jit
def place(tile_m, tile_k, quarter: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``[TILE / 4, 1]`` and columns ``[1, WIDTH]`` of a quarter of a tile."""
    row = tile_m * TILE + quarter + 4 * tl.arange(0, TILE // 4)[:, None]
    return row, tile_k * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load(x, row, column, m, k, x_row, x_column):
    """Elements in float32."""
    return tl.load(x + row * x_row + column * x_column, (row < m) & (column < k), other=0.0).to(tl.float32)


@triton.jit
def finite(values):
    """Values, with NaN for what is not finite: infinity times zero is NaN, and a zero keeps its sign."""
    return tl.fma(values, 0.0, values)


@triton.jit
def _load_quarter(x, tile_m, tile_k, quarter: tl.constexpr, m, k, x_row, x_column, TILE: tl.constexpr):
    row, column = place(tile_m, tile_k, quarter, TILE, TILE)
    return finite(load(x, row, column, m, k, x_row, x_column))


@triton.jit
def _load_tile(x, tile_m, tile_k, m, k, x_row, x_column, TILE: tl.constexpr):
    return (
        _load_quarter(x, tile_m, tile_k, 0, m, k, x_row, x_column, TILE),
        _load_quarter(x, tile_m, tile_k, 1, m, k, x_row, x_column, TILE),
        _load_quarter(x, tile_m, tile_k, 2, m, k, x_row, x_column, TILE),
        _load_quarter(x, tile_m, tile_k, 3, m, k, x_row, x_column, TILE),
    )


@triton.jit
def scale_of(largest, POWER: tl.constexpr):
    if POWER:
        # 448 is 1.75 · 2⁸. The exponent is one more for a mantissa above 1.75.
        bits = largest.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.math.div_rn(largest, 448.0), 2.0**-126)
    return tl.where(largest > 0.0, scale, 1.0)


@triton.jit
def rounded(values, scale, POWER: tl.constexpr):
    if POWER:
        # The exponent of 1 / scale.
        inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        quotient = values * inverse
    else:
        quotient = tl.math.div_rn(values, tl.broadcast_to(scale, values.shape))
    return quotient.to(tl.float8e4nv)


@triton.jit
def largest_of(quarters):
    """The largest magnitudes of four quarters, element by element."""
    upper = tl.maximum(tl.abs(quarters[0]), tl.abs(quarters[1]))
    return tl.maximum(upper, tl.maximum(tl.abs(quarters[2]), tl.abs(quarters[3])))


@kernel
def _largest(
    row_parts, column_parts, x, m, k, tiles_m, tiles_k, x_row, x_column,
    WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each row of a tile, and of each column; or that of the matrix."""
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    quarters = _load_tile(x, tile_m, tile_k, m, k, x_row, x_column, TILE)
    largest = tl.max(largest_of(quarters), 0, keep_dims=True)
    if WHOLE:  # both are the same number, 0 before
        tl.atomic_max(row_parts, tl.maximum(tl.max(tl.max(largest, 1), 0), 0.0), sem="relaxed")
    else:
        if row_parts is not None:
            for quarter in tl.static_range(4):
                row, column = place(tile_m, tile_k, quarter, TILE, TILE)
                largest_in_row = tl.max(tl.abs(quarters[quarter]), 1, keep_dims=True)
                tl.store(row_parts + row * tiles_k + tile_k, largest_in_row, row < m)
        if column_parts is not None:
            row, column = place(tile_m, tile_k, 0, TILE, TILE)
            tl.store(column_parts + column * tiles_m + tile_m, largest, column < k)


@kernel
def _join(scales, parts, lines, count, POWER: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr):
    """Scales of lines, whose largest magnitudes are those of `count` parts each."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    part = tl.arange(0, PARTS)[None, :]
    largest = tl.zeros((LINES, PARTS), tl.float32)
    for first in range(0, count, PARTS):
        inside = (line < lines)[:, None] & (part < count - first)
        largest = tl.maximum(largest, tl.load(parts + line[:, None] * count + first + part, inside, other=0.0))
    tl.store(scales + line, scale_of(tl.max(largest, 1), POWER), line < lines)


@triton.jit
def _line_scales(
    scales, largest, parts, line, lines, tile_line, tile_across, tiles_across,
    BLOCK: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Scales of lines, which are rows of the matrix or of its transpose; or the one scale of a block of several."""
    if BLOCK == "128x128":
        one = scale_of(largest, POWER)
        tl.store(scales + tile_line * tiles_across + tile_across, one)
        return one
    elif BLOCK == "tensor":
        one = scale_of(tl.load(parts), POWER)
        tl.store(scales, one, (tile_line == 0) & (tile_across == 0))
        return one
    elif BLOCK == "row":
        return tl.load(scales + line, line < lines, other=1.0)
    else:
        each = scale_of(largest, POWER)
        tl.store(scales + tile_across * lines + line, each, line < lines)
        return each


@triton.jit
def as_bits(quantized):
    """Elements in 8 bits as numbers below 256."""
    return quantized.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def store_columns(
    columns, quarters, scale, tile_m, tile_k, m, k,
    POWER: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The columns of a tile, by words if each begins at one: WORDS."""
    if WORDS:
        words = as_bits(rounded(quarters[0], scale, POWER))
        for quarter in tl.static_range(1, 4):
            words |= as_bits(rounded(quarters[quarter], scale, POWER)) << 8 * quarter
        line, word = (
            tile_k * WIDTH + tl.arange(0, WIDTH)[:, None],
            tile_m * (TILE // 4) + tl.arange(0, TILE // 4)[None, :],
        )
        at = columns.to(tl.pointer_type(tl.int32), bitcast=True) + line * (m // 4) + word
        tl.store(at, tl.trans(words), (line < k) & (word < m // 4))
    else:
        for quarter in tl.static_range(4):
            row, column = place(tile_m, tile_k, quarter, TILE, WIDTH)
            tl.store(columns + column * m + row, rounded(quarters[quarter], scale, POWER), (row < m) & (column < k))


@triton.jit
def write(
    rows, row_scales, columns, column_scales, quarters, row_parts, column_parts, tile_m, tile_k, m, k, tiles_m, tiles_k,
    BLOCK: tl.constexpr, POWER: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile as rows and as columns, with their scales."""
    largest = tl.max(largest_of(quarters), 0, keep_dims=True)
    if BLOCK == "128x128":
        largest = tl.max(tl.max(largest, 1), 0)
    if rows is not None:
        for quarter in tl.static_range(4):
            row, column = place(tile_m, tile_k, quarter, TILE, TILE)
            row_largest = largest
            if BLOCK == "1x128":
                row_largest = tl.max(tl.abs(quarters[quarter]), 1, keep_dims=True)
            scale = _line_scales(row_scales, row_largest, row_parts, row, m, tile_m, tile_k, tiles_k, BLOCK, POWER)
            tl.store(rows + row * k + column, rounded(quarters[quarter], scale, POWER), (row < m) & (column < k))
    if columns is not None:
        row, column = place(tile_m, tile_k, 0, TILE, TILE)
        scale = _line_scales(column_scales, largest, column_parts, column, k, tile_k, tile_m, tiles_m, BLOCK, POWER)
        store_columns(columns, quarters, scale, tile_m, tile_k, m, k, POWER, WORDS, TILE, TILE)


@kernel
def _quantize(
    rows, row_scales, columns, column_scales, x, row_parts, column_parts, m, k, tiles_m, tiles_k, x_row, x_column,
    BLOCK: tl.constexpr, POWER: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    quarters = _load_tile(x, tile_m, tile_k, m, k, x_row, x_column, TILE)
    write(
        rows, row_scales, columns, column_scales, quarters, row_parts, column_parts, tile_m, tile_k, m, k, tiles_m, tiles_k,
        BLOCK, POWER, WORDS, TILE,
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
    if block == "row":
        lines_and_parts = (result.row_scales, row_parts, m, tiles_k), (result.column_scales, column_parts, k, tiles_m)
        for scales_of_lines, parts, lines, count in lines_and_parts:
            if parts is not None:
                power = scales == "power_of_two"
                _join[(-(-lines // LINES),)](
                    scales_of_lines, parts, lines, count, POWER=power, LINES=LINES, PARTS=PARTS
                )
    _quantize[grid](
        *result, x, row_parts, column_parts, *inputs,
        BLOCK=block, POWER=scales == "power_of_two", WORDS=not m % 4, TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    return result, ()
