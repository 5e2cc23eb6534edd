"""What host code has to know of a device."""

import functools

import torch


@functools.cache
def _look_up_sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device, for grids of as many blocks as run at once.

    On the CPU, where an interpreter runs one block after another, it is 2: few, but more than one partial sum.
    """
    return _look_up_sm_count(device)


@functools.cache
def _look_up_major(device: torch.device) -> int:
    """The first number of a GPU's compute capability."""
    return torch.cuda.get_device_properties(device).major


def multiplies_from_shared(device: torch.device) -> bool:
    """Whether matrix products read shared memory, as on Hopper and on Blackwell of data centres; else they take registers.

    So it is on the CPU.
    """
    return device.type != "cuda" or _look_up_major(device) in (9, 10)


def loads_in_bulk(device: torch.device) -> bool:
    """Whether there is a TMA, as on Hopper and later; else what is on its way takes registers.

    So it is on the CPU.
    """
    return device.type != "cuda" or _look_up_major(device) >= 9


# What torch.compiler.assume_constant_result does, without importing Dynamo for it. Dynamo warns of functools.cache.
for _function in (sm_count, multiplies_from_shared, loads_in_bulk):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
