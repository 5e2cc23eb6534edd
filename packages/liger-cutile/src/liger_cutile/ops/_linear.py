"""cuTile's part of linear layers: it scales gradients that were made before the gradient of the loss was known."""

import cuda.tile as ct
from torch import Tensor

from liger_core.custom_op import opaque
from liger_core.host.linear import Linear
from liger_cutile.ops._launch import ConstInt, given, launch
from liger_cutile.ops._rows import as_one_row, blocks, load

# Elements of a tile that is scaled.
TILE = 4096


@ct.kernel(occupancy=4)
def _scale(y, x, dloss, totals, BLOCK: ConstInt):
    factor = ct.load(dloss, (0,), ())
    if given(totals):
        factor = factor / ct.load(totals, (0,), ())
    across = ct.num_tiles(y, axis=1, shape=(1, BLOCK))
    place = ct.bid(0) // across, ct.bid(0) % across
    ct.store(y, place, ct.astype(load(x if given(x) else y, place, 1, BLOCK) * factor, y.dtype))


@opaque(writes=("y",))
def _launch_scale(y: Tensor, x: Tensor | None, dloss: Tensor, totals: Tensor | None) -> None:
    (y,) = as_one_row(y)
    x = None if x is None else x.view_as(y)
    rows, columns = y.shape
    launch(_scale, (rows * blocks(columns, TILE),), y, x, dloss.view(1), totals, TILE)


class CuTileLinear(Linear):
    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        _launch_scale(y, None if y is x else x, dloss, divisor)


LINEAR = CuTileLinear()
