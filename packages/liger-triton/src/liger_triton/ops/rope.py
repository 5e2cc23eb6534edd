"""Rotary embedding: one program takes all heads of q and k of one token, so it reads the token's angles once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import rope
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._rows import power_of_2


@triton.jit
def _rotate_heads(
    y, x, heads, y_stride, x_stride, columns, head_size, cos1, cos2, sin1, sin2,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The heads of one token: y and x point at its first head, whose heads lie y_stride and x_stride apart."""
    half = columns // 2
    column = tl.arange(0, HALF)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (column < half)
        x_head = x + head.to(tl.int64) * x_stride
        y_head = y + head.to(tl.int64) * y_stride
        x1 = tl.load(x_head + column, inside).to(tl.float32)
        x2 = tl.load(x_head + half + column, inside).to(tl.float32)
        tl.store(y_head + column, x1 * cos1 - x2 * sin1, inside)
        tl.store(y_head + half + column, x2 * cos2 + x1 * sin2, inside)
        if REST > 0:
            rest = columns + tl.arange(0, REST)[None, :]
            passed = (head < heads) & (rest < head_size)
            tl.store(y_head + rest, tl.load(x_head + rest, passed), passed)


@triton.jit
def _rotate(
    yq, yk, q, k, cos, sin, length, q_heads, k_heads, columns, head_size,
    yq_batch, yq_head, yq_token, yk_batch, yk_head, yk_token, q_batch, q_head, q_token, k_batch, k_head, k_token,
    cos_batch, cos_token, sin_batch, sin_token,
    BACKWARD: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    half = columns // 2
    column = tl.arange(0, HALF)[None, :]
    inside = column < half
    cos += batch * cos_batch + token * cos_token
    sin += batch * sin_batch + token * sin_token
    cos1 = tl.load(cos + column, inside).to(tl.float32)
    cos2 = tl.load(cos + half + column, inside).to(tl.float32)
    sin1 = tl.load(sin + column, inside).to(tl.float32)
    sin2 = tl.load(sin + half + column, inside).to(tl.float32)
    if BACKWARD:  # the transpose: by the negative angle, where both halves have the same
        sin1, sin2 = -sin2, -sin1
    if q is not None:
        _rotate_heads(
            yq + batch * yq_batch + token * yq_token, q + batch * q_batch + token * q_token, q_heads, yq_head, q_head,
            columns, head_size, cos1, cos2, sin1, sin2, HEADS=Q_HEADS, HALF=HALF, REST=REST,
        )  # fmt: skip
    if k is not None:
        _rotate_heads(
            yk + batch * yk_batch + token * yk_token, k + batch * k_batch + token * k_token, k_heads, yk_head, k_head,
            columns, head_size, cos1, cos2, sin1, sin2, HEADS=K_HEADS, HALF=HALF, REST=REST,
        )  # fmt: skip


def _launch(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool
) -> tuple[Tensor | None, Tensor | None]:
    columns = cos.shape[-1]
    half = power_of_2(columns // 2)
    cos, *cos_strides = _table(cos)
    sin, *sin_strides = _table(sin)
    q, yq, q_heads, q_strides, yq_strides = _heads(q)
    k, yk, k_heads, k_strides, yk_strides = _heads(k)
    batch, _, length, head_size = (k if q is None else q).shape
    rest = power_of_2(head_size - columns) if head_size > columns else 0
    # At most 512 elements of each half at a time, 4 a thread. On an H200 (triton 3.6), q of 32 heads of 128 and k of 8,
    # 2 x 16384 tokens: 3.95 TB/s; 2048 elements at a time by 4, 8 and 16 warps: 3.40, 3.20 and 2.49.
    most = max(1, 512 // half)
    q_block, k_block = min(power_of_2(q_heads, 1), most), min(power_of_2(k_heads, 1), most)
    _rotate[(batch * length,)](
        yq, yk, q, k, cos, sin, length, q_heads, k_heads, columns, head_size,
        *yq_strides, *yk_strides, *q_strides, *k_strides, *cos_strides, *sin_strides,
        BACKWARD=backward, Q_HEADS=q_block, K_HEADS=k_block, HALF=half, REST=rest,
        num_warps=min(max(1, max(q_block, k_block) * max(half, rest) // 128), 8),
    )  # fmt: skip
    return yq, yk


def _table(table: Tensor) -> tuple[Tensor, int, int]:
    """cos or sin with adjacent columns, and the distances of its batches and tokens."""
    if table.stride(-1) != 1:
        table = table.contiguous()
    return table, 0 if table.dim() == 2 or table.shape[0] == 1 else table.stride(0), table.stride(-2)


def _heads(x: Tensor | None) -> tuple[Tensor | None, Tensor | None, int, tuple[int, ...], tuple[int, ...]]:
    """q or k with adjacent columns, its output, laid out alike, its heads, and the strides of both but the last."""
    if x is None:
        return None, None, 1, (0, 0, 0), (0, 0, 0)
    if x.stride(3) != 1:
        x = x.contiguous()
    y = torch.empty_like(x)
    return x, y, x.shape[1], x.stride()[:3], y.stride()[:3]


@implements(rope)
def forward(needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    return _launch(q, k, cos, sin, False), (cos, sin) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else _launch(dq, dk, *saved, True)
