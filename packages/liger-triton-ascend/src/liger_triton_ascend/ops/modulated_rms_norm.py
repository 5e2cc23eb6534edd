"""RMS norm with a scale and a shift per group of rows: a core takes shares of a group's rows, which have one scale.

Backward adds up dy, and dy · x/rms, from which both dscale and dweight are made.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import modulated_rms_norm
from liger_core.contract import implements
from liger_core.host.modulated_rms_norm import ModulatedRMSNorm, ModulatedRMSNormKernels, Modulation
from liger_triton_ascend.ops._device import get_npu_core_count
from liger_triton_ascend.ops._rms import inverse_rms_of, load_scale, rounded, square
from liger_triton_ascend.ops._rows import as_rows, row_tiles

# Float32 tiles alive at once, by the suite's estimate of the Unified Buffer, with two for each tile that is transferred.
FORWARD_TILES = 7
BACKWARD_TILES = 10
LONG_TILES = 8


@triton.jit
def _rows_of(item, chunks, k1, k2, m1, m2, scale_0, scale_1, scale_2):
    """An item is a share of a group: return the group's first row and the place of its scale."""
    group = tl.cast(item // chunks, tl.int64)
    first, second, third = group // k2 // k1, group // k2 % k1, group % k2
    row = (first * (k1 * m1) + second) * (k2 * m2) + third
    return row, first * scale_0 + second * scale_1 + third * scale_2


@triton.jit
def _forward(
    y, inverse_rms, x, weight, scale, shift, items, chunks, tiles, columns, k1, k2, m1, m2, x_stride,
    scale_0, scale_1, scale_2, shift_0, shift_1, shift_2, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile has adjacent rows, so that it is transferred at once. Each run of m2 rows has `tiles` of them."""
    lane = tl.arange(0, BLOCK)
    column = lane[None, :]
    if weight is not None:
        weights = load_scale(weight, column, column < columns, offset, NATIVE)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        first_row, scale_at = _rows_of(item, chunks, k1, k2, m1, m2, scale_0, scale_1, scale_2)
        factor = 1.0 + tl.load(scale + scale_at + column, column < columns, other=0.0).to(tl.float32)
        run, tile = tl.cast(item % chunks // tiles, tl.int64), tl.cast(item % chunks % tiles, tl.int64)
        start = first_row + (run // m1 * (k1 * m1) + run % m1) * (k2 * m2)
        member = tile * ROWS + tl.arange(0, ROWS)
        inside = (member < m2)[:, None] & (column < columns)
        row = start + member
        xs = tl.load(x + row[:, None] * x_stride + column, inside, other=0.0)
        r = inverse_rms_of(tl.sum(square(xs, NATIVE), 1), columns, eps, xs.dtype, NATIVE)
        if inverse_rms is not None:
            tl.store(inverse_rms + row, r, member < m2)
        ys = xs.to(tl.float32) * r[:, None]
        if weight is not None:
            ys = rounded(ys, xs.dtype, ROUND) * weights
        ys = rounded(ys, xs.dtype, True) * factor
        if shift is not None:
            whole, within = start // (k2 * m2), start % (k2 * m2) + member
            shift_at = whole // (k1 * m1) * shift_0 + whole % (k1 * m1) * shift_1 + within * shift_2
            ys += tl.load(shift + shift_at[:, None] + column, inside, other=0.0).to(tl.float32)
        tl.store(y + row[:, None] * columns + column, ys, inside)


@triton.jit
def _forward_long(
    y, inverse_rms, x, weight, scale, shift, rows, columns, k1, k2, m1, m2, x_stride,
    scale_0, scale_1, scale_2, shift_0, shift_1, shift_2, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        first, second, third = row // (k2 * m2) // (k1 * m1), row // (k2 * m2) % (k1 * m1), row % (k2 * m2)
        scale_at = first * scale_0 + second * scale_1 + third * scale_2
        shift_at = first * shift_0 + second * shift_1 + third * shift_2
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            squares += square(tl.load(x + row * x_stride + column, column < columns, other=0.0), NATIVE)
        r = inverse_rms_of(tl.sum(squares, 0), columns, eps, x.dtype.element_ty, NATIVE)
        if inverse_rms is not None:
            tl.store(inverse_rms + row, r)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            xs = tl.load(x + row * x_stride + column, inside, other=0.0)
            ys = xs.to(tl.float32) * r
            if weight is not None:
                ys = rounded(ys, xs.dtype, ROUND) * load_scale(weight, column, inside, offset, NATIVE)
            ys = rounded(ys, xs.dtype, True)
            ys *= 1.0 + tl.load(scale + scale_at + column, inside, other=0.0).to(tl.float32)
            if shift is not None:
                ys += tl.load(shift + shift_at + column, inside, other=0.0).to(tl.float32)
            tl.store(y + row * columns + column, ys, inside)


@triton.jit
def _backward(
    dx, products, shifts, dy, x, weight, scale, inverse_rms, items, chunks, tiles, columns, k1, k2, m0, m1, m2,
    dy_stride, x_stride, scale_0, scale_1, scale_2, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of an item's rows go to a row of `products` and of `shifts`."""
    lane = tl.arange(0, BLOCK)
    column = lane[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        first_row, scale_at = _rows_of(item, chunks, k1, k2, m1, m2, scale_0, scale_1, scale_2)
        product = tl.zeros((BLOCK,), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for index in range(item % chunks, m0 * m1 * tiles, chunks):
            run, tile = tl.cast(index // tiles, tl.int64), tl.cast(index % tiles, tl.int64)
            start = first_row + (run // m1 * (k1 * m1) + run % m1) * (k2 * m2)
            member = tile * ROWS + tl.arange(0, ROWS)
            row = start + member
            inside = (member < m2)[:, None] & (column < columns)
            dys = tl.load(dy + row[:, None] * dy_stride + column, inside, other=0.0).to(tl.float32)
            if shifts is not None:
                total += tl.sum(dys, 0)
            if products is not None or dx is not None:
                r = tl.load(inverse_rms + row, member < m2, other=0.0)
                normed = tl.load(x + row[:, None] * x_stride + column, inside, other=0.0).to(tl.float32) * r[:, None]
            if products is not None:
                product += tl.sum(dys * normed, 0)
            if dx is not None:
                dys *= 1.0 + tl.load(scale + scale_at + column, column < columns, other=0.0).to(tl.float32)
                if weight is not None:
                    dys *= load_scale(weight, column, column < columns, offset, False)
                slope = tl.sum(dys * normed, 1) / columns
                tl.store(dx + row[:, None] * columns + column, (dys - normed * slope[:, None]) * r[:, None], inside)
        at = tl.cast(item, tl.int64) * columns + lane
        if products is not None:
            tl.store(products + at, product, lane < columns)
        if shifts is not None:
            tl.store(shifts + at, total, lane < columns)


@triton.jit
def _dx_long(
    dx, dy, x, weight, scale, inverse_rms, rows, columns, k1, k2, m1, m2, dy_stride, x_stride,
    scale_0, scale_1, scale_2, offset, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        first, second, third = row // (k2 * m2) // (k1 * m1), row // (k2 * m2) % (k1 * m1), row % (k2 * m2)
        scale_at = first * scale_0 + second * scale_1 + third * scale_2
        r = tl.load(inverse_rms + row)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            g = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
            g *= 1.0 + tl.load(scale + scale_at + column, inside, other=0.0).to(tl.float32)
            if weight is not None:
                g *= load_scale(weight, column, inside, offset, False)
            products += g * tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
        slope = tl.sum(products, 0) / columns * r * r
        for start in range(0, columns, BLOCK):
            column = start + lane
            inside = column < columns
            g = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
            g *= 1.0 + tl.load(scale + scale_at + column, inside, other=0.0).to(tl.float32)
            if weight is not None:
                g *= load_scale(weight, column, inside, offset, False)
            dxs = (g - tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32) * slope) * r
            tl.store(dx + row * columns + column, dxs, inside)


@triton.jit
def _sums_long(
    products, shifts, dy, x, inverse_rms, items, chunks, columns, k1, k2, m0, m1, m2, dy_stride, x_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_backward`, but one row after another, and one block of its columns after another."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        first_row, _ = _rows_of(item, chunks, k1, k2, m1, m2, 0, 0, 0)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            product = tl.zeros((BLOCK,), tl.float32)
            total = tl.zeros((BLOCK,), tl.float32)
            for index in range(item % chunks, m0 * m1 * m2, chunks):
                member = tl.cast(index, tl.int64)
                row = first_row + (member // m2 // m1 * (k1 * m1) + member // m2 % m1) * (k2 * m2) + member % m2
                dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
                if shifts is not None:
                    total += dys
                if products is not None:
                    r = tl.load(inverse_rms + row)
                    product += dys * (tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32) * r)
            at = tl.cast(item, tl.int64) * columns + column
            if products is not None:
                tl.store(products + at, product, inside)
            if shifts is not None:
                tl.store(shifts + at, total, inside)


class AscendModulatedRMSNorm(ModulatedRMSNormKernels):
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
        m0, m1, m2 = places.shared
        strides = *places.scale, *places.shift
        rounds, native = casting_mode != "gemma", casting_mode == "none"
        _, tile_rows, block = row_tiles(x, rows, columns, FORWARD_TILES)
        if block < columns:
            programs, _, block = row_tiles(x, rows, columns, LONG_TILES)
            _forward_long[(programs,)](
                y, inverse_rms, x, weight, scale, shift, rows, columns, *sizes, x_stride, *strides, eps, offset,
                ROUND=rounds, NATIVE=native, BLOCK=block,
            )  # fmt: skip
            return
        tile_rows, tiles = _runs(tile_rows, m2)
        items = places.groups * m0 * m1 * tiles
        _forward[(min(items, get_npu_core_count(x.device)),)](
            y, inverse_rms, x, weight, scale, shift, items, m0 * m1 * tiles, tiles, columns, *sizes, x_stride, *strides,
            eps, offset, ROUND=rounds, NATIVE=native, ROWS=tile_rows, BLOCK=block,
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
        sizes = *places.kept[1:], *places.shared
        groups, m2 = places.groups, places.shared[2]
        cores = get_npu_core_count(x.device)
        programs, tile_rows, block = row_tiles(x, rows, columns, BACKWARD_TILES)
        tile_rows, tiles = _runs(tile_rows, m2)
        # If groups are few, all cores share each of them. If they are many, each core takes whole groups.
        chunks = max(1, min(cores // groups, places.members // m2 * tiles))
        items = groups * chunks
        products = shifts = None
        if dweight is not None or dscale is not None:
            products = torch.empty((items, columns), dtype=torch.float32, device=x.device)
        if dshift is not None:
            shifts = torch.empty((items, columns), dtype=torch.float32, device=x.device)
        if block >= columns:
            _backward[(min(items, cores),)](
                dx, products, shifts, dy, x, weight, scale, inverse_rms, items, chunks, tiles, columns, *sizes,
                dy_stride, x_stride, *places.scale, offset, ROWS=tile_rows, BLOCK=block,
            )  # fmt: skip
        else:
            if dx is not None:
                _dx_long[(programs,)](
                    dx, dy, x, weight, scale, inverse_rms, rows, columns, *places.kept[1:], *places.shared[1:],
                    dy_stride, x_stride, *places.scale, offset, BLOCK=block,
                )  # fmt: skip
            if products is not None or shifts is not None:
                _sums_long[(min(items, cores),)](
                    products,
                    shifts,
                    dy,
                    x,
                    inverse_rms,
                    items,
                    chunks,
                    columns,
                    *sizes,
                    dy_stride,
                    x_stride,
                    BLOCK=block,
                )
        if shifts is not None and dshift is not None:
            dshift.view(groups, columns).copy_(shifts.view(groups, chunks, columns).sum(1))
        if products is not None:
            product = products.view(groups, chunks, columns).sum(1)
            if dscale is not None:
                dscale.view(groups, columns).copy_(product if weight is None else product * (offset + weight.float()))
            if dweight is not None:
                factor = 1.0 + scale.reshape(groups, columns).float()
                dweight.copy_((product * factor).sum(0))


def _runs(tile_rows: int, m2: int) -> tuple[int, int]:
    """Rows of a tile, at most enough for m2 adjacent ones, and how many tiles those m2 take."""
    while tile_rows >= 2 * m2:
        tile_rows //= 2
    return tile_rows, (m2 + tile_rows - 1) // tile_rows


host = ModulatedRMSNorm(AscendModulatedRMSNorm())
forward = implements(modulated_rms_norm)(host.forward)
backward = host.backward
