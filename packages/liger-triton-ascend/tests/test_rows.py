"""How rows are divided over the vector cores of a 910B2. No device, and no triton."""

import pytest
import torch

from liger_triton_ascend.ops import _rows
from liger_triton_ascend.ops._rows import element_tiles, row_tiles

CORES = 48
UNIFIED_BUFFER = 192 * 1024


@pytest.fixture(autouse=True)
def chip(monkeypatch):
    monkeypatch.setenv("ASCEND_UB_CAPACITY_BITS", str(UNIFIED_BUFFER * 8))
    monkeypatch.setattr(_rows, "get_npu_core_count", lambda device: CORES)


SIZES = [(1, 1), (1, 151936), (7, 17), (48, 4096), (8192, 4096), (8192, 8192), (1 << 18, 100), (100, 1 << 18)]


@pytest.mark.parametrize("alive", [3, 4.5, 10])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("tiles", [row_tiles, element_tiles])
def test_tiles(tiles, rows, columns, alive):
    programs, tile_rows, block = tiles(torch.empty(0), rows, columns, alive)
    assert 4 * alive * tile_rows * block <= _rows.MARGIN * UNIFIED_BUFFER
    assert block >= 16
    assert tile_rows == 1 or block >= columns, "several rows are whole rows"
    in_all = -(-rows // tile_rows) * (1 if tiles is row_tiles else -(-columns // block))
    assert programs == min(CORES, in_all), "every core that could has work, and none more than one program"


def test_every_core_has_several_tiles():
    _, tile_rows, _ = row_tiles(torch.empty(0), 8192, 17, 4)
    assert 8192 // tile_rows >= 4 * CORES


def test_whole_rows_as_long_as_they_fit():
    assert row_tiles(torch.empty(0), 8192, 8192, 4)[2] == 8192
    assert row_tiles(torch.empty(0), 8192, 8193, 4)[2] == 8192
    assert row_tiles(torch.empty(0), 8192, 8192, 5)[2] == 4096


def test_cores_share_a_long_row():
    assert element_tiles(torch.empty(0), 1, 100_000, 4) == (CORES, 1, 1024)
    assert element_tiles(torch.empty(0), 1, 1000, 4) == (2, 1, 512)
    assert row_tiles(torch.empty(0), 1, 100_000, 4) == (1, 1, 8192)
