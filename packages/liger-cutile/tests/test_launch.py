"""What host code makes of tensors before a launch."""

import pytest
import torch

from liger_cutile.ops import _rows


def test_rows_are_a_view_where_strides_allow() -> None:
    x = torch.arange(48.0).reshape(2, 3, 8)
    for view in (x, x[..., :5], x[:, :1], x[:1].expand(4, 3, 8)[:, 0]):
        rows = _rows.as_rows(view)
        assert rows.data_ptr() == view.data_ptr()
        assert torch.equal(rows, view.reshape(-1, view.shape[-1]))


def test_rows_are_a_copy_where_they_must_be() -> None:
    x = torch.arange(48.0).reshape(6, 8)
    for view in (x.t(), x[:, ::2], x.view(2, 3, 8).transpose(0, 1)):
        rows = _rows.as_rows(view)
        assert rows.stride(1) == 1
        assert torch.equal(rows, view.reshape(-1, view.shape[-1]))


def test_strides_beyond_32_bits_are_copied() -> None:
    far = torch.empty((1 << 31) + 8, dtype=torch.int8).as_strided((2, 8), (1 << 31, 1))
    assert _rows.as_rows(far).stride() == (8, 1)


def test_one_row_where_all_are_contiguous() -> None:
    x = torch.zeros(3, 8)
    assert [t.shape for t in _rows.as_one_row(x, x)] == [(1, 24), (1, 24)]
    assert [t.shape for t in _rows.as_one_row(x, torch.zeros(8, 3).t())] == [(3, 8), (3, 8)]


def test_no_row_beyond_32_bits() -> None:
    long = torch.empty(1 << 31, dtype=torch.int8).view(2, -1)
    assert [t.shape for t in _rows.as_one_row(long)] == [long.shape]


@pytest.mark.parametrize(("size", "power"), [(1, 16), (16, 16), (17, 32), (4096, 4096), (4097, 8192)])
def test_power_of_2(size: int, power: int) -> None:
    assert _rows.power_of_2(size) == power


def test_blocks() -> None:
    assert [_rows.blocks(size, 8) for size in (1, 8, 9)] == [1, 1, 2]
