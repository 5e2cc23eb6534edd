"""Hyper-connections before a layer: one product of all streams with a narrow matrix, then each row's results from it.

The product is divided among programs by rows and columns, and the sum of squares is made beside it. Then come the coefficients,
and h, for which x is read again. Backward first sums dh · x of each stream. Then it goes through Sinkhorn's steps in reverse for
each row. Finally it goes over the streams once, for dx and dweight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import MHCPre, mhc_pre
from liger_core.contract import implements
from liger_core.host.mhc_pre import Coefficients, MHCPreHost, MHCPreKernels
from liger_triton.ops._device import is_hopper, sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._math import parts_of, product_of_parts
from liger_triton.ops._rows import as_rows, in_vectors, power_of_2
from liger_triton.ops._sums import multiply

PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_WARPS = 128, 64, 8
"""A tile of x in the forward product, and its warps. With half the rows and warps, the weight is read twice as often."""

HOPPER_PRODUCT_ROWS, HOPPER_PRODUCT_COLUMNS, HOPPER_PRODUCT_WARPS = 64, 128, 4
"""The same on Hopper for a bfloat16 x. If the weight has another dtype, its parts are made first: no program has to split it, and
wgmma takes two parts at once. On an H200 (triton 3.6), forward of 16384 rows of 4 streams of 7168 columns takes 0.55 ms, and 0.61
with the tile above; 8192 x 4 x 4096 takes 0.173 and 0.192 ms. Other chips would spill registers, or lack the shared memory."""

GRADIENT_ROWS, GRADIENT_COLUMNS, GRADIENT_WARPS = 32, 64, 4
"""The same for the products of backward."""

GRADIENT_STAGES = tl.constexpr(3)
"""Tiles in flight in backward, including the one that is taken. All of a tile's loads are ahead, also of what no product takes.
On an H200 (triton 3.6), 16384 x 4 x 7168 takes 0.77 ms, and 0.95 if only the products' loads are ahead."""

HOPPER_ROWS = 64
"""The rows on Hopper, whose wgmma multiplies so many. With 32, they take 0.83 ms. Other chips would spill registers."""

FEW = 32
"""Rows and columns of the forward tile for more than four streams, or if each element has its own address in registers. The
backward tile then has half as many rows, in float32 as well."""

PRODUCT_PROGRAMS = 4
"""Programs of the forward product per multiprocessor. Twice as many make more partial sums and take 3 % longer."""

HOPPER_PRODUCT_PROGRAMS = 2
"""The same for Hopper's tile. With twice as many, 8192 x 4 x 4096 takes 0.178 ms."""

GRADIENT_PROGRAMS = 16
"""The same for backward. With half as many it takes 10 % longer."""

FEWEST_COLUMNS = 512
"""The fewest columns for a program of the forward product: with fewer, the additional partial sums cost more time than they
save."""

COEFFICIENTS = 512
"""Elements of res in the rows whose coefficients one program makes."""

MOST_ELEMENTS = 4096
"""Elements of x in a program that makes h."""

EACH = 8
"""Neighbouring columns of a thread, which it adds up by itself until the row ends. Lanes are the last dimension of a tile:
otherwise a thread would have one column of each lane."""


UNROLL = tl.constexpr(4)
"""How many loads of a loop over partial sums are in flight at once."""


@triton.jit
def _by_columns(p, valid, eps):
    """Each column of ``[rows, n, n]`` divided by its sum, and the sums."""
    sums = tl.sum(p, 1, keep_dims=True) + eps
    return tl.where(valid, p / sums, 0.0), sums


@triton.jit
def _by_rows(p, valid, eps):
    sums = tl.sum(p, 2, keep_dims=True) + eps
    return tl.where(valid, p / sums, 0.0), sums


@triton.jit
def _softmax(logits, valid):
    """Over the last dimension of ``[rows, n, n]``; 0 if an element isn't valid."""
    shifted = tl.where(valid, logits, -float("inf"))
    largest = tl.max(shifted, 2, keep_dims=True)
    e = tl.where(valid, tl.exp(shifted - tl.where(largest == -float("inf"), 0.0, largest)), 0.0)
    sums = tl.sum(e, 2, keep_dims=True)
    return tl.where(valid, e / sums, 0.0)


@triton.jit
def _back(d, o, sums, valid, axis: tl.constexpr):
    """The gradient of values divided by their sums along an axis, from d, the gradient of the quotients o."""
    return tl.where(valid, (d - tl.sum(multiply(d, o, 1), axis, keep_dims=True)) / sums, 0.0)


@triton.jit
def _squares(partial, row, splits, count, inside):
    """The sum of squares of a row, or of several."""
    total = tl.load(partial + (row * splits) * (count + 1) + count, inside, other=0.0)
    for part in tl.range(1, splits, loop_unroll_factor=UNROLL):
        total += tl.load(partial + (row * splits + part) * (count + 1) + count, inside, other=0.0)
    return total


@triton.jit
def _products(partial, at, splits, count, inside):
    """The products, added up over the partial sums; `at` is their place in the first one."""
    total = tl.load(partial + at, inside, other=0.0)
    for part in tl.range(1, splits, loop_unroll_factor=UNROLL):
        total += tl.load(partial + part * (count + 1) + at, inside, other=0.0)
    return total


@triton.jit
def _scaled(m, alpha, bias, which, first, places, inside):
    """alpha · m + bias, for some of the products."""
    scale = tl.load(alpha + which).to(tl.float32)
    return scale * m + tl.load(bias + first + places, inside, other=0.0).to(tl.float32)


@triton.jit
def _store_parts(at, values, inside, apart):
    """The parts of some numbers, each so far behind the one before."""
    high, middle, low = parts_of(values)
    tl.store(at, high, inside)
    tl.store(at + apart, middle, inside)
    tl.store(at + 2 * apart, low, inside)


@kernel
def _split_weight(parts, weight, columns, count, weight_stride, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.arange(0, COUNT).to(tl.int64)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    ws = tl.load(weight + number * weight_stride + column, (number < count) & inside, other=0.0)
    _store_parts(parts + number * columns + column, ws, inside, COUNT * columns)


@kernel
def _multiply(
    partial, x, weight, rows, columns, count, share, splits, x_stride, weight_stride,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PARTS: `weight` is what `_split_weight` wrote, and x is bfloat16."""
    part = tl.program_id(0) % splits
    row = (tl.program_id(0) // splits).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    number = tl.arange(0, COUNT).to(tl.int64)
    sums = tl.zeros((ROWS, COUNT), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    if PARTS:
        high_sums = tl.zeros((ROWS, 2 * COUNT), tl.float32)
    for start in range(part * share, tl.minimum(columns, part * share + share), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        xs = tl.load(x + row[:, None] * x_stride + column[None, :], inside, other=0.0)
        wide = xs.to(tl.float32)
        squares += wide * wide
        if PARTS:
            # The two large parts are one operand, since a wider product reads its tile of x once for both. Each product's sum
            # starts at zero, as in `product`.
            high = tl.arange(0, 2 * COUNT).to(tl.int64)
            exists = (column < columns)[:, None]
            low_ws = tl.load(weight + (2 * COUNT + number)[None, :] * columns + column[:, None], exists, other=0.0)
            high_ws = tl.load(weight + high[None, :] * columns + column[:, None], exists, other=0.0)
            sums += tl.dot(xs, low_ws, sums * 0.0)
            high_sums += tl.dot(xs, high_ws, high_sums * 0.0)
        else:
            at = weight + number[None, :] * weight_stride + column[:, None]
            ws = tl.load(at, (number < count)[None, :] & (column < columns)[:, None], other=0.0)
            sums = product_of_parts(parts_of(xs), parts_of(ws), sums)
    if PARTS:
        sums += tl.sum(tl.reshape(high_sums, (ROWS, 2, COUNT)), 1)
    at = partial + (row * splits + part) * (count + 1)
    tl.store(at[:, None] + number[None, :], sums, (row < rows)[:, None] & (number < count)[None, :])
    tl.store(at + count, tl.sum(squares, 1), row < rows)


@kernel
def _coefficients(
    pre, post, res, m, partial, bias, alpha, rows, streams, width, count, splits, iterations, norm_eps, sinkhorn_eps, pre_eps,
    post_multiplier, HEAD: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    norm_eps, sinkhorn_eps = tl.cast(norm_eps, tl.float32), tl.cast(sinkhorn_eps, tl.float32)
    pre_eps, post_multiplier = tl.cast(pre_eps, tl.float32), tl.cast(post_multiplier, tl.float32)
    stream = tl.arange(0, STREAMS)
    there = stream < streams
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    some = inside[:, None] & there[None, :]
    r = tl.rsqrt(_squares(partial, row, splits, count, inside) / (streams * width) + norm_eps)
    first = (row * splits * (count + 1))[:, None]
    at = row[:, None] * streams + stream[None, :]
    ms = _products(partial, first + stream[None, :], splits, count, some) * r[:, None]
    z = _scaled(ms, alpha, bias, 0, 0, stream[None, :], there[None, :])
    tl.store(pre + at, tl.sigmoid(z) + pre_eps, some)
    if m is not None:
        tl.store(m + row[:, None] * (count + 1) + stream[None, :], ms, some)
        tl.store(m + row * (count + 1) + count, r, inside)
    if not HEAD:
        second = _products(partial, first + streams + stream[None, :], splits, count, some) * r[:, None]
        z = _scaled(second, alpha, bias, 1, streams, stream[None, :], there[None, :])
        tl.store(post + at, post_multiplier * tl.sigmoid(z), some)
        pair = stream[None, :, None] * streams + stream[None, None, :]
        valid = there[None, :, None] & there[None, None, :]
        every = inside[:, None, None] & valid
        third = _products(partial, first[:, :, None] + 2 * streams + pair, splits, count, every) * r[:, None, None]
        if m is not None:
            tl.store(m + row[:, None] * (count + 1) + streams + stream[None, :], second, some)
            tl.store(m + row[:, None, None] * (count + 1) + 2 * streams + pair, third, every)
        logits = _scaled(third, alpha, bias, 2, 2 * streams, pair, valid)
        p, _ = _by_columns(tl.where(valid, _softmax(logits, valid) + sinkhorn_eps, 0.0), valid, sinkhorn_eps)
        for _step in range(1, iterations):
            p, _ = _by_rows(p, valid, sinkhorn_eps)
            p, _ = _by_columns(p, valid, sinkhorn_eps)
        tl.store(res + row[:, None, None] * streams * streams + pair, p, every)


@kernel
def _merge(h, x, pre, streams, width, blocks, x_stride, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    # Last rows first: the product has just read them, so they are in L2.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (number // blocks).to(tl.int64)
    column, stream = number % blocks * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STREAMS)
    there = stream < streams
    at = x + row * x_stride + (stream * width)[:, None] + column[None, :]
    xs = tl.load(at, there[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    taken = tl.load(pre + row * streams + stream, there, other=0.0)
    tl.store(h + row * width + column, tl.sum(taken[:, None] * xs, 0), column < width)


@kernel
def _sum_streams(
    dots, dh, x, streams, width, dh_stride, x_stride, STREAMS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS)
    place = tl.arange(0, EACH)[:, None] + tl.arange(0, LANES)[None, :] * EACH
    sums = tl.zeros((STREAMS, LANES), tl.float32)
    for start in range(0, width, LANES * EACH):
        column = start + place
        dhs = tl.load(dh + row * dh_stride + column, column < width, other=0.0).to(tl.float32)
        at = x + row * x_stride + (stream * width)[:, None, None] + column[None, :, :]
        inside = (stream < streams)[:, None, None] & (column < width)[None, :, :]
        sums += tl.sum(tl.load(at, inside, other=0.0).to(tl.float32) * dhs[None, :, :], 1)
    tl.store(dots + row * streams + stream, tl.sum(sums, 1), stream < streams)


@kernel
def _coefficients_backward(
    plan, rest, partial, dots, dpre, dpost, dres, m, bias, alpha, rows, streams, width, count, iterations, sinkhorn_eps, pre_eps,
    post_multiplier, HEAD: tl.constexpr, STREAMS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sinkhorn_eps, pre_eps = tl.cast(sinkhorn_eps, tl.float32), tl.cast(pre_eps, tl.float32)
    post_multiplier = tl.cast(post_multiplier, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    stream = tl.arange(0, STREAMS)
    there = stream < streams
    some = inside[:, None] & there[None, :]
    kept = m + row[:, None] * (count + 1)
    planned = plan + row[:, None] * (3 * COUNT)
    sums = partial + tl.program_id(0) * (count + 3)
    at = row[:, None] * streams + stream[None, :]
    r = tl.load(m + row * (count + 1) + count, inside, other=0.0)

    ms = tl.load(kept + stream[None, :], some, other=0.0)
    s = tl.sigmoid(_scaled(ms, alpha, bias, 0, 0, stream[None, :], there[None, :]))
    d = tl.zeros((ROWS, STREAMS), tl.float32)
    if dots is not None:
        d += tl.load(dots + at, some, other=0.0)
    if dpre is not None:
        d += tl.load(dpre + at, some, other=0.0)
    d = tl.where(some, d * (s * (1.0 - s)), 0.0)
    tl.store(rest + row[:, None] * (streams + 1) + stream[None, :], s + pre_eps, some)
    g = d * tl.load(alpha).to(tl.float32)
    _store_parts(planned + stream[None, :], g * r[:, None], some, COUNT)
    tl.store(sums + stream, tl.sum(d, 0), there)
    tl.store(sums + count, tl.sum(tl.sum(multiply(d, ms, 1), 1), 0))
    through_r = tl.sum(multiply(g, ms, 1), 1)
    if not HEAD:
        ms = tl.load(kept + streams + stream[None, :], some, other=0.0)
        s = tl.sigmoid(_scaled(ms, alpha, bias, 1, streams, stream[None, :], there[None, :]))
        d = tl.zeros((ROWS, STREAMS), tl.float32)
        if dpost is not None:
            d += tl.load(dpost + at, some, other=0.0)
        d = tl.where(some, d * (post_multiplier * s * (1.0 - s)), 0.0)
        g = d * tl.load(alpha + 1).to(tl.float32)
        _store_parts(planned + streams + stream[None, :], g * r[:, None], some, COUNT)
        tl.store(sums + streams + stream, tl.sum(d, 0), there)
        tl.store(sums + count + 1, tl.sum(tl.sum(multiply(d, ms, 1), 1), 0))
        through_r += tl.sum(multiply(g, ms, 1), 1)

        pair = stream[None, :, None] * streams + stream[None, None, :]
        valid = there[None, :, None] & there[None, None, :]
        every = inside[:, None, None] & valid
        ms = tl.load(kept[:, :, None] + 2 * streams + pair, every, other=0.0)
        d = tl.zeros((ROWS, STREAMS, STREAMS), tl.float32)
        if dres is not None:
            d += tl.load(dres + row[:, None, None] * streams * streams + pair, every, other=0.0)
            e = _softmax(_scaled(ms, alpha, bias, 2, 2 * streams, pair, valid), valid)
            begun = tl.where(valid, e + sinkhorn_eps, 0.0)
            start, start_sums = _by_columns(begun, valid, sinkhorn_eps)
            for done in range(1, iterations):
                # Each iteration's input is made again from the start. That takes fewer registers than keeping all of them.
                p = start
                for _step in range(1, iterations - done):
                    p, _ = _by_rows(p, valid, sinkhorn_eps)
                    p, _ = _by_columns(p, valid, sinkhorn_eps)
                p, row_sums = _by_rows(p, valid, sinkhorn_eps)
                o, column_sums = _by_columns(p, valid, sinkhorn_eps)
                d = _back(d, o, column_sums, valid, 1)
                d = _back(d, p, row_sums, valid, 2)
            d = _back(d, start, start_sums, valid, 1)
            d = multiply(e, d - tl.sum(multiply(d, e, 1), 2, keep_dims=True), 1)
            d = tl.where(every, d, 0.0)
        g = d * tl.load(alpha + 2).to(tl.float32)
        _store_parts(planned[:, :, None] + 2 * streams + pair, g * r[:, None, None], every, COUNT)
        at_pair = tl.reshape(pair, (STREAMS, STREAMS))
        tl.store(sums + 2 * streams + at_pair, tl.sum(d, 0), there[:, None] & there[None, :])
        tl.store(sums + count + 2, tl.sum(tl.sum(tl.sum(multiply(d, ms, 1), 2), 1), 0))
        through_r += tl.sum(tl.sum(multiply(g, ms, 1), 2), 1)
    tl.store(rest + row * (streams + 1) + streams, through_r * r * r / (streams * width), inside)


@kernel
def _gradients(
    dx, partial, dh, x, weight, plan, rest, rows, streams, width, count, splits, dh_stride, x_stride, weight_stride,
    ROUGH: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # All streams of a block of columns at once: they read the same of dh.
    stream, block = tl.program_id(0) % streams, tl.program_id(0) // streams
    blocks = tl.cdiv(width, BLOCK)
    part = block // blocks
    of_stream = block % blocks * BLOCK + tl.arange(0, BLOCK)
    column, within = stream * width + of_stream, of_stream < width
    number = tl.arange(0, COUNT).to(tl.int64)
    counted = number < count
    if dx is not None:
        at = weight + number[:, None] * weight_stride + column[None, :]
        ws = parts_of(tl.load(at, counted[:, None] & within[None, :], other=0.0))
    dweight = tl.zeros((BLOCK, COUNT), tl.float32)
    for tile in tl.range(part, tl.cdiv(rows, ROWS), splits, num_stages=GRADIENT_STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        there = row < rows
        inside = there[:, None] & within[None, :]
        xs = tl.load(x + row[:, None] * x_stride + column[None, :], inside, other=0.0)
        planned = plan + row[:, None] * (3 * COUNT) + number[None, :]
        high = tl.load(planned, there[:, None], other=0.0)
        middle = tl.load(planned + COUNT, there[:, None], other=0.0)
        gs = (high, middle, tl.load(planned + 2 * COUNT, there[:, None], other=0.0))
        if dx is not None:
            dxs = product_of_parts(gs, ws, tl.zeros((ROWS, BLOCK), tl.float32), ROUGH)
            dxs -= tl.load(rest + row * (streams + 1) + streams, there, other=0.0)[:, None] * xs.to(tl.float32)
            if dh is not None:
                dhs = tl.load(dh + row[:, None] * dh_stride + of_stream[None, :], inside, other=0.0).to(tl.float32)
                dxs += tl.load(rest + row * (streams + 1) + stream, there, other=0.0)[:, None] * dhs
            tl.store(dx + row[:, None] * (streams * width) + column[None, :], dxs, inside)
        if partial is not None:
            dweight = product_of_parts(parts_of(tl.trans(xs)), gs, dweight)
    if partial is not None:
        sums = partial + (part * count + number)[None, :] * (streams * width) + column[:, None]
        tl.store(sums, dweight, counted[None, :] & within[:, None])


def _coefficient_rows(streams: int) -> int:
    """Rows whose coefficients a program makes."""
    return max(1, COEFFICIENTS // max(16, power_of_2(streams, 1) ** 2))


class TritonMHCPre(MHCPreKernels):
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
        h, pre, post, res = results
        (streams, width), count, rows = x.shape[-2:], weight.shape[0], h.shape[0]
        columns = streams * width
        x, x_stride = as_rows(x.flatten(-2))
        weight, weight_stride = as_rows(weight)
        tile_rows, block, warps = PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_WARPS
        programs, padded_count, parts = PRODUCT_PROGRAMS, power_of_2(count), False
        if count > 32 or not in_vectors(columns, x_stride, weight_stride):
            tile_rows, block, warps = FEW, FEW, 4
        elif x.dtype is torch.bfloat16 and is_hopper(x.device):
            tile_rows, block, warps = HOPPER_PRODUCT_ROWS, HOPPER_PRODUCT_COLUMNS, HOPPER_PRODUCT_WARPS
            programs, parts = HOPPER_PRODUCT_PROGRAMS, weight.dtype is not torch.bfloat16
            if parts:
                split_weight = x.new_empty((3 * padded_count, columns))
                _split_weight[((columns + block - 1) // block,)](
                    split_weight, weight, columns, count, weight_stride, COUNT=padded_count, BLOCK=block, num_warps=4
                )
                weight = split_weight
        tiles = (rows + tile_rows - 1) // tile_rows
        splits = max(1, min(sm_count(x.device) * programs // tiles, columns // FEWEST_COLUMNS))
        share = ((columns + splits - 1) // splits + block - 1) // block * block
        splits = (columns + share - 1) // share
        # Rows and splits are one dimension: torch.compile can't tell that there is a split, and torch 2.11 fails if an inner size
        # may be 0.
        partial = x.new_empty((rows * splits, count + 1), dtype=torch.float32)
        _multiply[(tiles * splits,)](
            partial, x, weight, rows, columns, count, share, splits, x_stride, weight_stride,
            PARTS=parts, ROWS=tile_rows, COUNT=padded_count, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        padded, coefficient_rows = power_of_2(streams, 1), _coefficient_rows(streams)
        _coefficients[((rows + coefficient_rows - 1) // coefficient_rows,)](
            pre, post, res, m, partial, bias, alpha, rows, streams, width, count, splits, *options,
            HEAD=count == streams, STREAMS=padded, ROWS=coefficient_rows, num_warps=4,
        )  # fmt: skip
        block = min(power_of_2(width), max(MOST_ELEMENTS // padded, 16))
        blocks = (width + block - 1) // block
        _merge[(rows * blocks,)](h, x, pre, streams, width, blocks, x_stride, STREAMS=padded, BLOCK=block, num_warps=4)

    def dot(self, dots: Tensor, dh: Tensor, x: Tensor) -> None:
        rows, streams, width = *dots.shape, x.shape[-1]
        x, x_stride = as_rows(x.flatten(-2))
        dh, dh_stride = as_rows(dh)
        padded = power_of_2(streams, 1)
        lanes = min(power_of_2(width), max(MOST_ELEMENTS // padded, 16 * EACH)) // EACH
        _sum_streams[(rows,)](
            dots, dh, x, streams, width, dh_stride, x_stride, STREAMS=padded, LANES=lanes, EACH=EACH, num_warps=4
        )

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
        (rows, _, padded_count), streams, count = plan.shape, rest.shape[1] - 1, bias.shape[0]
        coefficient_rows = _coefficient_rows(streams)
        tiles = (rows + coefficient_rows - 1) // coefficient_rows
        small = rest.new_empty((tiles, count + 3))
        _coefficients_backward[(tiles,)](
            plan, rest, small, dots, dpre, dpost, dres, m, bias, alpha, rows, streams, columns // streams, count,
            options.iterations, options.sinkhorn_eps, options.pre_eps, options.post_multiplier, HEAD=count == streams,
            STREAMS=power_of_2(streams, 1), COUNT=padded_count, ROWS=coefficient_rows, num_warps=4,
        )  # fmt: skip
        return small

    def gradients(
        self, dx: Tensor | None, dweight: bool, dh: Tensor | None, x: Tensor, weight: Tensor, plan: Tensor, rest: Tensor
    ) -> Tensor | None:
        (rows, _, padded_count), (streams, width), count = plan.shape, x.shape[-2:], weight.shape[0]
        dh_stride = 0
        if dh is not None:
            dh, dh_stride = as_rows(dh)
        x, x_stride = as_rows(x.flatten(-2))
        weight, weight_stride = as_rows(weight)
        tile_rows, block, warps = GRADIENT_ROWS, GRADIENT_COLUMNS, GRADIENT_WARPS
        if count > 32 or x.dtype is torch.float32 or not in_vectors(width, x_stride, weight_stride, dh_stride):
            tile_rows, block, warps = FEW // 2, FEW, 4 if count <= 32 else 8
        elif is_hopper(x.device):
            tile_rows = HOPPER_ROWS
        blocks = streams * ((width + block - 1) // block)
        splits = max(1, min(sm_count(x.device) * GRADIENT_PROGRAMS // blocks, (rows + tile_rows - 1) // tile_rows))
        partial = x.new_empty((splits, count, streams * width), dtype=torch.float32) if dweight else None
        _gradients[(blocks * splits,)](
            dx, partial, dh, x, weight, plan, rest, rows, streams, width, count, splits, dh_stride, x_stride, weight_stride,
            ROUGH=x.dtype is not torch.float32, COUNT=padded_count, ROWS=tile_rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return partial


host = MHCPreHost(TritonMHCPre())
forward = implements(mhc_pre)(host.forward)
backward = host.backward
