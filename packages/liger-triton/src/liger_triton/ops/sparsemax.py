"""Sparsemax: Newton's method finds tau on the greatest elements of groups of columns, and a look at the whole row proves it.

tau is the root of f(tau) = Σ max(x − tau, 0) − 1, which is convex. A step of Newton's method is tau ← (sum of the elements above
tau − 1) / (their number). Steps that start left of the root stay left of it. Once the number doesn't fall any more, tau is
exact. A step divides the product of f and its slope by at least four, so every row needs few steps.

The root for a part of a row is left of the row's own root. So the first steps take only the greatest element of each group of
columns. Their root is the row's own unless two elements of a group are in the support. That is rare, and then steps go on with
all elements. A row stays in registers; a long row of 2-byte elements does so in that form. A row too long for that is read
twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import sparsemax
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._device import warp_size
from liger_triton.ops._launch import kernel
from liger_triton.ops._rows import again, as_rows, in_pairs, interleaved, packed, power_of_2, unpacked
from liger_triton.ops._sums import add_two

# Rows up to this length stay in registers. The forward keeps them in float32, which at 16384 columns fills half of the
# registers. The backward reads dy only inside y's support. Reading it again, from the cache, is faster than reserving registers
# for all of it: on an H200 (triton 3.6), 4096 rows of 8192 in bfloat16 take 0.047 ms, in registers 0.065 to 0.076.
LONGEST_FORWARD = 16384
LONGEST_BACKWARD = 4096
# Between these lengths the forward holds rows of 2-byte elements in that form; those longer than LONGEST_FORWARD only if they
# fill seven eighths of a block. On an H200 (triton 3.6), in bfloat16, 4096 rows of 8192 take 0.0396 ms, held in float32 0.0473;
# of 16384 0.079 and 0.096; of 32768 0.148, read twice 0.184; 2048 of 57344 0.165 and 0.183, of 65536 0.174 and 0.198. But 4096
# rows of 4096 take 0.026 both ways, of 20480 0.128 and 0.121, and 2048 of 49152 0.159 and 0.148.
SHORTEST_PACKED = 4097
LONGEST_PACKED = 65536


@triton.jit
def _lanes(GROUPS: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr):
    """The columns of each group.

    If a thread can load a group at once, its columns are neighbours. Otherwise neighbouring threads load neighbouring columns.
    """
    group, member = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, GROUP)[None, None, :]
    return group * GROUP + member if ALIGNED else member * GROUPS + group


@triton.jit
def _sum_rows(a, b):
    """The sums of the rows of two tensors. Threads wait for each other here, so both are summed at once."""
    return tl.reduce((tl.sum(a, 2), tl.sum(b, 2)), 1, add_two)


@triton.jit
def _any(rows):
    return tl.max(rows.to(tl.int32), 0)


@triton.jit
def _newton(z, tau, count):
    """Take Newton's steps from tau while the number of elements above it falls, at first below `count`. Return both.

    NaN counts as above, so it spreads. Quotients are rounded to nearest: an element that equals tau in exact arithmetic equals
    it here.
    """
    active = tl.full((), 1, tl.int32)
    while active != 0:
        below = z <= tau[:, None, None]
        total, above = _sum_rows(tl.where(below, 0.0, z), tl.where(below, 0.0, 1.0))
        fewer = above < count
        tau = tl.where(fewer, tl.math.div_rn(total - 1.0, above), tau)
        count = above
        active = _any(fewer)
    return tau, count


@triton.jit
def _newton_of_best(best, top):
    """tau of a part of each row, relative to `top`, the row's greatest element; and how many elements of the part exceed it."""
    zeros = tl.zeros_like(top)
    return _newton(best - top[:, None, None], zeros - 1.0, zeros + float("inf"))


@triton.jit
def _result(above, dtype: tl.constexpr):
    """max(above, 0). A result greater than 0 stays so when it is rounded: backward finds the support by that."""
    result = tl.maximum(above, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.float16:
        result = tl.where(above > 0.0, tl.maximum(above, 5.9604644775390625e-08), result)
    return result


@kernel
def _forward(
    y, x, rows, columns, x_stride,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    column = _lanes(GROUPS, GROUP, ALIGNED)
    inside = (row < rows) & (column < columns)
    z = tl.load(x + row * x_stride + column, inside, other=float("-inf")).to(tl.float32)
    best = tl.max(z, 2)
    top = tl.max(best, 1)
    tau, count = _newton_of_best(best[:, :, None], top)
    z -= top[:, None, None]
    more = tl.sum(tl.sum(tl.where(z <= tau[:, None, None], 0.0, 1.0), 2), 1) != count
    if _any(more) != 0:
        tau, _ = _newton(z, tau, tl.where(more, float("inf"), count))
    tl.store(y + row * columns + column, _result(z - tau[:, None, None], y.dtype.element_ty), inside)


@triton.jit
def _sums_above(pairs, dtype: tl.constexpr, top, tau):
    """The sum, relative to `top`, of a row's elements that are above tau, and their number."""
    first, second = unpacked(again(pairs, tau), dtype)
    first, second = first - top, second - top
    total = tl.where(first <= tau, 0.0, first) + tl.where(second <= tau, 0.0, second)
    count = tl.where(first <= tau, 0.0, 1.0) + tl.where(second <= tau, 0.0, 1.0)
    return tl.reduce((tl.sum(total, 1), tl.sum(count, 1)), 0, add_two, keep_dims=True)


@kernel
def _forward_packed(y, x, columns, x_stride, BLOCK: tl.constexpr):
    """A row of 2-byte elements, held in that form and widened for each look at it. Its groups have 64 columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = column < columns
    dtype: tl.constexpr = x.dtype.element_ty
    pairs = packed(tl.load(x + row * x_stride + column, inside, other=float("-inf")))
    first, second = unpacked(pairs, dtype)
    best = tl.max(tl.maximum(first, second), 1)
    best = tl.max(tl.reshape(best, (8, BLOCK // 64)), 0)[None, :]
    top = tl.max(best, 1)
    tau, count = _newton_of_best(best[:, :, None], top)
    total, above = _sums_above(pairs, dtype, top, tau)
    active = _any(above != count)
    while active != 0:  # two elements of a group are in the support: a step over the whole row
        tau = tl.math.div_rn(total - 1.0, above)
        count = above
        total, above = _sums_above(pairs, dtype, top, tau)
        active = _any(above < count)
    first, second = unpacked(again(pairs, total), dtype)
    first = _result(first - top - tau, dtype)
    second = _result(second - top - tau, dtype)
    tl.store(y + row * columns + column, interleaved(first, second, dtype), inside)


@kernel
def _forward_long(y, x, columns, x_stride, GROUPS: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y += row * columns
    lanes = _lanes(GROUPS, GROUP, ALIGNED)
    best = tl.full(lanes.shape, float("-inf"), tl.float32)
    for start in range(0, columns, GROUPS * GROUP):
        column = start + lanes
        best = tl.maximum(best, tl.load(x + column, column < columns, other=float("-inf")).to(tl.float32))
    top = tl.max(tl.max(best, 2), 1)
    tau, count = _newton_of_best(best, top)
    seen = tl.zeros_like(top) + float("inf")
    active = tl.full((), 1, tl.int32)
    while active != 0:  # once, unless two of a lane's columns are in the support
        totals = tl.zeros(lanes.shape, tl.float32)
        counts = tl.zeros(lanes.shape, tl.float32)
        for back in range(0, columns, GROUPS * GROUP):  # backwards: what was read last is still in the cache
            column = (columns - 1) // (GROUPS * GROUP) * (GROUPS * GROUP) - back + lanes
            inside = column < columns
            z = tl.load(x + column, inside, other=float("-inf")).to(tl.float32) - top[:, None, None]
            above = z - tau[:, None, None]
            totals += tl.where(above <= 0.0, 0.0, z)
            counts += tl.where(above <= 0.0, 0.0, 1.0)
            tl.store(y + column, _result(above, y.dtype.element_ty), inside)
        total, above = _sum_rows(totals, counts)
        fewer = (above != count) & (above < seen)
        tau = tl.where(fewer, tl.math.div_rn(total - 1.0, above), tau)
        count = above
        seen = above
        active = _any(fewer)


@triton.jit
def _load_support(dy, y, inside):
    """Whether y is in the support, and dy there. Groups of columns outside the support, which are most, are not read."""
    support = tl.load(y, inside, other=0.0) > 0.0
    used = tl.max(support.to(tl.int32), 2, keep_dims=True) > 0
    return support, tl.load(dy, inside & used, other=0.0).to(tl.float32)


@kernel
def _backward(
    dx, dy, y, rows, columns, dy_stride,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    column = _lanes(GROUPS, GROUP, ALIGNED)
    inside = (row < rows) & (column < columns)
    support, dys = _load_support(dy + row * dy_stride + column, y + row * columns + column, inside)
    total = tl.sum(tl.sum(tl.where(support, dys, 0.0), 2), 1)
    mean = total / tl.sum(tl.sum(tl.where(support, 1.0, 0.0), 2), 1)
    tl.store(dx + row * columns + column, tl.where(support, dys - mean[:, None, None], 0.0), inside)


@kernel
def _backward_long(dx, dy, y, columns, dy_stride, GROUPS: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dx += row * columns
    dy += row * dy_stride
    y += row * columns
    lanes = _lanes(GROUPS, GROUP, ALIGNED)
    totals = tl.zeros(lanes.shape, tl.float32)
    counts = tl.zeros(lanes.shape, tl.float32)
    for start in range(0, columns, GROUPS * GROUP):
        column = start + lanes
        support, dys = _load_support(dy + column, y + column, column < columns)
        totals += tl.where(support, dys, 0.0)
        counts += tl.where(support, 1.0, 0.0)
    mean = tl.sum(totals) / tl.sum(counts)
    for back in range(0, columns, GROUPS * GROUP):
        column = (columns - 1) // (GROUPS * GROUP) * (GROUPS * GROUP) - back + lanes
        inside = column < columns
        support, dys = _load_support(dy + column, y + column, inside)
        tl.store(dx + column, tl.where(support, dys - mean, 0.0), inside)


def _along(x: Tensor, dim: int) -> Tensor:
    """x with `dim` last."""
    return x if dim == -1 or dim == x.dim() - 1 else x.movedim(dim, -1)


def _back(y: Tensor, dim: int) -> Tensor:
    """Undoes `_along`."""
    return y if dim == -1 or dim == y.dim() - 1 else y.movedim(-1, dim)


def _launch(short: Any, long: Any, longest: int, result: Tensor, tensors: tuple[Tensor, ...], stride: int) -> None:
    columns = result.shape[-1]
    rows = result.numel() // columns
    group = 16 // result.element_size()  # what a thread loads at once
    aligned = columns % 16 == 0 and stride % 16 == 0
    if columns > longest:
        # 8 columns per thread, in 44 registers for bf16 and 48 for float32 on sm_90. On an H200, in blocks of 4096 and of 2048,
        # 4096 rows of 32768 take 0.181 and 0.189 ms forward, 0.180 and 0.195 backward. Of 8192, backward takes 0.052 and 0.047.
        block = 4096 if columns > 16384 else 2048
        long[(rows,)](
            result, *tensors, columns, stride, GROUPS=block // group, GROUP=group, ALIGNED=aligned,
            num_warps=block // 256,
        )  # fmt: skip
        return
    # Rows of 2048 columns together, or one row; 32 columns per thread.
    block = power_of_2(columns)
    tile = max(1, 2048 // block)
    short[((rows + tile - 1) // tile,)](
        result, *tensors, rows, columns, stride, ROWS=tile, GROUPS=block // group, GROUP=group, ALIGNED=aligned,
        num_warps=min(max(4, block // 1024), 16),
    )  # fmt: skip


def _packs(x: Tensor, columns: int, stride: int) -> bool:
    """Whether the forward holds rows of 2-byte elements in that form."""
    if not SHORTEST_PACKED <= columns <= LONGEST_PACKED or not in_pairs(x, columns, stride):
        return False
    return columns <= LONGEST_FORWARD or 8 * columns >= 7 * power_of_2(columns)


@implements(sparsemax)
def forward(needs: Needs, x: Tensor, dim: int = -1) -> tuple[Tensor, Saved]:
    x = _along(x, dim)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, x_stride = as_rows(x)
    columns = y.shape[-1]
    if _packs(x, columns, x_stride):
        # 128 columns per thread: with 64, 4096 rows of 32768 take 0.155 ms.
        block = power_of_2(columns)
        warps = max(block // 128, 128) // warp_size(x.device)
        _forward_packed[(y.numel() // columns,)](y, x, columns, x_stride, BLOCK=block, num_warps=warps)
    else:
        _launch(_forward, _forward_long, LONGEST_FORWARD, y, (x,), x_stride)
    y = _back(y, dim)
    return y, (y,) if needs[0] else ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, dim: int) -> tuple[Tensor | None, ...]:
    y = _along(saved[0], dim)
    dx = torch.empty_like(y)
    dy, dy_stride = as_rows(_along(dy, dim))
    _launch(_backward, _backward_long, LONGEST_BACKWARD, dx, (dy, y), dy_stride)
    return (_back(dx, dim),)
