"""A tensor as rows at one distance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_core.host.rows import as_rows

X = torch.arange(120.0).view(2, 3, 20)


@pytest.mark.parametrize(
    ("x", "distance"),
    [
        (X, 20),
        (X[0], 20),
        (X[0, 0], 20),
        (X[..., :7], 20),
        (X[0, :, :7], 20),
        (X[:, 1:2], 60),
        (X[0, 0].expand(6, 20), 0),
        (X[:1].expand(2, 3, 20)[:, 0], 0),
    ],
    ids=lambda value: f"{[*value.shape]} by {value.stride()}" if isinstance(value, Tensor) else None,
)
def test_rows_are_views_where_strides_allow(x: Tensor, distance: int) -> None:
    rows, stride = as_rows(x)
    assert rows.data_ptr() == x.data_ptr(), "it was copied"
    assert stride == distance


@pytest.mark.parametrize("x", [X.transpose(0, 1), X.mT, X[0].t(), X[..., ::2]], ids=lambda x: str(x.stride()))
def test_other_rows_are_copied(x: Tensor) -> None:
    rows, distance = as_rows(x)
    assert distance == x.shape[-1]
    assert torch.equal(rows.reshape(x.shape), x)
