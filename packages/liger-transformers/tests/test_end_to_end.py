"""The benchmark of whole models, with tiny ones on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def end_to_end(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("end_to_end", BENCHMARKS / "end_to_end.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "end_to_end", module)
    spec.loader.exec_module(module)
    return module


def test_losses_of_all_ways_agree(end_to_end: ModuleType) -> None:
    ways = ["plain", "trl", "torch", "torch-lean"]
    rows = end_to_end.main(["--smoke", "--models=llama-1b,qwen3-moe-8-layers", f"--ways={','.join(ways)}"])
    assert [row["way"] for row in rows] == ways * 2
    for row in rows:
        assert float(row["ms"]) > 0
        assert not row["note"]
        assert row["way"] == "plain" or float(row["loss_off"]) < 1e-3, row


def test_records_are_joined(end_to_end: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import records

    monkeypatch.setenv("LIGER_COMMIT", "0123456")
    head = records.head_of("cpu")
    rows = [dict.fromkeys(end_to_end.COLUMNS, "") | {"way": way, "ms": ms} for way, ms in (("a", "1.0"), ("b", "2.0"))]
    files = [records.write_csv(tmp_path / row["way"], head, [row], end_to_end.COLUMNS) for row in rows]
    joined = end_to_end.main(["--render", *map(str, files), "--out", str(tmp_path), "--name", "joined"])
    assert joined == rows
    (page,) = tmp_path.glob("*joined*.md")
    assert "| a   | 1.0 |" in page.read_text()


def test_kernels_by_what_they_do(end_to_end: ModuleType) -> None:
    assert end_to_end.place_of("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT") == "matmul"
    assert end_to_end.place_of("cudnn_generated_fort_native_sdpa_sm90_flash_fprop") == "attention"
    assert end_to_end.place_of("_swiglu_backward_kernel") is None
