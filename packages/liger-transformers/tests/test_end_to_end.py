"""The benchmark of whole models, with tiny ones on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_of_all_ways_agree(end_to_end: ModuleType, checkpointing: bool, calls: Counter[str]) -> None:
    ways = ["plain", "torch", "torch-lean", "torch-lean-mlp", "trl"]
    more = ["--checkpointing"] if checkpointing else []
    rows = end_to_end.main(["--smoke", "--models=llama-1b,qwen3-moe-8-layers", f"--ways={','.join(ways)}", *more])
    assert (calls["gated_mlp"] > 1) is checkpointing  # one call proved it
    assert [row["way"] for row in rows] == ways * 2
    for row in rows:
        assert float(row["ms"]) > 0
        assert not row["note"]
        assert row["way"] == "plain" or float(row["loss_off"]) < 1e-3, row


class SmallDevice:
    """A device module of so many bytes, of which it counts the results of linear layers and their gradients."""

    def __init__(self, size: int) -> None:
        self.size, self.peak = size, 0
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}

    def memory_reserved(self) -> int:
        self.held = {key: held for key, held in self.held.items() if not held[0].expired()}
        return sum(size for _, size in self.held.values())

    def take(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if self.memory_reserved() + storage.nbytes() > self.size:
            raise torch.OutOfMemoryError
        self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.memory_reserved())
        return tensor

    def mem_get_info(self) -> tuple[int, int]:
        return self.size - self.memory_reserved(), self.size

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.memory_reserved()

    def max_memory_allocated(self) -> int:
        return self.peak

    def empty_cache(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.parametrize(
    ("way", "backward"),
    [("plain", False), ("trl", False), ("torch", False), ("torch-lean", False), ("torch-lean", True)],
)
def test_the_longest_sequence_is_found_though_longer_ones_fail(
    end_to_end: ModuleType, monkeypatch: pytest.MonkeyPatch, way: str, backward: bool
) -> None:
    """Memory runs out in forward, or in backward alone: what a failed step held is free for the next one."""
    linear, module_of, small = F.linear, torch.get_device_module, SmallDevice(80_000)

    def taking(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = linear(x, weight, bias)
        if backward and y.requires_grad:
            y.register_hook(small.take)
            return y
        return small.take(y)

    monkeypatch.setattr(F, "linear", taking)
    monkeypatch.setattr(torch, "get_device_module", lambda name=None: small if name == "cpu" else module_of(name))
    monkeypatch.setattr(end_to_end, "SHORT", 8)
    monkeypatch.setattr(end_to_end, "FINER", 4)
    monkeypatch.setattr(end_to_end, "FEWER", 0.85)
    row = end_to_end.longest(end_to_end.Job("llama-1b", way, 1, 8, 1, False, "cpu", True, longest=True))
    assert not row.get("note"), row
    assert row["longest"] > 16


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
