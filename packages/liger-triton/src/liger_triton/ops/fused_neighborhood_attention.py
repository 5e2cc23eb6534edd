"""Neighborhood attention: blocks of queries meet the keys around them in small matrix products.

Positions of one residue modulo the dilation see each other and no others. So a program works on one residue, in which windows
are dense. If a block of keys holds the windows of at least half as many queries, a program needs one block of each tensor. That
holds for backward too, whose scores serve dq, dk and dv.

With wider windows a program goes from block to block. Forward uses an online softmax. Backward goes over the keys that its
queries see for dq, and over the queries that see its keys for dk and dv.
"""

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import fused_neighborhood_attention
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._math import fast_exp
from liger_triton.ops._rows import adjacent, power_of_2


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _place(length, dilation, heads, STEP: tl.constexpr, PARTS: tl.constexpr):
    """This program's sample, head, residue, first position within the residue, and part of the columns."""
    blocks = tl.cdiv(tl.cdiv(length, dilation), STEP)
    part = tl.program_id(0) % PARTS
    rest = tl.program_id(0) // PARTS
    first = rest % blocks * STEP
    rest = rest // blocks
    residue = rest % dilation
    rest = rest // dilation
    return (rest // heads).to(tl.int64), (rest % heads).to(tl.int64), residue.to(tl.int64), first, part


@triton.jit
def _dense(batch, head, residue, length, heads, HEAD: tl.constexpr, TOKENS_FIRST: tl.constexpr):
    """For a tensor without gaps: the offset of a residue's first position, and the distance between neighbouring positions."""
    if TOKENS_FIRST:
        return ((batch * length + residue) * heads + head) * HEAD, heads * HEAD
    else:
        return ((batch * heads + head) * length + residue) * HEAD, HEAD


@triton.jit
def _at(distance, position, first, WIDTH: tl.constexpr):
    return position.to(tl.int64)[:, None] * distance + (first + tl.arange(0, WIDTH))[None, :]


@triton.jit
def _inside(inside, first, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    return inside[:, None] & (first + tl.arange(0, WIDTH) < HEAD)[None, :]


@triton.jit
def _load(x, distance, position, inside, first, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of x at these positions, WIDTH columns from `first` on."""
    return tl.load(x + _at(distance, position, first, WIDTH), _inside(inside, first, HEAD, WIDTH), other=0.0)


@triton.jit
def _store(x, distance, position, inside, first, value, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    tl.store(x + _at(distance, position, first, WIDTH), value, _inside(inside, first, HEAD, WIDTH))


@triton.jit
def _part(tile, x, distance, position, inside, part, HEAD: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of x that belong to a part of the output. `tile` is x's first CHUNK columns."""
    if HEAD <= CHUNK and CHUNK == WIDTH:
        return tile
    else:
        return _load(x, distance, position, inside, part * WIDTH, HEAD, WIDTH)


@triton.jit
def _products(
    a_tile, a, a_distance, a_position, a_inside, b_tile, b, b_distance, b_position, b_inside,
    HEAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Products of rows of a with rows of b. The tiles are their first CHUNK columns."""
    products = _dot(a_tile, tl.trans(b_tile))
    for start in range(CHUNK, HEAD, CHUNK):
        a_next = _load(a, a_distance, a_position, a_inside, start, HEAD, CHUNK)
        b_next = _load(b, b_distance, b_position, b_inside, start, HEAD, CHUNK)
        products += _dot(a_next, tl.trans(b_next))
    return products


@triton.jit
def _seen(query, query_inside, key, key_inside, reach):
    return (tl.abs(query[:, None] - key[None, :]) <= reach) & query_inside[:, None] & key_inside[None, :]


@kernel
def _forward(
    o, statistics, q, k, v, scale, heads, length, dilation, reach,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    TOKENS_FIRST: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # torch.compile passes floats as float64
    batch, head, residue, first, part = _place(length, dilation, heads, STEP, PARTS)
    count = tl.cdiv(length - residue, dilation)
    o_offset, o_distance = _dense(batch, head, residue, length, heads, HEAD, TOKENS_FIRST)
    q += batch * q_batch + head * q_head + residue * q_token
    k += batch * k_batch + head * k_head + residue * k_token
    v += batch * v_batch + head * v_head + residue * v_token
    apart = tl.cast(dilation, tl.int64)
    query = first + tl.arange(0, BLOCK)
    asks = (query < first + STEP) & (query < count)
    q_tile = _load(q, apart * q_token, query, asks, 0, HEAD, CHUNK)
    # The least float32 stands for -inf: the difference of two is 0.
    maximum = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, WIDTH), tl.float32)
    begin = tl.maximum(first - reach, 0)
    # A block of keys holds the windows of all queries, unless a block has as many queries as keys.
    blocks = 1 if STEP < BLOCK else tl.cdiv(tl.minimum(first + STEP + reach, count) - begin, BLOCK)
    for block in range(0, blocks):
        key = begin + block * BLOCK + tl.arange(0, BLOCK)
        here = key < count
        k_tile = _load(k, apart * k_token, key, here, 0, HEAD, CHUNK)
        v_tile = _load(v, apart * v_token, key, here, part * WIDTH, HEAD, WIDTH)
        scores = scale * _products(
            q_tile, q, apart * q_token, query, asks, k_tile, k, apart * k_token, key, here, HEAD, CHUNK
        )
        scores = tl.where(_seen(query, asks, key, here, reach), scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = fast_exp(scores - higher[:, None])
        shrink = fast_exp(maximum - higher)
        maximum = higher
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + _dot(weights.to(v.dtype.element_ty), v_tile)
    _store(o + o_offset, o_distance * apart, query, asks, part * WIDTH, sums / total[:, None], HEAD, WIDTH)
    if statistics is not None:
        # All parts of the columns write the same values.
        statistics += (batch * heads + head) * 2 * length + residue + query.to(tl.int64) * apart
        tl.store(statistics, maximum, asks)
        tl.store(statistics + length, total, asks)


@triton.jit
def _dscores(
    q_tile, q, q_distance, do_tile, do, do_distance, query, asks,
    k_tile, k, k_distance, v_tile, v, v_distance, key, here,
    statistics, mean, apart, length, reach, scale, HEAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The weights of a block of queries and keys, and the gradient of their scores.

    Without a `mean`, the block holds the whole windows of its queries.
    """
    scores = scale * _products(q_tile, q, q_distance, query, asks, k_tile, k, k_distance, key, here, HEAD, CHUNK)
    at = query.to(tl.int64) * apart
    maximum = tl.load(statistics + at, asks, other=0.0)
    seen = _seen(query, asks, key, here, reach)
    weights = fast_exp(scores - maximum[:, None])
    # These products may be rounded in another order than forward's. For large scores the weights would then differ by too much.
    # So a block with whole windows makes its own sum: if weights didn't add up to 1, the gradient of a score would be off by a
    # part of the mean. A position that sees only itself has a weight of 1.
    if mean is None:
        total = tl.sum(tl.where(seen, weights, 0.0), 1)
        total = tl.where(asks, total, 1.0)
    else:
        total = tl.load(statistics + length + at, asks, other=1.0)
    weights = tl.where(reach > 0, weights * (1.0 / total)[:, None], 1.0)
    weights = tl.where(seen, weights, 0.0)
    dweights = _products(do_tile, do, do_distance, query, asks, v_tile, v, v_distance, key, here, HEAD, CHUNK)
    means = tl.sum(weights * dweights, 1) if mean is None else tl.load(mean + at, asks, other=0.0)
    # A position that sees only itself has no gradient, not even a rounding error.
    return weights, tl.where(reach > 0, weights * (dweights - means[:, None]), 0.0)


@kernel
def _backward(
    dq, dk, dv, statistics, do, q, k, v, scale, heads, length, dilation, reach,
    do_batch, do_head, do_token, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    TOKENS_FIRST: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradients of STEP positions, from a block that holds the positions that see them and the positions that they see."""
    scale = tl.cast(scale, tl.float32)  # torch.compile passes floats as float64
    batch, head, residue, first, part = _place(length, dilation, heads, STEP, PARTS)
    count = tl.cdiv(length - residue, dilation)
    offset, distance = _dense(batch, head, residue, length, heads, HEAD, TOKENS_FIRST)
    apart = tl.cast(dilation, tl.int64)
    distance *= apart
    do += batch * do_batch + head * do_head + residue * do_token
    q += batch * q_batch + head * q_head + residue * q_token
    k += batch * k_batch + head * k_head + residue * k_token
    v += batch * v_batch + head * v_head + residue * v_token
    statistics += (batch * heads + head) * 2 * length + residue
    position = first - 2 * reach + tl.arange(0, BLOCK)
    here = (position >= 0) & (position < count)
    asks = here & (position >= first - reach) & (position < first + STEP + reach)
    own = here & (position >= first) & (position < first + STEP)
    q_tile = _load(q, apart * q_token, position, here, 0, HEAD, CHUNK)
    k_tile = _load(k, apart * k_token, position, here, 0, HEAD, CHUNK)
    v_tile = _load(v, apart * v_token, position, here, 0, HEAD, CHUNK)
    do_tile = _load(do, apart * do_token, position, here, 0, HEAD, CHUNK)
    weights, dscores = _dscores(
        q_tile, q, apart * q_token, do_tile, do, apart * do_token, position, asks,
        k_tile, k, apart * k_token, v_tile, v, apart * v_token, position, here,
        statistics, None, apart, length, reach, scale, HEAD, CHUNK,
    )  # fmt: skip
    dtype = q.dtype.element_ty
    if dv is not None:
        do_part = _part(do_tile, do, apart * do_token, position, here, part, HEAD, CHUNK, WIDTH)
        value = _dot(tl.trans(weights.to(dtype)), do_part)
        _store(dv + offset, distance, position, own, part * WIDTH, value, HEAD, WIDTH)
    if dq is not None:
        k_part = _part(k_tile, k, apart * k_token, position, here, part, HEAD, CHUNK, WIDTH)
        value = scale * _dot(dscores.to(dtype), k_part)
        _store(dq + offset, distance, position, own, part * WIDTH, value, HEAD, WIDTH)
    if dk is not None:
        q_part = _part(q_tile, q, apart * q_token, position, here, part, HEAD, CHUNK, WIDTH)
        value = scale * _dot(tl.trans(dscores.to(dtype)), q_part)
        _store(dk + offset, distance, position, own, part * WIDTH, value, HEAD, WIDTH)


@kernel
def _mean(
    mean, o, do, heads, length, do_batch, do_head, do_token,
    TOKENS_FIRST: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean of the gradients of each query's weights, weighted by them: the dot product of o and its gradient."""
    batch, head, residue, first, _ = _place(length, 1, heads, BLOCK, 1)
    offset, distance = _dense(batch, head, residue, length, heads, HEAD, TOKENS_FIRST)
    do += batch * do_batch + head * do_head
    query = first + tl.arange(0, BLOCK)
    here = query < length
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, HEAD, CHUNK):
        o_tile = _load(o + offset, distance, query, here, start, HEAD, CHUNK).to(tl.float32)
        sums += tl.sum(o_tile * _load(do, do_token, query, here, start, HEAD, CHUNK).to(tl.float32), 1)
    tl.store(mean + (batch * heads + head) * length + query, sums, here)


@kernel
def _backward_wide(
    dq, dk, dv, statistics, mean, do, q, k, v, scale, heads, length, dilation, reach,
    do_batch, do_head, do_token, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    TOKENS_FIRST: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of positions: as queries, going over blocks of keys; as keys, going over blocks of queries."""
    scale = tl.cast(scale, tl.float32)  # torch.compile passes floats as float64
    batch, head, residue, first, part = _place(length, dilation, heads, STEP, PARTS)
    count = tl.cdiv(length - residue, dilation)
    offset, distance = _dense(batch, head, residue, length, heads, HEAD, TOKENS_FIRST)
    apart = tl.cast(dilation, tl.int64)
    distance *= apart
    do += batch * do_batch + head * do_head + residue * do_token
    q += batch * q_batch + head * q_head + residue * q_token
    k += batch * k_batch + head * k_head + residue * k_token
    v += batch * v_batch + head * v_head + residue * v_token
    statistics += (batch * heads + head) * 2 * length + residue
    mean += (batch * heads + head) * length + residue
    own = first + tl.arange(0, BLOCK)
    mine = own < count
    begin = tl.maximum(first - reach, 0)
    end = tl.minimum(first + BLOCK + reach, count)
    dtype = q.dtype.element_ty
    if dq is not None:
        q_tile = _load(q, apart * q_token, own, mine, 0, HEAD, CHUNK)
        do_tile = _load(do, apart * do_token, own, mine, 0, HEAD, CHUNK)
        sums = tl.zeros((BLOCK, WIDTH), tl.float32)
        for start in range(begin, end, BLOCK):
            key = start + tl.arange(0, BLOCK)
            here = key < count
            k_tile = _load(k, apart * k_token, key, here, 0, HEAD, CHUNK)
            v_tile = _load(v, apart * v_token, key, here, 0, HEAD, CHUNK)
            _, dscores = _dscores(
                q_tile, q, apart * q_token, do_tile, do, apart * do_token, own, mine,
                k_tile, k, apart * k_token, v_tile, v, apart * v_token, key, here,
                statistics, mean, apart, length, reach, scale, HEAD, CHUNK,
            )  # fmt: skip
            k_part = _part(k_tile, k, apart * k_token, key, here, part, HEAD, CHUNK, WIDTH)
            sums += _dot(dscores.to(dtype), k_part)
        _store(dq + offset, distance, own, mine, part * WIDTH, scale * sums, HEAD, WIDTH)
    if dk is not None or dv is not None:
        k_tile = _load(k, apart * k_token, own, mine, 0, HEAD, CHUNK)
        v_tile = _load(v, apart * v_token, own, mine, 0, HEAD, CHUNK)
        dk_sums = tl.zeros((BLOCK, WIDTH), tl.float32)
        dv_sums = tl.zeros((BLOCK, WIDTH), tl.float32)
        for start in range(begin, end, BLOCK):
            query = start + tl.arange(0, BLOCK)
            here = query < count
            q_tile = _load(q, apart * q_token, query, here, 0, HEAD, CHUNK)
            do_tile = _load(do, apart * do_token, query, here, 0, HEAD, CHUNK)
            weights, dscores = _dscores(
                q_tile, q, apart * q_token, do_tile, do, apart * do_token, query, here,
                k_tile, k, apart * k_token, v_tile, v, apart * v_token, own, mine,
                statistics, mean, apart, length, reach, scale, HEAD, CHUNK,
            )  # fmt: skip
            if dk is not None:
                q_part = _part(q_tile, q, apart * q_token, query, here, part, HEAD, CHUNK, WIDTH)
                dk_sums += _dot(tl.trans(dscores.to(dtype)), q_part)
            if dv is not None:
                do_part = _part(do_tile, do, apart * do_token, query, here, part, HEAD, CHUNK, WIDTH)
                dv_sums += _dot(tl.trans(weights.to(dtype)), do_part)
        if dk is not None:
            _store(dk + offset, distance, own, mine, part * WIDTH, scale * dk_sums, HEAD, WIDTH)
        if dv is not None:
            _store(dv + offset, distance, own, mine, part * WIDTH, dv_sums, HEAD, WIDTH)


def _tiling(head: int, size: int, wide: bool) -> tuple[int, int, int, int]:
    """Positions of a block; columns at a time, of the products for the scores and of the output; warps.

    The sizes are those that compile for sm_90 without spills and fit the 99 KiB of shared memory of sm_120. `wide` is for the
    backward of windows that don't fit a block. On an H200 (triton 3.6), (1, 16, 8192, 128) and (2, 16, 2048, 64) in bfloat16,
    kernel_size 7: blocks of 64 by 4 warps take 0.043 and 0.015 ms forward, 0.101 and 0.028 backward; by 8 warps 0.045, 0.022,
    0.117, 0.038; blocks of 32 by 4 warps 0.048, 0.019, 0.095, 0.032.
    """
    width = power_of_2(head)
    if size == 4:  # no tensor cores: each thread holds the operands of its own elements of a product
        return 32, min(width, 32), min(width, 128), 4 if width <= 64 else 8
    if width <= 64:
        return 64, width, width, 4
    if width <= 128:
        return (32 if wide else 64), width, width, 4
    return 32, 256, 256, 8


def _window(q: Tensor, kernel_size: int, dilation: int) -> tuple[int, int]:
    """The dilation, and how far a position sees, in steps of it. Both are as small as the result allows."""
    length = q.shape[2]
    dilation = length if dilation > length else dilation
    reach = kernel_size // 2
    return dilation, (length - 1) // dilation if reach * dilation >= length else reach


def _step(q: Tensor, kernel_size: int, dilation: int, halo: int) -> int:
    """Positions that a program is for, if a block has `halo` times the reach around them; 0 if they are less than half of it."""
    block = _tiling(q.shape[3], q.element_size(), False)[0]
    step = block - halo * _window(q, kernel_size, dilation)[1]
    return step if 2 * step >= block else 0


_Strided: TypeAlias = tuple[Tensor, tuple[int, ...]]
"""A tensor with adjacent columns, and its strides."""


def _launch(
    launched: Any,
    tensors: tuple[Tensor | None, ...],
    strided: tuple[_Strided, ...],
    like: Tensor,
    kernel_size: int,
    dilation: int,
    scale: float | None,
    step: int,
    wide: bool = False,
) -> None:
    """Launch a kernel of tensors without gaps, and of strided ones: q, k and v are the last three. `like` has q's sizes."""
    batch, heads, length, head = like.shape
    dilation, reach = _window(like, kernel_size, dilation)
    block, chunk, width, warps = _tiling(head, like.element_size(), wide)
    step = step or block
    parts = (head + width - 1) // width
    blocks = ((length + dilation - 1) // dilation + step - 1) // step
    strides = [stride for _, of in strided for stride in of[:3]]
    launched[(batch * heads * dilation * blocks * parts,)](
        *tensors, *[x for x, _ in strided], head**-0.5 if scale is None else float(scale),
        heads, length, dilation, reach, *strides,
        TOKENS_FIRST=_tokens_first(strided[-3][1]), HEAD=head, CHUNK=chunk, WIDTH=width, PARTS=parts, BLOCK=block, STEP=step,
        num_warps=warps, num_stages=2,
    )  # fmt: skip


def _tokens_first(strides: tuple[int, ...]) -> bool:
    """Whether the heads of a token lie together, as in a transposed view of ``[B, S, H, D]``."""
    return strides[1] < strides[2]


def _new(q: Tensor, tokens_first: bool) -> Tensor:
    """A tensor like q without gaps."""
    if not tokens_first:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    _, heads, length, head = q.shape
    return q.new_empty_strided(q.shape, (length * heads * head, head, heads * head, 1))


@implements(fused_neighborhood_attention)
def forward(
    needs: Needs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> tuple[Tensor, Saved]:
    strided = adjacent(q), adjacent(k), adjacent(v)
    o = _new(q, _tokens_first(strided[0][1]))
    statistics = None
    if True in needs:
        batch, heads, length, _ = q.shape
        statistics = torch.empty((batch, heads, 2, length), dtype=torch.float32, device=q.device)
    step = _step(q, kernel_size, dilation, halo=2)
    _launch(_forward, (o, statistics), strided, q, kernel_size, dilation, scale, step)
    if statistics is None:
        return o, ()
    near = _step(q, kernel_size, dilation, halo=4)
    return o, (*[x for x, _ in strided], None if near else o, statistics)


def backward(
    needs: Needs, saved: Saved, do: Tensor, *, kernel_size: int, dilation: int, scale: float | None
) -> tuple[Tensor | None, ...]:
    q, k, v, o, statistics = saved
    do, do_strides = adjacent(do)
    strided = (do, do_strides), adjacent(q), adjacent(k), adjacent(v)
    tokens_first = _tokens_first(q.stride())
    gradients = tuple([_new(q, tokens_first) if need else None for need in needs])
    step = _step(q, kernel_size, dilation, halo=4)
    if step:
        _launch(_backward, (*gradients, statistics), strided, q, kernel_size, dilation, scale, step)
        return gradients
    batch, heads, length, head = q.shape
    mean = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    _mean[(batch * heads * ((length + 63) // 64),)](
        mean, o, do, heads, length, *do_strides[:3],
        TOKENS_FIRST=tokens_first, HEAD=head, CHUNK=min(power_of_2(head), 64), BLOCK=64, num_warps=4,
    )  # fmt: skip
    _launch(_backward_wide, (*gradients, statistics, mean), strided, q, kernel_size, dilation, scale, 0, True)
    return gradients
