"""RMS norm: a row is read again from the cache for its output. With a residual, it stays in registers if it fits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_core import rms_norm
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._device import shared_memory, sm_count, warp_size
from liger_triton.ops._launch import kernel
from liger_triton.ops._rms import inverse_rms_of, load_scale, scaled, square
from liger_triton.ops._rows import again, as_rows, in_vectors, interleaved, packed, tile_of, tile_read_twice, unpacked
from liger_triton.ops._sums import BYTES_AT_ONCE, COLUMNS_AT_ONCE, STAGES_AT_ONCE, at_once, multiply, total

# Longer rows don't fit registers. Forward adds up x and has 128 columns per thread of 8 warps. With a residual it keeps the sum
# and has 64 per thread of 16. Backward keeps x and dy and has 32 per thread of 16. If it keeps the sum of dweight as well, it
# has 16, or 32 if x and dy are held as 2-byte elements. If elements are loaded one by one, each load needs an address, so the
# limits are half.
LONGEST_FORWARD = 32768
LONGEST_BACKWARD = 16384
LONGEST_SUMMED = 8192


@triton.jit
def _load(x, residual, x_at, residual_at, inside, EVICT: tl.constexpr):
    """x, or x + residual rounded to x's dtype."""
    xs = tl.load(x + x_at, inside, other=0.0, eviction_policy=EVICT)
    if residual is not None:
        xs = (xs.to(tl.float32) + tl.load(residual + residual_at, inside, other=0.0).to(tl.float32)).to(xs.dtype)
    return xs


@kernel
def _forward(
    y, h, inverse_rms, x, residual, weight, rows, columns, x_stride, residual_stride, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    ws = None
    if residual is not None and weight is not None:  # before the row: nothing waits for it after the sum
        ws = tl.load(weight + column, column < columns, other=0.0, eviction_policy="evict_last")
    keep: tl.constexpr = "evict_last" if residual is None else ""
    xs = _load(x, residual, row * x_stride + column, row * residual_stride + column, inside, keep)
    if h is not None:
        tl.store(h + row * columns + column, xs, inside)
    r = inverse_rms_of(tl.sum(square(xs, NATIVE, BLOCK), 1, keep_dims=True), columns, eps, xs.dtype, NATIVE)
    if inverse_rms is not None:
        tl.store(inverse_rms + row, r, row < rows)
    if residual is None:
        xs = tl.load(x + row * x_stride + column, inside, other=0.0, eviction_policy="evict_first")
        if weight is not None:
            ws = tl.load(weight + column, column < columns, other=0.0, eviction_policy="evict_last")
    ys = scaled(xs, r, ws, offset, ROUND, NATIVE)
    tl.store(y + row * columns + column, ys, inside)


@kernel
def _forward_long(
    y, h, inverse_rms, x, residual, weight, columns, x_stride, residual_stride, eps, offset,
    ROUND: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        xs = _load(x, residual, row * x_stride + column, row * residual_stride + column, column < columns, "")
        squares += square(xs, NATIVE, BLOCK)
    r = inverse_rms_of(tl.sum(squares), columns, eps, x.dtype.element_ty, NATIVE)
    if inverse_rms is not None:
        tl.store(inverse_rms + row, r)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        xs = _load(x, residual, row * x_stride + column, row * residual_stride + column, inside, "")
        if h is not None:
            tl.store(h + row * columns + column, xs, inside)
        ws = None if weight is None else tl.load(weight + column, inside, other=0.0)
        ys = scaled(xs, r, ws, offset, ROUND, NATIVE)
        tl.store(y + row * columns + column, ys, inside)


@triton.jit
def _take_rows(
    dx, dy, dh, x, weight, scale, inverse_rms, tile, rows, columns, dy_stride, dh_stride, x_stride, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx of a tile of rows, unless it is None, and return dy and x · r there. Without `scale`, it loads `weight`."""
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    r = tl.load(inverse_rms + row, row < rows, other=0.0)[:, None]
    row = row[:, None]
    inside = (row < rows) & (column < columns)
    xs = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    dys = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
    if dx is not None:
        g = dys
        if weight is not None:
            g *= load_scale(weight, column, column < columns, offset) if scale is None else scale
        slope = tl.sum(multiply(g, xs, BLOCK), 1, keep_dims=True) / columns * r * r * r
        dxs = g * r - xs * slope
        if dh is not None:
            dxs += tl.load(dh + row * dh_stride + column, inside, other=0.0).to(tl.float32)
        tl.store(dx + row * columns + column, dxs, inside)
    return dys, xs * r


@kernel
def _backward(
    dx, partial, dy, dh, x, weight, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    scale = None  # if registers are short, each tile loads it from L1
    if weight is not None and STAGES > 1:
        scale = load_scale(weight, column[None, :], column[None, :] < columns, offset)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        dys, normed = _take_rows(
            dx, dy, dh, x, weight, scale, inverse_rms, tile, rows, columns, dy_stride, dh_stride, x_stride, offset,
            ROWS, BLOCK,
        )  # fmt: skip
        if partial is not None:
            dweight += dys * normed
    if partial is not None:
        tl.store(partial + tl.program_id(0).to(tl.int64) * columns + column, tl.sum(dweight, 0), column < columns)


@triton.jit
def _load_scale_in_pairs(weight, offset, columns, BLOCK: tl.constexpr):
    """The scale of the first and of the second column of each pair."""
    column = tl.arange(0, BLOCK)[None, :]
    scale = load_scale(weight, column, column < columns, offset)
    return tl.split(tl.reshape(scale, (1, BLOCK // 2, 2)))


@kernel
def _backward_packed(
    dx, partial, dy, dh, x, weight, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of 2-byte elements, held in that form."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    dweight_first = tl.zeros((1, BLOCK // 2), tl.float32)
    dweight_second = tl.zeros((1, BLOCK // 2), tl.float32)
    for tile in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        row = tl.cast(tile, tl.int64)
        r = tl.load(inverse_rms + row)
        xs = packed(tl.load(x + row * x_stride + column, inside, other=0.0))
        dys = packed(tl.load(dy + row * dy_stride + column, inside, other=0.0))
        a, b = unpacked(xs, x.dtype.element_ty)
        da, db = unpacked(dys, dy.dtype.element_ty)
        dweight_first += da * (a * r)
        dweight_second += db * (b * r)
        first, second = _load_scale_in_pairs(weight, offset, columns, BLOCK)
        slope = tl.sum(da * first * a + db * second * b, 1, keep_dims=True) / columns * r * r * r
        a, b = unpacked(again(xs, slope), x.dtype.element_ty)
        da, db = unpacked(again(dys, slope), dy.dtype.element_ty)
        first, second = _load_scale_in_pairs(weight, offset, columns, BLOCK)
        dxs = interleaved(da * first * r - a * slope, db * second * r - b * slope, tl.float32)
        if dh is not None:
            dxs += tl.load(dh + row * dh_stride + column, inside, other=0.0).to(tl.float32)
        tl.store(dx + row * columns + column, dxs, inside)
    sums = interleaved(dweight_first, dweight_second, tl.float32)
    tl.store(partial + tl.program_id(0).to(tl.int64) * columns + column, sums, inside)


@triton.jit
def _sum_rows(
    dweight, dy, x, inverse_rms, rows, columns, dy_stride, x_stride, block, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dweight of a block of columns. If STAGES is None, it is the kernel's own number."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, rows, ROWS, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        r = tl.load(inverse_rms + row, row < rows, other=0.0)[:, None]
        row = row[:, None]
        inside = (row < rows) & (column < columns)[None, :]
        normed = tl.load(x + row * x_stride + column[None, :], inside, other=0.0).to(tl.float32) * r
        sums += tl.load(dy + row * dy_stride + column[None, :], inside, other=0.0).to(tl.float32) * normed
    tl.store(dweight + column, tl.sum(sums, 0), column < columns)


@kernel
def _backward_at_once(
    dx, dweight, dy, dh, x, weight, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr,
    SUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The first programs add up columns, the others take rows. x and dy are read twice, but no program waits for a sum."""
    blocks = tl.cdiv(columns, SUM_COLUMNS)
    if tl.program_id(0) < blocks:
        _sum_rows(
            dweight, dy, x, inverse_rms, rows, columns, dy_stride, x_stride, tl.program_id(0),
            SUM_ROWS, SUM_COLUMNS, SUM_STAGES,
        )  # fmt: skip
    else:
        _take_rows(
            dx, dy, dh, x, weight, None, inverse_rms, tl.program_id(0) - blocks, rows, columns,
            dy_stride, dh_stride, x_stride, offset, ROWS, BLOCK,
        )  # fmt: skip


@kernel
def _dx_long(
    dx, dy, dh, x, weight, inverse_rms, columns, dy_stride, dh_stride, x_stride, offset, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    r = tl.load(inverse_rms + row)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        g = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        if weight is not None:
            g *= load_scale(weight, column, inside, offset)
        products += g * tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    slope = tl.sum(products) / columns * r * r * r
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        g = tl.load(dy + row * dy_stride + column, inside, other=0.0).to(tl.float32)
        if weight is not None:
            g *= load_scale(weight, column, inside, offset)
        dxs = g * r - tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32) * slope
        if dh is not None:
            dxs += tl.load(dh + row * dh_stride + column, inside, other=0.0).to(tl.float32)
        tl.store(dx + row * columns + column, dxs, inside)


@kernel
def _dweight_long(
    dweight, dy, x, inverse_rms, rows, columns, dy_stride, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    _sum_rows(dweight, dy, x, inverse_rms, rows, columns, dy_stride, x_stride, tl.program_id(0), ROWS, BLOCK, None)


def launch_forward(
    grad: bool, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, h = x + residual (None without a residual), and the inverse RMS of each row (None unless `grad`)."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h, residual_stride = None, 0
    if residual is not None:
        h = torch.empty_like(y)
        residual, residual_stride = as_rows(residual)
    inverse_rms = torch.empty(rows, dtype=torch.float32, device=x.device) if grad else None
    x, x_stride = as_rows(x)
    if weight is not None:
        weight = weight.contiguous()
    rounds, native = casting_mode != "gemma", casting_mode == "none"
    # 64 columns a thread of x + residual in float32 would spill registers.
    longest = LONGEST_FORWARD if residual is None or x.element_size() == 2 else LONGEST_FORWARD // 2
    if columns <= (longest if in_vectors(columns, x_stride, residual_stride) else LONGEST_FORWARD // 2):
        tile_rows, block, warps = _tile_of_forward(columns, residual is not None, x.element_size(), x.device)
        _forward[((rows + tile_rows - 1) // tile_rows,)](
            y, h, inverse_rms, x, residual, weight, rows, columns, x_stride, residual_stride, eps, offset,
            ROUND=rounds, NATIVE=native, ROWS=tile_rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    else:
        _forward_long[(rows,)](
            y, h, inverse_rms, x, residual, weight, columns, x_stride, residual_stride, eps, offset,
            ROUND=rounds, NATIVE=native, BLOCK=4096, num_warps=8,
        )  # fmt: skip
    return y, h, inverse_rms


def _tile_of_forward(columns: int, fused: bool, size: int, device: torch.device) -> tuple[int, int, int]:
    """Rows, columns and warps of a program, for elements of `size` bytes.

    Times were measured on an H200 (triton 3.6) in bfloat16, in ms.
    """
    if fused:
        tile_rows, block, warps = tile_of(columns)
        if block <= 4096:  # 2048 x 2048: 0.0133, with four warps 0.0144; 8192 x 4096: 0.0712, with eight 0.0718
            return tile_rows, block, max(2, warps // 2)
        # 16384 x 8192: 0.263, with 16 warps 0.266
        return tile_rows, block, 1024 // warp_size(device) if block == 8192 else warps
    tile_rows, block, warps = tile_read_twice(columns)
    # 16384 x 8192: 0.130, with eight warps 0.133, held 0.134. 16384 x 16384: 0.263, with 16 warps 0.275.
    # 128 float32 columns per thread spill registers.
    return tile_rows, block, 16 if block == 8192 or (block == 32768 and size == 4) else warps


def launch_backward(
    needs_x: bool,
    needs_weight: bool,
    dy: Tensor,
    dh: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    inverse_rms: Tensor,
    offset: float,
) -> tuple[Tensor | None, Tensor | None]:
    """dx, plus `dh` if there is one, and dweight; each if it is needed."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    dh_stride = 0
    if dh is not None:
        dh, dh_stride = as_rows(dh)
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    scale = None if weight is None else weight.contiguous()
    vectors = in_vectors(columns, dy_stride, dh_stride, x_stride)
    tile_rows, block, warps = tile_of(columns)
    programs = (rows + tile_rows - 1) // tile_rows
    if needs_x and needs_weight and at_once(x, rows, columns):
        dweight = torch.empty_like(scale)
        _backward_at_once[(programs + (columns + COLUMNS_AT_ONCE - 1) // COLUMNS_AT_ONCE,)](
            dx, dweight, dy, dh, x, scale, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
            ROWS=tile_rows, BLOCK=block, SUM_ROWS=BYTES_AT_ONCE // x.element_size(), SUM_COLUMNS=COLUMNS_AT_ONCE,
            SUM_STAGES=STAGES_AT_ONCE, num_warps=warps,
        )  # fmt: skip
        return dx, dweight
    partial, stages = None, 1
    if needs_x and needs_weight and vectors and x.element_size() == 2 and LONGEST_SUMMED < columns <= LONGEST_BACKWARD:
        programs = min(rows, sm_count(x.device))
        partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
        _backward_packed[(programs,)](
            dx, partial, dy, dh, x, scale, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return dx, total(partial, weight)
    if columns > LONGEST_SUMMED:
        dweight = torch.empty_like(scale) if needs_weight else None
        if needs_x and columns <= (LONGEST_BACKWARD if vectors else LONGEST_BACKWARD // 2):
            _backward[(programs,)](
                dx, None, dy, dh, x, scale, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
                ROWS=tile_rows, BLOCK=block, STAGES=1, num_warps=warps,
            )  # fmt: skip
        elif needs_x:
            _dx_long[(rows,)](
                dx, dy, dh, x, scale, inverse_rms, columns, dy_stride, dh_stride, x_stride, offset,
                BLOCK=4096, num_warps=8,
            )  # fmt: skip
        if needs_weight:
            # Rows are long here: blocks of 64 columns, a 128-byte line of bf16, still give at least 129 programs. With few rows,
            # blocks have more.
            sum_rows = 64 if rows > 16 else 16
            _dweight_long[((columns * sum_rows + 4095) // 4096,)](
                dweight, dy, x, inverse_rms, rows, columns, dy_stride, x_stride, ROWS=sum_rows, BLOCK=4096 // sum_rows
            )
        return dx, dweight
    if needs_weight:
        # Two tiles are prefetched beside the one that is worked on, if shared memory holds all three. Then a few programs keep
        # memory busy. On an H200 (triton 3.6), in bfloat16, 16384 x 8192 takes 0.201 ms with one program per multiprocessor and
        # 0.208 with two; with two tiles 0.277. 8192 x 4096 takes 0.062 with two programs, 0.069 with one or four.
        tile = tile_rows * block
        stages = 3 if 3 * (3 if dh is not None else 2) * tile * x.element_size() < shared_memory(x.device) else 1
        most = max(1, min(3, 8192 // tile)) if stages > 1 else 3 if tile_rows >= 8 else 16 // warps
        programs = min(programs, sm_count(x.device) * most)
        partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        dx, partial, dy, dh, x, scale, inverse_rms, rows, columns, dy_stride, dh_stride, x_stride, offset,
        ROWS=tile_rows, BLOCK=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, total(partial, weight) if needs_weight else None


@implements(rms_norm)
def forward(
    needs: Needs,
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Saved]:
    grad = True in needs
    y, _, inverse_rms = launch_forward(grad, x, None, weight, eps, offset, casting_mode)
    return y, (x, weight, inverse_rms) if grad else ()


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    x, weight, inverse_rms = saved
    return launch_backward(*needs, dy, None, x, weight, inverse_rms, offset)
