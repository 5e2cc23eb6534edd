"""What host code has to know of a device."""

import functools

import torch


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device, for grids of as many blocks as run at once.

    On the CPU, where an interpreter runs one block after another, it is 2: few, but more than one partial sum.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def multiplies_from_shared(device: torch.device) -> bool:
    """Whether matrix products read shared memory, as on Hopper and on Blackwell of data centres; else they take registers.

    So it is on the CPU.
    """
    return device.type != "cuda" or torch.cuda.get_device_properties(device).major in (9, 10)


@functools.cache
def loads_in_bulk(device: torch.device) -> bool:
    """Whether there is a TMA, as on Hopper and later; else what is on its way takes registers.

    So it is on the CPU.
    """
    return device.type != "cuda" or torch.cuda.get_device_properties(device).major >= 9
