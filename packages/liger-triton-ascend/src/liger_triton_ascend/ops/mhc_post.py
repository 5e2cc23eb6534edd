"""Mixing of residual streams: a tile has some columns of all new streams, so that each stream of a row is read once.

Backward writes each tile's part of the gradients of post and res. PyTorch adds up the tiles of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import mhc_post
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops._device import compute_default_tiling_strategy, get_npu_core_count
from liger_triton_ascend.ops._rows import MARGIN, as_rows

# Float32 tiles alive at once, by the suite's estimate of the Unified Buffer, with two for each tile that is transferred: tiles
# of all streams, and tiles of one stream.
FORWARD_TILES = 3, 4
BACKWARD_TILES = 3, 6


@triton.jit
def _forward(
    y, f, x, post, res, items, streams, columns, blocks, f_stride, x_stride, STREAMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    new = tl.arange(0, STREAMS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.cast(item // blocks, tl.int64)
        column = item % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        taken = tl.load(post + row * streams + new, new < streams, other=0.0).to(tl.float32)
        fs = tl.load(f + row * f_stride + column, inside, other=0.0).to(tl.float32)
        ys = taken[:, None] * fs[None, :]
        for old in range(0, streams):
            part = tl.load(res + (row * streams + old) * streams + new, new < streams, other=0.0).to(tl.float32)
            xs = tl.load(x + (row * streams + old) * x_stride + column, inside, other=0.0).to(tl.float32)
            ys += part[:, None] * xs[None, :]
        at = (row * streams + new)[:, None] * columns + column[None, :]
        tl.store(y + at, ys, (new < streams)[:, None] & inside[None, :])


@triton.jit
def _backward(
    df, dx, posts, ress, dy, f, x, post, res, items, streams, columns, blocks, dy_stride, f_stride, x_stride,
    STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    new = tl.arange(0, STREAMS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.cast(item // blocks, tl.int64)
        column = item % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        at = (row * streams + new)[:, None] * dy_stride + column[None, :]
        dys = tl.load(dy + at, (new < streams)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        place = tl.cast(item, tl.int64) * streams
        if df is not None:
            taken = tl.load(post + row * streams + new, new < streams, other=0.0).to(tl.float32)
            tl.store(df + row * columns + column, tl.sum(taken[:, None] * dys, 0), inside)
        if posts is not None:
            fs = tl.load(f + row * f_stride + column, inside, other=0.0).to(tl.float32)
            tl.store(posts + place + new, tl.sum(dys * fs[None, :], 1), new < streams)
        if dx is not None or ress is not None:
            for old in range(0, streams):
                if dx is not None:
                    part = tl.load(res + (row * streams + old) * streams + new, new < streams, other=0.0)
                    dxs = tl.sum(part.to(tl.float32)[:, None] * dys, 0)
                    tl.store(dx + (row * streams + old) * columns + column, dxs, inside)
                if ress is not None:
                    xs = tl.load(x + (row * streams + old) * x_stride + column, inside, other=0.0).to(tl.float32)
                    tl.store(ress + (place + old) * streams + new, tl.sum(dys * xs[None, :], 1), new < streams)


def _tiles(x: Tensor, alive: tuple[int, int]) -> tuple[int, int, int]:
    """Streams and columns of a tile, both powers of two; and how many tiles a row has."""
    streams, columns = x.shape[-2:]
    tiles = alive[0] + alive[1] / streams
    ((padded, block),) = compute_default_tiling_strategy(MARGIN, 4, tiles, [(streams, columns)], [1])
    return padded, block, (columns + block - 1) // block


@implements(mhc_post)
def forward(needs: Needs, f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, Saved]:
    streams, columns = x.shape[-2:]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    saved = (f, x, post, res) if True in needs else ()
    padded, block, blocks = _tiles(x, FORWARD_TILES)
    items = x.numel() // (streams * columns) * blocks
    f, f_stride = as_rows(f)
    x, x_stride = as_rows(x)
    _forward[(min(items, get_npu_core_count(x.device)),)](
        y, f, x, post.contiguous(), res.contiguous(), items, streams, columns, blocks, f_stride, x_stride,
        STREAMS=padded, BLOCK=block,
    )  # fmt: skip
    return y, saved


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    f, x, post, res = saved
    streams, columns = x.shape[-2:]
    rows = x.numel() // (streams * columns)
    needs_f, needs_x, needs_post, needs_res = needs
    df = torch.empty_like(f, memory_format=torch.contiguous_format) if needs_f else None
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    padded, block, blocks = _tiles(x, BACKWARD_TILES)
    posts = ress = None
    if needs_post:
        posts = torch.empty((rows, blocks, streams), dtype=torch.float32, device=x.device)
    if needs_res:
        ress = torch.empty((rows, blocks, streams, streams), dtype=torch.float32, device=x.device)
    dy, dy_stride = as_rows(dy)
    f, f_stride = as_rows(f)
    x, x_stride = as_rows(x)
    items = rows * blocks
    _backward[(min(items, get_npu_core_count(x.device)),)](
        df, dx, posts, ress, dy, f, x, post.contiguous(), res.contiguous(), items, streams, columns, blocks,
        dy_stride, f_stride, x_stride, STREAMS=padded, BLOCK=block,
    )  # fmt: skip
    dpost = None if posts is None else posts.sum(1).to(post.dtype).view(post.shape)
    dres = None if ress is None else ress.sum(1).to(res.dtype).view(res.shape)
    return df, dx, dpost, dres
