"""On a machine with an NPU the suite and the benchmarks find it: shown as far as collection, with one that isn't there."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from liger_core.contract import ops as contracts
from liger_triton_ascend import backend

if find_spec("triton") is None or find_spec("triton.triton_patch") is None:
    pytest.skip("needs triton-ascend", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
NPU = """
from types import SimpleNamespace
import torch
torch.npu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "an NPU")
"""


@pytest.mark.parametrize(
    "command", [["benchmarks/test_speed.py"], ["conformance", "--device=npu"]], ids=["benchmarks", "conformance"]
)
def test_the_npu_is_found(command, tmp_path):
    (tmp_path / "an_npu.py").write_text(NPU)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "LIGER_", "TRITON_INTERPRET"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "an_npu", "--collect-only", "-q", "--impl=triton-ascend", *command],
        env=environment | {"PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    ops = set(re.findall(r"\[(\w+)-triton-ascend-npu-", done.stdout))
    assert ops == {op for op in contracts if backend.has_kernel(op)}, done.stdout[-2000:] + done.stderr
    assert not re.search(r"triton-ascend-(?!npu)", done.stdout)


def test_kernels_name_no_other_device():
    files = ROOT.glob("packages/liger-triton-ascend/src/**/*.py")
    assert [path.name for path in files if re.search(r"\bcuda\b", path.read_text(encoding="utf-8"))] == []
