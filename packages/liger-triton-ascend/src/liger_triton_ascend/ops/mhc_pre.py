"""Hyper-connections before a layer: PyTorch multiplies by the weight. Kernels make the rest from the product, with rows last.

A row has a matrix of a few streams by a few streams. So a tile has those of adjacent rows, and a sum over streams adds vectors.
PyTorch transposes the results, which are small beside x. Backward runs Sinkhorn's steps in reverse, and makes each step's input
again from the start.

The host code is not `liger_core.host.mhc_pre`: there the numbers of a row are adjacent, and its plan is padded to a power of
two. Here rows lie last, so that a vector holds one number of many rows. To share that code, PyTorch would have to transpose each
tensor between kernels.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import mhc_pre
from liger_core.contract import Needs, Saved, implements
from liger_core.ops.mhc_pre import MHCPre
from liger_triton_ascend.ops._device import compute_default_tiling_strategy, get_npu_core_count
from liger_triton_ascend.ops._linear import LINEAR
from liger_triton_ascend.ops._math import ones_below
from liger_triton_ascend.ops._rows import MARGIN, TILES_A_CORE, as_rows, row_tiles

# Alive at once in float32, by the suite's estimate of the Unified Buffer, with two of each that is transferred: parts of rows;
# tiles of all streams, and tiles of one stream; matrices of adjacent rows.
SQUARES_TILES = 3
MIX_TILES = 3
DOTS_TILES = 4, 2
DX_TILES = 6
FORWARD_MATRICES = 9
BACKWARD_MATRICES = 18

MOST_STREAMS = 16
"""With more streams, the matrices of eight rows don't fit the Unified Buffer."""

CHUNK = 1 << 24
"""Elements of a float32 matrix as wide as x that PyTorch makes at once: 64 MiB, a third of a 910B's cache. Not measured."""


@triton.jit
def _squares(sums, x, rows, columns, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            inside = (row < rows)[:, None] & (column < columns)
            xs = tl.load(x + row[:, None] * x_stride + column, inside, other=0.0).to(tl.float32)
            squares += xs * xs
        tl.store(sums + row, tl.sum(squares, 1), row < rows)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _places(first, rows, streams, row, STREAMS: tl.constexpr):
    """The places of a value for each stream of these rows, ``[STREAMS, ROWS]``; and which of them exist."""
    stream = tl.arange(0, STREAMS).to(tl.int64)[:, None]
    return (first + stream) * rows + row[None, :], (stream < streams) & (row < rows)[None, :]


@triton.jit
def _matrix_places(first, rows, streams, row, STREAMS: tl.constexpr):
    """The places of a value for each pair of streams of these rows, ``[STREAMS, STREAMS, ROWS]``; and which of them exist."""
    stream = tl.arange(0, STREAMS).to(tl.int64)
    old, new = stream[:, None, None], stream[None, :, None]
    place = (first + old * streams + new) * rows + row[None, None, :]
    return place, (old < streams) & (new < streams) & (row < rows)[None, None, :]


@triton.jit
def _scaled(ms, alpha, bias, which, first, streams, STREAMS: tl.constexpr):
    """alpha · m + bias, a value for each stream."""
    stream = tl.arange(0, STREAMS)[:, None]
    shift = tl.load(bias + first + stream, stream < streams, other=0.0).to(tl.float32)
    return tl.load(alpha + which).to(tl.float32) * ms + shift


@triton.jit
def _logits(ms, alpha, bias, streams, STREAMS: tl.constexpr):
    """alpha · m + bias, a value for each pair of streams."""
    old, new = tl.arange(0, STREAMS)[:, None], tl.arange(0, STREAMS)[None, :]
    inside = (old < streams) & (new < streams)
    shift = tl.load(bias + 2 * streams + old * streams + new, inside, other=0.0).to(tl.float32)
    return tl.load(alpha + 2).to(tl.float32) * ms + shift[:, :, None]


@triton.jit
def _softmax(logits, there):
    """Over the second dimension; 0 if one of the two streams doesn't exist."""
    # Far below any logit, and finite: an infinity times 0 would be NaN.
    shifted = logits + ((there - 1.0) * 3e38)[None, :, None]
    e = tl.exp(shifted - tl.max(shifted, 1)[:, None, :]) * there[:, None, None] * there[None, :, None]
    return e * (1.0 / (tl.sum(e, 1) + (1.0 - there)[:, None]))[:, None, :]


@triton.jit
def _by_columns(p, there, eps):
    """Matrices whose columns are divided by their sums, and the inverses of these sums."""
    inverse = 1.0 / (tl.sum(p, 0) + (eps + (1.0 - there))[:, None])
    return p * inverse[None, :, :], inverse


@triton.jit
def _by_rows(p, there, eps):
    inverse = 1.0 / (tl.sum(p, 1) + (eps + (1.0 - there))[:, None])
    return p * inverse[:, None, :], inverse


@triton.jit
def _by_both(p, there, eps):
    """Matrices after another iteration."""
    p, _ = _by_rows(p, there, eps)
    p, _ = _by_columns(p, there, eps)
    return p


@triton.jit
def _forward(
    pre, post, res, m, products, squares, bias, alpha, rows, streams, columns, count, iterations, norm_eps, sinkhorn_eps, pre_eps,
    post_multiplier, HEAD: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    there = ones_below(tl.arange(0, STREAMS), streams)
    rows = tl.cast(rows, tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        r = tl.rsqrt(tl.load(squares + row, row < rows, other=0.0) / columns + norm_eps)
        at, inside = _places(0, rows, streams, row, STREAMS)
        ms = tl.load(products + at, inside, other=0.0) * r[None, :]
        tl.store(pre + at, _sigmoid(_scaled(ms, alpha, bias, 0, 0, streams, STREAMS)) + pre_eps, inside)
        if m is not None:
            tl.store(m + at, ms, inside)
            tl.store(m + count * rows + row, r, row < rows)
        if not HEAD:
            second, _ = _places(streams, rows, streams, row, STREAMS)
            ms = tl.load(products + second, inside, other=0.0) * r[None, :]
            if m is not None:
                tl.store(m + second, ms, inside)
            z = _scaled(ms, alpha, bias, 1, streams, streams, STREAMS)
            tl.store(post + at, post_multiplier * _sigmoid(z), inside)
            third, all_inside = _matrix_places(2 * streams, rows, streams, row, STREAMS)
            ms = tl.load(products + third, all_inside, other=0.0) * r[None, None, :]
            if m is not None:
                tl.store(m + third, ms, all_inside)
            p = _softmax(_logits(ms, alpha, bias, streams, STREAMS), there)
            p += sinkhorn_eps * there[:, None, None] * there[None, :, None]
            p, _ = _by_columns(p, there, sinkhorn_eps)
            for _step in range(1, iterations):
                p = _by_both(p, there, sinkhorn_eps)
            place, _ = _matrix_places(0, rows, streams, row, STREAMS)
            tl.store(res + place, p, all_inside)


@triton.jit
def _mix(h, x, pre, items, parts, streams, width, x_stride, BLOCK: tl.constexpr):
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.cast(item // parts, tl.int64)
        column = item % parts * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        sums = tl.zeros((BLOCK,), tl.float32)
        for stream in range(0, streams):
            xs = tl.load(x + row * x_stride + stream * width + column, inside, other=0.0).to(tl.float32)
            sums += tl.load(pre + row * streams + stream) * xs
        tl.store(h + row * width + column, sums, inside)


@triton.jit
def _dots(dots, dh, x, rows, streams, width, dh_stride, x_stride, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """dh · x of each stream of a row."""
    stream = tl.arange(0, STREAMS)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        sums = tl.zeros((STREAMS, BLOCK), tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            dhs = tl.load(dh + row * dh_stride + column, column < width, other=0.0).to(tl.float32)
            at = x + row * x_stride + stream[:, None] * width + column[None, :]
            inside = (stream < streams)[:, None] & (column < width)[None, :]
            sums += tl.load(at, inside, other=0.0).to(tl.float32) * dhs[None, :]
        tl.store(dots + row * streams + stream, tl.sum(sums, 1), stream < streams)


@triton.jit
def _back(d, o, inverse, AXIS: tl.constexpr):
    """The gradient of values divided by their sums along an axis, from d, the gradient of the quotients o."""
    if AXIS == 0:
        return (d - tl.sum(d * o, 0)[None, :, :]) * inverse[None, :, :]
    else:
        return (d - tl.sum(d * o, 1)[:, None, :]) * inverse[:, None, :]


@triton.jit
def _backward(
    plan, slopes, rest, dots, dpre, dpost, dres, m, bias, alpha, rows, streams, columns, count, iterations, sinkhorn_eps, pre_eps,
    post_multiplier, HEAD: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write `slopes`, the gradients of alpha · m + bias, and `plan`, those of the products with the weight."""
    there = ones_below(tl.arange(0, STREAMS), streams)
    rows = tl.cast(rows, tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        r = tl.load(m + count * rows + row, row < rows, other=0.0)
        at, inside = _places(0, rows, streams, row, STREAMS)
        ms = tl.load(m + at, inside, other=0.0)
        s = _sigmoid(_scaled(ms, alpha, bias, 0, 0, streams, STREAMS))
        tl.store(rest + at, s + pre_eps, inside)
        d = tl.zeros((STREAMS, ROWS), tl.float32)
        if dots is not None:
            d += tl.load(dots + at, inside, other=0.0)
        if dpre is not None:
            d += tl.load(dpre + at, inside, other=0.0)
        d *= s * (1.0 - s)
        tl.store(slopes + at, d, inside)
        g = tl.load(alpha).to(tl.float32) * d
        tl.store(plan + at, g * r[None, :], inside)
        through_r = tl.sum(g * ms, 0)
        if not HEAD:
            second, _ = _places(streams, rows, streams, row, STREAMS)
            d = tl.zeros((STREAMS, ROWS), tl.float32)
            if dpost is not None:
                ms = tl.load(m + second, inside, other=0.0)
                s = _sigmoid(_scaled(ms, alpha, bias, 1, streams, streams, STREAMS))
                d = tl.load(dpost + at, inside, other=0.0) * (post_multiplier * s * (1.0 - s))
                through_r += tl.load(alpha + 1).to(tl.float32) * tl.sum(d * ms, 0)
            tl.store(slopes + second, d, inside)
            tl.store(plan + second, tl.load(alpha + 1).to(tl.float32) * d * r[None, :], inside)
            third, all_inside = _matrix_places(2 * streams, rows, streams, row, STREAMS)
            d = tl.zeros((STREAMS, STREAMS, ROWS), tl.float32)
            if dres is not None:
                place, _ = _matrix_places(0, rows, streams, row, STREAMS)
                d = tl.load(dres + place, all_inside, other=0.0)
                ms = tl.load(m + third, all_inside, other=0.0)
                e = _softmax(_logits(ms, alpha, bias, streams, STREAMS), there)
                begun = e + sinkhorn_eps * there[:, None, None] * there[None, :, None]
                start, first_inverse = _by_columns(begun, there, sinkhorn_eps)
                for done in range(1, iterations):
                    p = start
                    for _step in range(1, iterations - done):
                        p = _by_both(p, there, sinkhorn_eps)
                    p, of_rows = _by_rows(p, there, sinkhorn_eps)
                    o, of_columns = _by_columns(p, there, sinkhorn_eps)
                    d = _back(d, o, of_columns, 0)
                    d = _back(d, p, of_rows, 1)
                d = _back(d, start, first_inverse, 0)
                d = e * (d - tl.sum(d * e, 1)[:, None, :])
                through_r += tl.load(alpha + 2).to(tl.float32) * tl.sum(tl.sum(d * ms, 0), 0)
            tl.store(slopes + third, d, all_inside)
            tl.store(plan + third, tl.load(alpha + 2).to(tl.float32) * d * r[None, None, :], all_inside)
        tl.store(rest + streams * rows + row, through_r * r * r / columns, row < rows)


@triton.jit
def _dx(
    dx, products, dh, x, rest, items, parts, streams, width, dh_stride, x_stride, BLOCK: tl.constexpr
):  # fmt: skip
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.cast(item // parts, tl.int64)
        column = item % parts * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        if dh is not None:
            dhs = tl.load(dh + row * dh_stride + column, inside, other=0.0).to(tl.float32)
        along_x = tl.load(rest + row * (streams + 1) + streams)
        for stream in range(0, streams):
            at = (row * streams + stream) * width + column
            xs = tl.load(x + row * x_stride + stream * width + column, inside, other=0.0).to(tl.float32)
            dxs = tl.load(products + at, inside, other=0.0) - along_x * xs
            if dh is not None:
                dxs += tl.load(rest + row * (streams + 1) + stream) * dhs
            tl.store(dx + at, dxs, inside)


def _times(small: Tensor, big: Tensor) -> Tensor:
    """small · big in float32, if `big` is x or its transpose. No digit of `small` is lost."""
    if small.dtype is big.dtype:
        return LINEAR.product(small, big)
    wide = small.float()
    if big.dtype is torch.bfloat16:  # a float32 number is the sum of three bfloat16 ones
        high = wide.to(torch.bfloat16)
        rest = wide - high.float()
        middle = rest.to(torch.bfloat16)
        low = (rest - middle.float()).to(torch.bfloat16)
        return LINEAR.product(torch.cat((low, middle, high)), big).view(3, *small.shape[:1], -1).sum(0)
    chunks = LINEAR.chunks(big.shape[1], max(1, CHUNK // big.shape[0]))
    return torch.cat([LINEAR.product(wide, big[:, first:last].float()) for first, last in chunks], 1)


def _matrices(rows: int, streams: int, like: Tensor, alive: float) -> tuple[int, int, int]:
    """Programs; streams of a tile; rows of a tile."""
    cores = get_npu_core_count(like.device)
    most = max(1, rows // (TILES_A_CORE * cores))
    ((padded, _, tile_rows),) = compute_default_tiling_strategy(MARGIN, 4, alive, [(streams, streams, most)], [2])
    return min((rows + tile_rows - 1) // tile_rows, cores), padded, tile_rows


def _parts(x: Tensor, rows: int, width: int, alive: float) -> tuple[int, int, int]:
    """Programs of a grid over parts of rows; parts of a row; columns of a part."""
    _, _, block = row_tiles(x, 1, width, alive)
    parts = (width + block - 1) // block
    return min(rows * parts, get_npu_core_count(x.device)), parts, block


def _rows_last(x: Tensor | None, rows: int) -> Tensor | None:
    """The transpose of a tensor that has some numbers for each row."""
    return None if x is None else x.reshape(rows, -1).t().contiguous()


def refuses(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    alpha: Tensor,
    *,
    iterations: int = 20,
    norm_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    pre_eps: float = 0.0,
    post_multiplier: float = 2.0,
) -> str | None:
    streams = x.shape[-2]
    return f"{streams} streams are more than {MOST_STREAMS}" if streams > MOST_STREAMS else None


@implements(mhc_pre)
def forward(
    needs: Needs,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    alpha: Tensor,
    *,
    iterations: int = 20,
    norm_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    pre_eps: float = 0.0,
    post_multiplier: float = 2.0,
) -> tuple[MHCPre, Saved]:
    leading, (streams, width), count = x.shape[:-2], x.shape[-2:], weight.shape[0]
    columns, head = streams * width, count == streams
    inputs = x, weight, bias, alpha
    x, x_stride = as_rows(x.reshape(-1, columns))
    rows = x.shape[0]
    squares = x.new_empty(rows, dtype=torch.float32)
    programs, tile_rows, block = row_tiles(x, rows, columns, SQUARES_TILES)
    _squares[(programs,)](squares, x, rows, columns, x_stride, ROWS=tile_rows, BLOCK=block)
    products = _times(weight, x.t())
    pre = x.new_empty((streams, rows), dtype=torch.float32)
    post = None if head else torch.empty_like(pre)
    res = None if head else x.new_empty((streams * streams, rows), dtype=torch.float32)
    m = x.new_empty((count + 1, rows), dtype=torch.float32) if True in needs else None
    programs, padded, tile_rows = _matrices(rows, streams, x, FORWARD_MATRICES)
    _forward[(programs,)](
        pre, post, res, m, products, squares, bias.contiguous(), alpha.contiguous(), rows, streams, columns, count, iterations,
        norm_eps, sinkhorn_eps, pre_eps, post_multiplier, HEAD=head, STREAMS=padded, ROWS=tile_rows,
    )  # fmt: skip
    pre = pre.t().contiguous()
    h = x.new_empty((*leading, width))
    programs, parts, block = _parts(x, rows, width, MIX_TILES)
    _mix[(programs,)](h, x, pre, rows * parts, parts, streams, width, x_stride, BLOCK=block)
    results = MHCPre(
        h,
        pre.view(*leading, streams),
        None if post is None else post.t().contiguous().view(*leading, streams),
        None if res is None else res.t().contiguous().view(*leading, streams, streams),
    )
    return results, () if m is None else (*inputs, m)


def backward(
    needs: Needs,
    saved: Saved,
    dh: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    *,
    iterations: int,
    norm_eps: float,
    sinkhorn_eps: float,
    pre_eps: float,
    post_multiplier: float,
) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_bias, needs_alpha = needs
    x, weight, bias, alpha, m = saved
    streams, width, count = *x.shape[-2:], weight.shape[0]
    columns, head = streams * width, count == streams
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    x, x_stride = as_rows(x.reshape(-1, columns))
    rows = x.shape[0]
    dots, dh_stride = None, 0
    if dh is not None:
        dh, dh_stride = as_rows(dh.reshape(-1, width))
        dots = x.new_empty((rows, streams), dtype=torch.float32)
        tiles = DOTS_TILES[0] + DOTS_TILES[1] / streams
        ((padded, block),) = compute_default_tiling_strategy(MARGIN, 4, tiles, [(streams, width)], [1])
        _dots[(min(rows, get_npu_core_count(x.device)),)](
            dots, dh, x, rows, streams, width, dh_stride, x_stride, STREAMS=padded, BLOCK=block
        )
    m = m.contiguous()
    plan = x.new_empty((count, rows), dtype=torch.float32)
    slopes = torch.empty_like(plan)
    rest = x.new_empty((streams + 1, rows), dtype=torch.float32)
    programs, padded, tile_rows = _matrices(rows, streams, x, BACKWARD_MATRICES)
    _backward[(programs,)](
        plan, slopes, rest, *(_rows_last(d, rows) for d in (dots, dpre, dpost, dres)), m, bias.contiguous(), alpha.contiguous(),
        rows, streams, columns, count, iterations, sinkhorn_eps, pre_eps, post_multiplier,
        HEAD=head, STREAMS=padded, ROWS=tile_rows,
    )  # fmt: skip
    dbias = slopes.sum(1).to(bias.dtype) if needs_bias else None
    dalpha = None
    if needs_alpha:
        sums = (slopes * m[:count]).sum(1)
        ends = (0, streams) if head else (0, streams, 2 * streams, count)
        dalpha = torch.stack([sums[a:b].sum() for a, b in itertools.pairwise(ends)]).to(alpha.dtype)
    dweight = _times(plan, x).to(weight.dtype) if needs_weight else None
    if dx is not None:
        rest, wide = rest.t().contiguous(), weight.float()
        for first, last in LINEAR.chunks(rows, max(1, CHUNK // columns)):
            programs, parts, block = _parts(x, last - first, width, DX_TILES)
            _dx[(programs,)](
                dx.view(rows, columns)[first:last], torch.mm(plan[:, first:last].t(), wide),
                None if dh is None else dh[first:last], x[first:last], rest[first:last], (last - first) * parts, parts, streams,
                width, dh_stride, x_stride, BLOCK=block,
            )  # fmt: skip
    return dx, dweight, dbias, dalpha
