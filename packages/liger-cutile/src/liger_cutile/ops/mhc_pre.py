"""Hyper-connections before a layer: one product of all streams with a narrow matrix, then the rest of each row from it.

The product is shared out by rows and columns, and the sum of squares is made beside it. Then a block makes the coefficients of
some rows, and h is made of the streams, read again. Backward first sums dh · x of each stream, runs Sinkhorn's steps backwards
for each row, and then goes over the streams once for dx and dweight.
"""

import functools
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import MHCPre, mhc_pre
from liger_core.contract import implements
from liger_core.custom_op import opaque
from liger_core.host.mhc_pre import Coefficients, MHCPreHost, MHCPreKernels
from liger_cutile.ops._device import is_hopper, multiplies_from_shared, sm_count
from liger_cutile.ops._launch import ConstBool, ConstInt, block_number, given, launch, one_each
from liger_cutile.ops._math import parts_of, product_of_parts, transposed_parts
from liger_cutile.ops._rows import ZERO, as_rows, blocks, power_of_2
from liger_cutile.ops._streams import by_lanes, load_number, load_part, store_part, store_sums

# A tile of x in the forward product: it reads the weight once for so many rows.
PRODUCT_ROWS, PRODUCT_COLUMNS = 128, 128
# The same on Hopper with a weight whose bfloat16 parts are made first. On an H200 (tileiras 13.4), forward of 16384 rows of 4
# streams of 7168 columns takes 0.55 ms, and 0.61 with the tile above; 8192 x 4 x 4096 takes 0.181 and 0.197 ms.
PARTS_ROWS, PARTS_COLUMNS = 64, 256
# A tile of the products of backward.
GRADIENT_ROWS, GRADIENT_COLUMNS = 64, 128
# Rows and columns of all products in float32 and float16, whose elements have parts of their own, with many rows of weight, and
# where elements are loaded one by one, each with an address in registers.
FEW = 32
# Rows of weight up to which tiles have all rows.
MOST_COUNT = 32
# Blocks for each multiprocessor, of the forward product: more make more partial sums. The same with parts, and of backward's.
PRODUCT_PROGRAMS, PARTS_PROGRAMS, GRADIENT_PROGRAMS = 4, 2, 16
# Columns of a block of the forward product: fewer make more partial sums than they save time.
FEWEST_COLUMNS = 512
# Partial sums of a row, which are added up at once.
MOST_SPLITS = 16
# Elements of res and its partial sums, of the rows whose coefficients a block makes.
COEFFICIENTS = 512
# Most columns of a block's tiles that make h, and of those that dot it with the streams.
MERGE_COLUMNS = 1024
DOT_COLUMNS = 1024
# Neighbouring columns of a thread, which it adds up by itself until the row ends.
EACH = 8


@ct.function
def _by_columns(p, valid, eps):
    """Each column of ``[rows, n, n]`` divided by its sum, and the sums."""
    sums = ct.sum(p, axis=1, keepdims=True) + eps
    return ct.where(valid, p / sums, 0.0), sums


@ct.function
def _by_rows(p, valid, eps):
    sums = ct.sum(p, axis=2, keepdims=True) + eps
    return ct.where(valid, p / sums, 0.0), sums


@ct.function
def _step(p, valid, eps):
    """Make one iteration."""
    of_rows, _ = _by_rows(p, valid, eps)
    quotients, _ = _by_columns(of_rows, valid, eps)
    return quotients


@ct.function
def _after(start, valid, eps, steps):
    """Result of `steps` more iterations after the first one's."""
    # A `while`, since cuda.tile 1.7 compiles no `for` up to a number that a loop around it makes.
    p, left = start, steps
    while left > 0:
        p = _step(p, valid, eps)
        left -= 1
    return p


@ct.function
def _softmax(logits, valid):
    """Over the last dimension of ``[rows, n, n]``; 0 where it isn't valid."""
    shifted = ct.where(valid, logits, -3.4e38)
    e = ct.where(valid, ct.exp(shifted - ct.max(shifted, axis=2, keepdims=True)), 0.0)
    sums = ct.sum(e, axis=2, keepdims=True)
    return ct.where(valid, e / sums, 0.0)


@ct.function
def _sigmoid(z):
    return 1.0 / (1.0 + ct.exp(-z))


@ct.function
def _back(d, o, sums, valid, AXIS):
    """The gradient of what was divided by its sum along an axis, of that of the quotients o."""
    return ct.where(valid, (d - ct.sum(d * o, axis=AXIS, keepdims=True)) / sums, 0.0)


@ct.function
def _along(N, shape):
    return ct.reshape(ct.arange(N, dtype=ct.int32), shape)


@ct.function
def _scaled(m, alpha, bias, which, place, valid):
    """alpha · m + bias of some of the products."""
    scale = ct.astype(ct.load(alpha, (which,), ()), ct.float32)
    return scale * m + ct.astype(ct.gather(bias, place, mask=valid), ct.float32)


@ct.kernel
def _split_weight(parts, weight, COUNT: ConstInt, BLOCK: ConstInt):
    column = ct.bid(0)
    three = parts_of(ct.load(weight, (0, column), (COUNT, BLOCK), padding_mode=ZERO))
    for part in ct.static_iter(range(3)):
        ct.store(parts, (part, column), three[part])


@ct.kernel(occupancy=2)
def _multiply(
    products, squares, x, weight, splits, share, PARTS: ConstBool, ROWS: ConstInt, COUNT: ConstInt, BLOCK: ConstInt
):  # fmt: skip
    """PARTS: `weight` is what `_split_weight` wrote, and x is bfloat16."""
    number = block_number()
    row, part = number // splits, number % splits
    if row < ct.num_tiles(x, axis=0, shape=(ROWS, BLOCK)):
        high_sums = ct.zeros((ROWS, 2 * COUNT), ct.float32) if PARTS else ()
        sums = ct.zeros((ROWS, COUNT), ct.float32)
        of_squares = ct.zeros((ROWS, BLOCK), ct.float32)
        last = ct.minimum(ct.num_tiles(x, axis=1, shape=(ROWS, BLOCK)), (part + 1) * share)
        for column in range(part * share, last):
            xs = ct.load(x, (row, column), (ROWS, BLOCK), padding_mode=ZERO)
            high = ct.load(weight, (0, column), (2 * COUNT, BLOCK), padding_mode=ZERO) if PARTS else ()
            ws = ct.load(weight, (2 if PARTS else 0, column), (COUNT, BLOCK), padding_mode=ZERO)
            wide = ct.astype(xs, ct.float32)
            of_squares += wide * wide
            if PARTS:
                # The two large parts are one operand, since a wider product reads its tile of x once for both. Each product's
                # sum starts at zero, as in `product_of_parts`.
                sums += ct.mma(xs, ct.transpose(ws), sums * 0.0)
                high_sums += ct.mma(xs, ct.transpose(high), high_sums * 0.0)
            else:
                sums = product_of_parts(parts_of(xs), transposed_parts(parts_of(ws)), sums)
        if PARTS:
            sums += ct.sum(ct.reshape(high_sums, (ROWS, 2, COUNT)), axis=1)
        ct.store(products, (part, row, 0), ct.reshape(sums, (1, ROWS, COUNT)), allow_tma=False)
        ct.store(squares, (part, row), ct.reshape(ct.sum(of_squares, axis=1), (1, ROWS)), allow_tma=False)


@ct.kernel
def _coefficients(
    pre, post, res, m, products, squares, bias, alpha, columns, iterations, norm_eps, sinkhorn_eps, pre_eps, post_multiplier,
    COUNT: ConstInt, STREAMS: ConstInt, N: ConstInt, SPLITS: ConstInt, ROWS: ConstInt,
):  # fmt: skip
    tile = ct.bid(0)
    row, stream = tile * ROWS + _along(ROWS, (ROWS, 1)), _along(N, (1, N))
    there = stream < STREAMS
    some, places = _along(SPLITS, (SPLITS, 1, 1)), ct.reshape(row, (1, ROWS, 1))
    total = ct.sum(ct.load(squares, (0, tile), (SPLITS, ROWS), padding_mode=ZERO, allow_tma=False), axis=0)
    r = ct.rsqrt(ct.reshape(total, (ROWS, 1)) / columns + norm_eps)

    at = ct.reshape(stream, (1, 1, N))
    ms = r * ct.sum(ct.gather(products, (some, places, at), mask=at < STREAMS), axis=0)
    ct.scatter(pre, (row, stream), _sigmoid(_scaled(ms, alpha, bias, 0, stream, there)) + pre_eps)
    if given(m):
        ct.scatter(m, (row, stream), ms, mask=there)
        ct.scatter(m, (row, ct.full((ROWS, 1), COUNT, ct.int32)), r)
    if given(post):
        ms = r * ct.sum(ct.gather(products, (some, places, at + STREAMS), mask=at < STREAMS), axis=0)
        z = _scaled(ms, alpha, bias, 1, stream + STREAMS, there)
        ct.scatter(post, (row, stream), post_multiplier * _sigmoid(z))
        if given(m):
            ct.scatter(m, (row, stream + STREAMS), ms, mask=there)

        old, new = _along(N, (1, N, 1)), _along(N, (1, 1, N))
        valid = (old < STREAMS) & (new < STREAMS)
        at = 2 * STREAMS + old * STREAMS + new
        rows = ct.reshape(row, (ROWS, 1, 1))
        parts = ct.gather(
            products,
            (_along(SPLITS, (SPLITS, 1, 1, 1)), ct.reshape(row, (1, ROWS, 1, 1)), ct.reshape(at, (1, 1, N, N))),
            mask=ct.reshape(valid, (1, 1, N, N)),
        )
        ms = ct.reshape(r, (ROWS, 1, 1)) * ct.sum(parts, axis=0)
        if given(m):
            ct.scatter(m, (rows, at), ms, mask=valid)
        logits = _scaled(ms, alpha, bias, 2, at, valid)
        p, _ = _by_columns(ct.where(valid, _softmax(logits, valid) + sinkhorn_eps, 0.0), valid, sinkhorn_eps)
        ct.scatter(res, (rows, old, new), _after(p, valid, sinkhorn_eps, iterations - 1))


@ct.kernel
def _merge(h, x, pre, across, STREAMS: ConstInt, BLOCK: ConstInt, INSIDE: ConstBool):
    # Last rows first: the product has just read them, so they are in the L2 cache.
    number = h.shape[0] * across - 1 - block_number()
    row, column = number // across, number % across
    if number >= 0:
        hs = load_number(pre, row, 0) * load_part(x, row * STREAMS, column, BLOCK, INSIDE)
        for stream in ct.static_iter(range(1, STREAMS)):
            hs += load_number(pre, row, stream) * load_part(x, row * STREAMS + stream, column, BLOCK, INSIDE)
        store_part(h, row, column, hs, INSIDE)


@ct.kernel(occupancy=4)
def _dot(dots, dh, x, STREAMS: ConstInt, BLOCK: ConstInt, LANES: ConstInt, INSIDE: ConstBool):
    row = ct.bid(0)
    zeros = ct.zeros((LANES, 1), ct.float32)
    of_streams = ()
    for _ in ct.static_iter(range(STREAMS)):
        of_streams += (zeros,)
    for column in range(ct.num_tiles(dh, axis=1, shape=(1, BLOCK))):
        dhs = load_part(dh, row, column, BLOCK, INSIDE)
        sums = ()
        for stream in ct.static_iter(range(STREAMS)):
            xs = load_part(x, row * STREAMS + stream, column, BLOCK, INSIDE)
            sums += (of_streams[stream] + by_lanes(xs * dhs, LANES),)
        of_streams = sums
    store_sums(dots, row, 0, of_streams)


@ct.function
def _through(dot, incoming, at, shape):
    """The gradient of coefficients: what came in, and what came through h."""
    d = ct.zeros(shape, ct.float32)
    if given(dot):
        d += ct.gather(dot, at)
    if given(incoming):
        d += ct.astype(ct.gather(incoming, at), ct.float32)
    return d


@ct.function
def _scatter_parts(plan, row, place, values, mask):
    """The parts of some of a row's numbers."""
    parts = parts_of(values)
    for part in ct.static_iter(range(3)):
        ct.scatter(plan, (row, part, place), parts[part], mask=mask)


@ct.kernel
def _plan(
    plan, rest, sums, dots, dpre, dpost, dres, m, bias, alpha, columns, iterations, sinkhorn_eps, pre_eps, post_multiplier,
    HEAD: ConstBool, COUNT: ConstInt, STREAMS: ConstInt, N: ConstInt, ROWS: ConstInt,
):  # fmt: skip
    tile = ct.bid(0)
    row, stream = tile * ROWS + _along(ROWS, (ROWS, 1)), _along(N, (1, N))
    there = stream < STREAMS
    some = there & (row < plan.shape[0])
    mine = ct.full((1, 1), tile, ct.int32)
    r = ct.gather(m, (row, ct.full((ROWS, 1), COUNT, ct.int32)))

    ms = ct.gather(m, (row, stream), mask=there)
    s = _sigmoid(_scaled(ms, alpha, bias, 0, stream, there))
    d = ct.where(some, _through(dots, dpre, (row, stream), (ROWS, N)) * (s * (1.0 - s)), 0.0)
    ct.scatter(rest, (row, stream), s + pre_eps, mask=there)
    g = d * ct.astype(ct.load(alpha, (0,), ()), ct.float32)
    _scatter_parts(plan, row, stream, g * r, there)
    ct.scatter(sums, (mine, stream), ct.sum(d, axis=0, keepdims=True), mask=there)
    ct.store(sums, (tile, COUNT), ct.sum(d * ms), allow_tma=False)
    through_r = ct.sum(g * ms, axis=1, keepdims=True)
    if not HEAD:
        ms = ct.gather(m, (row, stream + STREAMS), mask=there)
        s = _sigmoid(_scaled(ms, alpha, bias, 1, stream + STREAMS, there))
        d = _through((), dpost, (row, stream), (ROWS, N)) * (post_multiplier * s * (1.0 - s))
        d = ct.where(some, d, 0.0)
        g = d * ct.astype(ct.load(alpha, (1,), ()), ct.float32)
        _scatter_parts(plan, row, stream + STREAMS, g * r, there)
        ct.scatter(sums, (mine, stream + STREAMS), ct.sum(d, axis=0, keepdims=True), mask=there)
        ct.store(sums, (tile, COUNT + 1), ct.sum(d * ms), allow_tma=False)
        through_r += ct.sum(g * ms, axis=1, keepdims=True)

        old, new = _along(N, (1, N, 1)), _along(N, (1, 1, N))
        valid = (old < STREAMS) & (new < STREAMS)
        at = 2 * STREAMS + old * STREAMS + new
        rows = ct.reshape(row, (ROWS, 1, 1))
        every = valid & (rows < plan.shape[0])
        ms = ct.gather(m, (rows, at), mask=valid)
        d = ct.zeros((ROWS, N, N), ct.float32)
        if given(dres):
            d = ct.astype(ct.gather(dres, (rows, old, new)), ct.float32)
            e = _softmax(_scaled(ms, alpha, bias, 2, at, valid), valid)
            begun = ct.where(valid, e + sinkhorn_eps, 0.0)
            start, start_sums = _by_columns(begun, valid, sinkhorn_eps)
            for done in range(1, iterations):
                # The input of each iteration is made again from the start: this takes fewer registers than to keep all.
                p = _after(start, valid, sinkhorn_eps, iterations - 1 - done)
                of_rows, row_sums = _by_rows(p, valid, sinkhorn_eps)
                of_columns, column_sums = _by_columns(of_rows, valid, sinkhorn_eps)
                d = _back(d, of_columns, column_sums, valid, 1)
                d = _back(d, of_rows, row_sums, valid, 2)
            d = _back(d, start, start_sums, valid, 1)
            d = e * (d - ct.sum(d * e, axis=2, keepdims=True))
            d = ct.where(every, d, 0.0)
        g = d * ct.astype(ct.load(alpha, (2,), ()), ct.float32)
        _scatter_parts(plan, rows, at, g * ct.reshape(r, (ROWS, 1, 1)), valid)
        of_pairs = ct.sum(d, axis=0, keepdims=True)
        ct.scatter(sums, (ct.full((1, 1, 1), tile, ct.int32), at), of_pairs, mask=valid)
        ct.store(sums, (tile, COUNT + 2), ct.sum(d * ms), allow_tma=False)
        through_r += ct.sum(ct.sum(g * ms, axis=2), axis=1, keepdims=True)
    c = through_r * r * r / columns
    ct.scatter(rest, (row, ct.full((ROWS, 1), STREAMS, ct.int32)), c)


@ct.kernel(occupancy=2)
def _gradients(
    dx, partial, dh, x, weight, plan, rest, splits, across,
    ROUGH: ConstBool, COUNT: ConstInt, STREAMS: ConstInt, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    """A block of columns of one stream, and every so many tiles of rows."""
    # All streams of a block of columns at once: they read the same of dh.
    stream, number = ct.bid(0) % STREAMS, ct.bid(0) // STREAMS
    part, column = number // across, number % across
    ws = ()
    if given(dx):
        ws = parts_of(
            ct.reshape(ct.load(weight, (0, stream, column), (COUNT, 1, BLOCK), padding_mode=ZERO), (COUNT, BLOCK))
        )
    # By columns: wgmma takes no operand of fewer than 64 rows, so not the numbers of a row.
    dweight = ct.zeros((BLOCK, COUNT), ct.float32)
    for row in range(part, ct.num_tiles(plan, axis=0, shape=(ROWS, 1, COUNT)), splits):
        xs = ct.reshape(ct.load(x, (row, stream, column), (ROWS, 1, BLOCK), padding_mode=ZERO), (ROWS, BLOCK))
        gs = ()
        for which in ct.static_iter(range(3)):
            gs += (ct.reshape(ct.load(plan, (row, which, 0), (ROWS, 1, COUNT), padding_mode=ZERO), (ROWS, COUNT)),)
        if given(dx):
            rests = -ct.load(rest, (row, STREAMS), (ROWS, 1), padding_mode=ZERO, allow_tma=False) * ct.astype(
                xs, ct.float32
            )
            if given(dh):
                dhs = ct.astype(ct.load(dh, (row, column), (ROWS, BLOCK), padding_mode=ZERO), ct.float32)
                rests += ct.load(rest, (row, stream), (ROWS, 1), padding_mode=ZERO, allow_tma=False) * dhs
            dxs = product_of_parts(gs, ws, ct.zeros((ROWS, BLOCK), ct.float32), ROUGH) + rests
            dxs = ct.reshape(ct.astype(dxs, dx.dtype), (ROWS, 1, BLOCK))
            ct.store(dx, (row, stream, column), dxs, allow_tma=False)
        if given(partial):
            dweight = product_of_parts(transposed_parts(parts_of(xs)), gs, dweight)
    if given(partial):
        sums = ct.reshape(ct.transpose(dweight), (1, COUNT, 1, BLOCK))
        ct.store(partial, (part, 0, stream, column), sums, allow_tma=False)


def _rows_of_coefficients(padded: int, splits: int) -> int:
    """Rows whose coefficients a block makes."""
    return max(1, COEFFICIENTS // max(16, padded * padded) * 2 // max(2, splits))


def _in_bulk(*tensors: Tensor | None) -> bool:
    """Whether TMA loads tiles of these rows."""
    inputs = [x for x in tensors if x is not None]
    return not any(length * x.element_size() % 16 for x in inputs for length in (x.shape[-1], x.stride(0)))


def _tile(x: Tensor, count: int, in_bulk: bool, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of x: so many on Hopper, half as many columns elsewhere, half as many rows if operands take
    registers; or few.
    """
    if x.dtype is not torch.bfloat16 or count > MOST_COUNT or not in_bulk:
        return FEW, FEW
    return rows if multiplies_from_shared(x.device) else rows // 2, columns if is_hopper(x.device) else columns // 2


@functools.cache
def _sized(kernel: Any, count: int) -> Any:
    """`_gradients` for so many rows of weight: with room for two blocks, many rows spill registers (tileiras 13.4)."""
    return kernel if count <= MOST_COUNT else kernel.replace_hints(occupancy=1)


@opaque(writes=("results", "m"))
def _launch_forward(
    results: MHCPre,
    m: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    alpha: Tensor,
    options: Coefficients,
) -> None:
    (h, pre, post, res), (streams, width) = results, x.shape[-2:]
    count, columns, rows = weight.shape[0], streams * width, h.shape[0]
    whole, weight = as_rows(x.flatten(-2)), as_rows(weight)
    padded, programs, in_bulk = power_of_2(count), PRODUCT_PROGRAMS, _in_bulk(whole, weight)
    tile_rows, block = _tile(x, count, in_bulk, PRODUCT_ROWS, PRODUCT_COLUMNS)
    parts = x.dtype is torch.bfloat16 is not weight.dtype and count <= MOST_COUNT and in_bulk and is_hopper(x.device)
    if parts:
        tile_rows, block, programs = PARTS_ROWS, PARTS_COLUMNS, PARTS_PROGRAMS
        whole_weight, weight = weight, torch.empty((3 * padded, columns), dtype=torch.bfloat16, device=x.device)
        launch(_split_weight, (blocks(columns, block),), weight, whole_weight, padded, block)
    tiles = blocks(rows, tile_rows)
    splits = max(1, min(sm_count(x.device) * programs // tiles, columns // FEWEST_COLUMNS, MOST_SPLITS))
    share = blocks(blocks(columns, block), splits)
    splits = blocks(blocks(columns, block), share)
    products = torch.empty((splits, rows, count), dtype=torch.float32, device=x.device)
    squares = torch.empty((splits, rows), dtype=torch.float32, device=x.device)
    products = as_rows(products.view(-1, count)).view(splits, rows, count)  # another stride for the head of one stream
    launch(
        _multiply, one_each(tiles * splits), products, squares, whole, weight, splits, share, parts, tile_rows, padded, block,
    )  # fmt: skip
    at_once, most = power_of_2(splits, 1), power_of_2(streams, 1)
    partial = _rows_of_coefficients(most, at_once)
    numbers = columns, options.iterations, *map(float, options[1:])
    launch(
        _coefficients, (blocks(rows, partial),), pre, post, res, m, products, squares, bias, alpha, *numbers, count, streams,
        most, at_once, partial,
    )  # fmt: skip
    block = min(power_of_2(width), MERGE_COLUMNS)
    across = blocks(width, block)
    launch(_merge, one_each(rows * across), h, as_rows(x), pre, across, streams, block, width % block == 0)


@opaque(writes=("dots",))
def _launch_dot(dots: Tensor, dh: Tensor, x: Tensor) -> None:
    streams, width = x.shape[-2:]
    block = min(power_of_2(width), DOT_COLUMNS)
    launch(_dot, (dots.shape[0],), dots, as_rows(dh), as_rows(x), streams, block, block // EACH, width % block == 0)


@opaque(writes=("plan", "rest", "sums"))
def _launch_plan(
    plan: Tensor,
    rest: Tensor,
    sums: Tensor,
    dots: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    m: Tensor,
    bias: Tensor,
    alpha: Tensor,
    columns: int,
    options: Coefficients,
) -> None:
    rows, streams, count = plan.shape[0], rest.shape[1] - 1, bias.shape[0]
    dpre, dpost = (None if d is None else d.view(rows, streams) for d in (dpre, dpost))
    dres = None if dres is None else dres.view(rows, streams, streams)
    most = power_of_2(streams, 1)
    iterations, _, *numbers = options
    launch(
        _plan, (sums.shape[0],), plan, rest, sums, dots, dpre, dpost, dres, m, bias, alpha, columns, iterations,
        *map(float, numbers), count == streams, count, streams, most, _rows_of_coefficients(most, 1),
    )  # fmt: skip


@opaque(writes=("dx", "partial"))
def _launch_gradients(
    dx: Tensor | None,
    partial: Tensor | None,
    dh: Tensor | None,
    x: Tensor,
    weight: Tensor,
    plan: Tensor,
    rest: Tensor,
    splits: int,
    tile_rows: int,
    block: int,
) -> None:
    streams, width = x.shape[-2:]
    rows, count = plan.shape[0], weight.shape[0]
    across = blocks(width, block)
    # By way of rows, whose stride is another where a row is one element.
    dx = None if dx is None else as_rows(dx.flatten(-2)).view(rows, streams, width)
    partial = None if partial is None else as_rows(partial).view(splits, count, streams, width)
    launch(
        _sized(_gradients, count), (splits * streams * across,), dx, partial, None if dh is None else as_rows(dh),
        as_rows(x.flatten(-2)).view(rows, streams, width), as_rows(weight).view(count, streams, width), plan, rest, splits,
        across, x.dtype is not torch.float32, plan.shape[2], streams, tile_rows, block,
    )  # fmt: skip


class CuTileMHCPre(MHCPreKernels):
    def forward(
        self,
        results: MHCPre,
        m: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        alpha: Tensor,
        options: Coefficients,
    ) -> None:
        _launch_forward(results, m, x, weight, bias, alpha, options)

    def dot(self, dots: Tensor, dh: Tensor, x: Tensor) -> None:
        _launch_dot(dots, dh, x)

    def plan(
        self,
        plan: Tensor,
        rest: Tensor,
        dots: Tensor | None,
        dpre: Tensor | None,
        dpost: Tensor | None,
        dres: Tensor | None,
        m: Tensor,
        bias: Tensor,
        alpha: Tensor,
        columns: int,
        options: Coefficients,
    ) -> Tensor:
        rows, streams = plan.shape[0], rest.shape[1] - 1
        parts = blocks(rows, _rows_of_coefficients(power_of_2(streams, 1), 1))
        sums = torch.empty((parts, bias.shape[0] + 3), dtype=torch.float32, device=plan.device)
        _launch_plan(plan, rest, sums, dots, dpre, dpost, dres, m, bias, alpha, columns, options)
        return sums

    def gradients(
        self, dx: Tensor | None, dweight: bool, dh: Tensor | None, x: Tensor, weight: Tensor, plan: Tensor, rest: Tensor
    ) -> Tensor | None:
        count, columns = weight.shape
        in_bulk = _in_bulk(as_rows(x), as_rows(x.flatten(-2)), as_rows(weight), None if dh is None else as_rows(dh))
        tile_rows, block = _tile(x, count, in_bulk, GRADIENT_ROWS, GRADIENT_COLUMNS)
        items = x.shape[-2] * blocks(x.shape[-1], block)
        splits = max(1, min(sm_count(x.device) * GRADIENT_PROGRAMS // items, blocks(plan.shape[0], tile_rows)))
        partial = torch.empty((splits, count, columns), dtype=torch.float32, device=x.device) if dweight else None
        _launch_gradients(dx, partial, dh, x, weight, plan, rest, splits, tile_rows, block)
        return partial


host = MHCPreHost(CuTileMHCPre())
forward = implements(mhc_pre)(host.forward)
backward = host.backward
