"""Device properties that host code needs."""

import functools

import torch


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


# torch.compiler.assume_constant_result does this, but would import Dynamo. functools.cache would make Dynamo warn.
for _function in (sm_count, multiplies_from_shared, loads_in_bulk):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
