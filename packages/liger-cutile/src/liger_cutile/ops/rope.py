"""Rotary embedding: a block takes all heads of q and k of some tokens, so it reads the tokens' angles once."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import rope
from liger_core.contract import Needs, Saved, implements
from liger_core.opaque import opaque
from liger_cutile.ops._heads import load_heads, within_reach
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._rows import blocks, power_of_2

# Elements of each half at a time.
TILE = 2048


@ct.function
def _rotate_heads(y1s, y2s, rest, x, cos1, cos2, sin1, sin2, COLUMNS, TILES, HEADS, TOKENS, HALF, REST, CHECK):
    """The heads of some tokens. `y1s`, `y2s` and `rest` are columns of one tensor, which no other block writes to."""
    x1s, x2s = x.slice(3, 0, COLUMNS // 2), x.slice(3, COLUMNS // 2, COLUMNS)
    for head in range(TILES):
        at = (ct.bid(1), head, ct.bid(0), 0)
        x1 = load_heads(x1s, at, (1, HEADS, TOKENS, HALF), CHECK)
        x2 = load_heads(x2s, at, (1, HEADS, TOKENS, HALF), CHECK)
        ct.store(y1s, at, ct.astype(x1 * cos1 - x2 * sin1, y1s.dtype), check_bounds=CHECK)
        ct.store(y2s, at, ct.astype(x2 * cos2 + x1 * sin2, y2s.dtype), check_bounds=CHECK)
        if given(rest):
            ct.store(rest, at, ct.load(x.slice(3, COLUMNS, x.shape[3]), at, (1, HEADS, TOKENS, REST)))


@ct.kernel(occupancy=4)
def _rotate(
    yq1, yq2, q_rest, yk1, yk2, k_rest, q, k, cos, sin,
    BACKWARD: ConstBool, BATCHED: ConstBool, CHECK: ConstBool, COLUMNS: ConstInt, TOKENS: ConstInt,
    Q_TILES: ConstInt, Q_HEADS: ConstInt, K_TILES: ConstInt, K_HEADS: ConstInt, HALF: ConstInt, REST: ConstInt,
):  # fmt: skip
    at = (ct.bid(1) if BATCHED else 0, ct.bid(0), 0)
    # One row of the tables for all heads.
    shape = (1, 1, TOKENS, HALF)
    cos1 = ct.reshape(load_heads(cos.slice(2, 0, COLUMNS // 2), at, (1, TOKENS, HALF), CHECK), shape)
    cos2 = ct.reshape(load_heads(cos.slice(2, COLUMNS // 2, COLUMNS), at, (1, TOKENS, HALF), CHECK), shape)
    sin1 = ct.reshape(load_heads(sin.slice(2, 0, COLUMNS // 2), at, (1, TOKENS, HALF), CHECK), shape)
    sin2 = ct.reshape(load_heads(sin.slice(2, COLUMNS // 2, COLUMNS), at, (1, TOKENS, HALF), CHECK), shape)
    if BACKWARD:  # the transpose: by the negative angle, where both halves have the same
        sin1, sin2 = -sin2, -sin1
    if given(q):
        _rotate_heads(yq1, yq2, q_rest, q, cos1, cos2, sin1, sin2, COLUMNS, Q_TILES, Q_HEADS, TOKENS, HALF, REST, CHECK)
    if given(k):
        _rotate_heads(yk1, yk2, k_rest, k, cos1, cos2, sin1, sin2, COLUMNS, K_TILES, K_HEADS, TOKENS, HALF, REST, CHECK)


@opaque(writes=("yq", "yk"))
def _launch(
    yq: Tensor | None, yk: Tensor | None, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    for tensors in within_reach(yq, yk, q, k, cos, sin):
        _launch_samples(*tensors, backward)


def _launch_samples(
    yq: Tensor | None, yk: Tensor | None, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    columns = cos.shape[2]
    batch, _, length, head_size = (k if q is None else q).shape
    half, rest = power_of_2(columns // 2), power_of_2(head_size - columns)
    most = max(1, TILE // max(half, rest))
    q_count, k_count = (1 if x is None else x.shape[1] for x in (q, k))
    q_heads, k_heads = min(power_of_2(q_count, 1), most), min(power_of_2(k_count, 1), most)
    tokens = min(max(1, most // max(q_heads, k_heads)), power_of_2(length, 1))
    whole = half * 2 == columns and length % tokens == 0 and q_count % q_heads == 0 and k_count % k_heads == 0
    launch(
        _rotate, (blocks(length, tokens), batch), *_columns(yq, columns), *_columns(yk, columns), q, k, cos, sin,
        backward, cos.shape[0] > 1, not whole, columns, tokens,
        blocks(q_count, q_heads), q_heads, blocks(k_count, k_heads), k_heads, half, rest,
    )  # fmt: skip


def _columns(y: Tensor | None, columns: int) -> tuple[Tensor | None, ...]:
    """The two halves that are rotated, and the rest, if there is any.

    Apart, they are written in any order: a kernel that gets one tensor waits for one half before it writes the other.
    """
    if y is None:
        return None, None, None
    half = columns // 2
    first, second, rest = y.split_with_sizes((half, half, y.shape[3] - columns), -1)
    return first, second, rest if rest.shape[3] else None


def _like(x: Tensor | None) -> Tensor | None:
    """The output for q or k: without gaps, and its heads and tokens in the order of x's."""
    if x is None:
        return None
    batch, heads, length, head_size = x.shape
    if x.stride(1) >= x.stride(2):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty((batch, length, heads, head_size)).transpose(1, 2)


@implements(rope)
def forward(needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    yq, yk = _like(q), _like(k)
    _launch(yq, yk, q, k, cos, sin, False)
    return (yq, yk), (cos, sin) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    if dq is None and dk is None:
        return None, None
    yq, yk = _like(dq), _like(dk)
    _launch(yq, yk, dq, dk, *saved, True)
    return yq, yk
