"""Multimodal rotary embedding: a program takes all heads of one token, so it reads each column's plane once."""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from liger_core import qwen2vl_mrope
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import power_of_2
from liger_triton.ops.rope import load_heads, rotate_heads


@kernel
def _rotate(
    yq, yk, q, k, cos, sin, length, plane_stride, table_batch, table_token,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    BACKWARD: tl.constexpr, TOKEN_MAJOR: tl.constexpr, TIME: tl.constexpr, HEIGHT: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < HALF
    plane = tl.where(column < TIME, 0, tl.where(column < TIME + HEIGHT, 1, 2))
    at = batch * table_batch + token * table_token + plane.to(tl.int64) * plane_stride + column
    cos1 = tl.load(cos + at, inside).to(tl.float32)
    cos2 = tl.load(cos + HALF + at, inside).to(tl.float32)
    sin1 = tl.load(sin + at, inside).to(tl.float32)
    sin2 = tl.load(sin + HALF + at, inside).to(tl.float32)
    if BACKWARD:  # the transpose: by the negative angle, where both halves have the same
        sin1, sin2 = -sin2, -sin1
    # Both before anything is stored: what follows a store waits for memory once more.
    if q is not None:
        q += batch * q_batch + token * q_token
        q1, q2 = load_heads(q, q_head, 0, Q_HEADS, 2 * HALF, Q_BLOCK, COLUMNS)
    if k is not None:
        k += batch * k_batch + token * k_token
        k1, k2 = load_heads(k, k_head, 0, K_HEADS, 2 * HALF, K_BLOCK, COLUMNS)
    if q is not None:
        rotate_heads(
            yq, q, q_head, q1, q2, batch, token, length, cos1, cos2, sin1, sin2,
            Q_HEADS, 2 * HALF, 2 * HALF, TOKEN_MAJOR, HEADS=Q_BLOCK, HALF=COLUMNS, REST=0,
        )  # fmt: skip
    if k is not None:
        rotate_heads(
            yk, k, k_head, k1, k2, batch, token, length, cos1, cos2, sin1, sin2,
            K_HEADS, 2 * HALF, 2 * HALF, TOKEN_MAJOR, HEADS=K_BLOCK, HALF=COLUMNS, REST=0,
        )  # fmt: skip


def _launch(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], backward: bool
) -> tuple[Tensor | None, Tensor | None]:
    plane_stride, table_batch, table_token, adjacent = cos.stride()
    if adjacent != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
        plane_stride, table_batch, table_token, _ = cos.stride()
    if cos.shape[1] == 1:
        table_batch = 0
    first = k if q is None else q
    batch, _, length, head_size = first.shape
    _, by_head, by_token, _ = first.stride()
    token_major = by_head < by_token
    q, yq, q_heads, q_strides = _heads(q, token_major)
    k, yk, k_heads, k_strides = _heads(k, token_major)
    columns = power_of_2(head_size // 2)
    # At most 2048 elements of each half at a time, 16 a thread. On an H200 (triton 3.6), 2 x 16384 tokens, q of 28 heads of 128
    # and k of 4: 0.141 ms, with 512 elements, 4 a thread, 0.149; 1 x 2048 of them 0.0145 and 0.0153.
    most = max(1, 2048 // columns)
    q_block, k_block = min(power_of_2(q_heads, 1), most), min(power_of_2(k_heads, 1), most)
    _rotate[(batch * length,)](
        yq, yk, q, k, cos, sin, length, plane_stride, table_batch, table_token, *q_strides, *k_strides,
        BACKWARD=backward, TOKEN_MAJOR=token_major, TIME=mrope_section[0], HEIGHT=mrope_section[1],
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=head_size // 2, Q_BLOCK=q_block, K_BLOCK=k_block, COLUMNS=columns,
        num_warps=min(max(1, max(q_block, k_block) * columns // 512), 8),
    )  # fmt: skip
    return yq, yk


def _heads(x: Tensor | None, token_major: bool) -> tuple[Tensor | None, Tensor | None, int, tuple[int, ...]]:
    """q or k with adjacent columns, its output, its heads, and its strides but the last."""
    if x is None:
        return None, None, 1, (0, 0, 0)
    strides = x.stride()
    if strides[3] != 1:
        x = x.contiguous()
        strides = x.stride()
    _, heads, length, size = x.shape
    if token_major:
        y = x.new_empty_strided(x.shape, (length * heads * size, size, heads * size, 1))
    else:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return x, y, heads, strides[:3]


@implements(qwen2vl_mrope)
def forward(
    needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[tuple[Tensor, Tensor], Saved]:
    return _launch(q, k, cos, sin, mrope_section, False), (cos, sin) if True in needs else ()


def backward(
    needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None, *, mrope_section: Sequence[int]
) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else _launch(dq, dk, *saved, mrope_section, True)
