"""Rotary embedding: one program takes all heads of q and k of one token, so it reads the token's angles once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import rope
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import power_of_2


@triton.jit
def load_heads(x, x_head, first, COUNT: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Both halves of up to HEADS heads of one token, from `first` on. x points at its first head; they lie x_head apart."""
    head = first + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < COUNT) & (column < COLUMNS // 2)
    x += head.to(tl.int64) * x_head + column
    return tl.load(x, inside), tl.load(x + COLUMNS // 2, inside)


@triton.jit
def _store_heads(
    y, x, x_head, x1, x2, first, batch, token, length, cos1, cos2, sin1, sin2,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, HEAD_SIZE: tl.constexpr, TOKENS_FIRST: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """What `load_heads` gave, rotated, and the columns that aren't; y points at the start of the output."""
    head = first + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < COUNT) & (column < COLUMNS // 2)
    if TOKENS_FIRST:
        y += ((batch * length + token) * COUNT + head) * HEAD_SIZE
    else:
        y += ((batch * COUNT + head) * length + token) * HEAD_SIZE
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    tl.store(y + column, x1 * cos1 - x2 * sin1, inside)
    tl.store(y + COLUMNS // 2 + column, x2 * cos2 + x1 * sin2, inside)
    if REST > 0:
        rest = COLUMNS + tl.arange(0, REST)[None, :]
        passed = (head < COUNT) & (rest < HEAD_SIZE)
        tl.store(y + rest, tl.load(x + head.to(tl.int64) * x_head + rest, passed), passed)


@triton.jit
def rotate_heads(
    y, x, x_head, x1, x2, batch, token, length, cos1, cos2, sin1, sin2,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, HEAD_SIZE: tl.constexpr, TOKENS_FIRST: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """All heads of one token, of which the first HEADS are loaded."""
    _store_heads(
        y, x, x_head, x1, x2, 0, batch, token, length, cos1, cos2, sin1, sin2,
        COUNT, COLUMNS, HEAD_SIZE, TOKENS_FIRST, HEADS, HALF, REST,
    )  # fmt: skip
    for first in range(HEADS, COUNT, HEADS):
        x1, x2 = load_heads(x, x_head, first, COUNT, COLUMNS, HEADS, HALF)
        _store_heads(
            y, x, x_head, x1, x2, first, batch, token, length, cos1, cos2, sin1, sin2,
            COUNT, COLUMNS, HEAD_SIZE, TOKENS_FIRST, HEADS, HALF, REST,
        )  # fmt: skip


@kernel
def _rotate(
    yq, yk, q, k, cos, sin, length, q_batch, q_head, q_token, k_batch, k_head, k_token, table_batch, table_token,
    Q_COUNT: tl.constexpr, K_COUNT: tl.constexpr, COLUMNS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    Q_TOKENS_FIRST: tl.constexpr, K_TOKENS_FIRST: tl.constexpr, BACKWARD: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    half: tl.constexpr = COLUMNS // 2
    column = tl.arange(0, HALF)[None, :]
    inside = column < half
    cos += batch * table_batch + token * table_token
    sin += batch * table_batch + token * table_token
    cos1 = tl.load(cos + column, inside).to(tl.float32)
    cos2 = tl.load(cos + half + column, inside).to(tl.float32)
    sin1 = tl.load(sin + column, inside).to(tl.float32)
    sin2 = tl.load(sin + half + column, inside).to(tl.float32)
    if BACKWARD:  # the transpose: by the negative angle, where both halves have the same
        sin1, sin2 = -sin2, -sin1
    # Both before anything is stored: what follows a store waits for memory once more.
    if q is not None:
        q += batch * q_batch + token * q_token
        q1, q2 = load_heads(q, q_head, 0, Q_COUNT, COLUMNS, Q_HEADS, HALF)
    if k is not None:
        k += batch * k_batch + token * k_token
        k1, k2 = load_heads(k, k_head, 0, K_COUNT, COLUMNS, K_HEADS, HALF)
    if q is not None:
        rotate_heads(
            yq, q, q_head, q1, q2, batch, token, length, cos1, cos2, sin1, sin2,
            Q_COUNT, COLUMNS, HEAD_SIZE, Q_TOKENS_FIRST, HEADS=Q_HEADS, HALF=HALF, REST=REST,
        )  # fmt: skip
    if k is not None:
        rotate_heads(
            yk, k, k_head, k1, k2, batch, token, length, cos1, cos2, sin1, sin2,
            K_COUNT, COLUMNS, HEAD_SIZE, K_TOKENS_FIRST, HEADS=K_HEADS, HALF=HALF, REST=REST,
        )  # fmt: skip


def _launch(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool
) -> tuple[Tensor | None, Tensor | None]:
    columns = cos.shape[-1]
    half = power_of_2(columns // 2)
    cos, sin, table_batch, table_token = _tables(cos, sin)
    q, yq, q_tokens_first, q_heads, q_strides = _heads(q)
    k, yk, k_tokens_first, k_heads, k_strides = _heads(k)
    batch, _, length, head_size = (k if q is None else q).shape
    rest = power_of_2(head_size - columns) if head_size > columns else 0
    # At most 1024 elements of each half at a time, 16 a thread; 2048 where a token's heads lie apart. On an H200 (triton
    # 3.6), q of 32 heads of 128 and k of 8: 2 x 16384 tokens take 0.171 ms, with 512 elements 0.173; those whose heads
    # lie apart 0.180, with 1024 elements 0.191, and 1 x 2048 of them 0.0176 and 0.0199.
    together = q_tokens_first and k_tokens_first
    most = max(1, (1024 if together else 2048) // half)
    q_block, k_block = min(power_of_2(q_heads, 1), most), min(power_of_2(k_heads, 1), most)
    _rotate[(batch * length,)](
        yq, yk, q, k, cos, sin, length, *q_strides, *k_strides, table_batch, table_token,
        Q_COUNT=q_heads, K_COUNT=k_heads, COLUMNS=columns, HEAD_SIZE=head_size,
        Q_TOKENS_FIRST=q_tokens_first, K_TOKENS_FIRST=k_tokens_first, BACKWARD=backward,
        Q_HEADS=q_block, K_HEADS=k_block, HALF=half, REST=rest,
        num_warps=min(max(1, max(q_block, k_block) * max(half, rest) // 512), 8),
    )  # fmt: skip
    return yq, yk


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cos and sin, laid out alike with adjacent columns, and the distances of their batches and tokens."""
    strides = cos.stride()
    if strides[-1] != 1 or strides != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = cos.stride()
    return cos, sin, 0 if cos.dim() == 2 or cos.shape[0] == 1 else strides[0], strides[-2]


def _heads(x: Tensor | None) -> tuple[Tensor | None, Tensor | None, bool, int, tuple[int, ...]]:
    """q or k with adjacent columns, its output, whether that has a token's heads together, and x's heads and strides.

    The output has no gaps, and its heads and tokens lie in the order of x's.
    """
    if x is None:
        return None, None, False, 1, (0, 0, 0)
    strides = x.stride()
    if strides[3] != 1:
        x = x.contiguous()
        strides = x.stride()
    _, heads, length, head_size = x.shape
    tokens_first = strides[1] < strides[2]
    dense = (length * heads * head_size, head_size, heads * head_size, 1)
    if not tokens_first:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    elif strides == dense:
        y = torch.empty_like(x)
    else:
        y = x.new_empty_strided(x.shape, dense)
    return x, y, tokens_first, heads, strides[:3]


@implements(rope)
def forward(needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    return _launch(q, k, cos, sin, False), (cos, sin) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else _launch(dq, dk, *saved, True)
