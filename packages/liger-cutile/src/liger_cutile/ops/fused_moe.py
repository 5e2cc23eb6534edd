"""Mixture of experts: tiles of the slots of one expert, sorted, meet tiles of its weights.

PyTorch gathers the rows of the slots' tokens, so that TMA loads them: gathered inside of a product they spill hundreds of
registers. Each tile of rows knows its expert from a table. The gradient of a weight is one block's sum over the expert's
slots, so no result depends on an order of blocks. Experts with many slots come first.
"""

import functools
import math
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import fused_moe
from liger_core.contract import implements
from liger_core.custom_op import opaque
from liger_core.host.fused_moe import FusedMoE, MoEActivation, MoEKernels, Routing
from liger_cutile.ops._device import multiplies_from_shared
from liger_cutile.ops._launch import ConstBool, ConstInt, block_number, given, launch, one_each
from liger_cutile.ops._rows import ZERO, blocks, near, power_of_2
from liger_cutile.ops.geglu import gelu
from liger_cutile.ops.swiglu import silu

# Tiles of rows whose blocks run together on all tiles of columns, so that what they load is still in the L2 cache.
TURN = 8
# Elements of a tile of the sums over slots.
SUMMED = 1024
# Slots whose float32 terms of a weight's gradient are added one after another. Of n terms such a sum is off by √n roundings,
# where PyTorch's product divides them among several sums.
IN_SUM = 128
# Half of float16's least normal number: about the activation of a gate that is as small as that number.
HALF_NORMAL = 2.0**-15


@ct.function
def _activate(gate, array, GELU):
    if GELU:
        return gelu(gate)
    else:
        return silu(gate, array)


@ct.function
def _clamp(gates, ups, limit):
    """NaN stays."""
    ups = ct.where(ups > limit, limit, ct.where(ups < -limit, -limit, ups))
    return ct.where(gates > limit, limit, gates), ups


@ct.function
def _place(tiles, across, TURN):
    """This block's tile of rows, and its tile of columns; the number of tiles, if it has none."""
    number = block_number()
    turn = number // (TURN * across)
    rest = number % (TURN * across)
    size = ct.maximum(ct.minimum(tiles - turn * TURN, TURN), 1)
    return ct.where(rest // size < across, turn * TURN + rest % size, tiles), rest // size


@ct.function
def _number(array, place):
    """An element, as an index."""
    return ct.astype(ct.load(array, (place,), ()), ct.int32)


@ct.function
def _rows(starts, tile_starts, tile, expert, ROWS):
    """The sorted slots of a tile: the first, and the one after the last."""
    first = _number(tile_starts, tile)
    return first, ct.minimum(_number(starts, expert + 1), first + ROWS)


@ct.function
def _left(rows, k, ROWS, DEPTH):
    return ct.load(rows, (0, k), (ROWS, DEPTH), padding_mode=ZERO)


@ct.function
def _right(weight, expert, block, k, SWAPPED, COLUMNS, DEPTH):
    """A tile of an expert's weight ``[columns, depth]``, or if it is swapped ``[depth, columns]``, as ``[DEPTH, COLUMNS]``."""
    if SWAPPED:
        found = ct.load(weight, (expert, k, block), (1, DEPTH, COLUMNS), padding_mode=ZERO)
        return ct.reshape(found, (DEPTH, COLUMNS))
    else:
        found = ct.load(weight, (expert, block, k), (1, COLUMNS, DEPTH), padding_mode=ZERO)
        return ct.transpose(ct.reshape(found, (COLUMNS, DEPTH)))


@ct.function
def _store(array, first, last, half, block, values, ROWS, COLUMNS):
    """Store a tile of sorted slots in an array ``[slots, halves, columns]``."""
    some = array.slice(axis=0, start=first, stop=last)
    values = ct.reshape(ct.astype(values, array.dtype), (ROWS, 1, COLUMNS))
    ct.store(some, (0, half, block), values, allow_tma=False)


@ct.function
def _load(array, first, last, half, block, ROWS, COLUMNS):
    some = array.slice(axis=0, start=first, stop=last)
    found = ct.load(some, (0, half, block), (ROWS, 1, COLUMNS), padding_mode=ZERO, allow_tma=False)
    return ct.astype(ct.reshape(found, (ROWS, COLUMNS)), ct.float32)


@ct.function
def _made_up(gates, ups, factors, limit, GELU):
    """The other factor, but for what is left of the gate when it is rounded, times the change of the activation by it."""
    rounded = ct.astype(ct.astype(gates, factors.dtype), ct.float32)
    if given(limit):
        rounded = ct.where((gates > limit) | (rounded > limit), limit, rounded)
        gates = ct.where(gates > limit, limit, gates)
    acts, slopes = _activate(gates, factors, GELU)
    none = acts == 0.0
    if factors.dtype == ct.float16:
        # Rounding takes 2⁻¹¹ of a normal gate at most, and up to all of a smaller one. The other factor, of which the gate's
        # gradient is a multiple, must not be off by as much.
        none = ct.abs(acts) < HALF_NORMAL
    return ct.where(none, ups, ups + ups * (gates - rounded) * (slopes / acts))


@ct.kernel
def _up(
    factors, activated, left, gate, up, starts, tile_experts, tile_starts, experts, limit,
    GELU: ConstBool, EXACT: ConstBool, SWAPPED: ConstBool,
    ROWS: ConstInt, COLUMNS: ConstInt, DEPTH: ConstInt, TURN: ConstInt,
):  # fmt: skip
    columns = gate.shape[2] if SWAPPED else gate.shape[1]
    tile, block = _place(tile_experts.shape[0], ct.cdiv(columns, COLUMNS), TURN)
    expert = ct.astype(ct.gather(tile_experts, tile, padding_value=experts), ct.int32)
    if expert < experts:
        first, last = _rows(starts, tile_starts, tile, expert, ROWS)
        some = left.slice(axis=0, start=first, stop=last)
        gates = ct.zeros((ROWS, COLUMNS), ct.float32)
        ups = ct.zeros((ROWS, COLUMNS), ct.float32)
        for k in range(ct.cdiv(left.shape[1], DEPTH)):
            xs = _left(some, k, ROWS, DEPTH)
            gates = ct.mma(xs, _right(gate, expert, block, k, SWAPPED, COLUMNS, DEPTH), gates)
            ups = ct.mma(xs, _right(up, expert, block, k, SWAPPED, COLUMNS, DEPTH), ups)
        if given(activated):  # first: tileiras 13.4 spills if it comes last
            clamped_gates, clamped_ups = gates, ups
            if given(limit):
                clamped_gates, clamped_ups = _clamp(gates, ups, limit)
            acts, _ = _activate(clamped_gates, left, GELU)
            _store(activated, first, last, 0, block, acts * clamped_ups, ROWS, COLUMNS)
        if given(factors):
            kept_ups = ups
            if EXACT:
                kept_ups = _made_up(gates, ups, factors, limit, GELU)
            if given(limit):
                gates = ct.where(gates > limit, math.inf, gates)
                kept_ups = ct.where(ups > limit, math.inf, ct.where(ups < -limit, -math.inf, kept_ups))
            _store(factors, first, last, 0, block, gates, ROWS, COLUMNS)
            _store(factors, first, last, 1, block, kept_ups, ROWS, COLUMNS)


@ct.kernel
def _product(
    result, left, weight, starts, tile_experts, tile_starts, experts,
    ADD: ConstBool, SWAPPED: ConstBool, ROWS: ConstInt, COLUMNS: ConstInt, DEPTH: ConstInt, TURN: ConstInt,
):  # fmt: skip
    tile, block = _place(tile_experts.shape[0], ct.cdiv(result.shape[2], COLUMNS), TURN)
    expert = ct.astype(ct.gather(tile_experts, tile, padding_value=experts), ct.int32)
    if expert < experts:
        first, last = _rows(starts, tile_starts, tile, expert, ROWS)
        some = left.slice(axis=0, start=first, stop=last)
        sums = ct.zeros((ROWS, COLUMNS), ct.float32)
        if ADD:
            sums = _load(result, first, last, 0, block, ROWS, COLUMNS)
        for k in range(ct.cdiv(left.shape[1], DEPTH)):
            sums = ct.mma(_left(some, k, ROWS, DEPTH), _right(weight, expert, block, k, SWAPPED, COLUMNS, DEPTH), sums)
        _store(result, first, last, 0, block, sums, ROWS, COLUMNS)


@ct.kernel
def _gradient(
    dfactors, weighted, sums, left, down, factors, shares, order, starts, tile_experts, tile_starts, experts, limit,
    GELU: ConstBool, SWAPPED: ConstBool, ROWS: ConstInt, COLUMNS: ConstInt, DEPTH: ConstInt, TURN: ConstInt,
):  # fmt: skip
    tile, block = _place(tile_experts.shape[0], ct.cdiv(factors.shape[2], COLUMNS), TURN)
    expert = ct.astype(ct.gather(tile_experts, tile, padding_value=experts), ct.int32)
    if expert < experts:
        first, last = _rows(starts, tile_starts, tile, expert, ROWS)
        d = ct.zeros((ROWS, COLUMNS), ct.float32)
        if given(left):
            some = left.slice(axis=0, start=first, stop=last)
            for k in range(ct.cdiv(left.shape[1], DEPTH)):
                d = ct.mma(_left(some, k, ROWS, DEPTH), _right(down, expert, block, k, SWAPPED, COLUMNS, DEPTH), d)
        row = first + ct.arange(ROWS, dtype=ct.int32)
        slot = ct.where(row < last, ct.astype(ct.gather(order, row), ct.int32), shares.shape[0])
        kept_gates = _load(factors, first, last, 0, block, ROWS, COLUMNS)
        kept_ups = _load(factors, first, last, 1, block, ROWS, COLUMNS)
        gates, ups = kept_gates, kept_ups
        if given(limit):
            gates, ups = _clamp(gates, ups, limit)
        share = ct.reshape(ct.astype(ct.gather(shares, slot), ct.float32), (ROWS, 1))
        acts, slopes = _activate(gates, factors, GELU)
        if given(sums):
            ct.scatter(sums, (slot, block), ct.sum(d * (acts * ups), axis=1))
        if given(weighted):
            _store(weighted, first, last, 0, block, share * (acts * ups), ROWS, COLUMNS)
        if given(dfactors):
            d = d * share
            dgates, dups = d * ups * slopes, d * acts
            if given(limit):
                dgates = ct.where(kept_gates < math.inf, dgates, 0.0)
                dups = ct.where(ct.abs(kept_ups) < math.inf, dups, 0.0)
            _store(dfactors, first, last, 0, block, dgates, ROWS, COLUMNS)
            _store(dfactors, first, last, 1, block, dups, ROWS, COLUMNS)


@ct.kernel
def _weight_gradient(
    result, left, right, starts, by_size,
    ROWS: ConstInt, COLUMNS: ConstInt, DEPTH: ConstInt, SPAN: ConstInt, TURN: ConstInt,
):  # fmt: skip
    """Sums over SPAN times DEPTH slots are summed up; if it is 0, over all slots at once."""
    tiles, across = ct.cdiv(result.shape[1], ROWS), ct.cdiv(result.shape[2], COLUMNS)
    number = block_number()
    if number < tiles * across * by_size.shape[0]:
        expert = _number(by_size, number // (tiles * across))
        turn = number % (tiles * across) // (TURN * across)
        rest = number % (tiles * across) % (TURN * across)
        size = ct.minimum(tiles - turn * TURN, TURN)
        row, column = turn * TURN + rest % size, rest // size
        first, last = _number(starts, expert), _number(starts, expert + 1)
        sums = ct.zeros((ROWS, COLUMNS), ct.float32)
        total = ct.zeros((ROWS, COLUMNS), ct.float32)
        if first < last:
            lefts = left.slice(axis=0, start=first, stop=last)
            rights = right.slice(axis=0, start=first, stop=last)
            for k in range(ct.cdiv(last - first, DEPTH)):
                xs = ct.load(lefts, (k, row), (DEPTH, ROWS), padding_mode=ZERO)
                ys = ct.load(rights, (k, column), (DEPTH, COLUMNS), padding_mode=ZERO)
                sums = ct.mma(ct.transpose(xs), ys, sums)
                if SPAN > 0:  # noqa: SIM102
                    if k % SPAN == SPAN - 1:
                        total = total + sums
                        sums = ct.zeros((ROWS, COLUMNS), ct.float32)
        if SPAN > 0:
            sums = sums + total
        values = ct.reshape(ct.astype(sums, result.dtype), (1, ROWS, COLUMNS))
        ct.store(result, (expert, row, column), values, allow_tma=False)


@ct.kernel
def _sum_slots(result, slots, scale, keys, places, experts, per_token, MARKS: ConstBool, BLOCK: ConstInt):
    """Add up each token's slots. A slot's row lies at its place in the sorted order."""
    across = ct.cdiv(result.shape[1], BLOCK)
    number = block_number()
    token, column = number // across, number % across * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
    if token < result.shape[0]:
        sums = ct.zeros((BLOCK,), ct.float32)
        for i in range(per_token):
            slot = token * per_token + i
            key = _number(keys, slot)
            found = ct.astype(ct.gather(slots, (_number(places, slot), column), mask=key < experts), ct.float32)
            if given(scale):
                found = found * ct.astype(ct.load(scale, (slot,), ()), ct.float32)
            sums = sums + ct.where(key < experts, found, 0.0)
            if MARKS:
                sums = ct.where(key > experts, math.nan, sums)
        ct.scatter(result, (token, column), ct.astype(sums, result.dtype))


@opaque(writes=("factors", "activated"))
def _launch_up(
    factors: Tensor | None,
    activated: Tensor | None,
    left: Tensor,
    gate: Tensor,
    up: Tensor,
    routing: Routing,
    activation: MoEActivation,
    exact: bool,
) -> None:
    (experts, columns, depth), rows = gate.shape, routing.rows
    width, deep = _width(left, columns, depth, "up"), _deep(left, columns, depth)
    (gate, swapped), (up, _) = _inner(gate), _inner(up)
    launch(
        _with_warps(_up, rows * width * 2), _grid(routing, columns, width), _halves(factors), _whole(activated), left, gate, up,
        *routing.tables(), experts, activation.limit, activation.gelu, exact, swapped, rows, width, deep, TURN,
    )  # fmt: skip


@opaque(writes=("result",))
def _launch_product(result: Tensor, left: Tensor, weight: Tensor, routing: Routing, adds: bool) -> None:
    (experts, columns, depth), rows = weight.shape, routing.rows
    width, deep = _width(left, columns, depth, "product"), _deep(left, columns, depth)
    weight, swapped = _inner(weight)
    launch(
        _with_warps(_product, rows * width), _grid(routing, columns, width), _whole(result), left, weight,
        *routing.tables(), experts, adds, swapped, rows, width, deep, TURN,
    )  # fmt: skip


@opaque(writes=("dfactors", "weighted", "sums"))
def _launch_gradient(
    dfactors: Tensor | None,
    weighted: Tensor | None,
    sums: Tensor | None,
    left: Tensor | None,
    down: Tensor,
    factors: Tensor,
    expert_weights: Tensor,
    routing: Routing,
    activation: MoEActivation,
) -> None:
    (experts, depth, columns), rows = down.shape, routing.rows
    width, deep = _width(factors, columns, depth, "gradient"), _deep(factors, columns, depth)
    down, swapped = _inner(down.transpose(1, 2))
    launch(
        _with_warps(_gradient, rows * width * 2), _grid(routing, columns, width), _halves(dfactors), _whole(weighted), sums,
        left, down, _halves(factors), expert_weights, routing.order, *routing.tables(), experts, activation.limit,
        activation.gelu, swapped, rows, width, deep, TURN,
    )  # fmt: skip


@opaque(writes=("result",))
def _launch_weight_gradient(result: Tensor, left: Tensor, right: Tensor, starts: Tensor, by_size: Tensor) -> None:
    experts, rows, columns = result.shape
    high, width = _width(left, rows, columns, "rows"), _width(left, columns, rows, "columns")
    deep = _deep(left, rows, columns)
    launch(
        _with_warps(_weight_gradient, high * width), one_each(experts * blocks(rows, high) * blocks(columns, width)),
        result, left, right, starts, by_size, high, width, deep, IN_SUM // deep if left.element_size() == 4 else 0, TURN,
    )  # fmt: skip


@opaque(writes=("result",))
def _launch_sum_slots(
    result: Tensor, slots: Tensor, scale: Tensor | None, keys: Tensor, places: Tensor, experts: int, marks: bool
) -> None:
    tokens, columns = result.shape
    block = min(power_of_2(columns), SUMMED)
    launch(
        _sum_slots, one_each(tokens * blocks(columns, block)), result, slots, scale, keys.view(-1), places, experts,
        keys.shape[1], marks, block,
    )  # fmt: skip


class CuTileMoE(MoEKernels):
    """Launches cuTile's kernels."""

    def rows(self, slots: int, experts: int, x: Tensor) -> int:
        each = slots // experts
        if x.element_size() == 4:
            return 32 if each >= 24 else 16
        return (128 if _wide(x) else 64) if each >= 64 else 64 if each >= 24 else 16

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
        _launch_up(factors, activated, routing.gathered(x), gate, up, routing, activation, exact)

    def product(self, total: Tensor | None, left: Tensor, weight: Tensor, routing: Routing, last: bool) -> Tensor:
        """The result is in sorted order."""
        result = total
        if result is None:
            result = torch.empty(routing.slots(), weight.shape[1], dtype=torch.float32, device=left.device)
        _launch_product(result, left, weight, routing, total is not None)
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
        left = None if dfactors is None and sums is None else routing.gathered(dy)
        _launch_gradient(dfactors, weighted, sums, left, down, factors, expert_weights, routing, activation)

    def parts(self, columns: int, x: Tensor) -> int:
        return blocks(columns, _width(x, columns, x.shape[1], "gradient"))

    def weight_gradient(
        self, result: Tensor | None, left: Tensor, right: Tensor, routing: Routing, gathers: str
    ) -> Tensor:
        if result is None:
            result = left.new_empty(routing.by_size.shape[0], left.shape[1], right.shape[1])
        if gathers == "left":
            left = routing.gathered(left)
        else:
            right = routing.gathered(right)
        _launch_weight_gradient(result, left, right, routing.starts, routing.by_size)
        return result

    def sum_slots(self, result: Tensor, slots: Tensor, scale: Tensor | None, routing: Routing, marks: bool) -> None:
        _launch_sum_slots(result, slots, scale, routing.keys, routing.places, routing.by_size.shape[0], marks)


WIDTHS = {"up": (128, 64), "product": (256, 64), "gradient": (64, 32), "rows": (128, 32), "columns": (256, 64)}
"""Columns of a tile where operands of 2 bytes are multiplied from shared memory, and elsewhere: the most that don't spill. `_up`
has two tiles of sums, and `_gradient` needs the factors beside its own. "rows" and "columns" are those of a weight's gradient."""


def _wide(x: Tensor, *sizes: int) -> bool:
    """Whether tiles are large: of operands of 2 bytes in shared memory, whose rows aren't loaded element by element."""
    return x.element_size() == 2 and multiplies_from_shared(x.device) and not any(size % 8 for size in sizes)


def _width(x: Tensor, columns: int, depth: int, kind: str) -> int:
    """Columns of a tile."""
    wide, narrow = WIDTHS[kind]  # not by a bool: Dynamo of torch 2.11 and before takes none as an index
    return min(power_of_2(columns), wide if _wide(x, columns, depth) else narrow)


def _deep(x: Tensor, columns: int, depth: int) -> int:
    """How deep the operands of a tile are at a time."""
    return 64 if _wide(x, columns, depth) else 64 // x.element_size()


def _inner(weight: Tensor) -> tuple[Tensor, bool]:
    """A weight whose last dimension has adjacent elements, if it has such a one, and whether it was swapped for that."""
    weight = near(weight)
    swapped = weight.stride(2) != 1 and weight.stride(1) == 1
    return (weight.transpose(1, 2) if swapped else weight), swapped


def _grid(routing: Routing, columns: int, width: int) -> tuple[int, int]:
    """A block for each tile of slots and of columns."""
    return one_each(routing.tile_experts.shape[0] * blocks(columns, width))


def _halves(factors: Tensor | None) -> Tensor | None:
    """Both factors of each slot as ``[slots, 2, columns]``."""
    return None if factors is None else factors.view(factors.shape[0], 2, -1)


def _whole(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows[:, None]


@functools.cache
def _with_warps(kernel: Any, elements: int) -> Any:
    """The kernel for so many sums: compiled for eight warps where four would spill."""
    return kernel.replace_hints(num_worker_warps=8) if elements >= 128 * 128 else kernel


_host = FusedMoE(CuTileMoE())
forward = implements(fused_moe)(_host.forward)
backward = _host.backward
