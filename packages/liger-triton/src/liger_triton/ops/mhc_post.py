"""Mixing of residual streams: a program has all streams of a row, so that each is read once. Backward loops along the row."""

import torch
import triton.language as tl
from torch import Tensor

from liger_core import mhc_post
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import as_rows, in_vectors, power_of_2

MOST_ELEMENTS = 4096
"""Elements of the new streams in one program: eight columns of four streams per thread."""

BACKWARD_ELEMENTS = 4096
"""The same in the backward, whose programs also hold the old streams and sums of their products."""

EACH = 8
"""Neighbouring columns of a thread, which it adds up by itself until the row ends.

With more than four streams, in float32, or if elements are loaded one by one, registers are short: there are half as many
columns and half as many elements.

Triton gives threads the last dimension of a tile first. So lanes come last, and no sum in the loop crosses threads. With a
lane's columns last, a loop over 512 columns had 128 shuffles and 12 barriers on sm_90 (triton 3.7.1). Now it has none.
"""

STAGES = 3
"""Tiles of f, x and dy in flight, including the one that is taken. On an H200 (triton 3.6), in bfloat16, backward takes, in ms,
with 1, 2 and 3: for 16384 rows of 4 x 7168 1.0800, 1.0666 and 0.8440; for 8192 of 4 x 4096 0.3294, 0.3300 and 0.2761. A row of
one tile has none to fetch."""


@kernel
def _forward(
    y, f, x, post, res, streams, columns, blocks, f_stride, x_stride, STREAMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    new = tl.arange(0, STREAMS)
    taken = tl.load(post + row * streams + new, new < streams, other=0.0).to(tl.float32)
    fs = tl.load(f + row * f_stride + column, inside, other=0.0).to(tl.float32)
    ys = taken[:, None] * fs[None, :]
    for old in tl.static_range(STREAMS):
        there = old < streams
        part = tl.load(res + (row * streams + old) * streams + new, there & (new < streams), other=0.0).to(tl.float32)
        xs = tl.load(x + (row * streams + old) * x_stride + column, there & inside, other=0.0).to(tl.float32)
        ys += part[:, None] * xs[None, :]
    at = (row * streams + new)[:, None] * columns + column[None, :]
    tl.store(y + at, ys, (new < streams)[:, None] & inside[None, :])


@kernel
def _backward(
    df, dx, dpost, dres, dy, f, x, post, res, streams, columns, dy_stride, f_stride, x_stride,
    STREAMS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS)
    # `here` has a place for each pair of streams, [old, new]. Tiles are [stream, columns of a lane, lanes].
    here = (stream < streams)[:, None] & (stream < streams)[None, :]
    place = tl.arange(0, EACH)[:, None] + tl.arange(0, LANES)[None, :] * EACH
    from_row = (row * streams + stream)[:, None, None]
    taken = tl.load(post + row * streams + stream, stream < streams, other=0.0).to(tl.float32)
    part = tl.load(res + (row * streams + stream)[:, None] * streams + stream[None, :], here, other=0.0).to(tl.float32)
    of_pairs = tl.zeros((STREAMS, STREAMS, LANES), tl.float32)
    of_streams = tl.zeros((STREAMS, LANES), tl.float32)
    for start in tl.range(0, columns, LANES * EACH, num_stages=STAGES):
        column = start + place
        inside = (stream < streams)[:, None, None] & (column < columns)[None, :, :]
        dys = tl.load(dy + from_row * dy_stride + column[None, :, :], inside, other=0.0).to(tl.float32)
        if dpost is not None:
            fs = tl.load(f + row * f_stride + column, column < columns, other=0.0).to(tl.float32)
            of_streams += tl.sum(dys * fs[None, :, :], 1)
        if dres is not None:
            xs = tl.load(x + from_row * x_stride + column[None, :, :], inside, other=0.0).to(tl.float32)
            of_pairs += tl.sum(xs[:, None, :, :] * dys[None, :, :, :], 2)
        if dx is not None:
            dxs = tl.sum(part[:, :, None, None] * dys[None, :, :, :], 1)
            tl.store(dx + from_row * columns + column[None, :, :], dxs, inside)
        if df is not None:
            dfs = tl.sum(taken[:, None, None] * dys, 0)
            tl.store(df + row * columns + column, dfs, column < columns)
    if dpost is not None:
        tl.store(dpost + row * streams + stream, tl.sum(of_streams, 1), stream < streams)
    if dres is not None:
        at = dres + (row * streams + stream)[:, None] * streams + stream[None, :]
        tl.store(at, tl.sum(of_pairs, 2), here)


@implements(mhc_post)
def forward(needs: Needs, f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, Saved]:
    streams, columns = x.shape[-2:]
    rows = x.numel() // (streams * columns)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    saved = (f, x, post, res) if True in needs else ()
    f, f_stride = as_rows(f)
    x, x_stride = as_rows(x)
    padded = power_of_2(streams, 1)
    block = min(power_of_2(columns), max(MOST_ELEMENTS // padded, 16))
    blocks = (columns + block - 1) // block
    _forward[(rows * blocks,)](
        y, f, x, post.contiguous(), res.contiguous(), streams, columns, blocks, f_stride, x_stride,
        STREAMS=padded, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    f, x, post, res = saved
    streams, columns = x.shape[-2:]
    rows = x.numel() // (streams * columns)
    df, dx, dpost, dres = (
        torch.empty_like(like, memory_format=torch.contiguous_format) if wanted else None
        for wanted, like in zip(needs, saved, strict=True)
    )
    dy, dy_stride = as_rows(dy)
    f, f_stride = as_rows(f)
    x, x_stride = as_rows(x)
    padded = power_of_2(streams, 1)
    each, elements = EACH, BACKWARD_ELEMENTS
    if padded > 4 or x.element_size() > 2 or not in_vectors(columns, dy_stride, f_stride, x_stride):
        each, elements = each // 2, elements // 2
    lanes = min(power_of_2(columns), max(elements // padded, 16 * each)) // each
    _backward[(rows,)](
        df, dx, dpost, dres, dy, f, x, post.contiguous(), res.contiguous(), streams, columns, dy_stride, f_stride, x_stride,
        STREAMS=padded, LANES=lanes, EACH=each, STAGES=STAGES if columns > lanes * each else 1,
        num_warps=max(1, min(lanes // 32, 4)),
    )  # fmt: skip
    return df, dx, dpost, dres
