"""Device properties that host code needs, and how many blocks of a kernel share a multiprocessor.

Without a hint, tileiras gives a kernel that uses TMA all registers of a multiprocessor, so only one block runs there.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from liger_cutile.ops._rows import blocks


@functools.cache
def _look_up_sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def sm_count(device: torch.device) -> int:
    """The number of multiprocessors of a device, for grids of as many blocks as run at once.

    On the CPU an interpreter runs one block after another. There it is 2: few blocks, but more than one partial sum.
    """
    return _look_up_sm_count(device)


@functools.cache
def _look_up_major(device: torch.device) -> int:
    """The first number of a GPU's compute capability."""
    return torch.cuda.get_device_properties(device).major


def multiplies_from_shared(device: torch.device) -> bool:
    """Whether matrix products read shared memory, as on Hopper and data-centre Blackwell, instead of registers.

    On the CPU it is true.
    """
    return device.type != "cuda" or _look_up_major(device) in (9, 10)


def is_hopper(device: torch.device) -> bool:
    """Whether matrix products read shared memory and their results take registers, as on Hopper alone.

    On the CPU it is true.
    """
    return device.type != "cuda" or _look_up_major(device) == 9


def loads_in_bulk(device: torch.device) -> bool:
    """Whether there is a TMA, as on Hopper and later; otherwise data in flight takes registers.

    On the CPU it is true.
    """
    return device.type != "cuda" or _look_up_major(device) >= 9


def has_float8(device: torch.device) -> bool:
    """Whether a device converts to float8_e4m3fn: from compute capability 8.9 on. On the CPU it is true."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


# torch.compiler.assume_constant_result does this, but would import Dynamo. functools.cache would make Dynamo warn.
for _function in (sm_count, multiplies_from_shared, loads_in_bulk, has_float8):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def resident(kernel: Any, elements: int, tiles: int = 1) -> tuple[Any, int]:
    """`sized`, and how many blocks of the kernel fit a multiprocessor: for blocks that take one tile after another.

    Such a block loads the next tile while it works on one. A new block has nothing to work on while it loads. On an H200,
    softmax's backward of 8192 x 8192 in bfloat16 takes 0.105 ms, and 0.120 with a block for each row.
    """
    if tiles * elements <= 8192:
        return kernel.replace_hints(occupancy=4), 4
    if elements <= 8192:
        return kernel.replace_hints(occupancy=2), 2
    return kernel.replace_hints(num_worker_warps=8), 1


def by_turns(kernel: Any, x: Tensor, tile_rows: int, block: int, tiles: int = 1) -> tuple[Any, tuple[int]]:
    """`resident` for tiles of whole rows of x, and a grid with a block for each tile, but at most as many as run at once."""
    kernel, at_once = resident(kernel, tile_rows * block, tiles)
    return kernel, (min(blocks(x.shape[0], tile_rows), sm_count(x.device) * at_once),)


def sized(kernel: Any, elements: int, tiles: int = 1) -> Any:
    """The kernel for `tiles` float32 tiles of `elements` each, compiled for the most blocks per multiprocessor that don't spill.

    The choice follows what tileiras 13.4 compiles for sm_90. On an H200, layer_norm of 16384 x 8192 in bfloat16, with a block
    for each row, takes 0.172 ms with four blocks, 0.243 with two and 0.341 with six.
    """
    kernel, _ = resident(kernel, elements, tiles)
    return kernel


@functools.cache
def packed(kernel: Any, elements: int) -> Any:
    """The kernel for a block per tile of `elements`, loaded by plain instructions: up to eight blocks at once.

    On an H200, layer_norm in bfloat16 takes 0.137 ms with four blocks of 8192 elements, and 0.147 without a hint. With eight
    blocks of 4096 it takes 0.039, and 0.047 without.
    """
    return kernel.replace_hints(occupancy=min(8, 32768 // elements))


@functools.cache
def persistent(kernel: Any, elements: int) -> tuple[Any, int]:
    """The kernel for a tile of `elements`, and how many of its blocks fit a multiprocessor: for sums of gradients.

    Its blocks take tile after tile and sum up gradients meanwhile.

    The numbers are for kernels that hold two such tiles and two float32 sums of that size. With them tileiras 13.4 spills
    nothing on sm_90. Without a hint it gives one block all registers.
    """
    if elements <= 2048:
        return kernel.replace_hints(occupancy=3), 3
    if elements <= 4096:
        return kernel.replace_hints(occupancy=2), 2
    return kernel.replace_hints(num_worker_warps=8), 1
