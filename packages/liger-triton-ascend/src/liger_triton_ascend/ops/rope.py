"""Rotary embedding: a tile has several tokens, or several heads of a few tokens. Its angles are read once for all heads."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import rope
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._device import compute_default_tiling_strategy, get_npu_core_count
from liger_triton_ascend.ops._rows import MARGIN

TILES = 15
"""Float32 tiles, by the estimate of the Unified Buffer: 10 for elements of 2 bytes, 15 for those of 4. Both leave 2048."""


@triton.jit
def _load_angles(
    table, at, token, column, length, half, plane_stride, TIME: tl.constexpr, HEIGHT: tl.constexpr
):  # fmt: skip
    """The table's entries. If it has planes, each column takes those of its own plane."""
    inside = (token < length) & (column < half)
    angles = tl.load(table + at, inside, other=0.0).to(tl.float32)
    if plane_stride is not None:
        height = tl.load(table + plane_stride + at, inside, other=0.0).to(tl.float32)
        width = tl.load(table + plane_stride + plane_stride + at, inside, other=0.0).to(tl.float32)
        place = column.to(tl.float32)  # the vector unit would compare integers one by one
        angles = tl.where(place < TIME, angles, tl.where(place < TIME + HEIGHT, height, width))
    return angles


@triton.jit
def _rotate_heads(
    y, x, batch, token, column, cos1, cos2, sin1, sin2, length, half, heads,
    x_batch, x_head, x_token, y_batch, y_head, y_token, HEADS: tl.constexpr,
):  # fmt: skip
    for first in range(0, heads, HEADS):
        head = tl.cast(first, tl.int64) + tl.arange(0, HEADS)[None, :, None]
        inside = (token < length) & (head < heads) & (column < half)
        x_at = x + batch * x_batch + token * x_token + head * x_head + column
        y_at = y + batch * y_batch + token * y_token + head * y_head + column
        x1 = tl.load(x_at, inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_at + half, inside, other=0.0).to(tl.float32)
        tl.store(y_at, x1 * cos1 - x2 * sin1, inside)
        tl.store(y_at + half, x2 * cos2 + x1 * sin2, inside)


@triton.jit
def _pass_heads(
    y, x, batch, token, length, rotated, head_size, heads,
    x_batch, x_head, x_token, y_batch, y_head, y_token, HEADS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    for first in range(0, heads, HEADS):
        head = tl.cast(first, tl.int64) + tl.arange(0, HEADS)[None, :, None]
        for start in range(rotated, head_size, REST):
            column = start + tl.arange(0, REST)[None, None, :]
            inside = (token < length) & (head < heads) & (column < head_size)
            xs = tl.load(x + batch * x_batch + token * x_token + head * x_head + column, inside)
            tl.store(y + batch * y_batch + token * y_token + head * y_head + column, xs, inside)


@triton.jit
def _rotate(
    yq, yk, q, k, cos, sin, batches, length, half, head_size, q_heads, k_heads,
    plane_stride, table_batch, table_token,
    q_batch, q_head, q_token, k_batch, k_head, k_token, yq_batch, yq_head, yq_token, yk_batch, yk_head, yk_token,
    BACKWARD: tl.constexpr, TIME: tl.constexpr, HEIGHT: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, TOKENS)
    for index in range(tl.program_id(0), batches * tiles, tl.num_programs(0)):
        batch = tl.cast(index // tiles, tl.int64)
        token = tl.cast(index % tiles, tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
        for start in range(0, half, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, None, :]
            at = batch * table_batch + token * table_token + column
            cos1 = _load_angles(cos, at, token, column, length, half, plane_stride, TIME, HEIGHT)
            cos2 = _load_angles(cos, at + half, token, column, length, half, plane_stride, TIME, HEIGHT)
            sin1 = _load_angles(sin, at, token, column, length, half, plane_stride, TIME, HEIGHT)
            sin2 = _load_angles(sin, at + half, token, column, length, half, plane_stride, TIME, HEIGHT)
            if BACKWARD:  # the transpose: by the negative angle, if both halves have the same angles
                sin1, sin2 = -sin2, -sin1
            if q is not None:
                _rotate_heads(
                    yq, q, batch, token, column, cos1, cos2, sin1, sin2, length, half, q_heads,
                    q_batch, q_head, q_token, yq_batch, yq_head, yq_token, HEADS,
                )  # fmt: skip
            if k is not None:
                _rotate_heads(
                    yk, k, batch, token, column, cos1, cos2, sin1, sin2, length, half, k_heads,
                    k_batch, k_head, k_token, yk_batch, yk_head, yk_token, HEADS,
                )  # fmt: skip
        if REST > 0:
            if q is not None:
                _pass_heads(
                    yq, q, batch, token, length, 2 * half, head_size, q_heads,
                    q_batch, q_head, q_token, yq_batch, yq_head, yq_token, HEADS, REST,
                )  # fmt: skip
            if k is not None:
                _pass_heads(
                    yk, k, batch, token, length, 2 * half, head_size, k_heads,
                    k_batch, k_head, k_token, yk_batch, yk_head, yk_token, HEADS, REST,
                )  # fmt: skip


def launch(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool, sections: Sequence[int] | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """q and k rotated, or rotated back. `sections` says how many columns take each plane of the tables."""
    rotated = cos.shape[-1]
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    plane_stride = None if sections is None else cos.stride(0)
    table_batch = 0 if cos.dim() == 2 or cos.shape[-3] == 1 else cos.stride(-3)
    q, yq, q_heads, q_strides, yq_strides = _heads(q)
    k, yk, k_heads, k_strides, yk_strides = _heads(k)
    batches, _, length, head_size = (k if q is None else q).shape
    cores = get_npu_core_count(cos.device)
    share = (batches * length + cores - 1) // cores
    # Columns grow first. Then come tokens, whose angles all heads share. Heads come last: for them the angles are repeated.
    shape = (max(q_heads, k_heads), min(share, length), rotated // 2)
    ((heads, tokens, block),) = compute_default_tiling_strategy(MARGIN, 4, TILES, [shape], [(0, 1, 2)])
    programs = min(batches * ((length + tokens - 1) // tokens), cores)
    _rotate[(programs,)](
        yq, yk, q, k, cos, sin, batches, length, rotated // 2, head_size, q_heads, k_heads,
        plane_stride, table_batch, cos.stride(-2), *q_strides, *k_strides, *yq_strides, *yk_strides,
        BACKWARD=backward, TIME=sections[0] if sections else 0, HEIGHT=sections[1] if sections else 0,
        HEADS=heads, TOKENS=tokens, BLOCK=block, REST=4 * block if rotated < head_size else 0,
    )  # fmt: skip
    return yq, yk


def _heads(x: Tensor | None) -> tuple[Tensor | None, Tensor | None, int, tuple[int, ...], tuple[int, ...]]:
    """q or k with adjacent columns, its output, its heads, and the strides of both except their columns'.

    The output has no gaps. Its heads and tokens lie in the order of x's.
    """
    if x is None:
        return None, None, 1, (0, 0, 0), (0, 0, 0)
    if x.stride(3) != 1:
        x = x.contiguous()
    _, heads, length, head_size = x.shape
    if x.stride(1) < x.stride(2):
        y = x.new_empty_strided(x.shape, (length * heads * head_size, head_size, heads * head_size, 1))
    else:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return x, y, heads, x.stride()[:3], y.stride()[:3]


@implements(rope)
def forward(needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    return launch(q, k, cos, sin, False), (cos, sin) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else launch(dq, dk, *saved, True)
