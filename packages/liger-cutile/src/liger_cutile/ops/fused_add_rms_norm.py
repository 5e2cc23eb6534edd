"""Residual addition and RMS norm in one pass, on rms_norm's arithmetic: a row stays in registers from the sum to the output."""

import cuda.tile as ct
import torch
from torch import Tensor

from liger_core import fused_add_rms_norm
from liger_core.contract import Needs, Saved, implements
from liger_core.opaque import opaque
from liger_cutile.ops._device import sm_count
from liger_cutile.ops._hints import sized
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._partial_sums import launch_total
from liger_cutile.ops._persistent import persistent
from liger_cutile.ops._rows import as_rows, blocks, whole_rows
from liger_cutile.ops._tiles import load
from liger_cutile.ops.rms_norm import (
    LONG_BLOCK,
    _dweight_long,
    _inverse_rms,
    _load_scale,
    _round,
    _scaled,
)

# Longer rows are worked on in tiles of LONG_BLOCK columns.
LONGEST_FORWARD = 16384
LONGEST_BACKWARD = 8192


@ct.function
def _add(h, x, residual, place, ROWS, BLOCK):
    """Write x + residual to h, and return it as it was rounded."""
    sums = ct.astype(load(x, place, ROWS, BLOCK) + load(residual, place, ROWS, BLOCK), h.dtype)
    ct.store(h, place, sums)
    return ct.astype(sums, ct.float32)


@ct.kernel
def _forward(
    y, h, inverse_rms, x, residual, weight, columns, eps, offset,
    ROUND: ConstBool, NATIVE: ConstBool, ROWS: ConstInt, BLOCK: ConstInt,
):  # fmt: skip
    row = ct.bid(0)
    hs = _add(h, x, residual, (row, 0), ROWS, BLOCK)
    squares = ct.sum(_round(hs * hs, h.dtype, NATIVE), axis=1, keepdims=True)
    r = _inverse_rms(squares, columns, eps, h.dtype, NATIVE)
    if given(inverse_rms):
        ct.store(inverse_rms, (row, 0), r)
    ct.store(y, (row, 0), _scaled(hs, r, weight, 0, offset, y.dtype, BLOCK, ROUND, NATIVE))


@ct.kernel(occupancy=4)
def _forward_long(
    y, h, inverse_rms, x, residual, weight, columns, eps, offset, ROUND: ConstBool, NATIVE: ConstBool, BLOCK: ConstInt
):  # fmt: skip
    row = ct.bid(0)
    tiles = ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    squares = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        hs = _add(h, x, residual, (row, column), 1, BLOCK)
        squares += _round(hs * hs, h.dtype, NATIVE)
    r = _inverse_rms(ct.sum(squares, axis=1, keepdims=True), columns, eps, h.dtype, NATIVE)
    if given(inverse_rms):
        ct.store(inverse_rms, (row, 0), r)
    for column in range(tiles):
        hs = load(h, (row, column), 1, BLOCK)
        ct.store(y, (row, column), _scaled(hs, r, weight, column, offset, y.dtype, BLOCK, ROUND, NATIVE))


@ct.kernel
def _backward(dsum, partial, dy, dh, h, weight, inverse_rms, columns, offset, ROWS: ConstInt, BLOCK: ConstInt):
    dweight = ct.zeros((ROWS, BLOCK), ct.float32)
    for row in range(ct.bid(0), ct.num_tiles(h, axis=0, shape=(ROWS, BLOCK)), ct.num_blocks(0)):
        r = load(inverse_rms, (row, 0), ROWS, 1)
        hs = load(h, (row, 0), ROWS, BLOCK)
        dys = load(dy, (row, 0), ROWS, BLOCK)
        if given(dsum):
            g = dys * _load_scale(weight, 0, offset, BLOCK)
            slope = ct.sum(g * hs, axis=1, keepdims=True) / columns * r * r * r
            sums = g * r - hs * slope
            if given(dh):
                sums += load(dh, (row, 0), ROWS, BLOCK)
            ct.store(dsum, (row, 0), ct.astype(sums, dsum.dtype))
        if given(partial):
            dweight += dys * (hs * r)
    if given(partial):
        ct.store(partial, (ct.bid(0), 0), ct.sum(dweight, axis=0, keepdims=True))


@ct.kernel(occupancy=4)
def _dsum_long(dsum, dy, dh, h, weight, inverse_rms, columns, offset, BLOCK: ConstInt):
    row = ct.bid(0)
    r = load(inverse_rms, (row, 0), 1, 1)
    tiles = ct.num_tiles(h, axis=1, shape=(1, BLOCK))
    products = ct.zeros((1, BLOCK), ct.float32)
    for column in range(tiles):
        g = load(dy, (row, column), 1, BLOCK) * _load_scale(weight, column, offset, BLOCK)
        products += g * load(h, (row, column), 1, BLOCK)
    slope = ct.sum(products, axis=1, keepdims=True) / columns * r * r * r
    for column in range(tiles):
        g = load(dy, (row, column), 1, BLOCK) * _load_scale(weight, column, offset, BLOCK)
        sums = g * r - load(h, (row, column), 1, BLOCK) * slope
        if given(dh):
            sums += load(dh, (row, column), 1, BLOCK)
        ct.store(dsum, (row, column), ct.astype(sums, dsum.dtype))


@opaque(writes=("y", "h", "inverse_rms"))
def _launch_forward(
    y: Tensor,
    h: Tensor,
    inverse_rms: Tensor | None,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    casting_mode: str,
) -> None:
    y, h, x, residual, weight = as_rows(y), as_rows(h), as_rows(x), as_rows(residual), weight.contiguous()
    rows, columns = x.shape
    numbers = columns, float(eps), float(offset), casting_mode != "gemma", casting_mode == "none"
    if columns <= LONGEST_FORWARD:
        tile_rows, block = whole_rows(columns)
        grid = (blocks(rows, tile_rows),)
        launch(
            sized(_forward, tile_rows * block), grid, y, h, inverse_rms, x, residual, weight, *numbers, tile_rows, block
        )
    else:
        launch(_forward_long, (rows,), y, h, inverse_rms, x, residual, weight, *numbers, LONG_BLOCK)


@opaque(writes=("dsum", "dweight"))
def _launch_backward(
    dsum: Tensor | None,
    dweight: Tensor | None,
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    offset: float,
) -> None:
    dsum, dh = (None if x is None else as_rows(x) for x in (dsum, dh))
    dy, h, weight = as_rows(dy), as_rows(h), weight.contiguous()
    rows, columns = h.shape
    if columns > LONGEST_BACKWARD:
        if dsum is not None:
            launch(_dsum_long, (rows,), dsum, dy, dh, h, weight, inverse_rms, columns, float(offset), LONG_BLOCK)
        if dweight is not None:
            # Columns are many: 64 of them, a 128-byte line of bf16, leave more than 128 blocks.
            launch(_dweight_long, (blocks(columns, 64),), dweight, dy, h, inverse_rms, 64, 64)
        return
    tile_rows, block = whole_rows(columns)
    backward, at_once = persistent(_backward, tile_rows * block)
    grid, partial = blocks(rows, tile_rows), None
    if dweight is not None:
        grid = min(grid, sm_count(h.device) * at_once)
        partial = torch.empty((grid, columns), dtype=torch.float32, device=h.device)
    launch(
        backward, (grid,), dsum, partial, dy, dh, h, weight, inverse_rms, columns, float(offset), tile_rows, block
    )  # fmt: skip
    if partial is not None:
        launch_total(dweight, partial)


@implements(fused_add_rms_norm)
def forward(
    needs: Needs,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[tuple[Tensor, Tensor], Saved]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = torch.empty_like(x, memory_format=torch.contiguous_format)
    if True not in needs:
        _launch_forward(y, h, None, x, residual, weight, eps, offset, casting_mode)
        return (y, h), ()
    inverse_rms = torch.empty((x.numel() // x.shape[-1], 1), dtype=torch.float32, device=x.device)
    _launch_forward(y, h, inverse_rms, x, residual, weight, eps, offset, casting_mode)
    return (y, h), (h, weight, inverse_rms)


def backward(
    needs: Needs, saved: Saved, dy: Tensor | None, dh: Tensor | None, *, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor | None, ...]:
    needs_x, needs_residual, needs_weight = needs
    h, weight, inverse_rms = saved
    if dy is None:
        dsum, dweight = (None if dh is None else dh.clone()), None
    else:
        needs_sum = needs_x or needs_residual
        dsum = torch.empty_like(h, memory_format=torch.contiguous_format) if needs_sum else None
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        _launch_backward(dsum, dweight, dy, dh if needs_sum else None, h, weight, inverse_rms, offset)
    # One tensor for both: autograd adds in place only to a tensor that nobody else holds.
    return dsum if needs_x else None, dsum if needs_residual else None, dweight
