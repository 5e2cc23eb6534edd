"""A tensor as rows, and the tiles of rows that a vector core takes one after another."""

from torch import Tensor

from liger_core.host.rows import as_rows as as_rows
from liger_triton_ascend.ops._device import compute_default_tiling_strategy, get_npu_core_count

MARGIN = 0.8
"""The share of the Unified Buffer that tiles may take. The compiler keeps temporaries there, which a count of tiles leaves
out."""

LEAST = 16
"""The fewest columns of a tile: one aligned block of 32 bytes in float16 or bfloat16."""

LEAST_SHARED = 512
"""The fewest columns of a tile of a row that cores share, if the row is that long: 1 KiB in bfloat16, so that it is transferred
in few pieces. Not measured."""

TILES_A_CORE = 4
"""The fewest tiles per core, if there are enough rows, so that transfers overlap with work and cores finish together. Not
measured."""


def row_tiles(like: Tensor, rows: int, columns: int, alive: float) -> tuple[int, int, int]:
    """How a grid of vector cores goes over rows that are each worked on as a whole.

    A tile is as many whole rows as fit the Unified Buffer, but few enough for all cores to have some. If not even one row fits,
    it is a part of one row.

    Args:
        like: a tensor on the device.
        rows: number of rows.
        columns: number of columns.
        alive: float32 tiles that a kernel holds at once.

    Returns:
        Programs, at most one per core; rows of a tile; columns of a tile, which are fewer than `columns` if no row fits.
    """
    cores = get_npu_core_count(like.device)
    tile_rows, block = _tile(rows // (TILES_A_CORE * cores), columns, alive)
    return min(_ceil_div(rows, tile_rows), cores), tile_rows, block


def element_tiles(like: Tensor, rows: int, columns: int, alive: float) -> tuple[int, int, int]:
    """How a grid of vector cores goes over rows whose elements don't depend on each other.

    It is as `row_tiles`, but cores share a row if there are fewer rows than cores.

    Returns:
        Programs, at most one per core; rows of a tile; columns of a tile.
    """
    cores = get_npu_core_count(like.device)
    sharers = max(1, cores // rows)
    part = columns if sharers == 1 else max(LEAST_SHARED, columns // (TILES_A_CORE * sharers))
    tile_rows, block = _tile(rows // (TILES_A_CORE * cores), min(columns, part), alive)
    return min(_ceil_div(rows, tile_rows) * _ceil_div(columns, block), cores), tile_rows, block


def long_row_blocks(like: Tensor, rows: int, columns: int, alive: float) -> tuple[int, int]:
    """How a grid of vector cores goes over rows that seldom fit the Unified Buffer: whole rows, block after block.

    Args:
        like: a tensor on the device.
        rows: number of rows.
        columns: number of columns.
        alive: float32 blocks that a kernel holds at once.

    Returns:
        Programs, one per row and at most one per core; columns of a block, a power of two.
    """
    _, _, block = row_tiles(like, 1, columns, alive)
    return min(rows, get_npu_core_count(like.device)), block


def _tile(most_rows: int, columns: int, alive: float) -> tuple[int, int]:
    rows = 1
    while 2 * rows <= most_rows:
        rows *= 2
    ((tile_rows, block),) = compute_default_tiling_strategy(MARGIN, 4, alive, [(rows, max(columns, LEAST))], [(0, 1)])
    return tile_rows, block


def _ceil_div(size: int, part: int) -> int:
    return (size + part - 1) // part
