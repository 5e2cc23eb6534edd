"""Blocks of rows that don't fit the Unified Buffer, or seldom do, so they are taken one block after another."""

from torch import Tensor

from liger_triton_ascend.ops._rows import row_tiles
from liger_triton_ascend.tiling import get_npu_core_count


def long_row_blocks(like: Tensor, rows: int, columns: int, alive: float) -> tuple[int, int]:
    """How a grid of vector cores goes over rows. Each program takes whole rows.

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
