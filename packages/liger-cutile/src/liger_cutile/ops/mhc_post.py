"""Mixing of residual streams: a block has all streams of a row, so that each is read once. Backward loops along the row.

Loops over streams are unrolled when a kernel is compiled. A block makes up to four streams: new ones in forward, old ones in
backward.
"""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import mhc_post
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._launch import ConstBool, ConstInt, block_number, given, launch, one_each
from liger_cutile.ops._rows import as_rows, blocks, power_of_2
from liger_cutile.ops._streams import by_lanes, load_number, load_part, store_part, store_sums

# The most columns of a block's tiles, each of one stream.
FORWARD_COLUMNS = 1024
BACKWARD_COLUMNS = 512
# The most streams that a block makes. Their number divides that of all streams.
MOST_STREAMS = 4
# Neighbouring columns of a thread, which it adds up by itself until the row ends.
EACH = 4


@ct.kernel
def _forward(y, f, x, post, res, across, STREAMS: ConstInt, MADE: ConstInt, BLOCK: ConstInt, INSIDE: ConstBool):
    item, column = block_number() // across, block_number() % across
    row, first = item // (STREAMS // MADE), item % (STREAMS // MADE) * MADE
    if row < post.shape[0]:
        fs = load_part(f, row, column, BLOCK, INSIDE)
        olds = ()
        for old in ct.static_iter(range(STREAMS)):
            olds += (load_part(x, row * STREAMS + old, column, BLOCK, INSIDE),)
        for made in ct.static_iter(range(MADE)):
            ys = load_number(post, row, first + made) * fs
            for old in ct.static_iter(range(STREAMS)):
                ys += load_number(res, row, old * STREAMS + first + made) * olds[old]
            store_part(y, row * STREAMS + first + made, column, ys, INSIDE)


@ct.kernel
def _backward(
    df, dx, dpost, dres, dy, f, x, post, res,
    STREAMS: ConstInt, MADE: ConstInt, BLOCK: ConstInt, LANES: ConstInt, INSIDE: ConstBool,
):  # fmt: skip
    """All of df and dpost; and dx and dres of the old streams from the block's first one on."""
    row, first = ct.bid(0), ct.bid(1) * MADE
    zeros = ct.zeros((LANES, 1), ct.float32)
    of_pairs, of_streams = (), ()
    for _ in ct.static_iter(range(MADE * STREAMS)):
        of_pairs += (zeros,)
    for _ in ct.static_iter(range(STREAMS)):
        of_streams += (zeros,)
    for column in range(ct.num_tiles(dy, axis=1, shape=(1, BLOCK))):
        news = ()
        for new in ct.static_iter(range(STREAMS)):
            news += (load_part(dy, row * STREAMS + new, column, BLOCK, INSIDE),)
        if given(df):
            dfs = load_number(post, row, 0) * news[0]
            for new in ct.static_iter(range(1, STREAMS)):
                dfs += load_number(post, row, new) * news[new]
            store_part(df, row, column, dfs, INSIDE)
        if given(dpost):
            fs = load_part(f, row, column, BLOCK, INSIDE)
            sums = ()
            for new in ct.static_iter(range(STREAMS)):
                sums += (of_streams[new] + by_lanes(fs * news[new], LANES),)
            of_streams = sums
        if given(dx):
            for made in ct.static_iter(range(MADE)):
                dxs = load_number(res, row, (first + made) * STREAMS) * news[0]
                for new in ct.static_iter(range(1, STREAMS)):
                    dxs += load_number(res, row, (first + made) * STREAMS + new) * news[new]
                store_part(dx, row * STREAMS + first + made, column, dxs, INSIDE)
        if given(dres):
            sums = ()
            for made in ct.static_iter(range(MADE)):
                xs = load_part(x, row * STREAMS + first + made, column, BLOCK, INSIDE)
                for new in ct.static_iter(range(STREAMS)):
                    sums += (of_pairs[made * STREAMS + new] + by_lanes(xs * news[new], LANES),)
            of_pairs = sums
    if given(dpost):
        store_sums(dpost, row, 0, of_streams)
    if given(dres):
        store_sums(dres, row, first * STREAMS, of_pairs)


def _made(streams: int) -> int:
    """How many streams a block makes."""
    return next(made for made in range(MOST_STREAMS, 0, -1) if streams % made == 0)


@opaque(writes=("y",))
def _launch_forward(y: Tensor, f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> None:
    streams, columns = x.shape[-2:]
    y, f, x, post, res = as_rows(y), as_rows(f), as_rows(x), as_rows(post), as_rows(res.flatten(-2))
    at_once, block = _made(streams), min(power_of_2(columns), FORWARD_COLUMNS)
    across = blocks(columns, block)
    grid = one_each(f.shape[0] * (streams // at_once) * across)
    launch(_forward, grid, y, f, x, post, res, across, streams, at_once, block, columns % block == 0)


@opaque(writes=("df", "dx", "dpost", "dres"))
def _launch_backward(
    df: Tensor | None,
    dx: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    dy: Tensor,
    f: Tensor,
    x: Tensor,
    post: Tensor,
    res: Tensor,
) -> None:
    streams, columns = x.shape[-2:]
    dy, f, x, post, res = as_rows(dy), as_rows(f), as_rows(x), as_rows(post), as_rows(res.flatten(-2))
    df, dx, dpost = (None if t is None else as_rows(t) for t in (df, dx, dpost))
    dres = None if dres is None else dres.view(-1, streams * streams)
    at_once, block = _made(streams), min(power_of_2(columns), BACKWARD_COLUMNS)
    rows, tensors = f.shape[0], (dy, f, x, post, res)
    constants = block, block // EACH, columns % block == 0
    if at_once == streams:
        launch(_backward, (rows,), df, dx, dpost, dres, *tensors, streams, at_once, *constants)
        return
    if df is not None or dpost is not None:
        launch(_backward, (rows,), df, None, dpost, None, *tensors, streams, at_once, *constants)
    if dx is not None or dres is not None:
        launch(_backward, (rows, streams // at_once), None, dx, None, dres, *tensors, streams, at_once, *constants)


@implements(mhc_post)
def forward(needs: Needs, f: Tensor, x: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_forward(y, f, x, post, res)
    return y, (f, x, post, res) if True in needs else ()


def backward(needs: Needs, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    gradients = tuple(
        torch.empty_like(like, memory_format=torch.contiguous_format) if wanted else None
        for wanted, like in zip(needs, saved, strict=True)
    )
    _launch_backward(*gradients, dy, *saved)
    return gradients
