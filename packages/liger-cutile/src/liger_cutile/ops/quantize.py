"""Quantization by tiles of 128 by 128: each is read once, and written as rows and, transposed, as columns.

Where a block is larger than a tile, a first kernel writes the largest magnitude of each tile's part of it.
"""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import quantize
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_core.host.quantize import TILE, new_results, tiles
from liger_core.ops.quantize import BLOCKS, Quantized
from liger_cutile.ops._device import has_float8
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._rows import as_rows, load

PARTS = 32
"""Parts of a block whose largest magnitudes are compared at a time."""
SHORT, SQUARE, ROW, WHOLE = range(4)
"""Kinds of blocks: `BLOCKS` as numbers."""


@ct.function
def _magnitudes(values):
    """Magnitudes of finite numbers, and 0 in place of others."""
    return ct.where(ct.abs(values) < float("inf"), ct.abs(values), 0.0)


@ct.function
def _scale(largest, POWER):
    if POWER:
        # 448 is 1.75 · 2⁸. The exponent is one more for a mantissa above 1.75.
        bits = ct.bitcast(largest, ct.int32)
        exponent = (bits >> 23) - 8 + ct.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
        scale = ct.bitcast(ct.maximum(exponent, 1) << 23, ct.float32)
    else:
        scale = ct.maximum(largest / 448.0, 2.0**-126)
    return ct.where(largest > 0.0, scale, 1.0)


@ct.function
def _rounded(values, scale, POWER):
    quotient = values * (1.0 / scale) if POWER else values / scale
    return ct.astype(ct.where(ct.abs(values) < float("inf"), quotient, float("nan")), ct.float8_e4m3fn)


@ct.function
def _join(parts, line, LINES, PARTS):
    """The largest of each line of `parts`, ``[LINES, 1]``."""
    largest = ct.zeros((LINES, 1), ct.float32)
    for part in range(ct.num_tiles(parts, 1, (LINES, PARTS))):
        some = ct.load(parts, (line, part), (LINES, PARTS), padding_mode=ct.PaddingMode.ZERO)
        largest = ct.maximum(largest, ct.max(some, axis=1, keepdims=True))
    return largest


@ct.kernel(num_worker_warps=8)
def _largest(row_parts, column_parts, x, tiles_k, ALL: ConstBool, TILE: ConstInt):
    """The largest finite magnitude of each row of a tile, and of each column; or that of the tile."""
    tile_m, tile_k = ct.bid(0) // tiles_k, ct.bid(0) % tiles_k
    magnitudes = _magnitudes(load(x, (tile_m, tile_k), TILE, TILE))
    if ALL:
        one = ct.max(ct.max(magnitudes, axis=1, keepdims=True), axis=0, keepdims=True)
        ct.store(row_parts, (0, ct.bid(0)), one)
    else:
        if given(row_parts):
            ct.store(row_parts, (tile_m, tile_k), ct.max(magnitudes, axis=1, keepdims=True))
        if given(column_parts):
            each = ct.max(magnitudes, axis=0, keepdims=True)
            ct.store(column_parts, (tile_k, tile_m), ct.reshape(each, (TILE, 1)))


@ct.function
def write(result, scales, values, tile_line, tile_across, AXIS, POWER, LINES, BLOCK=SHORT, parts=(), PARTS=PARTS):
    """A tile of the matrix, or of its transpose: lines of the result, which lie along AXIS, and their scales."""
    if not given(result):
        return
    along = ct.static_eval((LINES, 1) if AXIS == 1 else (1, LINES))
    if BLOCK == SQUARE:
        magnitudes = _magnitudes(values)
        scale = _scale(ct.max(ct.max(magnitudes, axis=1, keepdims=True), axis=0, keepdims=True), POWER)
        ct.store(scales, (tile_line, tile_across), scale)
    elif BLOCK == WHOLE:
        scale = _scale(_join(parts, 0, 1, PARTS), POWER)
        if tile_line + tile_across == 0:
            ct.store(scales, (0, 0), scale)
    elif BLOCK == ROW:
        each = _scale(_join(parts, tile_line, LINES, PARTS), POWER)
        if tile_across == 0:
            ct.store(scales, (0, tile_line), ct.reshape(each, (1, LINES)))
        scale = ct.reshape(each, along)
    else:
        scale = _scale(ct.max(_magnitudes(values), axis=AXIS, keepdims=True), POWER)
        ct.store(scales, (tile_across, tile_line), ct.reshape(scale, (1, LINES)))
    quantized = _rounded(values, scale, POWER)
    if AXIS == 0:
        ct.store(result, (tile_line, tile_across), ct.transpose(quantized))
    else:
        ct.store(result, (tile_line, tile_across), quantized)


@ct.kernel(num_worker_warps=8)
def _quantize(
    rows, row_scales, columns, column_scales, x, row_parts, column_parts, tiles_k,
    BLOCK: ConstInt, POWER: ConstBool, TILE: ConstInt, PARTS: ConstInt,
):  # fmt: skip
    tile_m, tile_k = ct.bid(0) // tiles_k, ct.bid(0) % tiles_k
    values = load(x, (tile_m, tile_k), TILE, TILE)
    write(rows, row_scales, values, tile_m, tile_k, 1, POWER, TILE, BLOCK, row_parts, PARTS)
    write(columns, column_scales, values, tile_k, tile_m, 0, POWER, TILE, BLOCK, column_parts, PARTS)


@opaque(writes=("rows", "row_scales", "columns", "column_scales"))
def _launch(
    rows: Tensor | None,
    row_scales: Tensor | None,
    columns: Tensor | None,
    column_scales: Tensor | None,
    x: Tensor,
    block: str,
    power: bool,
) -> None:
    m, k = x.shape
    x, kind = as_rows(x), BLOCKS.index(block)
    tiles_m, tiles_k = tiles(m), tiles(k)
    grid = (tiles_m * tiles_k,)
    row_parts = column_parts = None
    if kind == WHOLE:
        row_parts = column_parts = x.new_empty(1, tiles_m * tiles_k, dtype=torch.float32)
    elif kind == ROW:
        row_parts = None if rows is None else x.new_empty(m, tiles_k, dtype=torch.float32)
        column_parts = None if columns is None else x.new_empty(k, tiles_m, dtype=torch.float32)
    if kind in (WHOLE, ROW):
        launch(_largest, grid, row_parts, None if kind == WHOLE else column_parts, x, tiles_k, kind == WHOLE, TILE)
    results = (None if t is None else as_rows(t) for t in (rows, row_scales, columns, column_scales))
    launch(_quantize, grid, *results, x, row_parts, column_parts, tiles_k, kind, power, TILE, PARTS)


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
    result = new_results(x, block, rows, columns)
    _launch(*result, x, block, scales == "power_of_two")
    return result, ()
