"""Memory for the results of `quantize`."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_core.ops.quantize import Quantized

TILE = 128
"""Rows and columns of a square that shares a scale, and of a kernel's tile."""


def tiles(size: int) -> int:
    """Tiles along a dimension; the last one may be smaller."""
    return -(-size // TILE)


def new_results(x: Tensor, block: str, rows: bool, columns: bool) -> Quantized:
    """Memory for what is wanted, as the contract's `Quantized` lies."""
    m, k = x.shape
    return Quantized(*_new_lines(x, block, m, k, rows), *_new_lines(x, block, k, m, columns))


def _new_lines(x: Tensor, block: str, lines: int, length: int, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """Memory for so many lines of a matrix, and for their scales."""
    if not wanted:
        return None, None
    scales = {
        "1x128": (tiles(length), lines),
        "128x128": (tiles(lines), tiles(length)),
        "row": (1, lines),
        "tensor": (1, 1),
    }[block]
    return x.new_empty(lines, length, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)
