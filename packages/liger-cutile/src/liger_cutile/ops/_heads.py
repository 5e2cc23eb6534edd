"""Tensors of heads, ``[B, ., ., D]``, for kernels that index all four of their dimensions."""

import functools
from typing import cast

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core.contract import compiling
from liger_cutile.ops._launch import MOST_DOWN
from liger_cutile.ops._rows import LARGEST, blocks, near, power_of_2

# Elements of a tile of heads: of each half, or pairs of neighbouring columns.
TILE = 2048


@ct.function
def load_heads(array, place, shape, CHECK):
    """A tile of any number of dimensions, in float32. Elements outside the array are undefined.

    Without CHECK no element may be outside: checking the bounds takes as many instructions as all the rest.
    """
    return ct.astype(ct.load(array, place, shape, check_bounds=CHECK), ct.float32)


@functools.lru_cache
def tiling(columns: int, rest: int, length: int, q_heads: int, k_heads: int) -> tuple[int, bool, tuple[int, ...]]:
    """How heads are divided into blocks, each with some tokens and all their heads.

    Args:
        columns: columns of a head that are rotated.
        rest: its other columns.
        length: tokens of a sample.
        q_heads: heads of q, or 1 if there is no q.
        k_heads: heads of k, or 1 if there is no k.

    Returns:
        The number of blocks per sample; whether all their tiles lie inside q and k; and for a block: its tokens, the number of
        tiles of q and their heads, the same for k, and the columns of half a head.
    """
    half = power_of_2(columns // 2)
    most = max(1, TILE // max(half, power_of_2(rest)))
    q_tile, k_tile = min(power_of_2(q_heads, 1), most), min(power_of_2(k_heads, 1), most)
    tokens = min(max(1, most // max(q_tile, k_tile)), power_of_2(length, 1))
    whole = half * 2 == columns and length % tokens == 0 and q_heads % q_tile == 0 and k_heads % k_tile == 0
    tiles = blocks(q_heads, q_tile), q_tile, blocks(k_heads, k_tile), k_tile
    return blocks(length, tokens), whole, (tokens, *tiles, half)


def like(x: Tensor | None, gradient: bool = False) -> Tensor | None:
    """An uninitialised tensor of x's shape, without gaps, whose second and third dimensions lie in the order of x's.

    It is contiguous if x's columns aren't adjacent.

    Where a backward asks for a gradient's strides, Dynamo doesn't know them, and copies all gradients. So a trace asks for none.
    """
    if x is None:
        return None
    if gradient and compiling():
        return torch.empty_like(x)
    _, outer, inner, step = x.stride()
    if step != 1 or outer >= inner:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    _, second, third, columns = x.shape
    return x.new_empty_strided(x.shape, (second * third * columns, columns, second * columns, 1))


def side_by_side(x: Tensor | None) -> Tensor | None:
    """The tensor; or a copy, where its heads or tokens lie side by side in memory instead of its columns.

    A tile of such a tensor has a layout of its own. tileiras 13.4 gives it to the tables' tiles beside it, too, and then loads
    pairs of their 16-bit columns at odd places: a CUDA error.
    """
    if x is None or x.shape[3] == 1 or x.stride(3) == 1 or 1 not in x.stride():
        return x
    return cast("Tensor", like(x)).copy_(x)


def far_apart(*tensors: Tensor | None) -> bool:
    """Whether any stride is too long for a kernel."""
    return any(x is not None and max(x.stride()) > LARGEST for x in tensors)


def within_reach(*tensors: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """The tensors as they are; or some samples at a time, and only one if any stride is too long.

    A tensor of one sample goes with every sample of the others. The first tensor that isn't None has all samples.
    """
    samples, apart = next(x.shape[0] for x in tensors if x is not None), far_apart(*tensors)
    if samples <= MOST_DOWN and not apart:
        return [tensors]
    most = 1 if apart else MOST_DOWN
    return [tuple(samples_of(x, begin, most) for x in tensors) for begin in range(0, samples, most)]


def samples_of(x: Tensor | None, begin: int, count: int) -> Tensor | None:
    """Up to `count` samples of a tensor, from `begin` on. A tensor with one sample gives that one.

    If `count` is 1, the result is `near`.
    """
    if x is None or x.shape[0] == 1 < count:
        return x
    if count > 1:
        return x[begin : begin + count]
    # A kernel takes the stride of a dimension of one sample all the same, so it has to be short as well.
    return near(x[begin % x.shape[0]].expand(1, *x.shape[1:]))
