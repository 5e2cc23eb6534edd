"""The interpreter of Tile IR against recorded results of a GPU, operation by operation."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from liger_conformance.interpreters import tileir

ct = pytest.importorskip("cuda.tile")
if os.environ.get("CUTILE_INTERPRET") != "1":
    pytest.skip("needs CUTILE_INTERPRET=1", allow_module_level=True)
tileir.install()


def load_recorder():
    spec = importlib.util.spec_from_file_location("record_tileir", Path(__file__).with_name("record_tileir.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recorder = load_recorder()


class Records:
    """Records that `record` wrote."""

    def __init__(self, folder: Path) -> None:
        self.about = json.loads((folder / "tileir_records.json").read_text())
        self.results = np.load(folder / "tileir_records.npz")

    def check(self, name: str) -> None:
        """Run a case here and compare every tensor."""
        case = recorder.CASES[name]
        tensors = recorder.arguments_of(case)
        ct.launch(0, (1,), case.kernel, (*tensors, *case.constants))
        for position, tensor in enumerate(tensors):
            bits = torch.from_numpy(self.results[f"{name}/{position}"])
            recorded = bits.view(tensor.dtype).view(tensor.shape)
            torch.testing.assert_close(
                tensor, recorded, rtol=case.error, atol=case.error, equal_nan=True, msg=lambda text: f"{name}: {text}"
            )

    def check_program(self, name: str) -> None:
        """A GPU's tensors have the signature that these have here, and the same program is compiled for it."""
        case, recorded = recorder.CASES[name], self.about["cases"][name]
        signature = tileir.signature(case.kernel, (*recorder.arguments_of(case), *case.constants))
        assert signature.symbol == recorded["symbol"]
        assert recorder.program_of(case.kernel, signature) == recorded["program"]


@pytest.fixture(scope="session")
def recorded():
    if not (recorder.FOLDER / "tileir_records.json").exists():
        pytest.skip("not run: no results of a GPU are recorded; conformance/tests/record_tileir.py does, on one")
    return Records(recorder.FOLDER)


@pytest.mark.parametrize("name", recorder.CASES)
def test_results_are_a_gpu_s(name, recorded):
    recorded.check(name)


@pytest.mark.parametrize("name", recorder.CASES)
def test_programs_are_a_gpu_s(name, recorded):
    if (there := recorded.about["cuda-tile"]) != version("cuda-tile"):
        pytest.skip(f"not run: recorded with cuda-tile {there}, which may write other programs")
    recorded.check_program(name)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Records of the interpreter itself."""
    folder = tmp_path_factory.mktemp("records")
    recorder.record(folder, "cpu")
    return Records(folder)


@pytest.mark.parametrize("name", recorder.CASES)
def test_own_results_are_the_same_again(name, own):
    own.check(name)
    own.check_program(name)


def test_another_result_is_noticed(own, monkeypatch):
    results = dict(own.results)
    monkeypatch.setattr(own, "results", results)
    results["modulo/2"] = results["modulo/2"] ^ 1
    with pytest.raises(AssertionError, match="modulo: Tensor-likes are not equal"):
        own.check("modulo")
    monkeypatch.setitem(own.about["cases"]["modulo"], "program", "")
    with pytest.raises(AssertionError):
        own.check_program("modulo")
