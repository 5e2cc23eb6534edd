"""Rotary embedding of neighbouring columns: a tile has several tokens, or several heads of a few tokens.

Its frequencies are read once for all heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import llama4_rope
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._device import compute_default_tiling_strategy, get_npu_core_count
from liger_triton_ascend.ops._rows import MARGIN

TILES = 9
"""Float32 tiles: 5.5 by the estimate of the Unified Buffer, which leaves out the tile whose pairs are joined, and its layout."""


@triton.jit
def _split_pairs(tile, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """The first and the second of each pair of neighbouring columns."""
    return tl.split(tl.reshape(tile.to(tl.float32), (TOKENS, HEADS, BLOCK // 2, 2)))


@triton.jit
def _rotate_heads(
    y, x, batch, token, column, real, imaginary, length, head_size, heads, x_batch, x_token, x_head,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(0, heads, HEADS):
        head = tl.cast(first, tl.int64) + tl.arange(0, HEADS)[None, :, None]
        inside = (token < length) & (head < heads) & (column < head_size)
        xs = tl.load(x + batch * x_batch + token * x_token + head * x_head + column, inside, other=0.0)
        even, odd = _split_pairs(xs, TOKENS, HEADS, BLOCK)
        ys = tl.join(even * real - odd * imaginary, even * imaginary + odd * real)
        at = ((batch * length + token) * heads + head) * head_size + column
        tl.store(y + at, tl.reshape(ys, (TOKENS, HEADS, BLOCK)), inside)


@triton.jit
def _rotate(
    yq, yk, q, k, freqs, batches, length, head_size, q_heads, k_heads, freqs_token,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, TOKENS)
    for index in range(tl.program_id(0), batches * tiles, tl.num_programs(0)):
        batch = tl.cast(index // tiles, tl.int64)
        token = tl.cast(index % tiles, tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
        for start in range(0, head_size, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, None, :]
            inside = (token < length) & (column < head_size)
            rows = tl.load(freqs + token * freqs_token + column, inside, other=0.0)
            real, imaginary = _split_pairs(rows, TOKENS, 1, BLOCK)
            if BACKWARD:  # by the conjugate
                imaginary = -imaginary
            if q is not None:
                _rotate_heads(
                    yq, q, batch, token, column, real, imaginary, length, head_size, q_heads,
                    q_batch, q_token, q_head, HEADS, TOKENS, BLOCK,
                )  # fmt: skip
            if k is not None:
                _rotate_heads(
                    yk, k, batch, token, column, real, imaginary, length, head_size, k_heads,
                    k_batch, k_token, k_head, HEADS, TOKENS, BLOCK,
                )  # fmt: skip


def _launch(
    q: Tensor | None, k: Tensor | None, freqs_cis: Tensor, backward: bool
) -> tuple[Tensor | None, Tensor | None]:
    freqs = torch.view_as_real(freqs_cis.resolve_conj()) if freqs_cis.is_complex() else freqs_cis
    if freqs.stride(2) != 1 or freqs.stride(1) != 2:
        freqs = freqs.contiguous()
    q, yq, q_heads, q_strides = _heads(q)
    k, yk, k_heads, k_strides = _heads(k)
    batches, length, _, head_size = (k if q is None else q).shape
    cores = get_npu_core_count(freqs.device)
    share = (batches * length + cores - 1) // cores
    # Columns grow first. Then come tokens, whose frequencies all heads share. Heads come last: for them the frequencies are
    # repeated.
    shape = (max(q_heads, k_heads), min(share, length), head_size)
    ((heads, tokens, block),) = compute_default_tiling_strategy(MARGIN, 4, TILES, [shape], [(0, 1, 2)])
    programs = min(batches * ((length + tokens - 1) // tokens), cores)
    _rotate[(programs,)](
        yq, yk, q, k, freqs, batches, length, head_size, q_heads, k_heads, freqs.stride(0), *q_strides, *k_strides,
        BACKWARD=backward, HEADS=heads, TOKENS=tokens, BLOCK=block,
    )  # fmt: skip
    return yq, yk


def _heads(x: Tensor | None) -> tuple[Tensor | None, Tensor | None, int, tuple[int, ...]]:
    """q or k with adjacent columns, its contiguous output, its heads, and the strides of its other dimensions."""
    if x is None:
        return None, None, 1, (0, 0, 0)
    if x.stride(3) != 1:
        x = x.contiguous()
    return x, torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[2], x.stride()[:3]


@implements(llama4_rope)
def forward(needs: Needs, q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    return _launch(q, k, freqs_cis, False), (freqs_cis,) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else _launch(dq, dk, *saved, True)
