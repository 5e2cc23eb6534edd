"""How the suite turns the interpreter of Tile IR on, and what it sees of launches."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest
import torch

import liger_core
from liger_conformance import interpreters
from liger_conformance.interpreters import cutile, tileir
from liger_conformance.interpreters.tileir import capture
from liger_conformance.interpreters.triton import Launch
from liger_conformance.route import only
from liger_conformance.target import Target
from liger_core import BackendInfo

ct = pytest.importorskip("cuda.tile")
if os.environ.get("CUTILE_INTERPRET") != "1":
    pytest.skip("needs CUTILE_INTERPRET=1", allow_module_level=True)
cutile.repair()

BACKEND = BackendInfo("acme", devices=("cuda", "cpu"), requires="cuda", package="liger_acme", install="")


@ct.kernel
def add(x, y, BLOCK: ct.Constant[int]):
    place = (ct.bid(0), ct.bid(1))
    ct.store(y, place, ct.load(y, place, (1, BLOCK)) + ct.load(x, place, (1, BLOCK)))


def test_languages_of_cuda_tile_are_interpreted_on_the_cpu():
    assert interpreters.interprets(BACKEND, "cpu")
    assert not interpreters.interprets(BACKEND, "cuda")
    assert interpreters.counts_launches(BACKEND)


def test_launches_are_recorded():
    x, y = torch.ones(3, 32), torch.zeros(3, 32)
    before = ct.launch
    with interpreters.launches() as launches:
        ct.launch(0, (3, 2), add, (x, y, 16))
        with interpreters.launches() as inner:
            ct.launch(0, (1, 1), add, (x, y, 16))
    ct.launch(0, (1, 1), add, (x, y, 16))
    assert launches == [Launch("add", __name__, (3, 2, 1)), Launch("add", __name__, (1, 1, 1))]
    assert inner == launches[1:]
    assert ct.launch is before


def test_a_launch_that_fails_is_not_recorded():
    with interpreters.launches() as launches, pytest.raises(tileir.KernelBug, match="bounds"):
        ct.launch(0, (4,), add, (torch.ones(3, 16), torch.ones(3, 16), 16))
    assert launches == []


def test_host_code_is_watched():
    """Tensors that it allocates and doesn't fill are no input, for the languages whose interpreter can tell."""
    x = torch.ones(3, 16)
    with interpreters.checking(BACKEND, "cpu"), pytest.raises(tileir.KernelBug, match="uninitialised: argument 1"):
        ct.launch(0, (3,), add, (x, torch.empty(3, 16), 16))
    for backend, device in ((None, "cpu"), (BACKEND, "cuda")):
        with interpreters.checking(backend, device):
            ct.launch(0, (3,), add, (x, torch.empty(3, 16), 16))


def test_the_suite_watches_host_code():
    op = liger_core.rms_norm
    target = Target(op, "cutile", "cpu", pytest.importorskip("liger_cutile").backend, "interpreted")
    x = torch.ones(3, 16)
    with only(target):
        op(x, None)
        with pytest.raises(tileir.KernelBug, match="uninitialised: argument 1"):
            ct.launch(0, (3, 1), add, (x, torch.empty(3, 16), 16))


@pytest.mark.parametrize(("device", "value"), [("cpu", "1"), ("cuda", None)])
def test_it_is_turned_on_with_the_cpu(device, value, monkeypatch):
    for name in ("TRITON_INTERPRET", "CUTILE_INTERPRET", "ASCEND_UB_CAPACITY_BITS"):
        monkeypatch.setenv(name, "")  # so that what is set in its place is undone
        monkeypatch.delenv(name)
    interpreters.prepare(device)
    assert os.environ.get("CUTILE_INTERPRET") == value


def test_repair_needs_the_variable(monkeypatch):
    monkeypatch.setenv("CUTILE_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="set CUTILE_INTERPRET=1"):
        cutile.repair()


def test_a_libcuda_that_is_loaded_is_not_replaced():
    with pytest.raises(RuntimeError, match="cuda.tile has loaded libcuda"):
        capture.stand_in_for_libcuda.__wrapped__()


def test_the_page_s_example_runs(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "writing-a-cutile-kernel.md"
    path = tmp_path / "example_of_the_page.py"
    path.write_text("\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S)))
    monkeypatch.syspath_prepend(tmp_path)
    example = importlib.import_module(path.stem)
    x, weight = torch.randn(6, 100), torch.randn(100)
    with tileir.tracking():
        y, largest = example.scale(x.bfloat16(), weight, 2.0)
    expected = x.bfloat16().float() * weight
    torch.testing.assert_close(largest[:, 0], expected.abs().amax(1))
    assert torch.equal(y, (expected * 2).bfloat16())


def test_signature_is_of_the_tensors_own_types():
    """Dtypes without a name in the array interface are declared as another type, and put right."""
    for dtype, expected in (
        (torch.bfloat16, ct.bfloat16),
        (torch.float8_e5m2, ct.float8_e5m2),
        (torch.float32, ct.float32),
    ):
        x = torch.zeros(3, 32, dtype=dtype)
        first, second, _ = tileir.signature(add, (x, x, 16)).parameters
        assert first.dtype == second.dtype == expected
        assert first.stride_constant == (None, 1)
        assert first.stride_divisible_by[0] * dtype.itemsize == 16
