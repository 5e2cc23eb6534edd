"""RMS norm with a scale and a shift per group of rows: rms_norm's passes, with sums for each group.

In backward a program takes rows of one group. It adds up dy, and dy · x/rms, from which both dscale and dweight are made.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import modulated_rms_norm
from liger_core.contract import implements
from liger_core.host.modulated_rms_norm import ModulatedRMSNorm, ModulatedRMSNormKernels, Modulation
from liger_triton.ops._device import shared_memory, sm_count
from liger_triton.ops._launch import kernel
from liger_triton.ops._partial_sums import write_total
from liger_triton.ops._rms import inverse_rms_of, load_scale, rounded, scaled, square
from liger_triton.ops._rows import as_rows, in_vectors, multiply, tile_of, tile_read_twice

# Longer rows don't fit registers. Elements that are loaded one by one need addresses in x, the scale and the shift.
LONGEST_FORWARD = 16384
LONGEST_SUMMED = 8192
LONGEST_BY_ONES = 4096

SIZES = ["k1", "k2", "m1", "m2"]
"""Of `Places`' second and third dimension: the sizes that the scale keeps, and the sizes over which it is broadcast."""


@triton.jit
def _modulated(ys, scale, shift, scale_at, shift_at, inside):
    ys *= 1.0 + tl.load(scale + scale_at, inside, other=0.0).to(tl.float32)
    if shift is not None:
        ys += tl.load(shift + shift_at, inside, other=0.0).to(tl.float32)
    return ys


@kernel(do_not_specialize=SIZES)
def _forward(
    y, inverse_rms, x, weight, scale, shift, rows, columns, k1, k2, m1, m2, x_stride,
    scale_0, scale_1, scale_2, shift_0, shift_1, shift_2, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    first, second, third = row // (k2 * m2) // (k1 * m1), row // (k2 * m2) % (k1 * m1), row % (k2 * m2)
    xs = tl.load(x + row * x_stride + column, inside, other=0.0, eviction_policy="evict_last")
    r = inverse_rms_of(tl.sum(square(xs, NATIVE, BLOCK), 1, keep_dims=True), columns, eps, xs.dtype, NATIVE)
    if inverse_rms is not None:
        tl.store(inverse_rms + row, r, row < rows)
    xs = tl.load(x + row * x_stride + column, inside, other=0.0, eviction_policy="evict_first")
    ws = None
    if weight is not None:
        ws = tl.load(weight + column, column < columns, other=0.0, eviction_policy="evict_last")
    ys = rounded(scaled(xs, r, ws, offset, ROUND, NATIVE), xs.dtype, True)
    scale_at = first * scale_0 + second * scale_1 + third * scale_2 + column
    shift_at = first * shift_0 + second * shift_1 + third * shift_2 + column
    tl.store(y + row * columns + column, _modulated(ys, scale, shift, scale_at, shift_at, inside), inside)


@kernel(do_not_specialize=SIZES)
def _forward_long(
    y, inverse_rms, x, weight, scale, shift, columns, k1, k2, m1, m2, x_stride,
    scale_0, scale_1, scale_2, shift_0, shift_1, shift_2, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, second, third = row // (k2 * m2) // (k1 * m1), row // (k2 * m2) % (k1 * m1), row % (k2 * m2)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        squares += square(tl.load(x + row * x_stride + column, column < columns, other=0.0), NATIVE, BLOCK)
    r = inverse_rms_of(tl.sum(squares), columns, eps, x.dtype.element_ty, NATIVE)
    if inverse_rms is not None:
        tl.store(inverse_rms + row, r)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        xs = tl.load(x + row * x_stride + column, inside, other=0.0)
        ws = None if weight is None else tl.load(weight + column, inside, other=0.0)
        ys = rounded(scaled(xs, r, ws, offset, ROUND, NATIVE), xs.dtype, True)
        scale_at = first * scale_0 + second * scale_1 + third * scale_2 + column
        shift_at = first * shift_0 + second * shift_1 + third * shift_2 + column
        tl.store(y + row * columns + column, _modulated(ys, scale, shift, scale_at, shift_at, inside), inside)


@triton.jit
def _group_at(group, k1, k2, m1, m2, scale_0, scale_1, scale_2):
    """A group's first row, and the place of its scale."""
    first, second, third = group // k2 // k1, group // k2 % k1, group % k2
    return (first * (k1 * m1) + second) * (k2 * m2) + third, first * scale_0 + second * scale_1 + third * scale_2


@triton.jit
def _member_at(member, k1, k2, m1, m2):
    """How many rows a member of a group lies after the group's first row."""
    return (member // m2 // m1 * (k1 * m1) + member // m2 % m1) * (k2 * m2) + member % m2


@kernel(do_not_specialize=[*SIZES, "items", "chunks", "members"])
def _backward(
    dx, dscale, dshift, partial, dy, x, weight, scale, inverse_rms, items, chunks, members, columns, k1, k2, m1, m2,
    dy_stride, x_stride, scale_0, scale_1, scale_2, offset,
    CHUNKED: tl.constexpr, PRODUCTS: tl.constexpr, SHIFTS: tl.constexpr, WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """An item is a share of a group's rows.

    If CHUNKED, a group has several items. Each program takes one and writes its sums to `partial`. Otherwise an item is a whole
    group, and `partial` gets each program's part of dweight.
    """
    column = tl.arange(0, BLOCK)[None, :]
    exists = column < columns
    dweight = tl.zeros((1, BLOCK), tl.float32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        group = tl.cast(item // chunks, tl.int64)
        first_row, scale_at = _group_at(group, k1, k2, m1, m2, scale_0, scale_1, scale_2)
        factor = 1.0 + tl.load(scale + scale_at + column, exists, other=0.0).to(tl.float32)
        if weight is not None:
            factor *= load_scale(weight, column, exists, offset)
        products = tl.zeros((ROWS, BLOCK), tl.float32)
        shifts = tl.zeros((ROWS, BLOCK), tl.float32)
        for tile in tl.range(item % chunks, tl.cdiv(members, ROWS), chunks, num_stages=STAGES):
            member = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
            row = first_row + _member_at(member, k1, k2, m1, m2)
            inside = (member < members)[:, None] & exists
            dys = tl.load(dy + row[:, None] * dy_stride + column, inside, other=0.0).to(tl.float32)
            if SHIFTS:
                shifts += dys
            if PRODUCTS or dx is not None:
                r = tl.load(inverse_rms + row, member < members, other=0.0)[:, None]
                xs = tl.load(x + row[:, None] * x_stride + column, inside, other=0.0).to(tl.float32)
            if PRODUCTS:
                products += dys * (xs * r)
            if dx is not None:
                g = dys * factor
                slope = tl.sum(multiply(g, xs, BLOCK), 1, keep_dims=True) / columns * r * r * r
                tl.store(dx + row[:, None] * columns + column, g * r - xs * slope, inside)
        if PRODUCTS:
            sums = tl.sum(products, 0, keep_dims=True)
            if CHUNKED:
                tl.store(partial + tl.cast(item, tl.int64) * columns + column, sums, exists)
            else:
                if dscale is not None:
                    ds = sums
                    if weight is not None:
                        ds *= load_scale(weight, column, exists, offset)
                    tl.store(dscale + group * columns + column, ds, exists)
                if WEIGHT:
                    dweight += sums * (1.0 + tl.load(scale + scale_at + column, exists, other=0.0).to(tl.float32))
        if SHIFTS:
            sums = tl.sum(shifts, 0, keep_dims=True)
            if CHUNKED:
                tl.store(partial + tl.cast(PRODUCTS * items + item, tl.int64) * columns + column, sums, exists)
            else:
                tl.store(dshift + group * columns + column, sums, exists)
    if WEIGHT and not CHUNKED:
        tl.store(partial + tl.program_id(0).to(tl.int64) * columns + column, dweight, exists)


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


@kernel(do_not_specialize=[*SIZES, "groups", "chunks"])
def _add_up(
    dweight, dscale, dshift, partial, weight, scale, groups, chunks, columns, k1, k2, m1, m2,
    scale_0, scale_1, scale_2, offset, PRODUCTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up a block of columns of the sums that the programs of `_backward` wrote to `partial`."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weights = tl.zeros((BLOCK,), tl.float32)
    for index in range(0, groups):
        group = tl.cast(index, tl.int64)
        _, scale_at = _group_at(group, k1, k2, m1, m2, scale_0, scale_1, scale_2)
        products = tl.zeros((ROWS, BLOCK), tl.float32)
        shifts = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, chunks, ROWS):
            chunk = start + tl.arange(0, ROWS)
            at = (group * chunks + chunk)[:, None] * columns + column[None, :]
            inside = (chunk < chunks)[:, None] & (column < columns)[None, :]
            if PRODUCTS:
                products += tl.load(partial + at, inside, other=0.0)
            if dshift is not None:
                at += tl.cast(PRODUCTS * groups, tl.int64) * chunks * columns
                shifts += tl.load(partial + at, inside, other=0.0)
        if PRODUCTS:
            sums = tl.sum(products, 0)
            weights = _write(
                dscale, dweight, sums, weights, weight, scale, group, scale_at, column, columns, offset
            )  # fmt: skip
        if dshift is not None:
            tl.store(dshift + group * columns + column, tl.sum(shifts, 0), column < columns)
    if dweight is not None:
        tl.store(dweight + column, weights, column < columns)


@kernel(do_not_specialize=SIZES)
def _dx_long(
    dx, dy, x, weight, scale, inverse_rms, columns, k1, k2, m1, m2, dy_stride, x_stride, scale_0, scale_1, scale_2, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, second, third = row // (k2 * m2) // (k1 * m1), row // (k2 * m2) % (k1 * m1), row % (k2 * m2)
    scale += first * scale_0 + second * scale_1 + third * scale_2
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


@kernel(do_not_specialize=[*SIZES, "groups", "members"])
def _sums_long(
    dweight, dscale, dshift, dy, x, weight, scale, inverse_rms, groups, members, columns, k1, k2, m1, m2,
    dy_stride, x_stride, scale_0, scale_1, scale_2, offset, PRODUCTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of all rows."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weights = tl.zeros((BLOCK,), tl.float32)
    for index in range(0, groups):
        group = tl.cast(index, tl.int64)
        first_row, scale_at = _group_at(group, k1, k2, m1, m2, scale_0, scale_1, scale_2)
        products = tl.zeros((ROWS, BLOCK), tl.float32)
        shifts = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, members, ROWS):
            member = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
            row = first_row + _member_at(member, k1, k2, m1, m2)
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


class _Kernels(ModulatedRMSNormKernels):
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
        rows = x.numel() // columns
        x, x_stride = as_rows(x)
        sizes = *places.kept[1:], *places.shared[1:]
        strides = *places.scale, *places.shift
        rounds, native = casting_mode != "gemma", casting_mode == "none"
        vectors = in_vectors(columns, x_stride, *strides)
        if columns <= (LONGEST_FORWARD if vectors else LONGEST_BY_ONES):
            tile_rows, block, warps = tile_read_twice(columns) if vectors else _tile_by_ones(columns)
            _forward[((rows + tile_rows - 1) // tile_rows,)](
                y, inverse_rms, x, weight, scale, shift, rows, columns, *sizes, x_stride, *strides, eps, offset,
                ROUND=rounds, NATIVE=native, ROWS=tile_rows, BLOCK=block, num_warps=16 if block >= 8192 else warps,
            )  # fmt: skip
        else:
            _forward_long[(rows,)](
                y, inverse_rms, x, weight, scale, shift, columns, *sizes, x_stride, *strides, eps, offset,
                ROUND=rounds, NATIVE=native, BLOCK=4096, num_warps=8,
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
        rows = x.numel() // columns
        dy, dy_stride = as_rows(dy)
        x, x_stride = as_rows(x)
        sizes = *places.kept[1:], *places.shared[1:]
        groups, members = places.groups(), places.members()
        products = dscale is not None or dweight is not None
        sums = products + (dshift is not None)
        vectors = in_vectors(columns, dy_stride, x_stride, *places.scale)
        if columns > (LONGEST_SUMMED if vectors else LONGEST_BY_ONES):
            if dx is not None:
                _dx_long[(rows,)](
                    dx, dy, x, weight, scale, inverse_rms, columns, *sizes, dy_stride, x_stride, *places.scale, offset,
                    BLOCK=4096, num_warps=8,
                )  # fmt: skip
            if sums:
                # 64 columns, a 128-byte line of bf16; more if rows are few.
                sum_rows = 64 if members > 16 else 16
                _sums_long[((columns * sum_rows + 4095) // 4096,)](
                    dweight, dscale, dshift, dy, x, weight, scale, inverse_rms, groups, members, columns, *sizes,
                    dy_stride, x_stride, *places.scale, offset,
                    PRODUCTS=products, ROWS=sum_rows, BLOCK=4096 // sum_rows,
                )  # fmt: skip
            return
        tile_rows, block, warps = tile_of(columns) if vectors else _tile_by_ones(columns)
        while tile_rows > 1 and tile_rows >= 2 * members:
            tile_rows //= 2
        tile = tile_rows * block
        stages = 3 if vectors and sums and 6 * tile * x.element_size() < shared_memory(x.device) else 1
        tiles = (members + tile_rows - 1) // tile_rows
        programs, chunks, partial = groups * tiles, tiles, None
        if sums:
            most = sm_count(x.device) * (max(1, min(3, 8192 // tile)) if stages > 1 else 3)
            chunks = max(1, min(most // groups, tiles))
            programs = min(groups * chunks, most)
            if chunks > 1:
                partial = torch.empty((sums, groups * chunks, columns), dtype=torch.float32, device=x.device)
            elif dweight is not None:
                partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
        _backward[(programs,)](
            dx, dscale, dshift, partial, dy, x, weight, scale, inverse_rms, groups * chunks, chunks, members, columns,
            *sizes, dy_stride, x_stride, *places.scale, offset,
            CHUNKED=chunks > 1, PRODUCTS=products, SHIFTS=dshift is not None, WEIGHT=dweight is not None,
            ROWS=tile_rows, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        if sums and chunks > 1:
            _add_up[((columns + 31) // 32,)](
                dweight, dscale, dshift, partial, weight, scale, groups, chunks, columns, *sizes, *places.scale, offset,
                PRODUCTS=products, ROWS=64, BLOCK=32,
            )  # fmt: skip
        elif dweight is not None:
            write_total(dweight, partial)


def _tile_by_ones(columns: int) -> tuple[int, int, int]:
    """As `tile_of`, with half as many elements per thread, for elements that are loaded one by one."""
    tile_rows, block, warps = tile_of(columns)
    return tile_rows, block, min(2 * warps, 16)


host = ModulatedRMSNorm(_Kernels())
forward = implements(modulated_rms_norm)(host.forward)
backward = host.backward
