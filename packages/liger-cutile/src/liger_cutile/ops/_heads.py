"""Tensors of heads, ``[B, ., ., D]``, for kernels that index all four dimensions."""

from collections.abc import Iterator

import cuda.tile as ct
from torch import Tensor

from liger_cutile.ops._rows import LARGEST


@ct.function
def load_heads(array, place, shape, CHECK):
    """A tile of any number of dimensions, in float32. What lies outside of the array is undetermined.

    Without CHECK nothing may lie outside; the bounds cost as many instructions as all else.
    """
    return ct.astype(ct.load(array, place, shape, check_bounds=CHECK), ct.float32)


def within_reach(*tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """The tensors as they are; or sample by sample, where the distance of two samples is too long for a kernel.

    A tensor of one sample goes with every sample of the others.
    """
    if all(x is None or x.stride(0) <= LARGEST for x in tensors):
        yield tensors
        return
    for sample in range(max(x.shape[0] for x in tensors if x is not None)):
        # A single sample's distance from the next is of no account.
        yield tuple(
            None if x is None else x[sample % x.shape[0]].as_strided((1, *x.shape[1:]), (0, *x.stride()[1:]))
            for x in tensors
        )
