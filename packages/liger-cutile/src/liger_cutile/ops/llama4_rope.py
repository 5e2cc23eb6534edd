"""Rotary embedding of neighbouring columns: a block takes all heads of some tokens, so it reads the frequencies once."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import llama4_rope
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._heads import load_heads, side_by_side, tiling, within_reach
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._rows import gather, near


@ct.function
def _split_pairs(tile, TOKENS, HEADS, PAIRS):
    """The first and the second of each pair of neighbouring columns."""
    pairs = ct.reshape(tile, (TOKENS, HEADS, PAIRS, 2))
    shape = (TOKENS, HEADS, PAIRS, 1)
    return ct.extract(pairs, (0, 0, 0, 0), shape), ct.extract(pairs, (0, 0, 0, 1), shape)


@ct.function
def _rotate_heads(y, x, real, imaginary, TILES, HEADS, TOKENS, PAIRS, CHECK):
    for head in range(TILES):
        at = (ct.bid(1), ct.bid(0), head, 0)
        xs = load_heads(x, at, (1, TOKENS, HEADS, 2 * PAIRS), CHECK)
        even, odd = _split_pairs(xs, TOKENS, HEADS, PAIRS)
        ys = ct.cat((even * real - odd * imaginary, even * imaginary + odd * real), 3)
        ct.store(y, at, ct.astype(ct.reshape(ys, (1, TOKENS, HEADS, 2 * PAIRS)), y.dtype), check_bounds=CHECK)


@ct.kernel(occupancy=4)
def _rotate(
    yq, yk, q, k, freqs,
    BACKWARD: ConstBool, CHECK: ConstBool, TOKENS: ConstInt, Q_TILES: ConstInt, Q_HEADS: ConstInt, K_TILES: ConstInt,
    K_HEADS: ConstInt, PAIRS: ConstInt,
):  # fmt: skip
    # Loaded one by one: tileiras 13.4 splits a tile this small as it loads it, 16 bytes at once from unaligned addresses.
    token = ct.reshape(ct.bid(0) * TOKENS + ct.arange(TOKENS, dtype=ct.int32), (TOKENS, 1, 1, 1))
    column = ct.reshape(2 * ct.arange(PAIRS, dtype=ct.int32), (1, 1, PAIRS, 1))
    real, imaginary = gather(freqs, (token, column)), gather(freqs, (token, column + 1))
    if BACKWARD:  # by the conjugate
        imaginary = -imaginary
    if given(q):
        _rotate_heads(yq, q, real, imaginary, Q_TILES, Q_HEADS, TOKENS, PAIRS, CHECK)
    if given(k):
        _rotate_heads(yk, k, real, imaginary, K_TILES, K_HEADS, TOKENS, PAIRS, CHECK)


@opaque(writes=("yq", "yk"))
def _launch(
    yq: Tensor | None, yk: Tensor | None, q: Tensor | None, k: Tensor | None, freqs: Tensor, backward: bool
) -> None:
    _, length, _, head_size = (k if q is None else q).shape
    q_heads, k_heads = 1 if q is None else q.shape[2], 1 if k is None else k.shape[2]
    across, whole, tile = tiling(head_size, 0, length, q_heads, k_heads)
    freqs = near(freqs.flatten(1))
    for tensors in within_reach(yq, yk, side_by_side(q), side_by_side(k)):
        own_yq, own_yk, _, _ = tensors
        samples = (own_yk if own_yq is None else own_yq).shape[0]
        launch(_rotate, (across, samples), *tensors, freqs, backward, not whole, *tile)


def _as_real(freqs_cis: Tensor) -> Tensor:
    """``[S, D/2, 2]``, made before the launch: PyTorch 2.11's Inductor can't lower custom operators with complex arguments."""
    return torch.view_as_real(freqs_cis.resolve_conj()) if freqs_cis.is_complex() else freqs_cis


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


@implements(llama4_rope)
def forward(needs: Needs, q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    yq, yk = _like(q), _like(k)
    _launch(yq, yk, q, k, _as_real(freqs_cis), False)
    return (yq, yk), (freqs_cis,) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    if dq is None and dk is None:
        return None, None
    yq, yk = _like(dq), _like(dk)
    (freqs_cis,) = saved
    _launch(yq, yk, dq, dk, _as_real(freqs_cis), True)
    return yq, yk
