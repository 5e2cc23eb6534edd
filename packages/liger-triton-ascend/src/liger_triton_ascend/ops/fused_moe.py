"""Mixture of experts: blocks of sorted slots meet blocks of their expert's weights on the cube unit.

PyTorch gathers rows before a kernel and sums up slots after it: a gather inside a kernel would read rows past their mask. Blocks
that are left over have no rows, so that kernels need no branch. One core sums a weight's gradient over the expert's slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import fused_moe
from liger_core.contract import implements
from liger_core.host.fused_moe import FusedMoE, MoEActivation, MoEKernels, Routing
from liger_triton_ascend.ops._device import get_npu_core_count
from liger_triton_ascend.ops._rows import row_tiles
from liger_triton_ascend.ops.geglu import gelu

ROWS, COLUMNS, DEPTH = 32, 64, 64
"""Slots of a block, columns of a block, and how many products are summed at a time. `_gradient` has twelve float32 tiles of ROWS
by COLUMNS alive, 96 KiB by the estimate of the Unified Buffer. Not measured."""
SUMMED, WHOLE = 128, 1 << 30
"""Slots whose terms of a weight's gradient are added one after another, in float32 and in other dtypes. A sum of n terms made so
is off by √n roundings. PyTorch's product divides the terms among several sums."""
HALF_NORMAL = tl.constexpr(2.0**-15)
"""Half of float16's least normal number: about the activation of a gate that is as small as that number."""
SUM_TILES = 4
"""Float32 tiles of `_sum_slots` alive, by the same estimate."""


@triton.jit
def _activate(gates, GELU: tl.constexpr):
    if GELU:
        return gelu(gates)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gates))
        return gates * sigmoid, sigmoid * (1.0 + gates * (1.0 - sigmoid))


@triton.jit
def _block(starts, tile_experts, tile_starts, tile, experts, ROWS: tl.constexpr):
    """A block's expert, its sorted slots, ``[ROWS, 1]``, and which of them exist. A block that is left over has none."""
    found = tl.load(tile_experts + tile)
    expert = tl.minimum(found, experts - 1)
    last = tl.where(found < experts, tl.load(starts + expert + 1), 0)
    row = tl.load(tile_starts + tile) + tl.arange(0, ROWS)[:, None]
    return expert, row, row < last


@triton.jit
def _up(
    factors, activated, x, gate, up, starts, tile_experts, tile_starts, experts, tiles, columns, depth, limit,
    weight_expert, weight_row, weight_column,
    GELU: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), COLUMNS)
    for part in range(tl.program_id(0), tiles * blocks, tl.num_programs(0)):
        expert, row, here = _block(starts, tile_experts, tile_starts, part // blocks, experts, ROWS)
        first = tl.cast(part % blocks, tl.int64) * COLUMNS
        at = first + tl.arange(0, COLUMNS)[:, None]
        gates = tl.zeros((ROWS, COLUMNS), tl.float32)
        ups = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            k = start + tl.arange(0, DEPTH)[None, :]
            xs = tl.load(x + row * depth + k, here & (k < depth), other=0.0)
            inside = (at < columns) & (k < depth)
            place = expert * weight_expert + at * weight_row + k * tl.cast(weight_column, tl.int64)
            gates = tl.dot(xs, tl.trans(tl.load(gate + place, inside, other=0.0)), gates)
            ups = tl.dot(xs, tl.trans(tl.load(up + place, inside, other=0.0)), ups)
        column = first + tl.arange(0, COLUMNS)[None, :]
        both = here & (column < columns)
        kept_gates, kept_ups = gates, ups
        if limit is not None:
            kept_gates = tl.where(gates > limit, float("inf"), gates)
            gates = tl.where(gates > limit, limit, gates)
        if activated is not None or EXACT:
            acts, slopes = _activate(gates, GELU)
            if EXACT:
                rounded = kept_gates.to(factors.dtype.element_ty).to(tl.float32)
                if limit is not None:
                    rounded = tl.where(rounded > limit, limit, rounded)
                none = acts == 0.0
                if factors.dtype.element_ty == tl.float16:
                    # Rounding takes 2⁻¹¹ of a normal gate at most, and up to all of a smaller one. The other factor, of which the
                    # gate's gradient is a multiple, must not be off by as much.
                    none = tl.abs(acts) < HALF_NORMAL
                # A first-order correction: what rounding took from the gate, times the derivative of the activation.
                kept_ups += tl.where(none, 0.0, ups * (gates - rounded) * (slopes / acts))
        if limit is not None:
            kept_ups = tl.where(ups > limit, float("inf"), tl.where(ups < -limit, float("-inf"), kept_ups))
            ups = tl.where(ups > limit, limit, tl.where(ups < -limit, -limit, ups))
        if factors is not None:
            tl.store(factors + row * (2 * columns) + column, kept_gates, both)
            tl.store(factors + row * (2 * columns) + columns + column, kept_ups, both)
        if activated is not None:
            tl.store(activated + row * columns + column, acts * ups, both)


@triton.jit
def _product(
    result, left, weight, starts, tile_experts, tile_starts, experts, tiles, columns, depth,
    left_row, weight_expert, weight_row, weight_column,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The result is in sorted order."""
    blocks = tl.cdiv(tl.cast(columns, tl.int64), COLUMNS)
    for part in range(tl.program_id(0), tiles * blocks, tl.num_programs(0)):
        expert, row, here = _block(starts, tile_experts, tile_starts, part // blocks, experts, ROWS)
        first = tl.cast(part % blocks, tl.int64) * COLUMNS
        at = first + tl.arange(0, COLUMNS)[:, None]
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            k = start + tl.arange(0, DEPTH)[None, :]
            xs = tl.load(left + row * left_row + k, here & (k < depth), other=0.0)
            place = expert * weight_expert + at * weight_row + k * tl.cast(weight_column, tl.int64)
            ws = tl.load(weight + place, (at < columns) & (k < depth), other=0.0)
            sums = tl.dot(xs, tl.trans(ws), sums)
        column = first + tl.arange(0, COLUMNS)[None, :]
        both = here & (column < columns)
        if ADD:
            sums += tl.load(result + row * columns + column, both, other=0.0)
        tl.store(result + row * columns + column, sums, both)


@triton.jit
def _gradient(
    dfactors, weighted, sums, dy, down, factors, expert_weights, starts, tile_experts, tile_starts,
    experts, tiles, columns, depth, parts, limit, down_expert, down_row, down_column,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tl.cast(columns, tl.int64), COLUMNS)
    for part in range(tl.program_id(0), tiles * blocks, tl.num_programs(0)):
        expert, row, here = _block(starts, tile_experts, tile_starts, part // blocks, experts, ROWS)
        block = part % blocks
        column = tl.cast(block, tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        both = here & (column < columns)
        d = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            k = start + tl.arange(0, DEPTH)[None, :]
            ds = tl.load(dy + row * depth + k, here & (k < depth), other=0.0)
            at = start + tl.arange(0, DEPTH)[:, None]
            place = expert * down_expert + at * tl.cast(down_row, tl.int64) + column * down_column
            d = tl.dot(ds, tl.load(down + place, (at < depth) & (column < columns), other=0.0), d)
        gates = tl.load(factors + row * (2 * columns) + column, both, other=0.0).to(tl.float32)
        ups = tl.load(factors + row * (2 * columns) + columns + column, both, other=0.0).to(tl.float32)
        share = tl.load(expert_weights + row, here, other=0.0).to(tl.float32)
        kept_gates, kept_ups = gates, ups
        if limit is not None:
            gates = tl.where(gates > limit, limit, gates)
            ups = tl.where(ups > limit, limit, tl.where(ups < -limit, -limit, ups))
        acts, slopes = _activate(gates, GELU)
        products = acts * ups
        if sums is not None:
            tl.store(sums + row * parts + block, tl.sum(d * products, 1)[:, None], here)
        if weighted is not None:
            tl.store(weighted + row * columns + column, share * products, both)
        if dfactors is not None:
            d *= share
            dgates, dups = d * ups * slopes, d * acts
            if limit is not None:
                dgates = tl.where(kept_gates < float("inf"), dgates, 0.0)
                dups = tl.where(tl.abs(kept_ups) < float("inf"), dups, 0.0)
            tl.store(dfactors + row * (2 * columns) + column, dgates, both)
            tl.store(dfactors + row * (2 * columns) + columns + column, dups, both)


@triton.jit
def _weight_gradient(
    result, left, right, starts, experts, rows, columns, result_expert, result_row, result_column, left_row, right_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The product of an expert's slots. It adds up sums over SPAN slots each."""
    blocks = tl.cdiv(tl.cast(columns, tl.int64), COLUMNS)
    each = tl.cdiv(tl.cast(rows, tl.int64), ROWS) * blocks
    for part in range(tl.program_id(0), experts * each, tl.num_programs(0)):
        expert = part // each
        first_row = part % each // blocks * ROWS
        column = part % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        row = first_row + tl.arange(0, ROWS)[None, :]
        last = tl.load(starts + expert + 1)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(tl.load(starts + expert), last, SPAN):
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(first, tl.minimum(first + SPAN, last), DEPTH):
                place = start + tl.arange(0, DEPTH)[:, None]
                xs = tl.load(left + place * left_row + row, (place < last) & (row < rows), other=0.0)
                ys = tl.load(right + place * right_row + column, (place < last) & (column < columns), other=0.0)
                sums = tl.dot(tl.trans(xs), ys, sums)
            total += sums
        at = first_row + tl.arange(0, ROWS)[:, None]
        place = expert * result_expert + at * result_row + column * result_column
        tl.store(result + place, total, (at < rows) & (column < columns))


@triton.jit
def _sum_slots(
    result, slots, scale, keys, places, experts, tokens, per_token, columns, MARKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add up each token's slots. A slot's row lies at its place in the sorted order."""
    blocks = tl.cdiv(tl.cast(columns, tl.int64), BLOCK)
    for part in range(tl.program_id(0), tokens * blocks, tl.num_programs(0)):
        token = tl.cast(part // blocks, tl.int64)
        column = part % blocks * BLOCK + tl.arange(0, BLOCK)
        sums = tl.zeros((BLOCK,), tl.float32)
        for i in range(0, per_token):
            slot = token * per_token + i
            key = tl.load(keys + slot)
            exists = key < experts
            at = tl.where(exists, tl.load(places + slot), 0) * columns
            found = tl.load(slots + at + column, (column < columns) & exists, other=0.0)
            if scale is not None:
                found *= tl.load(scale + slot).to(tl.float32)
            sums += found
            if MARKS:
                sums += tl.where(key > experts, float("nan"), 0.0)
        tl.store(result + token * columns + column, sums, column < columns)


class AscendMoE(MoEKernels):
    """Launches triton-ascend's kernels."""

    def rows(self, slots: int, experts: int, x: Tensor) -> int:
        return ROWS

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
        _up[_grid(routing, columns)](
            factors, activated, routing.gathered(x), gate, up, *routing.tables(), experts, _tiles(routing), columns, depth,
            activation.limit, *gate.stride(), GELU=activation.gelu, EXACT=exact, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
        )  # fmt: skip

    def product(self, total: Tensor | None, left: Tensor, weight: Tensor, routing: Routing, last: bool) -> Tensor:
        experts, columns, depth = weight.shape
        result = total
        if result is None:
            result = torch.empty(routing.slots(), columns, dtype=torch.float32, device=left.device)
        _product[_grid(routing, columns)](
            result, left, weight, *routing.tables(), experts, _tiles(routing), columns, depth,
            left.stride(0), *weight.stride(), ADD=total is not None, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
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
        parts = self.parts(columns, dy)
        totals = None if sums is None else torch.zeros_like(sums)
        _gradient[_grid(routing, columns)](
            dfactors, weighted, totals, routing.gathered(dy), down, factors, expert_weights[routing.order],
            *routing.tables(), experts, _tiles(routing), columns,
            depth if dfactors is not None or sums is not None else 0, parts, activation.limit, *down.stride(),
            GELU=activation.gelu, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
        )  # fmt: skip
        if sums is not None and totals is not None:
            sums[routing.order] = totals

    def parts(self, columns: int, x: Tensor) -> int:
        return (columns + COLUMNS - 1) // COLUMNS

    def weight_gradient(
        self, result: Tensor | None, left: Tensor, right: Tensor, routing: Routing, gathers: str
    ) -> Tensor:
        experts, rows, columns = routing.by_size.shape[0], left.shape[1], right.shape[1]
        if result is None:
            result = left.new_empty(experts, rows, columns)
        if gathers == "left":
            left = routing.gathered(left)
        else:
            right = routing.gathered(right)
        blocks = (rows + ROWS - 1) // ROWS * ((columns + COLUMNS - 1) // COLUMNS)
        _weight_gradient[(min(experts * blocks, get_npu_core_count(result.device)),)](
            result, left, right, routing.starts, experts, rows, columns, *result.stride(), left.stride(0), right.stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, SPAN=SUMMED if left.element_size() == 4 else WHOLE,
        )  # fmt: skip
        return result

    def sum_slots(self, result: Tensor, slots: Tensor, scale: Tensor | None, routing: Routing, marks: bool) -> None:
        tokens, columns = result.shape
        _, _, block = row_tiles(result, 1, columns, SUM_TILES)
        programs = min(tokens * ((columns + block - 1) // block), get_npu_core_count(result.device))
        _sum_slots[(programs,)](
            result, slots, scale, routing.keys, routing.places, routing.by_size.shape[0], tokens, routing.per_token(), columns,
            MARKS=marks, BLOCK=block,
        )  # fmt: skip


def _tiles(routing: Routing) -> int:
    return routing.tile_experts.shape[0]


def _grid(routing: Routing, columns: int) -> tuple[int]:
    blocks = _tiles(routing) * ((columns + COLUMNS - 1) // COLUMNS)
    return (min(blocks, get_npu_core_count(routing.order.device)),)


_host = FusedMoE(AscendMoE())
forward = implements(fused_moe)(_host.forward)
backward = _host.backward
