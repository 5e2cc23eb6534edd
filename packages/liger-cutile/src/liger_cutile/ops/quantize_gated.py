"""The product of a gated MLP's branches in 8 bits, by tiles as in `quantize`."""

import cuda.tile as ct
from torch import Tensor

from liger_core import quantize_gated
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_core.host.quantize import TILE, new_results, tiles
from liger_core.ops.quantize import Quantized
from liger_cutile.ops._device import has_float8
from liger_cutile.ops._launch import ConstBool, ConstInt, launch
from liger_cutile.ops._rows import as_rows, load
from liger_cutile.ops.geglu import gelu
from liger_cutile.ops.quantize import write
from liger_cutile.ops.swiglu import silu


@ct.function
def activate(gate, place, ROWS, BLOCK, GELU):
    """The activation of a tile of gate, and its derivative."""
    if GELU:
        return gelu(load(gate, place, ROWS, BLOCK))
    else:
        return silu(load(gate, place, ROWS, BLOCK), gate)


@ct.kernel(num_worker_warps=8)
def _forward(
    rows, row_scales, columns, column_scales, gate, up, tiles_k, GELU: ConstBool, POWER: ConstBool, TILE: ConstInt
):  # fmt: skip
    tile_m, tile_k = ct.bid(0) // tiles_k, ct.bid(0) % tiles_k
    act, _ = activate(gate, (tile_m, tile_k), TILE, TILE, GELU)
    product = act * load(up, (tile_m, tile_k), TILE, TILE)
    write(rows, row_scales, product, tile_m, tile_k, 1, POWER, TILE)
    write(columns, column_scales, product, tile_k, tile_m, 0, POWER, TILE)


@opaque(writes=("rows", "row_scales", "columns", "column_scales"))
def _launch(
    rows: Tensor | None,
    row_scales: Tensor | None,
    columns: Tensor | None,
    column_scales: Tensor | None,
    gate: Tensor,
    up: Tensor,
    gelu: bool,
    power: bool,
) -> None:
    m, k = gate.shape
    results = (None if t is None else as_rows(t) for t in (rows, row_scales, columns, column_scales))
    launch(_forward, (tiles(m) * tiles(k),), *results, as_rows(gate), as_rows(up), tiles(k), gelu, power, TILE)


def refuses(
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    scales: str = "power_of_two",
    rows: bool = True,
    columns: bool = False,
) -> str | None:
    if not has_float8(gate.device):
        return "the device doesn't convert to float8_e4m3fn"
    return None


@implements(quantize_gated)
def forward(
    needs: Needs,
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    scales: str = "power_of_two",
    rows: bool = True,
    columns: bool = False,
) -> tuple[Quantized, Saved]:
    result = new_results(gate, "1x128", rows, columns)
    _launch(*result, gate, up, activation == "gelu_tanh", scales == "power_of_two")
    return result, ()
