"""Custom ops that a trace records: each says which tensors it writes to."""

import pytest
import torch

from liger_conformance.traces import custom_ops
from liger_core.contract import ops
from liger_core.custom_op import DEFINED
from liger_triton import backend


def test_custom_ops_say_what_they_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()
    for name in sorted(ops):
        if backend.has_kernel(name):
            ran |= custom_ops(name, backend, monkeypatch)
    monkeypatch.setattr("liger_triton.ops._logit_statistics.is_hopper", lambda device: True)
    for frozen in (False, True):
        options = {"case_id": "hundreds-of-rows", "dtype": torch.bfloat16, "frozen": frozen}
        ran |= custom_ops("fused_linear_logit_statistics", backend, monkeypatch, **options)
    ran |= custom_ops("fused_moe", backend, monkeypatch, case_id="few-columns")
    monkeypatch.setattr("liger_triton.ops.fused_moe.is_hopper", lambda device: True)
    ran |= custom_ops("fused_moe", backend, monkeypatch, case_id="dropped", dtype=torch.bfloat16)
    ours = "liger_triton_", "liger_core_"
    assert ran == {name for name in DEFINED if name.startswith(ours)}
