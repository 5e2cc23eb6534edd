"""Tiles that fit the Unified Buffer, the memory of an Ascend vector core.

A kernel computes only with what is in the Unified Buffer, 192 KiB on a 910B. A kernel that needs more doesn't compile. So a
tile's size follows from how many tiles are alive at once, not from what one element costs.
"""

import functools
import os
from collections.abc import Sequence

import torch

ALIGNMENT = 32
"""Bytes of a block of the Unified Buffer. Each row of a tile takes whole blocks."""

CORES_WITHOUT_NPU = 2
"""The number of vector cores if there is no NPU, as in an interpreter: few, but more than one partial sum. A 910B2 has 48."""


def compute_default_tiling_strategy(
    safety_margin: float,
    dtype_size: int,
    memory_multiplier: float,
    shapes: Sequence[tuple[int, ...]],
    tiling_dims: Sequence[int | tuple[int, ...]],
) -> tuple[tuple[int, ...], ...]:
    """The largest tile of each shape that fits the Unified Buffer.

    A tile's sizes are powers of two, no larger than the shape needs, and its rows are multiples of 32 bytes. If several
    dimensions are tiled, they share one budget, and the last one grows first: adjacent elements stay together.

    Args:
        safety_margin: the share of the Unified Buffer that may be used; the compiler needs the rest.
        dtype_size: bytes of an element in the dtype that the kernel computes in.
        memory_multiplier: tiles of the shape that are alive at once.
        shapes: the shapes to tile.
        tiling_dims: for each shape the dimensions, or the one dimension, in which its tile may be smaller than the shape.

    Returns:
        For each shape the sizes of its tile.

    Raises:
        ValueError: the dimensions that aren't tiled don't fit, or an argument makes no sense.
        RuntimeError: the capacity of the Unified Buffer is not known.

    On a 910B, with six float32 tiles at a time, for 512 rows of 100 and for one row of 32000:

        compute_default_tiling_strategy(0.8, 4, 6, [(512, 100), (1, 32000)], [(0, 1), (0, 1)]) == ((32, 128), (1, 4096))
    """
    if len(shapes) != len(tiling_dims):
        raise ValueError(f"{len(shapes)} shapes have {len(tiling_dims)} tiling_dims; each takes its own")
    if not 0 < safety_margin <= 1 or dtype_size <= 0 or memory_multiplier <= 0:
        raise ValueError(
            f"safety_margin is {safety_margin}, dtype_size {dtype_size}, memory_multiplier {memory_multiplier}; "
            "they take a share above 0 and up to 1, and two numbers above 0"
        )
    elements = int(safety_margin * unified_buffer_bytes() / (dtype_size * memory_multiplier))
    return tuple(
        _largest_tile(shape, (dims,) if isinstance(dims, int) else dims, elements, dtype_size)
        for shape, dims in zip(shapes, tiling_dims, strict=True)
    )


def _largest_tile(shape: tuple[int, ...], dims: tuple[int, ...], elements: int, dtype_size: int) -> tuple[int, ...]:
    """The largest tile of a shape that has at most `elements` elements."""
    rank = len(shape)
    if not all(-rank <= dim < rank for dim in dims):
        raise ValueError(f"tiling dimensions {dims} are not all dimensions of {shape}")
    tiled = sorted({dim % rank for dim in dims})
    least = [1] * (rank - 1) + [max(1, ALIGNMENT // dtype_size)]
    whole = [_power_of_2(size, at_least) for size, at_least in zip(shape, least, strict=True)]
    tile = [least[dim] if dim in tiled else whole[dim] for dim in range(rank)]
    size = 1
    for length in tile:
        size *= length
    if size > elements:
        raise ValueError(
            f"of shape {shape}, tiled in dimensions {tiled}, the smallest tile {tuple(tile)} has {size} elements, and "
            f"{elements} fit the Unified Buffer: tile more dimensions"
        )
    for dim in reversed(tiled):
        while tile[dim] < whole[dim] and 2 * size <= elements:
            tile[dim] *= 2
            size *= 2
    return tuple(tile)


def _power_of_2(size: int, least: int) -> int:
    """The least power of two that is at least `size` and `least`, which is one itself.

    It uses comparisons, so that a dynamic size stays dynamic while torch.compile traces.
    """
    power = least
    while power < size:
        power *= 2
    return power


def unified_buffer_bytes() -> int:
    """The capacity of the Unified Buffer: ASCEND_UB_CAPACITY_BITS / 8 if that is set, else what CANN reports.

    Raises:
        RuntimeError: neither is available.
    """
    bits = os.environ.get("ASCEND_UB_CAPACITY_BITS")
    return _of_this_npu() if bits is None else int(bits) // 8


@functools.cache
def _of_this_npu() -> int:
    try:
        from tbe.common.platform import get_soc_spec, set_current_compile_soc_info
    except ImportError as error:
        raise RuntimeError(
            "the capacity of the Unified Buffer is not known: CANN's get_soc_spec(\"UB_SIZE\") can't be imported "
            "(source CANN's set_env.sh), and ASCEND_UB_CAPACITY_BITS is not set (1572864 on a 910B)"
        ) from error
    set_current_compile_soc_info(torch.npu.get_device_name())
    return int(get_soc_spec("UB_SIZE"))


def get_npu_core_count(device: torch.device | None = None) -> int:
    """Vector cores of an NPU: the number of programs that run at once.

    Args:
        device: the tensors' device; None for the current NPU. For any device but an NPU the result is `CORES_WITHOUT_NPU`.
    """
    if device is None:
        npu = getattr(torch, "npu", None)
        device = torch.device("npu" if npu is not None and npu.is_available() else "cpu")
    return _look_up_core_count(device)


@functools.cache
def _look_up_core_count(device: torch.device) -> int:
    if device.type != "npu":
        return CORES_WITHOUT_NPU
    from triton.runtime import driver

    index = driver.active.get_current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)["num_vectorcore"]


# torch.compiler.assume_constant_result does this, but would import Dynamo. functools.cache would make Dynamo warn.
for _function in (unified_buffer_bytes, get_npu_core_count):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
