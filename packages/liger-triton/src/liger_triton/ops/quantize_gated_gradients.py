"""Gradients of a gated MLP's branches in 8 bits.

Rows and columns are written by a kernel each, since a program's registers don't hold tiles of 128 by 128 of three matrices. The
rows' kernel goes over its tile by quarters. The columns' kernel has tiles of a quarter of the width.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_core import quantize_gated_gradients
from liger_core.contract import Needs, Saved, implements
from liger_core.host.quantize import TILE, new_results, tiles
from liger_core.ops.quantize_gated_gradients import QuantizedGradients
from liger_triton.ops._device import has_float8
from liger_triton.ops._launch import kernel
from liger_triton.ops.quantize import finite, largest_of, load, place, rounded, scale_of, store_columns
from liger_triton.ops.quantize_gated import activate

ROWS_WARPS, COLUMNS_WARPS = 8, 4
WIDTH = 32
"""Columns of a tile whose columns are written."""


@triton.jit
def _quarter(
    dy, gate, up, tile_m, tile_k, quarter: tl.constexpr, m, k, dy_row, dy_column, gate_row, gate_column, up_row, up_column,
    GELU: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A quarter of a tile of gate's and up's gradients, and of act(gate) · up."""
    row, column = place(tile_m, tile_k, quarter, TILE, WIDTH)
    act, slope = activate(load(gate, row, column, m, k, gate_row, gate_column), GELU)
    dys, ups = load(dy, row, column, m, k, dy_row, dy_column), load(up, row, column, m, k, up_row, up_column)
    return finite(dys * ups * slope), finite(dys * act), finite(act * ups)


@triton.jit
def _write_rows(rows, scales, values, row, column, m, k, tile_k, POWER: tl.constexpr):
    scale = scale_of(tl.max(tl.abs(values), 1, keep_dims=True), POWER)
    tl.store(scales + tile_k * m + row, scale, row < m)
    tl.store(rows + row * k + column, rounded(values, scale, POWER), (row < m) & (column < k))


@kernel
def _rows(
    gate_rows, gate_row_scales, up_rows, up_row_scales, dy, gate, up, m, k, tiles_k,
    dy_row, dy_column, gate_row, gate_column, up_row, up_column,
    GELU: tl.constexpr, POWER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    for quarter in tl.static_range(4):
        dgate, dup, _ = _quarter(
            dy, gate, up, tile_m, tile_k, quarter, m, k, dy_row, dy_column, gate_row, gate_column, up_row, up_column,
            GELU, TILE, TILE,
        )  # fmt: skip
        row, column = place(tile_m, tile_k, quarter, TILE, TILE)
        _write_rows(gate_rows, gate_row_scales, dgate, row, column, m, k, tile_k, POWER)
        _write_rows(up_rows, up_row_scales, dup, row, column, m, k, tile_k, POWER)


@triton.jit
def _write_columns(
    columns, scales, quarters, tile_m, tile_k, m, k,
    POWER: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    scale = scale_of(tl.max(largest_of(quarters), 0, keep_dims=True), POWER)
    _, column = place(tile_m, tile_k, 0, TILE, WIDTH)
    tl.store(scales + tile_m * k + column, scale, column < k)
    store_columns(columns, quarters, scale, tile_m, tile_k, m, k, POWER, WORDS, TILE, WIDTH)


@kernel
def _columns(
    gate_columns, gate_column_scales, up_columns, up_column_scales, columns, column_scales, dy, gate, up, m, k, tiles_k,
    dy_row, dy_column, gate_row, gate_column, up_row, up_column,
    GELU: tl.constexpr, POWER: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    dgate0, dup0, product0 = _quarter(
        dy, gate, up, tile_m, tile_k, 0, m, k, dy_row, dy_column, gate_row, gate_column, up_row, up_column,
        GELU, TILE, WIDTH,
    )  # fmt: skip
    dgate1, dup1, product1 = _quarter(
        dy, gate, up, tile_m, tile_k, 1, m, k, dy_row, dy_column, gate_row, gate_column, up_row, up_column,
        GELU, TILE, WIDTH,
    )  # fmt: skip
    dgate2, dup2, product2 = _quarter(
        dy, gate, up, tile_m, tile_k, 2, m, k, dy_row, dy_column, gate_row, gate_column, up_row, up_column,
        GELU, TILE, WIDTH,
    )  # fmt: skip
    dgate3, dup3, product3 = _quarter(
        dy, gate, up, tile_m, tile_k, 3, m, k, dy_row, dy_column, gate_row, gate_column, up_row, up_column,
        GELU, TILE, WIDTH,
    )  # fmt: skip
    _write_columns(
        gate_columns, gate_column_scales, (dgate0, dgate1, dgate2, dgate3), tile_m, tile_k, m, k, POWER, WORDS, TILE, WIDTH
    )  # fmt: skip
    _write_columns(
        up_columns, up_column_scales, (dup0, dup1, dup2, dup3), tile_m, tile_k, m, k, POWER, WORDS, TILE, WIDTH
    )  # fmt: skip
    _write_columns(
        columns, column_scales, (product0, product1, product2, product3), tile_m, tile_k, m, k, POWER, WORDS, TILE, WIDTH
    )  # fmt: skip


def refuses(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    scales: str = "power_of_two",
    rows: bool = True,
    columns: bool = True,
) -> str | None:
    if not has_float8(dy.device):
        return "the device doesn't convert to float8_e4m3fn"
    return None


@implements(quantize_gated_gradients)
def forward(
    needs: Needs,
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    scales: str = "power_of_two",
    rows: bool = True,
    columns: bool = True,
) -> tuple[QuantizedGradients, Saved]:
    m, k = dy.shape
    gate_results, up_results = (new_results(dy, "1x128", rows, columns) for _ in range(2))
    product = new_results(dy, "1x128", False, columns)[2:]
    inputs = dy, gate, up, m, k
    strides = *dy.stride(), *gate.stride(), *up.stride()
    options = {"GELU": activation == "gelu_tanh", "POWER": scales == "power_of_two"}
    if rows:
        _rows[(tiles(m) * tiles(k),)](
            *gate_results[:2], *up_results[:2], *inputs, tiles(k), *strides, **options, TILE=TILE, num_warps=ROWS_WARPS
        )
    if columns:
        across = -(-k // WIDTH)
        _columns[(tiles(m) * across,)](
            *gate_results[2:], *up_results[2:], *product, *inputs, across, *strides,
            **options, WORDS=not m % 4, TILE=TILE, WIDTH=WIDTH, num_warps=COLUMNS_WARPS,
        )  # fmt: skip
    return QuantizedGradients(*gate_results, *up_results, *product), ()
