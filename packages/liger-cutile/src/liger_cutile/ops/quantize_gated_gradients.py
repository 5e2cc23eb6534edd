"""Gradients of a gated MLP's branches in 8 bits.

Rows and columns are written by a launch each, since a block's registers don't hold tiles of 128 by 128 of three matrices. A tile
is 128 long in the direction in which elements share a scale.
"""

import cuda.tile as ct
from torch import Tensor

from liger_core import quantize_gated_gradients
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_core.host.quantize import TILE, new_results
from liger_core.ops.quantize_gated_gradients import QuantizedGradients
from liger_cutile.ops._device import has_float8
from liger_cutile.ops._launch import ConstBool, ConstInt, launch
from liger_cutile.ops._rows import as_rows, blocks, load
from liger_cutile.ops.quantize import write
from liger_cutile.ops.quantize_gated import activate

LINES = 32
"""Rows of a tile whose rows are written, and columns of one whose columns are."""


@ct.kernel(occupancy=2)
def _gradients(
    dgate, dgate_scales, dup, dup_scales, product, product_scales, dy, gate, up, tiles_k,
    AXIS: ConstInt, GELU: ConstBool, POWER: ConstBool, LINES: ConstInt, TILE: ConstInt,
):  # fmt: skip
    """Rows of gate's and up's gradients, or columns of them and of act(gate) · up."""
    ROWS, WIDTH = ct.static_eval((LINES, TILE) if AXIS == 1 else (TILE, LINES))
    tile_m, tile_k = ct.bid(0) // tiles_k, ct.bid(0) % tiles_k
    line, across = ct.static_eval((tile_m, tile_k) if AXIS == 1 else (tile_k, tile_m))
    act, slope = activate(gate, (tile_m, tile_k), ROWS, WIDTH, GELU)
    dys, ups = load(dy, (tile_m, tile_k), ROWS, WIDTH), load(up, (tile_m, tile_k), ROWS, WIDTH)
    write(dgate, dgate_scales, dys * ups * slope, line, across, AXIS, POWER, LINES)
    write(dup, dup_scales, dys * act, line, across, AXIS, POWER, LINES)
    write(product, product_scales, act * ups, line, across, AXIS, POWER, LINES)


@opaque(writes=("dgate", "dgate_scales", "dup", "dup_scales", "product", "product_scales"))
def _launch(
    dgate: Tensor,
    dgate_scales: Tensor,
    dup: Tensor,
    dup_scales: Tensor,
    product: Tensor | None,
    product_scales: Tensor | None,
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    axis: int,
    gelu: bool,
    power: bool,
) -> None:
    m, k = dy.shape
    results = (dgate, dgate_scales, dup, dup_scales, product, product_scales)
    tensors = (None if t is None else as_rows(t) for t in (*results, dy, gate, up))
    rows, width = (LINES, TILE) if axis == 1 else (TILE, LINES)
    grid = (blocks(m, rows) * blocks(k, width),)
    launch(_gradients, grid, *tensors, blocks(k, width), axis, gelu, power, LINES, TILE)


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
    dgate, dup = (new_results(dy, "1x128", rows, columns) for _ in range(2))
    product = new_results(dy, "1x128", False, columns)[2:]
    inputs, options = (dy, gate, up), (activation == "gelu_tanh", scales == "power_of_two")
    if rows:
        _launch(*dgate[:2], *dup[:2], None, None, *inputs, 1, *options)
    if columns:
        _launch(*dgate[2:], *dup[2:], *product, *inputs, 0, *options)
    return QuantizedGradients(*dgate, *dup, *product), ()
