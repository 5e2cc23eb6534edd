"""Neighborhood attention: blocks of positions meet their neighbours at one offset after another, on the vector unit.

Whatever the dilation, the neighbours of adjacent positions at one offset are adjacent. So each block is read as it lies.

The cube unit would be a poor fit. In matrix products of blocks of 64, a window of 7 would use about 10 % of the results, and the
cube unit can hand them to a vector unit only through global memory. The vector unit's float32 products also keep their digits.

Forward keeps an online softmax. Backward makes dq from the neighbours that a position sees, then dk and dv from those that see
it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import fused_neighborhood_attention
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._device import get_npu_core_count
from liger_triton_ascend.ops._rows import row_tiles

# Float32 tiles alive, by the estimate.
FORWARD_TILES = 7.5
BACKWARD_TILES = 10


@triton.jit
def _rows(first, length, ROWS: tl.constexpr):
    """Adjacent positions, and which of them exist."""
    position = first + tl.arange(0, ROWS)
    return tl.cast(position, tl.int64), (position >= 0) & (position < length)


@triton.jit
def _load(x, row, exists, distance, column, head):
    at = row[:, None] * distance + column
    return tl.load(x + at, exists[:, None] & (column < head), other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, row, exists, distance, column, head):
    tl.store(x + row[:, None] * distance + column, value, exists[:, None] & (column < head))


@triton.jit
def _add_dots(products, a, b, a_row, b_row, a_exists, b_exists, a_distance, b_distance, head, BLOCK: tl.constexpr):
    """Products of rows of a with rows of b. `products` already has those of the first BLOCK columns."""
    for start in range(BLOCK, head, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        a_next = _load(a, a_row, a_exists, a_distance, column, head)
        products += tl.sum(a_next * _load(b, b_row, b_exists, b_distance, column, head), 1)
    return products


@triton.jit
def _place(tile, length, heads, parts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile's sample, its head, its first position, and its first column."""
    blocks = tl.cdiv(length, ROWS)
    pair = tile // parts // blocks
    first = tile // parts % blocks * ROWS
    return tl.cast(pair // heads, tl.int64), tl.cast(pair % heads, tl.int64), first, tile % parts * BLOCK


@triton.jit
def _forward(
    o, statistics, q, k, v, scale, tiles, parts, heads, length, head, dilation, reach,
    o_batch, o_head, o_token, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, at_head, first, start = _place(tile, length, heads, parts, ROWS, BLOCK)
        q_at = q + batch * q_batch + at_head * q_head
        k_at = k + batch * k_batch + at_head * k_head
        v_at = v + batch * v_batch + at_head * v_head
        part = start + column
        row, exists = _rows(first, length, ROWS)
        q_tile = _load(q_at, row, exists, q_token, column, head)
        # The least float32 stands for -inf: the difference of two is 0.
        maximum = tl.full((ROWS,), -3.4028234663852886e38, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for offset in range(-reach, reach + 1):
            seen, seen_exists = _rows(first + offset * dilation, length, ROWS)
            k_tile = _load(k_at, seen, seen_exists, k_token, column, head)
            products = tl.sum(q_tile * k_tile, 1)
            if WIDE:
                products = _add_dots(
                    products, q_at, k_at, row, seen, exists, seen_exists, q_token, k_token, head, BLOCK
                )
            scores = tl.where(seen_exists, scale * products, float("-inf"))
            higher = tl.maximum(maximum, scores)
            weights = tl.exp(scores - higher)
            shrink = tl.exp(maximum - higher)
            maximum = higher
            total = total * shrink + weights
            v_tile = _load(v_at, seen, seen_exists, v_token, part, head)
            sums = sums * shrink[:, None] + weights[:, None] * v_tile
        o_at = o + batch * o_batch + at_head * o_head
        _store(o_at, sums * (1.0 / total)[:, None], row, exists, o_token, part, head)
        if statistics is not None:
            # All parts of the columns write the same values.
            at = statistics + (batch * heads + at_head) * 3 * length + row
            tl.store(at, maximum, exists)
            tl.store(at + length, total, exists)


@triton.jit
def _backward_queries(
    dq, statistics, do, q, k, v, scale, tiles, parts, heads, length, head, dilation, reach,
    dq_batch, dq_head, dq_token, do_batch, do_head, do_token,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dq, and for each query the mean of its weights' gradients, weighted by the weights."""
    column = tl.arange(0, BLOCK)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, at_head, first, start = _place(tile, length, heads, parts, ROWS, BLOCK)
        do_at = do + batch * do_batch + at_head * do_head
        q_at = q + batch * q_batch + at_head * q_head
        k_at = k + batch * k_batch + at_head * k_head
        v_at = v + batch * v_batch + at_head * v_head
        part = start + column
        row, exists = _rows(first, length, ROWS)
        q_tile = _load(q_at, row, exists, q_token, column, head)
        do_tile = _load(do_at, row, exists, do_token, column, head)
        at = statistics + (batch * heads + at_head) * 3 * length + row
        maximum = tl.load(at, exists, other=0.0)
        inverse = 1.0 / tl.load(at + length, exists, other=1.0)
        mean = tl.zeros((ROWS,), tl.float32)
        # dq is Σ w (dw − mean) k. One pass makes it as Σ w dw k, minus the mean times Σ w k.
        slopes = tl.zeros((ROWS, BLOCK), tl.float32)
        keys = tl.zeros((ROWS, BLOCK), tl.float32)
        for offset in range(-reach, reach + 1):
            seen, seen_exists = _rows(first + offset * dilation, length, ROWS)
            k_tile = _load(k_at, seen, seen_exists, k_token, column, head)
            v_tile = _load(v_at, seen, seen_exists, v_token, column, head)
            products = tl.sum(q_tile * k_tile, 1)
            dweights = tl.sum(do_tile * v_tile, 1)
            if WIDE:
                products = _add_dots(
                    products, q_at, k_at, row, seen, exists, seen_exists, q_token, k_token, head, BLOCK
                )
                dweights = _add_dots(
                    dweights, do_at, v_at, row, seen, exists, seen_exists, do_token, v_token, head, BLOCK
                )
                k_tile = _load(k_at, seen, seen_exists, k_token, part, head)
            weights = tl.where(seen_exists, tl.exp(scale * products - maximum) * inverse, 0.0)
            slope = weights * dweights
            mean += slope
            if dq is not None:
                slopes += slope[:, None] * k_tile
                keys += weights[:, None] * k_tile
        tl.store(at + 2 * length, mean, exists)
        if dq is not None:
            dq_at = dq + batch * dq_batch + at_head * dq_head
            _store(dq_at, scale * (slopes - mean[:, None] * keys), row, exists, dq_token, part, head)


@triton.jit
def _backward_keys(
    dk, dv, statistics, do, q, k, v, scale, tiles, parts, heads, length, head, dilation, reach,
    d_batch, d_head, d_token, do_batch, do_head, do_token,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        batch, at_head, first, start = _place(tile, length, heads, parts, ROWS, BLOCK)
        do_at = do + batch * do_batch + at_head * do_head
        q_at = q + batch * q_batch + at_head * q_head
        k_at = k + batch * k_batch + at_head * k_head
        v_at = v + batch * v_batch + at_head * v_head
        statistics_at = statistics + (batch * heads + at_head) * 3 * length
        part = start + column
        row, exists = _rows(first, length, ROWS)
        k_tile = _load(k_at, row, exists, k_token, column, head)
        if dk is not None:
            v_tile = _load(v_at, row, exists, v_token, column, head)
        dks = tl.zeros((ROWS, BLOCK), tl.float32)
        dvs = tl.zeros((ROWS, BLOCK), tl.float32)
        for offset in range(-reach, reach + 1):
            by, by_exists = _rows(first + offset * dilation, length, ROWS)
            q_tile = _load(q_at, by, by_exists, q_token, column, head)
            do_tile = _load(do_at, by, by_exists, do_token, column, head)
            products = tl.sum(q_tile * k_tile, 1)
            if WIDE:
                products = _add_dots(products, q_at, k_at, by, row, by_exists, exists, q_token, k_token, head, BLOCK)
            maximum = tl.load(statistics_at + by, by_exists, other=0.0)
            total = tl.load(statistics_at + length + by, by_exists, other=float("inf"))  # infinity gives a weight of 0
            weights = tl.exp(scale * products - maximum) * (1.0 / total)
            if dk is not None:
                dweights = tl.sum(do_tile * v_tile, 1)
                if WIDE:
                    dweights = _add_dots(
                        dweights, do_at, v_at, by, row, by_exists, exists, do_token, v_token, head, BLOCK
                    )
                    q_tile = _load(q_at, by, by_exists, q_token, part, head)
                mean = tl.load(statistics_at + 2 * length + by, by_exists, other=0.0)
                dks += (weights * (dweights - mean))[:, None] * q_tile
            if dv is not None:
                if WIDE:
                    do_tile = _load(do_at, by, by_exists, do_token, part, head)
                dvs += weights[:, None] * do_tile
        d_at = batch * d_batch + at_head * d_head
        if dk is not None:
            _store(dk + d_at, scale * dks, row, exists, d_token, part, head)
        if dv is not None:
            _store(dv + d_at, dvs, row, exists, d_token, part, head)


def _launch(
    launched: Any,
    alive: float,
    results: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    kernel_size: int,
    dilation: int,
    scale: float | None,
) -> None:
    """Launch a kernel.

    Args:
        alive: float32 tiles that it holds at once.
        results: the tensors that it writes.
        strided: one of the results, which has the strides of all of them, and the tensors that it reads.
    """
    like, *read = strided
    batch, heads, length, head = like.shape
    _, rows, block = row_tiles(like, batch * heads * length, head, alive)
    while rows > 1 and rows // 2 >= length:
        rows //= 2
    parts = (head + block - 1) // block
    tiles = batch * heads * ((length + rows - 1) // rows) * parts
    strides = [stride for x in strided for stride in (x.stride(0), x.stride(1), x.stride(2))]
    # There may be fewer positions than the window reaches.
    reach = min(kernel_size // 2, (length - 1) // dilation)
    launched[(min(tiles, get_npu_core_count(like.device)),)](
        *results, *read, head**-0.5 if scale is None else float(scale), tiles, parts, heads, length, head,
        dilation, reach, *strides, WIDE=parts > 1, ROWS=rows, BLOCK=block,
    )  # fmt: skip


def _new(q: Tensor) -> Tensor:
    """A tensor without gaps, laid out like q."""
    if q.stride(1) >= q.stride(2):
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    # The heads of a token lie together, as in a transposed view of [B, S, H, D].
    _, heads, length, head = q.shape
    return q.new_empty_strided(q.shape, (length * heads * head, head, heads * head, 1))


def _adjacent(x: Tensor) -> Tensor:
    """x with adjacent columns."""
    return x if x.stride(3) == 1 else x.contiguous()


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
    q, k, v = _adjacent(q), _adjacent(k), _adjacent(v)
    o = _new(q)
    statistics = None
    if True in needs:
        batch, heads, length, _ = q.shape
        # For each query: the maximum of its scores, the sum of their exponentials, and, in backward, a mean.
        statistics = torch.empty((batch, heads, 3, length), dtype=torch.float32, device=q.device)
    _launch(_forward, FORWARD_TILES, (o, statistics), (o, q, k, v), kernel_size, dilation, scale)
    return o, () if statistics is None else (q, k, v, statistics)


def backward(
    needs: Needs, saved: Saved, do: Tensor, *, kernel_size: int, dilation: int, scale: float | None
) -> tuple[Tensor | None, ...]:
    q, k, v, statistics = saved
    do = _adjacent(do)
    dq, dk, dv = (_new(q) if need else None for need in needs)
    options = kernel_size, dilation, scale
    if dq is not None or dk is not None:
        statistics = statistics.clone()
        _launch(_backward_queries, BACKWARD_TILES, (dq, statistics), (q if dq is None else dq, do, q, k, v), *options)
    if dk is not None or dv is not None:
        like = dk if dv is None else dv
        _launch(_backward_keys, BACKWARD_TILES, (dk, dv, statistics), (like, do, q, k, v), *options)
    return dq, dk, dv
