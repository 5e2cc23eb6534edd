"""Tiles from the capacity of the Unified Buffer. No device, and no triton."""

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from liger_triton_ascend.ops import _device
from liger_triton_ascend.ops._device import compute_default_tiling_strategy, get_npu_core_count, unified_buffer_bytes


class Device(NamedTuple):
    """A torch.device, of which there is no "npu" without torch_npu."""

    type: str
    index: int | None


KIB = 1024
UNIFIED_BUFFER = 192 * KIB


@pytest.fixture(autouse=True)
def capacity(monkeypatch):
    monkeypatch.setenv("ASCEND_UB_CAPACITY_BITS", str(UNIFIED_BUFFER * 8))
    _device._of_this_npu.cache_clear()
    _device._look_up_core_count.cache_clear()
    yield
    _device._of_this_npu.cache_clear()
    _device._look_up_core_count.cache_clear()


def test_example():
    tiles = compute_default_tiling_strategy(0.8, 4, 6, [(512, 100), (1, 32000)], [(0, 1), (0, 1)])
    assert tiles == ((32, 128), (1, 4096))


@pytest.mark.parametrize("dtype_size", [1, 2, 4])
@pytest.mark.parametrize("multiplier", [1, 3, 5.5, 12])
@pytest.mark.parametrize("margin", [0.5, 0.8, 1.0])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((32768,), 0),
        ((4096, 17), (0, 1)),
        ((1, 151936), (0, 1)),
        ((1, 151936), 1),
        ((2048, 1024), 0),
        ((2048, 1024), -2),
        ((64, 8, 100), (0, 2)),
        ((1, 1), (0, 1)),
    ],
)
def test_tiles_fit_and_can_not_be_doubled(shape, dims, dtype_size, multiplier, margin):
    (tile,) = compute_default_tiling_strategy(margin, dtype_size, multiplier, [shape], [dims])
    dims = {dim % len(shape) for dim in ((dims,) if isinstance(dims, int) else dims)}
    size = 1
    for length in tile:
        assert length & (length - 1) == 0, "a power of two"
        size *= length
    assert tile[-1] * dtype_size % 32 == 0, "rows of whole blocks"
    budget = margin * UNIFIED_BUFFER
    assert size * dtype_size * multiplier <= budget
    for dim, (length, needed) in enumerate(zip(tile, shape, strict=True)):
        if dim not in dims:
            assert length >= needed, "what is not tiled is whole"
        elif length < needed:
            assert 2 * size * dtype_size * multiplier > budget, f"dimension {dim} could be twice as large"
        assert length < 2 * max(needed, 32 // dtype_size if dim == len(shape) - 1 else 1), "no more than is needed"


def test_the_last_dimension_grows_first():
    assert compute_default_tiling_strategy(1, 4, 1, [(1 << 20, 1 << 20)], [(0, 1)]) == ((1, 32768),)
    assert compute_default_tiling_strategy(1, 4, 1, [(1 << 20, 1 << 20)], [(1, 0)]) == ((1, 32768),)
    assert compute_default_tiling_strategy(1, 4, 1, [(1 << 20, 1000)], [(0, 1)]) == ((32, 1024),)


def test_what_is_not_tiled_and_does_not_fit():
    with pytest.raises(ValueError, match=r"shape \(4, 32000\).*\(1, 32768\) has 32768 elements, and 8192 fit"):
        compute_default_tiling_strategy(1, 4, 6, [(4, 32000)], [0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 1, [(8,)], [0]), "safety_margin is 0"),
        ((1.5, 4, 1, [(8,)], [0]), "safety_margin is 1.5"),
        ((1, 0, 1, [(8,)], [0]), "dtype_size 0"),
        ((1, 4, -1, [(8,)], [0]), "memory_multiplier -1"),
        ((1, 4, 1, [(8,)], []), "1 shapes have 0 tiling_dims"),
        ((1, 4, 1, [(8,)], [1]), r"dimensions \(1,\) are not all dimensions of \(8,\)"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_default_tiling_strategy(*arguments)


def test_half_the_buffer_gives_half_the_tile(monkeypatch):
    whole = compute_default_tiling_strategy(1, 4, 1, [(1 << 20,)], [0])
    monkeypatch.setenv("ASCEND_UB_CAPACITY_BITS", str(UNIFIED_BUFFER * 4))
    half = compute_default_tiling_strategy(1, 4, 1, [(1 << 20,)], [0])
    assert whole == ((32768,),)
    assert half == ((16384,),)


def test_capacity_from_the_environment():
    assert unified_buffer_bytes() == UNIFIED_BUFFER


def test_capacity_from_cann(monkeypatch):
    monkeypatch.delenv("ASCEND_UB_CAPACITY_BITS")
    soc = []
    platform = ModuleType("tbe.common.platform")
    platform.set_current_compile_soc_info = soc.append
    platform.get_soc_spec = lambda what: {"UB_SIZE": 256 * KIB}[what]
    for name, module in {"tbe": ModuleType("tbe"), "tbe.common": ModuleType("tbe.common")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "tbe.common.platform", platform)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(get_device_name=lambda: "Ascend910B2"), raising=False)
    assert unified_buffer_bytes() == 256 * KIB
    assert soc == ["Ascend910B2"]


def test_unknown_capacity_names_both_sources(monkeypatch):
    monkeypatch.delenv("ASCEND_UB_CAPACITY_BITS")
    with pytest.raises(RuntimeError, match=r"get_soc_spec\(\"UB_SIZE\"\).*ASCEND_UB_CAPACITY_BITS"):
        compute_default_tiling_strategy(0.8, 4, 6, [(8,)], [0])


def test_cores_without_an_npu():
    assert get_npu_core_count(torch.device("cpu")) == _device.CORES_WITHOUT_NPU
    if not hasattr(torch, "npu"):
        assert get_npu_core_count() == _device.CORES_WITHOUT_NPU


def test_cores_of_an_npu(monkeypatch):
    utils = SimpleNamespace(get_device_properties=lambda index: {"num_aicore": 20, "num_vectorcore": 40 + index})
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils, get_current_device=lambda: 1))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=driver))
    assert get_npu_core_count(Device("npu", 0)) == 40
    assert get_npu_core_count(Device("npu", None)) == 41


def test_import_needs_no_triton():
    code = "import sys, liger_triton_ascend.ops._rows; print('triton' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert finished.stdout == "False\n", finished.stderr
