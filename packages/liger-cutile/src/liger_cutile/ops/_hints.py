"""Registers for tiles of different sizes.

Without a hint tileiras gives a kernel that uses TMA all registers of a multiprocessor, so that one block runs there.
"""

import functools
from typing import Any


@functools.cache
def sized(kernel: Any, elements: int) -> Any:
    """The kernel for a tile of so many elements: compiled for the most blocks on a multiprocessor that don't spill.

    It fits kernels that hold one such tile in float32 or two in 16 bits; by what tileiras 13.4 compiles for sm_90.
    """
    if elements <= 4096:
        return kernel.replace_hints(occupancy=4)
    if elements <= 8192:
        return kernel.replace_hints(occupancy=2)
    return kernel.replace_hints(num_worker_warps=8)
