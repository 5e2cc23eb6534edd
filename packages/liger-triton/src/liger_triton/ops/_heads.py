"""Rotary embeddings: a program takes some heads of one token, of q and then k in one row of heads.

q and k share one tile. With a tile for each, the compiler issues the second load only after the first has arrived, and waits for
memory twice. On an H200 (triton 3.6), 2048 tokens then take 13.2 µs instead of 12.9, and with 28 + 4 heads 11.2 instead of 10.7.
"""

import torch
import triton.language as tl
from torch import Tensor

from liger_core.contract import compiling
from liger_core.custom_op import opaque
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import adjacent, power_of_2, without_gaps

TILE_BYTES = 1024
"""Bytes of each half of a tile, 32 per thread. On an H200 (triton 3.6), rope of 2 x 16384 tokens, 32 + 8 heads of 128 in
bfloat16, takes 0.168 ms, its backward 0.169. With twice as many bytes they take 0.168 and 0.175. With half as many both take
0.203, because an H200 starts only 1.6 programs per nanosecond."""
MOST_BATCHES = 65535
"""Limit of a grid's second axis. The third axis has the remaining batches."""


@kernel
def _rotate(
    yq, yk, q, k, cos, sin, batches, length, q_batch, q_head, q_token, k_batch, k_head, k_token,
    table_plane, table_batch, table_token,
    Q_COUNT: tl.constexpr, K_COUNT: tl.constexpr, COLUMNS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    TIME: tl.constexpr, HEIGHT: tl.constexpr, TOKENS_FIRST: tl.constexpr, DENSE: tl.constexpr,
    BACKWARD: tl.constexpr, MOST_BATCHES: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64) * MOST_BATCHES + tl.program_id(1)
    if batch >= batches:
        return
    tiles: tl.constexpr = (Q_COUNT + K_COUNT + HEADS - 1) // HEADS
    token = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(0) % tiles * HEADS + tl.arange(0, HEADS)[:, None]
    exists = None
    if tiles * HEADS > Q_COUNT + K_COUNT:
        exists = head < Q_COUNT + K_COUNT

    q += batch * q_batch + token * q_token
    if TOKENS_FIRST:
        yq += (batch * length + token) * (Q_COUNT * HEAD_SIZE)
    else:
        yq += (batch * Q_COUNT * length + token) * HEAD_SIZE
    if k is None:
        x, y, x_head = q, yq, q_head
    else:
        k += batch * k_batch + token * k_token
        if TOKENS_FIRST:
            yk += (batch * length + token) * (K_COUNT * HEAD_SIZE)
        else:
            yk += (batch * K_COUNT * length + token) * HEAD_SIZE
        of_k = head >= Q_COUNT
        x, y, x_head = tl.where(of_k, k, q), tl.where(of_k, yk, yq), tl.where(of_k, k_head, q_head)
        head = tl.where(of_k, head - Q_COUNT, head)
    if DENSE:
        x += head * HEAD_SIZE
    else:
        x += head.to(tl.int64) * x_head
    if TOKENS_FIRST:
        y += head * HEAD_SIZE
    else:
        y += head.to(tl.int64) * length * HEAD_SIZE

    half: tl.constexpr = COLUMNS // 2
    column = tl.arange(0, HALF)[None, :]
    if half == HALF:
        known = None
        inside = exists
    else:
        known = tl.broadcast_to(column < half, (HEADS, HALF))
        inside = known if exists is None else exists & known
    x1, x2 = tl.load(x + column, inside), tl.load(x + half + column, inside)
    plane = tl.where(column < TIME, 0, tl.where(column < TIME + HEIGHT, 1, 2)).to(tl.int64)
    # Each element has an address of its own: a row of angles that is spread over the tile after loading would send x through
    # shared memory.
    at = tl.broadcast_to(plane * table_plane + column, (HEADS, HALF))
    cos += batch * table_batch + token * table_token
    sin += batch * table_batch + token * table_token
    cos1, cos2 = tl.load(cos + at, known).to(tl.float32), tl.load(cos + half + at, known).to(tl.float32)
    sin1, sin2 = tl.load(sin + at, known).to(tl.float32), tl.load(sin + half + at, known).to(tl.float32)
    if BACKWARD:  # the transpose: by the negative angle, if both halves have the same angles
        sin1, sin2 = -sin2, -sin1
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    tl.store(y + column, x1 * cos1 - x2 * sin1, inside)
    tl.store(y + half + column, x2 * cos2 + x1 * sin2, inside)
    if REST > 0:
        rest = COLUMNS + tl.arange(0, REST)[None, :]
        passed = rest < HEAD_SIZE if exists is None else exists & (rest < HEAD_SIZE)
        tl.store(y + rest, tl.load(x + rest, passed), passed)


def rotate(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    backward: bool,
    time: int = 0,
    height: int = 0,
) -> tuple[Tensor | None, Tensor | None]:
    """q and k, rotated by the angles whose cos and sin are given; with `backward`, by the negative angles.

    Args:
        q, k: ``[B, heads, S, D]``, or None.
        cos, sin: ``[S, columns]``, ``[1 or B, S, columns]``, or, if there are planes, ``[3, 1 or B, S, columns]``.
        backward: whether q and k are gradients of the results.
        time, height: columns of a half that take the first plane, and the second; the others take the third.
    """
    if backward and compiling():
        results = tuple(None if x is None else torch.empty_like(x) for x in (q, k))
        _rotate_gradients(*results, q, k, cos, sin, time, height)
        return results
    return _rotated(None, None, q, k, cos, sin, backward, time, height)


def _rotated(
    yq: Tensor | None,
    yk: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    backward: bool,
    time: int,
    height: int,
) -> tuple[Tensor | None, Tensor | None]:
    """`rotate`, into yq and yk if a kernel can write to them."""
    batch, _, length, head_size = (k if q is None else q).shape
    q, yq, q_count, q_strides, q_tokens_first = _heads(q, yq)
    k, yk, k_count, k_strides, k_tokens_first = _heads(k, yk)
    shape, strides = cos.shape, cos.stride()
    if strides[-1] != 1 or strides != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = without_gaps(shape)
    plane = strides[0] if len(shape) == 4 else 0
    of_sample = 0 if len(shape) == 2 or shape[-3] == 1 else strides[-3]
    sizes = batch, length, head_size, shape[-1]
    tables = cos, sin, (plane, of_sample, strides[-2]), sizes, backward, time, height
    if (
        q is not None
        and k is not None
        and q.dtype is k.dtype
        and (q_tokens_first == k_tokens_first or q_count == 1 or k_count == 1)
        # Triton 3.7 for AMD doesn't compile a choice between a tensor of less than 2 GB and a larger one.
        and torch.version.hip is None
    ):
        tokens_first = k_tokens_first if q_count == 1 else q_tokens_first  # a single head lies in both orders
        _launch(yq, yk, q, k, q_count, k_count, q_strides, k_strides, tokens_first, *tables)
    else:
        if q is not None:
            _launch(yq, None, q, None, q_count, 0, q_strides, q_strides, q_tokens_first, *tables)
        if k is not None:
            _launch(yk, None, k, None, k_count, 0, k_strides, k_strides, k_tokens_first, *tables)
    return yq, yk


@opaque(writes=("yq", "yk"))
def _rotate_gradients(
    yq: Tensor | None,
    yk: Tensor | None,
    dq: Tensor | None,
    dk: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    time: int,
    height: int,
) -> None:
    """`rotate` for a traced backward. If it asks for gradients' strides, Dynamo doesn't know them, and copies all gradients."""
    for y, result in zip((yq, yk), _rotated(yq, yk, dq, dk, cos, sin, True, time, height), strict=True):
        if y is not None and result is not y:
            y.copy_(result)


def _launch(
    yq: Tensor | None,
    yk: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_count: int,
    k_count: int,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    tokens_first: bool,
    cos: Tensor,
    sin: Tensor,
    table_strides: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    backward: bool,
    time: int,
    height: int,
) -> None:
    batch, length, head_size, columns = sizes
    half = power_of_2(columns // 2)
    rest = power_of_2(head_size - columns) if head_size > columns else 0
    size = q.element_size()
    count = q_count + k_count
    heads = max(1, TILE_BYTES // (half * size))
    if count <= 2 * heads:
        heads = power_of_2(count, 1)
    tiles = -(-count // heads)
    _rotate[length * tiles, min(batch, MOST_BATCHES), -(-batch // MOST_BATCHES)](
        yq, yk, q, k, cos, sin, batch, length, *q_strides, *k_strides, *table_strides,
        Q_COUNT=q_count, K_COUNT=k_count, COLUMNS=columns, HEAD_SIZE=head_size, TIME=time, HEIGHT=height,
        TOKENS_FIRST=tokens_first,
        DENSE=bool((q_count == 1 or q_strides[1] == head_size) and (k_count <= 1 or k_strides[1] == head_size)),
        BACKWARD=backward, MOST_BATCHES=MOST_BATCHES, HEADS=heads, HALF=half, REST=rest,
        num_warps=min(max(1, heads * max(half, rest) * size // 1024), 8),
    )  # fmt: skip


def _heads(x: Tensor | None, y: Tensor | None) -> tuple[Tensor | None, Tensor | None, int, tuple[int, ...], bool]:
    """q or k with adjacent columns, its output, its heads, its strides but the last, and whether a token's heads lie together.

    The output has no gaps: y if it has none, or else a new tensor. That one's heads and tokens lie in the order of x's.
    """
    if x is None:
        return None, None, 0, (), False
    _, heads, length, head_size = x.shape
    x, strides = adjacent(x)
    dense = (length * heads * head_size, head_size, heads * head_size, 1)
    if y is not None and (y.stride() == dense or y.is_contiguous()):
        return x, y, heads, strides[:3], y.stride() == dense
    if strides[1] >= strides[2]:
        return x, torch.empty_like(x, memory_format=torch.contiguous_format), heads, strides[:3], False
    y = torch.empty_like(x) if strides == dense else x.new_empty_strided(x.shape, dense)
    return x, y, heads, strides[:3], True
