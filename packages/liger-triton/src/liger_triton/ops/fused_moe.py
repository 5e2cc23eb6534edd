"""Mixture of experts: slots are sorted by expert, and blocks of one expert's slots meet blocks of its weights.

Loads gather the slots' rows. A table gives the expert of each block of rows. One program sums a weight's gradient over the
expert's slots, so no result depends on an order of programs. Experts with many slots come first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import fused_moe, torch_state
from liger_core.contract import implements
from liger_core.custom_op import opaque
from liger_core.host.fused_moe import FusedMoE, MoEActivation, MoEKernels, Routing, route
from liger_triton.ops._device import is_hopper, shared_memory
from liger_triton.ops._launch import kernel
from liger_triton.ops._linear import TILES_IN_TURN, tile_in_turn
from liger_triton.ops._rows import in_vectors, power_of_2
from liger_triton.ops.geglu import gelu

COUNTED, FOUND = 128, 16
"""Slots that one program counts and places; experts or blocks of rows that one program finds."""
CLEARERS = 8
"""Programs that write an expert's zeros."""
SUMMED = 128
"""Slots whose float32 terms of a weight's gradient are added one after another. A sum of n terms made so is off by √n roundings.
PyTorch's product divides the terms among several sums."""
HALF_NORMAL = tl.constexpr(2.0**-15)
"""Half of float16's least normal number: about the activation of a gate that is as small as that number."""
MOST_BLOCKS, MOST_EXPERTS = 2048, 512
"""Slots are sorted here up to so many blocks and experts, because one program adds up what all blocks have counted."""


@triton.jit
def _silu(xs):
    """silu(x) = x·σ(x), and its derivative."""
    sigmoid = tl.sigmoid(xs)
    return xs * sigmoid, sigmoid * (1.0 + xs * (1.0 - sigmoid))


@triton.jit
def _activate(gate, GELU: tl.constexpr):
    if GELU:
        return gelu(gate)
    else:
        return _silu(gate)


@triton.jit
def _rows(start, end, ROWS: tl.constexpr):
    """The sorted slots of a block, and which of them exist. The others repeat the last slot, so that they load without a mask.

    It takes numbers: torch.compile assumes that a pointer is written to if a store's address depends on it through a call.
    """
    row = start + tl.arange(0, ROWS)
    return tl.minimum(row, end - 1), row < end


@triton.jit
def _left(left, start, depth, EVEN: tl.constexpr, DEPTH: tl.constexpr):
    """A block of the left operand, zero past the depth."""
    if EVEN:
        return tl.load(left)
    else:
        return tl.load(left, (start + tl.arange(0, DEPTH) < depth)[None, :], other=0.0)


@triton.jit
def _right(right, start, depth, inside, EVEN: tl.constexpr, WHOLE: tl.constexpr, DEPTH: tl.constexpr):
    """A block of the right operand, zero past the depth and the columns."""
    if EVEN and WHOLE:
        return tl.load(right)
    elif EVEN:
        return tl.load(right, inside[None, :], other=0.0)
    else:
        return tl.load(right, (start + tl.arange(0, DEPTH) < depth)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _both(here, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return here[:, None]
    else:
        return here[:, None] & inside[None, :]


@kernel(do_not_specialize=["slots", "experts"])
def _count(keys, counts, indices, slots, experts, per_token, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Write each slot's key, and how many slots of this block have each key."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    index = tl.load(indices + slot, inside, other=0)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, per_token):
        other = tl.load(indices + slot // per_token * per_token + i, inside, other=0)
        wrong += ((other < -1) | (other >= experts)).to(tl.int32)
    key = tl.where(wrong > 0, experts + 1, tl.where(index < 0, experts, index)).to(tl.int32)
    tl.store(keys + slot, key, inside)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(key, EXPERTS, mask=inside))


@kernel(do_not_specialize=["blocks", "experts", "rows"])
def _scan(starts, ends, counts, blocks, experts, rows, BLOCKS: tl.constexpr, EACH: tl.constexpr, EXPERTS: tl.constexpr):
    """Write where each expert's slots start and where its blocks of rows end. Turn each block's counts into starts."""
    block = tl.arange(0, BLOCKS)[:, None]
    start, end = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    for first in range(0, EXPERTS, EACH):
        expert = first + tl.arange(0, EACH)
        at = counts + block * EXPERTS + expert[None, :]
        count = tl.load(at, block < blocks, other=0)
        total = tl.sum(count, 0)
        before = start + tl.cumsum(total, 0) - total
        tl.store(at, before[None, :] + tl.cumsum(count, 0) - count, block < blocks)
        tl.store(starts + expert, before.to(tl.int64), expert <= experts)
        tiles = tl.where(expert < experts, (total + rows - 1) // rows, 0)
        tl.store(ends + expert, end + tl.cumsum(tiles, 0), expert < experts)
        start += tl.sum(total, 0)
        end += tl.sum(tiles, 0)


@kernel(do_not_specialize=["slots", "experts", "tiles", "rows", "placers"])
def _place_slots(
    order, places, by_size, tile_experts, tile_starts, keys, counts, starts, ends, slots, experts, tiles, rows, placers,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    """Write the order of the slots, then the tables of experts and of blocks of rows."""
    program = tl.program_id(0)
    if program < placers:
        lane = tl.arange(0, BLOCK)
        slot = program.to(tl.int64) * BLOCK + lane
        key = tl.load(keys + slot, slot < slots, other=-1)
        before = tl.zeros((BLOCK,), tl.int32)
        for part in range(0, BLOCK, 32):
            other = part + tl.arange(0, 32)
            found = tl.load(keys + program.to(tl.int64) * BLOCK + other, program * BLOCK + other < slots, other=-1)
            earlier = (found[None, :] == key[:, None]) & (other[None, :] < lane[:, None])
            before += tl.sum(earlier.to(tl.int32), 1)
        place = (tl.load(counts + program * EXPERTS + key, slot < slots, other=0) + before).to(tl.int64)
        tl.store(places + slot, place, slot < slots)
        tl.store(order + place, slot, slot < slots)
    else:
        every = tl.arange(0, EXPERTS)
        own = (program - placers) * FOUND + tl.arange(0, FOUND)
        there = every < experts
        count = (tl.load(starts + every + 1, there, other=0) - tl.load(starts + every, there, other=1)).to(tl.int32)
        mine = tl.load(starts + own + 1, own < experts, other=0) - tl.load(starts + own, own < experts, other=0)
        mine = mine.to(tl.int32)
        # Lanes past the last expert have -1.
        more = (count[None, :] > mine[:, None]) | ((count[None, :] == mine[:, None]) & (every[None, :] < own[:, None]))
        rank = tl.sum(more.to(tl.int32), 1)
        tl.store(by_size + rank, own.to(tl.int64), own < experts)
        end = tl.load(ends + every, there, other=2147483647)
        expert = tl.sum((end[None, :] <= own[:, None]).to(tl.int32), 1)
        begun = tl.load(ends + expert - 1, (expert > 0) & (expert < experts), other=0)
        start = tl.load(starts + expert, expert < experts, other=0)
        tl.store(tile_experts + own, expert.to(tl.int64), own < tiles)
        tl.store(tile_starts + own, start + (own - begun).to(tl.int64) * rows, own < tiles)


@kernel(do_not_specialize=["tiles", "experts"])
def _up(
    factors, activated, x, gate, up, order, starts, tile_experts, tile_starts, experts, tiles, per_token, columns, depth,
    limit, x_row, x_column, weight_expert, weight_row, weight_column,
    GELU: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    tile, block = tile_in_turn(tl.program_id(0), tiles, columns, COLUMNS, TURN)
    expert = tl.load(tile_experts + tile)
    if expert < experts:
        row, here = _rows(tl.load(tile_starts + tile), tl.load(starts + expert + 1), ROWS)
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < columns
        token = tl.load(order + row) // per_token
        k = tl.arange(0, DEPTH).to(tl.int64)
        lefts = x + token[:, None] * x_row + k[None, :] * x_column
        at = expert * weight_expert + column.to(tl.int64)[None, :] * weight_row + k[:, None] * weight_column
        first, second = gate + at, up + at
        gates = tl.zeros((ROWS, COLUMNS), tl.float32)
        ups = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            xs = _left(lefts, start, depth, EVEN, DEPTH)
            ws = _right(first, start, depth, inside, EVEN, WHOLE, DEPTH)
            gates = tl.dot(xs, ws, gates, input_precision="ieee")
            ws = _right(second, start, depth, inside, EVEN, WHOLE, DEPTH)
            ups = tl.dot(xs, ws, ups, input_precision="ieee")
            lefts += tl.cast(x_column, tl.int64) * DEPTH
            first += tl.cast(weight_column, tl.int64) * DEPTH
            second += tl.cast(weight_column, tl.int64) * DEPTH
        both = _both(here, inside, WHOLE)
        kept_gates, kept_ups = gates, ups
        if limit is not None:
            bound = tl.cast(limit, tl.float32)
            kept_gates = tl.where(gates > bound, float("inf"), gates)
            gates = tl.where(gates > bound, bound, gates)
        if activated is not None or EXACT:
            acts, slopes = _activate(gates, GELU)
            if EXACT:
                rounded = kept_gates.to(factors.dtype.element_ty).to(tl.float32)
                if limit is not None:
                    rounded = tl.where(rounded > bound, bound, rounded)
                none = acts == 0.0
                if factors.dtype.element_ty == tl.float16:
                    # Rounding takes 2⁻¹¹ of a normal gate at most, and up to all of a smaller one. The other factor, of which the
                    # gate's gradient is a multiple, must not be off by as much.
                    none = tl.abs(acts) < HALF_NORMAL
                # A first-order correction: what rounding took from the gate, times the derivative of the activation.
                kept_ups += tl.where(none, 0.0, ups * (gates - rounded) * (slopes / acts))
        if limit is not None:
            infinity = float("inf")
            kept_ups = tl.where(ups > bound, infinity, tl.where(ups < -bound, -infinity, kept_ups))
            ups = tl.where(ups > bound, bound, tl.where(ups < -bound, -bound, ups))
        if factors is not None:
            place = (factors + row[:, None] * (2 * columns)) + column[None, :]
            tl.store(place, kept_gates, both)
            tl.store(place + columns, kept_ups, both)
        if activated is not None:
            tl.store((activated + row[:, None] * columns) + column[None, :], acts * ups, both)


@kernel(do_not_specialize=["tiles", "experts"])
def _product(
    result, left, weight, starts, tile_experts, tile_starts, experts, tiles, columns, depth,
    left_row, weight_expert, weight_row, weight_column,
    ADD: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    tile, block = tile_in_turn(tl.program_id(0), tiles, columns, COLUMNS, TURN)
    expert = tl.load(tile_experts + tile)
    if expert < experts:
        row, here = _rows(tl.load(tile_starts + tile), tl.load(starts + expert + 1), ROWS)
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < columns
        k = tl.arange(0, DEPTH).to(tl.int64)
        lefts = left + row[:, None] * left_row + k[None, :]
        weights = (
            weight + expert * weight_expert + column.to(tl.int64)[None, :] * weight_row + k[:, None] * weight_column
        )
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            xs = _left(lefts, start, depth, EVEN, DEPTH)
            ws = _right(weights, start, depth, inside, EVEN, WHOLE, DEPTH)
            sums = tl.dot(xs, ws, sums, input_precision="ieee")
            lefts += DEPTH
            weights += tl.cast(weight_column, tl.int64) * DEPTH
        both = _both(here, inside, WHOLE)
        at = (result + row[:, None] * columns) + column[None, :]
        if ADD:
            sums += tl.load(at, both, other=0.0)
        tl.store(at, sums, both)


@kernel(do_not_specialize=["tiles", "experts", "parts"])
def _gradient(
    dfactors, weighted, sums, products, dy, down, factors, expert_weights, order, starts, tile_experts, tile_starts,
    experts, tiles, per_token, columns, depth, parts, limit, dy_row, dy_column, down_expert, down_row, down_column,
    GELU: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    tile, block = tile_in_turn(tl.program_id(0), tiles, columns, COLUMNS, TURN)
    expert = tl.load(tile_experts + tile)
    if expert < experts:
        row, here = _rows(tl.load(tile_starts + tile), tl.load(starts + expert + 1), ROWS)
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < columns
        slot = tl.load(order + row)
        both = _both(here, inside, WHOLE)
        if products is None:
            k = tl.arange(0, DEPTH).to(tl.int64)
            left = dy + (slot // per_token)[:, None] * dy_row + k[None, :] * dy_column
            right = down + expert * down_expert + column.to(tl.int64)[None, :] * down_column + k[:, None] * down_row
            d = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, depth, DEPTH):
                ds = _left(left, start, depth, EVEN, DEPTH)
                ws = _right(right, start, depth, inside, EVEN, WHOLE, DEPTH)
                d = tl.dot(ds, ws, d, input_precision="ieee")
                left += tl.cast(dy_column, tl.int64) * DEPTH
                right += tl.cast(down_row, tl.int64) * DEPTH
        else:
            d = tl.load((products + row[:, None] * columns) + column[None, :], both, other=0.0).to(tl.float32)
        at = (factors + row[:, None] * (2 * columns)) + column[None, :]
        gates = tl.load(at, both, other=0.0).to(tl.float32)
        ups = tl.load(at + columns, both, other=0.0).to(tl.float32)
        share = tl.load(expert_weights + slot).to(tl.float32)[:, None]
        if limit is not None:
            bound = tl.cast(limit, tl.float32)
            gate_free = gates < float("inf")
            up_free = tl.abs(ups) < float("inf")
            gates = tl.where(gates > bound, bound, gates)
            ups = tl.where(ups > bound, bound, tl.where(ups < -bound, -bound, ups))
        acts, slopes = _activate(gates, GELU)
        if sums is not None:
            tl.store(sums + slot * parts + block, tl.sum(tl.where(inside[None, :], d * (acts * ups), 0.0), 1), here)
        if weighted is not None:
            tl.store((weighted + row[:, None] * columns) + column[None, :], share * (acts * ups), both)
        if dfactors is not None:
            d *= share
            dgates, dups = d * ups * slopes, d * acts
            if limit is not None:
                dgates, dups = tl.where(gate_free, dgates, 0.0), tl.where(up_free, dups, 0.0)
            place = (dfactors + row[:, None] * (2 * columns)) + column[None, :]
            tl.store(place, dgates, both)
            tl.store(place + columns, dups, both)


@kernel
def _weight_gradient(
    result, left, right, order, starts, by_size, per_token, rows, columns,
    result_expert, result_row, result_column, left_row, left_column, right_row, right_column,
    LEFT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SPAN: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """The product of an expert's slots. It adds up sums over SPAN slots each; without SPAN, one sum over all slots."""
    tiles = tl.cdiv(rows, ROWS)
    programs = tiles * tl.cdiv(columns, COLUMNS)
    expert = tl.load(by_size + tl.program_id(0) // programs)
    program = tl.program_id(0) % programs
    turn = program // (TURN * tl.cdiv(columns, COLUMNS))
    rest = program % (TURN * tl.cdiv(columns, COLUMNS))
    size = tl.minimum(tiles - turn * TURN, TURN)
    row = (turn * TURN + rest % size) * ROWS + tl.arange(0, ROWS)
    column = rest // size * COLUMNS + tl.arange(0, COLUMNS)
    left += row.to(tl.int64)[:, None] * left_column
    right += column.to(tl.int64)[None, :] * right_column
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SPAN is not None:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, DEPTH):
        place = start + tl.arange(0, DEPTH)
        here = place < last
        token = tl.load(order + place, here, other=0) // per_token
        of_left, of_right = (token, place) if LEFT else (place, token)
        if WHOLE:
            xs = tl.load(left + of_left[None, :] * left_row, here[None, :], other=0.0)
            ys = tl.load(right + of_right[:, None] * right_row, here[:, None], other=0.0)
        else:
            xs = tl.load(left + of_left[None, :] * left_row, here[None, :] & (row < rows)[:, None], other=0.0)
            ys = tl.load(right + of_right[:, None] * right_row, here[:, None] & (column < columns)[None, :], other=0.0)
        sums = tl.dot(xs, ys, sums, input_precision="ieee")
        if SPAN is not None:  # noqa: SIM102
            if (start - first) % SPAN == SPAN - DEPTH:
                total += sums
                sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SPAN is not None:
        sums += total
    result += (
        expert * result_expert + row.to(tl.int64)[:, None] * result_row + column.to(tl.int64)[None, :] * result_column
    )
    if WHOLE:
        tl.store(result, sums)
    else:
        tl.store(result, sums, (row < rows)[:, None] & (column < columns)[None, :])


@kernel
def _clear(result, starts, size, parts, BLOCK: tl.constexpr):
    """Write zeros for experts without slots."""
    expert = (tl.program_id(0) // parts).to(tl.int64)
    if tl.load(starts + expert) == tl.load(starts + expert + 1):
        for first in range(tl.program_id(0) % parts * BLOCK, size, parts * BLOCK):
            place = first + tl.arange(0, BLOCK)
            tl.store(result + expert * size + place, tl.zeros((BLOCK,), tl.float32), place < size)


@kernel
def _sum_slots(
    result, slots, scale, keys, places, experts, tokens, per_token, columns,
    MARKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up each token's slots. A slot's row lies at its place in the sorted order."""
    blocks = tl.cdiv(columns, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (column < columns)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in range(0, per_token):
        slot = token * per_token + i
        key = tl.load(keys + slot, token < tokens, other=0)
        exists = (token < tokens) & (key < experts)
        place = tl.load(places + slot, exists, other=0)
        found = tl.load(slots + place[:, None] * columns + column, inside & exists[:, None], other=0.0).to(tl.float32)
        if scale is not None:
            found *= tl.load(scale + slot, exists, other=0.0).to(tl.float32)[:, None]
        sums += found
        if MARKS:
            sums = tl.where((key > experts)[:, None], float("nan"), sums)
    tl.store(result + token[:, None] * columns + column, sums, inside)


# These two aren't traced: with a memory budget they write to rows or columns of a tensor.
@opaque(writes=("result",))
def _launch_weight_gradient(
    result: Tensor,
    left: Tensor,
    right: Tensor,
    order: Tensor,
    starts: Tensor,
    by_size: Tensor,
    per_token: int,
    gathers_left: bool,
) -> None:
    experts, rows, columns = result.shape
    high = min(power_of_2(rows, 16), 64 if left.element_size() == 4 else 128)
    width, deep, named = _tile(left, high, columns, 64, "weight_gradient")
    programs = ((rows + high - 1) // high) * ((columns + width - 1) // width)
    _weight_gradient[(programs * experts,)](
        result, left, right, order, starts, by_size, per_token, rows, columns,
        *result.stride(), *left.stride(), *right.stride(), LEFT=gathers_left, WHOLE=not (rows % high or columns % width),
        ROWS=high, COLUMNS=width, DEPTH=deep, SPAN=SUMMED if left.element_size() == 4 else None, TURN=TILES_IN_TURN,
        **named,
    )  # fmt: skip


@opaque(writes=("result",))
def _launch_sum_slots(
    result: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    keys: Tensor,
    places: Tensor,
    experts: int,
    per_token: int,
    marks: bool,
) -> None:
    tokens, columns = result.shape
    block = min(power_of_2(columns, 16), 1024)
    rows = 1024 // block
    programs = (tokens + rows - 1) // rows * ((columns + block - 1) // block)
    _sum_slots[(programs,)](
        result, slots, scale, keys, places, experts, tokens, per_token, columns,
        MARKS=marks, ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip


class TritonMoE(MoEKernels):
    """Launches Triton's kernels."""

    def rows(self, slots: int, experts: int, x: Tensor) -> int:
        each = slots // experts
        if x.element_size() == 4:
            return 64 if each >= 32 else 16
        return 128 if each >= 64 else 64 if each >= 24 else 16

    def route(self, indices: Tensor, experts: int, rows: int) -> Routing:
        """As the base class does, but by counting: on an H200 it takes 10 % of the time of PyTorch's operators."""
        tokens, per_token = indices.shape
        slots = indices.numel()
        blocks = (slots + COUNTED - 1) // COUNTED
        if blocks > MOST_BLOCKS or experts > MOST_EXPERTS:
            return route(indices, experts, rows)
        padded, device = power_of_2(experts + 2), indices.device
        keys = torch.empty((tokens, per_token), dtype=torch.int32, device=device)
        counts = torch.empty((blocks, padded), dtype=torch.int32, device=device)
        tiles = (slots + rows - 1) // rows + experts

        def empty(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int64, device=device)

        ends = torch.empty(experts, dtype=torch.int32, device=device)
        order, places, starts, by_size = empty(slots), empty(slots), empty(experts + 1), empty(experts)
        tile_experts, tile_starts = empty(tiles), empty(tiles)
        _count[(blocks,)](
            keys, counts, indices.contiguous(), slots, experts, per_token, BLOCK=COUNTED, EXPERTS=padded, num_warps=4
        )
        scanned = power_of_2(blocks)
        each = min(padded, max(1, 8192 // scanned))
        _scan[(1,)](starts, ends, counts, blocks, experts, rows, BLOCKS=scanned, EACH=each, EXPERTS=padded, num_warps=8)
        finders = (tiles + FOUND - 1) // FOUND  # there are more blocks of rows than experts
        _place_slots[(blocks + finders,)](
            order, places, by_size, tile_experts, tile_starts, keys, counts, starts, ends,
            slots, experts, tiles, rows, blocks, BLOCK=COUNTED, EXPERTS=padded, FOUND=FOUND, num_warps=8,
        )  # fmt: skip
        return Routing(keys, order, places, starts, by_size, tile_experts, tile_starts, rows)

    def up(
        self,
        factors: Tensor | None,
        activated: Tensor | None,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        routing: Routing,
        activation: MoEActivation,
        exact: bool,
    ) -> None:
        experts, columns, depth = gate.shape
        width, deep, named = _tile(x, routing.rows, columns, depth, "up")
        tiles = routing.tile_experts.shape[0]
        _up[(tiles * ((columns + width - 1) // width),)](
            factors, activated, x, gate, up, routing.order, *routing.tables(), experts, tiles, routing.per_token(), columns,
            depth, activation.limit, *x.stride(), *gate.stride(), GELU=activation.gelu, EXACT=exact,
            EVEN=not depth % deep, WHOLE=not columns % width,
            ROWS=routing.rows, COLUMNS=width, DEPTH=deep, TURN=TILES_IN_TURN, **named,
        )  # fmt: skip

    def product(self, total: Tensor | None, left: Tensor, weight: Tensor, routing: Routing, last: bool) -> Tensor:
        """The result is in sorted order."""
        if total is None and last and _grouped(weight.shape[1], left, weight):
            return _multiply(left, weight.transpose(1, 2), routing)
        experts, columns, depth = weight.shape
        result = total
        if result is None:
            result = torch.empty(routing.slots(), columns, dtype=torch.float32, device=left.device)
        width, deep, named = _tile(left, routing.rows, columns, depth, "product")
        tiles = routing.tile_experts.shape[0]
        _product[(tiles * ((columns + width - 1) // width),)](
            result, left, weight, *routing.tables(), experts, tiles, columns, depth,
            left.stride(0), *weight.stride(), ADD=total is not None, EVEN=not depth % deep, WHOLE=not columns % width,
            ROWS=routing.rows, COLUMNS=width, DEPTH=deep, TURN=TILES_IN_TURN, **named,
        )  # fmt: skip
        return result

    def gradient(
        self,
        dfactors: Tensor | None,
        weighted: Tensor | None,
        sums: Tensor | None,
        dy: Tensor,
        down: Tensor,
        factors: Tensor,
        expert_weights: Tensor,
        routing: Routing,
        activation: MoEActivation,
    ) -> None:
        experts, depth, columns = down.shape
        width, deep, named = _tile(dy, routing.rows, columns, depth, "gradient")
        tiles = routing.tile_experts.shape[0]
        products = None
        if dfactors is None and sums is None:
            depth = 0
        elif _grouped(columns, dy, down) and (sums is None or expert_weights.element_size() == 2):
            # The product rounds d to bfloat16. A float32 gradient of the weights needs more precision.
            products = _multiply(routing.gathered(dy), down, routing)
        _gradient[(tiles * ((columns + width - 1) // width),)](
            dfactors, weighted, sums, products, dy, down, factors, expert_weights, routing.order, *routing.tables(),
            experts, tiles, routing.per_token(), columns, depth, self.parts(columns, dy), activation.limit,
            *dy.stride(), *down.stride(), GELU=activation.gelu, EVEN=not depth % deep, WHOLE=not columns % width,
            ROWS=routing.rows, COLUMNS=width, DEPTH=deep, TURN=TILES_IN_TURN, **named,
        )  # fmt: skip

    def parts(self, columns: int, x: Tensor) -> int:
        width = _width(x, columns, "gradient")
        return (columns + width - 1) // width

    def weight_gradient(
        self, result: Tensor | None, left: Tensor, right: Tensor, routing: Routing, gathers: str
    ) -> Tensor:
        experts, rows, columns = routing.by_size.shape[0], left.shape[1], right.shape[1]
        if result is None:
            if _grouped(columns, left, right):
                lefts = routing.gathered(left) if gathers == "left" else left
                rights = routing.gathered(right) if gathers == "right" else right
                result = _multiply(lefts.t(), rights, routing)
                # PyTorch doesn't document what the product leaves for experts without slots.
                _clear[(experts * CLEARERS,)](result, routing.starts, rows * columns, CLEARERS, BLOCK=4096, num_warps=4)
                return result
            result = left.new_empty(experts, rows, columns)
        _launch_weight_gradient(
            result, left, right, routing.order, routing.starts, routing.by_size, routing.per_token(), gathers == "left"
        )
        return result

    def sum_slots(self, result: Tensor, slots: Tensor, scale: Tensor | None, routing: Routing, marks: bool) -> None:
        experts = routing.by_size.shape[0]
        _launch_sum_slots(result, slots, scale, routing.keys, routing.places, experts, routing.per_token(), marks)


def _grouped(columns: int, *operands: Tensor) -> bool:
    """Whether PyTorch multiplies these faster than the kernels here: in bfloat16 on Hopper, if rows are multiples of 16 bytes.

    At the largest sizes its grouped product achieves 626 to 684 TFLOP/s there, the kernels here 329 to 616 (H200, torch 2.11).
    The result's `columns` have to be a multiple of 16 bytes as well: PyTorch would pad its rows.
    """
    device = operands[0].device
    if columns % 8 or operands[0].dtype is not torch.bfloat16 or not is_hopper(device):
        return False
    return all(_in_rows(operand) for operand in operands)


def _in_rows(operand: Tensor) -> bool:
    """Whether one dimension has adjacent elements, and the other strides and the start are multiples of 8 elements.

    Rows of a matrix may be gathered, and then follow each other.
    """
    if operand.dim() == 2 and operand.shape[1] % 8:
        return False
    *outer, row, column = operand.stride()
    apart = row if column == 1 else column if row == 1 else 1
    # Dynamo doesn't know where a tensor starts: what it traces copies an operand that starts elsewhere.
    starts = 0 if torch_state.compiling() else operand.storage_offset()
    return not (apart % 8 or any(stride % 8 for stride in outer) or starts % 8)


def _multiply(left: Tensor, right: Tensor, routing: Routing) -> Tensor:
    """PyTorch's product of each expert's rows, or over them. It leaves the rows of slots without an expert unwritten."""
    return _grouped_product(left, right, routing.starts)


def _product_like(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    return torch._grouped_mm(left, right, offs=starts[1:].int())


@opaque(writes=(), fake=_product_like)
def _grouped_product(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    return torch._grouped_mm(_at_16_bytes(left), _at_16_bytes(right), offs=starts[1:].int())


def _at_16_bytes(operand: Tensor) -> Tensor:
    """The operand, or a copy with its strides, which starts at an address that PyTorch's product takes."""
    if operand.data_ptr() % 16 == 0:
        return operand
    return operand.new_empty_strided(operand.shape, operand.stride()).copy_(operand)


WIDTHS = {"up": (128, 64), "product": (128, 128), "gradient": (64, 32), "weight_gradient": (128, 128)}
"""Columns of a block with 2-byte operands, on chips with more than 200 KiB of shared memory, and on others. More columns would
spill registers: `_up` has two blocks of sums, and `_gradient` needs the factors beside its own."""


def _width(x: Tensor, columns: int, kind: str) -> int:
    """Columns of a block."""
    widest, narrower = WIDTHS[kind]
    most = 64 if x.element_size() == 4 else widest if shared_memory(x.device) > 200 << 10 else narrower
    return min(power_of_2(columns, 16), most)


def _tile(x: Tensor, rows: int, columns: int, depth: int, kind: str) -> tuple[int, int, dict[str, int]]:
    """Columns of a block, the depth that a program reads at a time, and its launch options."""
    width = _width(x, columns, kind)
    deep = min(power_of_2(depth, 16), 32 if x.element_size() == 4 else 64)
    if not in_vectors(columns, depth):
        width, deep = min(width, 64), min(deep, 32)
    stage = (rows + width * (1 + (kind == "up"))) * deep * x.element_size()
    stages = max(1, min(3 if kind == "up" else 4, shared_memory(x.device) // stage))
    warps = 8 if rows * width >= (4096 if x.element_size() == 4 or kind == "gradient" else 8192) else 4
    return width, deep, {"num_warps": warps, "num_stages": stages}


_host = FusedMoE(TritonMoE())
forward = implements(fused_moe)(_host.forward)
backward = _host.backward
