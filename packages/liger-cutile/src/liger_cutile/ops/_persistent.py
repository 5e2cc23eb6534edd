"""Kernels whose blocks take tile after tile, and sum up gradients on the way: how many of them run at once."""

import functools
from typing import Any


@functools.cache
def persistent(kernel: Any, elements: int) -> tuple[Any, int]:
    """The kernel for a tile of so many elements, and how many of its blocks a multiprocessor has room for.

    It fits kernels that hold two such tiles and two sums of theirs in float32, by what tileiras 13.4 compiles for sm_90
    without spilling. Without a hint tileiras gives one block all registers.
    """
    if elements <= 2048:
        return kernel.replace_hints(occupancy=3), 3
    if elements <= 4096:
        return kernel.replace_hints(occupancy=2), 2
    return kernel.replace_hints(num_worker_warps=8), 1
