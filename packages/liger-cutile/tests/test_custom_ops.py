"""Custom ops that a trace records: each says which tensors it writes to."""

import pytest
import torch

from liger_conformance.traces import custom_ops
from liger_core.contract import ops
from liger_core.custom_op import DEFINED
from liger_cutile import backend


def test_custom_ops_say_what_they_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()
    for name in sorted(ops):
        if backend.has_kernel(name):
            ran |= custom_ops(name, backend, monkeypatch)
    for frozen in (False, True):
        options = {"case_id": "hundreds-of-rows", "dtype": torch.bfloat16, "frozen": frozen}
        ran |= custom_ops("fused_linear_logit_statistics", backend, monkeypatch, **options)
    ran |= custom_ops("fused_moe", backend, monkeypatch, case_id="few-columns")
    ours = "liger_cutile_", "liger_core_"
    eager_alone = {"liger_cutile_ops__divergences_launch_scale"}  # it scales gradients that an eager forward has made
    assert ran == {name for name in DEFINED if name.startswith(ours)} - eager_alone
