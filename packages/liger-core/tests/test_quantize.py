"""quantize against the format's definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liger_core import quantize
from liger_core.ops.quantize import BLOCKS, SCALES


def table() -> Tensor:
    """All finite numbers of float8_e4m3fn that are not negative, in order: 0 to 448."""
    subnormal = [mantissa * 2.0**-9 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)]
    return torch.tensor(subnormal + normal[:-1], dtype=torch.float64)


def nearest(x: Tensor) -> Tensor:
    """The nearest number of the format, of two the one with an even last bit: every other number of the table."""
    numbers = table()
    right = torch.searchsorted(numbers, x.abs().contiguous()).clamp(max=len(numbers) - 1)
    left = (right - 1).clamp(min=0)
    below, above = x.abs() - numbers[left], numbers[right] - x.abs()
    chosen = torch.where((below < above) | ((below == above) & (left % 2 == 0)), left, right)
    return numbers[chosen].copysign(x)


def test_each_bfloat16_goes_to_the_nearest_number() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = x[x.abs() <= 448][None]
    q = quantize(x, block="tensor")
    assert q.rows is not None
    assert q.row_scales is not None
    assert q.row_scales.item() == 1.0
    torch.testing.assert_close(q.rows.double(), nearest(x.double()), rtol=0, atol=0)
    assert torch.equal(q.rows.float().signbit(), x.float().signbit())


@pytest.mark.parametrize("block", BLOCKS)
def test_a_scale_is_the_least_power_of_two_that_holds_its_block(block: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(131, 259) * torch.exp2(torch.randint(-140, 126, (131, 259)))
    q = quantize(x, block=block)
    height, width = {"1x128": (1, 128), "128x128": (128, 128), "row": (1, 259), "tensor": (131, 259)}[block]
    assert q.row_scales is not None
    scales = q.row_scales if block in ("128x128", "tensor") else q.row_scales.mT
    for i, rows in enumerate(x.split(height)):
        for j, part in enumerate(rows.split(width, 1)):
            scale, largest = scales[i, j].item(), part.abs().max().item()
            assert math.frexp(scale)[0] == 0.5
            assert largest / scale <= 448
            assert scale == 2.0**-126 or largest / (scale / 2) > 448


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("block", BLOCKS)
def test_columns_are_the_rows_of_the_transpose(block: str, scales: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(131, 259)
    both = quantize(x, block=block, scales=scales, columns=True)
    there = quantize(x.mT.contiguous(), block=block, scales=scales)
    assert both.columns is not None
    assert there.rows is not None
    assert torch.equal(both.columns.view(torch.uint8), there.rows.view(torch.uint8))
    assert both.column_scales is not None
    assert there.row_scales is not None
    assert torch.equal(both.column_scales, there.row_scales)


def test_what_is_not_finite_becomes_nan_and_changes_nothing_else() -> None:
    x = torch.tensor([[1.0, -3.0, 100.0, 0.0]])
    odd = torch.tensor([[1.0, math.inf, 100.0, math.nan]])
    plain, other = quantize(x), quantize(odd)
    assert plain.row_scales is not None
    assert other.row_scales is not None
    assert plain.rows is not None
    assert other.rows is not None
    assert torch.equal(plain.row_scales, other.row_scales)
    assert other.rows.float().isnan().tolist() == [[False, True, False, True]]
    assert torch.equal(other.rows.float()[:, ::2], plain.rows.float()[:, ::2])


def test_zeros_have_the_scale_one() -> None:
    q = quantize(torch.zeros(2, 200), columns=True)
    assert all(scales is not None and bool((scales == 1).all()) for scales in (q.row_scales, q.column_scales))
    assert q.rows is not None
    assert not q.rows.float().any()


def test_float32_scales_hold_the_largest_number_exactly() -> None:
    x = torch.tensor([[0.1, -7.3, 3.0]])
    q = quantize(x, scales="float32")
    assert q.row_scales is not None
    assert q.rows is not None
    assert q.row_scales.item() == (torch.tensor(7.3) / 448).item()
    assert q.rows.float()[0, 1] == -448
