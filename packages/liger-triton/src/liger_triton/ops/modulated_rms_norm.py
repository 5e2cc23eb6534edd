"""RMS norm with a scale and a shift per group of rows. Backward adds up dy, and dy · x/rms, which makes dscale and dweight.

Forward takes a row, or a few short ones, per program. In backward a program takes rows of one group and fetches the next ones
ahead, so it finds its scale and weight once, and no row needs a division.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import modulated_rms_norm
from liger_core.contract import implements
from liger_core.host.modulated_rms_norm import ModulatedRMSNorm, ModulatedRMSNormKernels, Modulation, Places
from liger_core.torch_state import remembered
from liger_triton.ops._device import shared_memory, sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._rms import inverse_rms_of, load_scale, rounded, scaled, square
from liger_triton.ops._rows import as_rows, in_vectors, power_of_2, tile_of
from liger_triton.ops._sums import multiply, write_total

# Longer rows don't fit registers. Elements that are loaded one by one need addresses in x, the scale and the shift.
LONGEST_HELD = 8192
LONGEST_BY_ONES = 4096

FORWARD_BYTES = 2048
"""Bytes of a program's rows for each warp: 16 or 32 registers of a thread. It has at most 4 warps, 8 in float32. On an H100
(triton 3.6), where a copy reads and writes 3.02 TB/s, 16384 rows of 8192, 5120 and 4096 in bfloat16 reach 2.98, 2.96 and 2.96
with 4 warps, and 2.80, 2.59 and 2.82 with 8. A program that fetched its next rows ahead reached 2.84, 2.41 and 2.99."""

BACKWARD_STAGES = 3
"""Tiles of dy and x in flight, including those that are taken. On an H200 (triton 3.6), in bfloat16, 16384 x 8192 takes 0.2788 ms
with 2, 0.2101 with 3 and 0.2170 with 4."""

ELEMENTS = 8192
"""Elements of the tiles that a multiprocessor takes at a time in backward: a program takes a row of 8192 columns, two of 4096."""

ADD_UP_STAGES = 4
"""Groups whose sums are in flight. With the sums of 33 programs for each group, 16384 x 8192 takes 0.2062 ms and 8192 x 4096
0.0687; with one group after another 0.2101 and 0.0767."""

SIZES = ["k1", "k2", "m1", "m2"]
"""Sizes of `Places`' second and third dimension: those that the scale keeps, and the sizes over which it is broadcast."""


@triton.jit
def _place(group, k1, k2):
    """A group's place in the dimensions that the scale keeps. The divisions are as wide as `group`: 64 bits take long."""
    outer = group // k2
    return (outer // k1).to(tl.int64), (outer % k1).to(tl.int64), (group % k2).to(tl.int64)


@triton.jit
def _group_at(group, k1, k2, m1, m2, scale_0, scale_1, scale_2):
    """A group's first row, and the place of its scale."""
    first, second, third = _place(group, k1, k2)
    return (first * (k1 * m1) + second) * (k2 * m2) + third, first * scale_0 + second * scale_1 + third * scale_2


@triton.jit
def _member_at(member, step, k1, k2, m1, m2):
    """How many rows a member of a group lies after the group's first row: `step` for each. If it is None, see `_step`."""
    if step is None:
        outer = member // m2
        after = ((outer // m1).to(tl.int64) * (k1 * m1) + outer % m1) * (k2 * m2) + member % m2
    else:
        after = member.to(tl.int64) * step
    return after


@kernel(do_not_specialize=[*SIZES, "runs", "tiles", "members", "step"])
def _forward(
    y, inverse_rms, x, weight, scale, shift, runs, tiles, members, step, k1, k2, m1, m2, x_stride,
    scale_0, scale_1, scale_2, shift_0, shift_1, shift_2, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, IN_ORDER: tl.constexpr,
    RUNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows of a run, or a row of each of RUNS runs. If IN_ORDER, see `_in_order`."""
    column = tl.arange(0, BLOCK)[None, :]
    exists = column < COLUMNS
    # Never more than `runs`, and as wide: so many that they take 64 bits are rare.
    run = tl.minimum(tl.program_id(0) // tiles, runs)
    member = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)[:, None]
    if RUNS > 1:
        run = run * RUNS + tl.arange(0, RUNS)[:, None]
    first_row, scale_at = _group_at(run, k1, k2, m1, m2, scale_0, scale_1, scale_2)
    there, inside, scale_inside = None, exists, exists
    if IN_ORDER:
        # The load of x then waits for none of the divisions above, which are made one after another.
        row = tl.program_id(0).to(tl.int64) * (RUNS * ROWS) + tl.arange(0, RUNS * ROWS)[:, None]
        if RUNS > 1:
            there = row < runs
            inside, scale_inside = there & exists, there & exists
    else:
        row = first_row + member.to(tl.int64) * step
        if RUNS * ROWS > 1:
            there = (run < runs) & (member < members)
            inside, scale_inside = there & exists, (run < runs) & exists
    xs = tl.load(x + row * x_stride + column, inside, other=0.0)
    r = inverse_rms_of(tl.sum(square(xs, NATIVE, BLOCK), 1, keep_dims=True), COLUMNS, eps, xs.dtype, NATIVE)
    if inverse_rms is not None:
        tl.store(inverse_rms + row, r, there)
    # After the sum: in registers they would let fewer programs run at once.
    ws = None
    if weight is not None:
        ws = tl.load(weight + column, exists, other=0.0, eviction_policy="evict_last")
    ss = tl.load(scale + scale_at + column, scale_inside, other=0.0, eviction_policy="evict_last")
    ys = rounded(scaled(xs, r, ws, offset, ROUND, NATIVE), xs.dtype, True) * (1.0 + ss.to(tl.float32))
    if shift is not None:
        first, second, third = _place(run, k1, k2)
        shift += first * shift_0 + second * shift_1 + third * shift_2
        ys += tl.load(shift + column, scale_inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(y + row * COLUMNS + column, ys, inside, eviction_policy="evict_first")


@kernel(do_not_specialize=SIZES)
def _forward_long(
    y, inverse_rms, x, weight, scale, shift, columns, k1, k2, m1, m2, x_stride,
    scale_0, scale_1, scale_2, shift_0, shift_1, shift_2, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, second, third = _place(tl.program_id(0), k1 * m1, k2 * m2)
    scale += first * scale_0 + second * scale_1 + third * scale_2
    if shift is not None:
        shift += first * shift_0 + second * shift_1 + third * shift_2
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y += row * columns
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        squares += square(tl.load(x + column, column < columns, other=0.0), NATIVE, BLOCK)
    r = inverse_rms_of(tl.sum(squares), columns, eps, x.dtype.element_ty, NATIVE)
    if inverse_rms is not None:
        tl.store(inverse_rms + row, r)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        xs = tl.load(x + column, inside, other=0.0)
        ws = None if weight is None else tl.load(weight + column, inside, other=0.0)
        ys = rounded(scaled(xs, r, ws, offset, ROUND, NATIVE), xs.dtype, True)
        ys *= 1.0 + tl.load(scale + column, inside, other=0.0).to(tl.float32)
        if shift is not None:
            ys += tl.load(shift + column, inside, other=0.0).to(tl.float32)
        tl.store(y + column, ys, inside)


@triton.jit
def _take_tiles(
    dx, dy, x, weight, scale, inverse_rms, group, tile, chunks, members, step, columns, k1, k2, m1, m2,
    dy_stride, x_stride, scale_0, scale_1, scale_2, offset,
    PRODUCTS: tl.constexpr, SHIFTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx, unless it is None, of each tile of a group that lies a multiple of `chunks` after `tile`.

    Return the tiles' sums of dy · x/rms and of dy, and the place of the group's scale.
    """
    column = tl.arange(0, BLOCK)[None, :]
    exists = column < columns
    first_row, scale_at = _group_at(group, k1, k2, m1, m2, scale_0, scale_1, scale_2)
    factor = 1.0 + tl.load(scale + scale_at + column, exists, other=0.0).to(tl.float32)
    if weight is not None:
        factor *= load_scale(weight, column, exists, offset)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    shifts = tl.zeros((ROWS, BLOCK), tl.float32)
    for at in tl.range(tile, tl.cdiv(members, ROWS), chunks, num_stages=STAGES):
        member = at * ROWS + tl.arange(0, ROWS)
        row = first_row + _member_at(member, step, k1, k2, m1, m2)
        inside = (member < members)[:, None] & exists
        dys = tl.load(dy + row[:, None] * dy_stride + column, inside, other=0.0).to(tl.float32)
        if SHIFTS:
            shifts += dys
        if PRODUCTS or dx is not None:
            r = tl.load(inverse_rms + row, member < members, other=0.0)[:, None]
            xs = tl.load(x + row[:, None] * x_stride + column, inside, other=0.0).to(tl.float32)
        if dx is not None:
            g = dys * factor
            slope = tl.sum(multiply(g, xs, BLOCK), 1, keep_dims=True) / columns * r * r * r
            tl.store(dx + row[:, None] * columns + column, g * r - xs * slope, inside)
        if PRODUCTS:  # after dx: fewer values wait for the sum in registers
            products += dys * (xs * r)
    return tl.sum(products, 0), tl.sum(shifts, 0), scale_at


@triton.jit
def _write(dscale, dweight, sums, weights, weight, scale, group, scale_at, column, columns, offset):
    """Write a group's dscale from the sum of dy · x/rms. Return `weights` plus that sum's part of dweight."""
    inside = column < columns
    if dweight is not None:
        weights += sums * (1.0 + tl.load(scale + scale_at + column, inside, other=0.0).to(tl.float32))
    if dscale is not None:
        if weight is not None:
            sums *= load_scale(weight, column, inside, offset)
        tl.store(dscale + group * columns + column, sums, inside)
    return weights


@kernel(do_not_specialize=[*SIZES, "items", "chunks", "members", "step"])
def _backward(
    dx, dscale, dshift, partial, dy, x, weight, scale, inverse_rms, items, chunks, members, step, columns, k1, k2, m1, m2,
    dy_stride, x_stride, scale_0, scale_1, scale_2, offset,
    CHUNKED: tl.constexpr, PRODUCTS: tl.constexpr, SHIFTS: tl.constexpr, WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """An item is a share of a group's rows.

    If CHUNKED, a group has several items. Each program takes one and writes its sums to `partial`. Otherwise an item is a whole
    group, and `partial` gets each program's part of dweight.
    """
    column = tl.arange(0, BLOCK)
    if CHUNKED:  # without a loop over items, which would take registers
        item = tl.program_id(0)
        products, shifts, _ = _take_tiles(
            dx, dy, x, weight, scale, inverse_rms, item // chunks, item % chunks, chunks, members, step, columns,
            k1, k2, m1, m2, dy_stride, x_stride, scale_0, scale_1, scale_2, offset, PRODUCTS, SHIFTS, ROWS, BLOCK, STAGES,
        )  # fmt: skip
        at = item.to(tl.int64) * columns + column
        if PRODUCTS:
            tl.store(partial + at, products, column < columns)
        if SHIFTS:
            tl.store(partial + tl.cast(PRODUCTS * items, tl.int64) * columns + at, shifts, column < columns)
    else:
        weights = tl.zeros((BLOCK,), tl.float32)
        for index in range(tl.program_id(0), items, tl.num_programs(0)):
            products, shifts, scale_at = _take_tiles(
                dx, dy, x, weight, scale, inverse_rms, index, 0, chunks, members, step, columns,
                k1, k2, m1, m2, dy_stride, x_stride, scale_0, scale_1, scale_2, offset, PRODUCTS, SHIFTS, ROWS, BLOCK, STAGES,
            )  # fmt: skip
            group = tl.cast(index, tl.int64)
            if PRODUCTS:
                weights = _write(
                    dscale, partial if WEIGHT else None, products, weights, weight, scale, group, scale_at, column, columns,
                    offset,
                )  # fmt: skip
            if SHIFTS:
                tl.store(dshift + group * columns + column, shifts, column < columns)
        if WEIGHT:
            tl.store(partial + tl.program_id(0).to(tl.int64) * columns + column, weights, column < columns)


@kernel(do_not_specialize=[*SIZES, "groups", "chunks"])
def _add_up(
    dweight, dscale, dshift, partial, weight, scale, groups, chunks, columns, k1, k2, m1, m2,
    scale_0, scale_1, scale_2, offset,
    PRODUCTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add up a block of columns of the sums that the programs of `_backward` wrote to `partial`."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.arange(0, CHUNKS)
    inside = (chunk < chunks)[:, None] & (column < columns)[None, :]
    weights = tl.zeros((BLOCK,), tl.float32)
    for index in tl.range(0, groups, num_stages=STAGES):
        group = tl.cast(index, tl.int64)
        _, scale_at = _group_at(index, k1, k2, m1, m2, scale_0, scale_1, scale_2)
        at = (group * chunks + chunk)[:, None] * columns + column[None, :]
        if PRODUCTS:
            sums = tl.sum(tl.load(partial + at, inside, other=0.0), 0)
            weights = _write(
                dscale, dweight, sums, weights, weight, scale, group, scale_at, column, columns, offset
            )  # fmt: skip
        if dshift is not None:
            at += tl.cast(PRODUCTS * groups, tl.int64) * chunks * columns
            sums = tl.sum(tl.load(partial + at, inside, other=0.0), 0)
            tl.store(dshift + group * columns + column, sums, column < columns)
    if dweight is not None:
        tl.store(dweight + column, weights, column < columns)


@kernel(do_not_specialize=SIZES)
def _dx_long(
    dx, dy, x, weight, scale, inverse_rms, columns, k1, k2, m1, m2, dy_stride, x_stride, scale_0, scale_1, scale_2, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first, second, third = _place(tl.program_id(0), k1 * m1, k2 * m2)
    scale += first * scale_0 + second * scale_1 + third * scale_2
    row = tl.program_id(0).to(tl.int64)
    r = tl.load(inverse_rms + row)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        g = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        g *= 1.0 + tl.load(scale + column, inside, other=0.0).to(tl.float32)
        if weight is not None:
            g *= load_scale(weight, column, inside, offset)
        products += g * tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    slope = tl.sum(products) / columns * r * r * r
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        g = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        g *= 1.0 + tl.load(scale + column, inside, other=0.0).to(tl.float32)
        if weight is not None:
            g *= load_scale(weight, column, inside, offset)
        dxs = g * r - tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32) * slope
        tl.store(dx + row * columns + column, dxs, inside)


@kernel(do_not_specialize=[*SIZES, "groups", "members", "step"])
def _sums_long(
    dweight, dscale, dshift, dy, x, weight, scale, inverse_rms, groups, members, step, columns, k1, k2, m1, m2,
    dy_stride, x_stride, scale_0, scale_1, scale_2, offset, PRODUCTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of all rows."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weights = tl.zeros((BLOCK,), tl.float32)
    for index in range(0, groups):
        group = tl.cast(index, tl.int64)
        first_row, scale_at = _group_at(index, k1, k2, m1, m2, scale_0, scale_1, scale_2)
        products = tl.zeros((ROWS, BLOCK), tl.float32)
        shifts = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, members, ROWS):
            member = start + tl.arange(0, ROWS)
            row = first_row + _member_at(member, step, k1, k2, m1, m2)
            inside = (member < members)[:, None] & (column < columns)[None, :]
            dys = tl.load(dy + row[:, None] * dy_stride + column[None, :], inside, other=0.0).to(tl.float32)
            if PRODUCTS:
                r = tl.load(inverse_rms + row, member < members, other=0.0)[:, None]
                products += dys * (
                    tl.load(x + row[:, None] * x_stride + column[None, :], inside, other=0.0).to(tl.float32) * r
                )
            shifts += dys
        if PRODUCTS:
            sums = tl.sum(products, 0)
            weights = _write(
                dscale, dweight, sums, weights, weight, scale, group, scale_at, column, columns, offset
            )  # fmt: skip
        if dshift is not None:
            tl.store(dshift + group * columns + column, tl.sum(shifts, 0), column < columns)
    if dweight is not None:
        tl.store(dweight + column, weights, column < columns)


class TritonModulatedRMSNorm(ModulatedRMSNormKernels):
    def forward(
        self,
        y: Tensor,
        inverse_rms: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        modulation: Modulation,
        eps: float,
        offset: float,
        casting_mode: str,
    ) -> None:
        scale, shift, places = modulation
        columns = x.shape[-1]
        x, x_stride = as_rows(x)
        strides = *places.scale, *places.shift
        options = {"ROUND": casting_mode != "gemma", "NATIVE": casting_mode == "none"}
        plan = _forward_plan(places, columns, x_stride, x.element_size())
        if plan is None:
            _forward_long[(x.numel() // columns,)](
                y, inverse_rms, x, weight, scale, shift, columns, *places.kept[1:], *places.shared[1:], x_stride, *strides,
                eps, offset, **options, BLOCK=4096, num_warps=8,
            )  # fmt: skip
            return
        _forward[(plan.programs,)](
            y, inverse_rms, x, weight, scale, shift, *plan.numbers, x_stride, *strides, eps, offset,
            **options, **plan.constants,
        )  # fmt: skip

    def backward(
        self,
        dx: Tensor | None,
        dweight: Tensor | None,
        dscale: Tensor | None,
        dshift: Tensor | None,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        modulation: Modulation,
        inverse_rms: Tensor | None,
        offset: float,
    ) -> None:
        scale, _, places = modulation
        columns = x.shape[-1]
        dy, dy_stride = as_rows(dy)
        x, x_stride = as_rows(x)
        sizes = *places.kept[1:], *places.shared[1:]
        products, shifts = dscale is not None or dweight is not None, dshift is not None
        plan = _backward_plan(places, columns, dy_stride, x_stride, x.element_size(), x.device, products, shifts)
        if plan is None:
            if dx is not None:
                _dx_long[(x.numel() // columns,)](
                    dx, dy, x, weight, scale, inverse_rms, columns, *sizes, dy_stride, x_stride, *places.scale, offset,
                    BLOCK=4096, num_warps=8,
                )  # fmt: skip
            if products or shifts:
                # 64 columns, a 128-byte line of bf16; more if rows are few.
                sum_rows = 64 if places.members > 16 else 16
                _sums_long[((columns * sum_rows + 4095) // 4096,)](
                    dweight, dscale, dshift, dy, x, weight, scale, inverse_rms, places.groups, places.members,
                    _step(places), columns, *sizes, dy_stride, x_stride, *places.scale, offset,
                    PRODUCTS=products, ROWS=sum_rows, BLOCK=4096 // sum_rows,
                )  # fmt: skip
            return
        (items, chunks, *_), partial = plan.numbers, None
        chunked = chunks > 1 and (products or shifts)
        if chunked:
            partial = torch.empty((products + shifts, items, columns), dtype=torch.float32, device=x.device)
        elif dweight is not None:
            partial = torch.empty((plan.programs, columns), dtype=torch.float32, device=x.device)
        _backward[(plan.programs,)](
            dx, dscale, dshift, partial, dy, x, weight, scale, inverse_rms, *plan.numbers, dy_stride, x_stride, *places.scale,
            offset, WEIGHT=dweight is not None, **plan.constants,
        )  # fmt: skip
        if chunked:
            # 32 columns, a 128-byte line of float32; fewer if a group has many sums.
            add_chunks = power_of_2(chunks, 64)
            add_block = max(2048 // add_chunks, 8)
            _add_up[((columns + add_block - 1) // add_block,)](
                dweight, dscale, dshift, partial, weight, scale, places.groups, chunks, columns, *sizes, *places.scale, offset,
                PRODUCTS=products, CHUNKS=add_chunks, BLOCK=add_block,
                STAGES=ADD_UP_STAGES if add_chunks * add_block <= 2048 else 1,
            )  # fmt: skip
        elif dweight is not None:
            write_total(dweight, partial)


class _Plan(NamedTuple):
    """A launch of `_forward` or `_backward`: its programs, its integers up to `m2`, and its constants."""

    programs: int
    numbers: tuple[int | None, ...]
    constants: dict[str, Any]


@remembered
def _forward_plan(places: Places, columns: int, x_stride: int, size: int) -> _Plan | None:
    """For elements of `size` bytes. None for rows that are not held."""
    vectors = in_vectors(columns, x_stride, *places.scale, *places.shift)
    if columns > (LONGEST_HELD if vectors else LONGEST_BY_ONES):
        return None
    places = _runs_of(places)
    runs, members = places.groups, places.members
    tile_rows, block, warps = tile_of(columns) if vectors else _tile_by_ones(columns)
    tile_runs = 1
    if vectors:
        warps = min(2 * size, tile_rows * block * size // FORWARD_BYTES)
    if tile_rows > 1 and tile_rows >= 2 * members:
        tile_rows, tile_runs = 1, tile_rows
    tiles = (members + tile_rows - 1) // tile_rows
    step = _step(places)
    numbers = runs, tiles, members, step, *places.kept[1:], *places.shared[1:]
    constants = {"RUNS": tile_runs, "ROWS": tile_rows, "COLUMNS": columns, "BLOCK": block, "num_warps": warps}
    constants |= {"IN_ORDER": _in_order(members, step, tile_rows, tile_runs)}
    return _Plan((runs + tile_runs - 1) // tile_runs * tiles, numbers, constants)


@remembered
def _backward_plan(
    places: Places,
    columns: int,
    dy_stride: int,
    x_stride: int,
    size: int,
    device: torch.device,
    products: bool,
    shifts: bool,
) -> _Plan | None:
    """For elements of `size` bytes, and the sums that are wanted. None for rows that are not held."""
    groups, members = places.groups, places.members
    vectors, sums = in_vectors(columns, dy_stride, x_stride, *places.scale), products or shifts
    if columns > (LONGEST_HELD if vectors else LONGEST_BY_ONES):
        return None
    tile_rows, block, warps = tile_of(columns) if vectors else _tile_by_ones(columns)
    while tile_rows > 1 and tile_rows >= 2 * members:
        tile_rows //= 2
    tile = tile_rows * block
    stages = 1
    if vectors and sums and 2 * BACKWARD_STAGES * tile * size < shared_memory(device):
        stages = BACKWARD_STAGES
    tiles = (members + tile_rows - 1) // tile_rows
    programs, chunks = groups * tiles, tiles
    if sums:
        most = sm_count(device) * (max(1, min(3, ELEMENTS // tile)) if stages > 1 else 3)
        chunks = max(1, min(most // groups, tiles))
        programs = min(groups * chunks, most)
    constants = {"CHUNKED": chunks > 1, "PRODUCTS": products, "SHIFTS": shifts, "ROWS": tile_rows, "BLOCK": block}
    numbers = groups * chunks, chunks, members, _step(places), columns, *places.kept[1:], *places.shared[1:]
    return _Plan(programs, numbers, {**constants, "STAGES": stages, "num_warps": warps})


def _runs_of(places: Places) -> Places:
    """Runs of rows that share the scale and the shift: only the last dimension over which both are broadcast counts as shared."""
    sizes, shared = list(places.sizes()), [1, 1, 1]
    for dim in (2, 1, 0):
        if sizes[dim] > 1 and places.scale[dim] == 0 and places.shift[dim] == 0:
            sizes[dim], shared[dim] = 1, sizes[dim]
            break
    return Places.of(tuple(sizes), tuple(shared), places.scale, places.shift)


def _in_order(members: int, step: int | None, tile_rows: int, tile_runs: int) -> bool:
    """Whether a program's number tells its rows: they lie side by side in full tiles, or each run is one row."""
    return members == 1 or (step == 1 and tile_runs == 1 and members % tile_rows == 0)


def _step(places: Places) -> int | None:
    """Rows from one member of a group to the next. None if that differs: a dimension that the scale keeps lies between them."""
    _, second, third = places.sizes()
    shared_0, shared_1, shared_2 = places.shared
    if shared_2 > 1:
        return 1 if shared_0 == shared_1 == 1 else None
    if shared_1 > 1:
        return third if shared_0 == 1 else None
    return second * third


def _tile_by_ones(columns: int) -> tuple[int, int, int]:
    """As `tile_of`, with half as many elements per thread, for elements that are loaded one by one."""
    tile_rows, block, warps = tile_of(columns)
    return tile_rows, block, min(2 * warps, 16)


host = ModulatedRMSNorm(TritonModulatedRMSNorm())
forward = implements(modulated_rms_norm)(host.forward)
backward = host.backward
