"""What the oldest Triton spills, and the one that the kernels are tuned for doesn't, is declared for it alone."""

import runpy

import pytest
import triton

from liger_triton import known_spills


@pytest.mark.parametrize(("version", "declared"), [("3.5.1", True), ("3.6.0", False), ("3.7.1", False)])
def test_spills_of_the_oldest_triton(version: str, declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    spills = runpy.run_path(known_spills.__file__)["KNOWN_SPILLS"]
    assert any(key.startswith("layer_norm-triton-sm_90 ") for key in spills) is declared
    assert any(key.startswith("rms_norm-triton-sm_90 ") for key in spills) is not declared
    assert "softmax-triton-sm_* softmax._backward[*BLOCK=32768*" in spills
