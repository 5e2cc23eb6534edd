"""Spills of another Triton, which the one that the kernels are tuned for hasn't, are declared for it alone."""

import runpy

import pytest
import triton

from liger_triton import known_spills


@pytest.mark.parametrize(("version", "tuned"), [("3.5.1", False), ("3.6.0", True), ("3.7.1", True), ("3.9.0", False)])
def test_spills_of_another_triton(version: str, tuned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    spills = runpy.run_path(known_spills.__file__)["KNOWN_SPILLS"]
    assert any(key.startswith("layer_norm-triton-sm_90 ") for key in spills) is not tuned
    assert any(key.startswith("rms_norm-triton-sm_90 ") for key in spills) is tuned
    assert "softmax-triton-sm_* softmax._backward[*BLOCK=32768*" in spills
