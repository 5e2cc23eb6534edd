"""Device properties that host code needs."""

import functools

import torch


@functools.cache
def _look_up_sm_count(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 2


def sm_count(device: torch.device) -> int:
    """The number of multiprocessors of a device, for grids of as many programs as run at once.

    On the CPU an interpreter runs one program after another. There it is 2: few programs, but more than one partial sum.
    """
    return _look_up_sm_count(device)


@functools.cache
def _look_up_shared_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return 64 << 10


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have. If torch doesn't tell, it is 64 KiB, which any GPU has."""
    return _look_up_shared_memory(device)


@functools.cache
def _look_up_warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def warp_size(device: torch.device) -> int:
    """Threads of a warp: 32, or 64 on AMD's data centre GPUs. A program has at most 1024 threads."""
    return _look_up_warp_size(device)


@functools.cache
def _look_up_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether a device has compute capability 9.0, such as an H100 or H200."""
    return _look_up_hopper(device)


def has_float8(device: torch.device) -> bool:
    """Whether a device's compiler converts to float8_e4m3fn: of NVIDIA's, those from compute capability 8.9 on."""
    return device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)


# torch.compiler.assume_constant_result does this, but would import Dynamo. functools.cache would make Dynamo warn.
for _function in (sm_count, shared_memory, warp_size, is_hopper, has_float8):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
