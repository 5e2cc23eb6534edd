"""The product of a gated MLP's branches in 8 bits, by tiles as in `quantize`."""

import triton
import triton.language as tl
from torch import Tensor

from liger_core import quantize_gated
from liger_core.contract import Needs, Saved, implements
from liger_core.host.quantize import TILE, new_results, tiles
from liger_core.ops.quantize import Quantized
from liger_triton.ops._device import has_float8
from liger_triton.ops._launch import kernel
from liger_triton.ops.geglu import gelu
from liger_triton.ops.quantize import WARPS, finite, load, place, write


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """The activation, and its derivative."""
    if GELU:
        return gelu(gate)
    else:
        sigmoid = tl.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))


@triton.jit
def _quarter(
    gate, up, tile_m, tile_k, quarter: tl.constexpr, m, k, gate_row, gate_column, up_row, up_column,
    GELU: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, column = place(tile_m, tile_k, quarter, TILE, TILE)
    act, _ = activate(load(gate, row, column, m, k, gate_row, gate_column), GELU)
    return finite(act * load(up, row, column, m, k, up_row, up_column))


@kernel
def _forward(
    rows, row_scales, columns, column_scales, gate, up, m, k, tiles_m, tiles_k, gate_row, gate_column, up_row, up_column,
    GELU: tl.constexpr, POWER: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = (tl.program_id(0) // tiles_k).to(tl.int64), (tl.program_id(0) % tiles_k).to(tl.int64)
    quarters = (
        _quarter(gate, up, tile_m, tile_k, 0, m, k, gate_row, gate_column, up_row, up_column, GELU, TILE),
        _quarter(gate, up, tile_m, tile_k, 1, m, k, gate_row, gate_column, up_row, up_column, GELU, TILE),
        _quarter(gate, up, tile_m, tile_k, 2, m, k, gate_row, gate_column, up_row, up_column, GELU, TILE),
        _quarter(gate, up, tile_m, tile_k, 3, m, k, gate_row, gate_column, up_row, up_column, GELU, TILE),
    )
    write(
        rows, row_scales, columns, column_scales, quarters, None, None, tile_m, tile_k, m, k, tiles_m, tiles_k,
        "1x128", POWER, WORDS, TILE,
    )  # fmt: skip


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
    m, k = gate.shape
    tiles_m, tiles_k = tiles(m), tiles(k)
    result = new_results(gate, "1x128", rows, columns)
    _forward[(tiles_m * tiles_k,)](
        *result, gate, up, m, k, tiles_m, tiles_k, *gate.stride(), *up.stride(),
        GELU=activation == "gelu_tanh", POWER=scales == "power_of_two", WORDS=not m % 4, TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    return result, ()
