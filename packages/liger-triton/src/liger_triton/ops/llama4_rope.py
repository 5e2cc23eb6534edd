"""Rotary embedding of neighbouring columns: a program takes all heads of one token, so it reads the frequencies once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import llama4_rope
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import adjacent, power_of_2, without_gaps

# Elements at a time, 8 per thread: one 16-byte load of bf16.
TILE = 2048


@triton.jit
def _split_pairs(tile, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """The first and the second of each pair of neighbouring columns."""
    return tl.split(tl.reshape(tile, (ROWS, PAIRS, 2)))


@triton.jit
def _rotate_heads(
    y, x, x_head, real, imaginary,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """All heads of one token. Heads of y are adjacent. Heads of x lie x_head apart."""
    column = tl.arange(0, 2 * PAIRS)[None, :]
    for first in range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)[:, None]
        inside = (head < HEADS) & (column < HEAD_SIZE)
        xs = tl.load(x + head.to(tl.int64) * x_head + column, inside).to(tl.float32)
        even, odd = _split_pairs(xs, BLOCK, PAIRS)
        ys = tl.join(even * real - odd * imaginary, even * imaginary + odd * real)
        tl.store(y + head * HEAD_SIZE + column, tl.reshape(ys, (BLOCK, 2 * PAIRS)), inside)


@kernel
def _rotate(
    yq, yk, q, k, freqs, length, freqs_token, q_batch, q_token, q_head, k_batch, k_token, k_head,
    BACKWARD: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    column = tl.arange(0, 2 * PAIRS)[None, :]
    row = tl.load(freqs + token * freqs_token + column, column < HEAD_SIZE)
    real, imaginary = _split_pairs(row.to(tl.float32), 1, PAIRS)
    if BACKWARD:  # by the conjugate
        imaginary = -imaginary
    if q is not None:
        _rotate_heads(
            yq + place * (Q_HEADS * HEAD_SIZE), q + batch * q_batch + token * q_token, q_head, real, imaginary,
            HEADS=Q_HEADS, HEAD_SIZE=HEAD_SIZE, BLOCK=Q_BLOCK, PAIRS=PAIRS,
        )  # fmt: skip
    if k is not None:
        _rotate_heads(
            yk + place * (K_HEADS * HEAD_SIZE), k + batch * k_batch + token * k_token, k_head, real, imaginary,
            HEADS=K_HEADS, HEAD_SIZE=HEAD_SIZE, BLOCK=K_BLOCK, PAIRS=PAIRS,
        )  # fmt: skip


def _launch(
    q: Tensor | None, k: Tensor | None, freqs_cis: Tensor, backward: bool
) -> tuple[Tensor | None, Tensor | None]:
    freqs = torch.view_as_real(freqs_cis.resolve_conj()) if freqs_cis.is_complex() else freqs_cis
    shape, strides = freqs.shape, freqs.stride()
    if strides[2] != 1 or strides[1] != 2:
        freqs, strides = freqs.contiguous(), without_gaps(shape)
    batch, length, _, head_size = (k if q is None else q).shape
    q, yq, q_heads, q_strides = _heads(q)
    k, yk, k_heads, k_strides = _heads(k)
    pairs = power_of_2(head_size // 2, 8)
    most = max(1, TILE // (2 * pairs))
    q_block, k_block = min(power_of_2(q_heads, 1), most), min(power_of_2(k_heads, 1), most)
    _rotate[(batch * length,)](
        yq, yk, q, k, freqs, length, strides[0], *q_strides, *k_strides,
        BACKWARD=backward, Q_HEADS=q_heads, K_HEADS=k_heads, HEAD_SIZE=head_size,
        Q_BLOCK=q_block, K_BLOCK=k_block, PAIRS=pairs, num_warps=min(max(1, max(q_block, k_block) * pairs // 128), 8),
    )  # fmt: skip
    return yq, yk


def _heads(x: Tensor | None) -> tuple[Tensor | None, Tensor | None, int, tuple[int, ...]]:
    """q or k with adjacent columns, its contiguous output, its heads, and the strides of its other dimensions."""
    if x is None:
        return None, None, 1, (0, 0, 0)
    heads = x.shape[2]
    x, strides = adjacent(x)
    return x, torch.empty_like(x, memory_format=torch.contiguous_format), heads, strides[:3]


@implements(llama4_rope)
def forward(needs: Needs, q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    return _launch(q, k, freqs_cis, False), (freqs_cis,) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else _launch(dq, dk, *saved, True)
