"""How the suite finds the answer that a kernel is held against."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import liger_core
from liger_conformance import compare, evaluate
from liger_conformance.route import only
from liger_conformance.target import Target
from liger_core.backend import BackendInfo
from liger_core.contract import ops


def test_truth_is_computed_on_the_cpu_where_a_device_has_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def see(op: Any, call: Any, arguments: dict[str, Any], grads: Any, incoming: dict[str, torch.Tensor]) -> None:
        tensors = [v for v in (*arguments.values(), *incoming.values()) if isinstance(v, torch.Tensor)]
        seen.append({(tensor.device.type, tensor.dtype) for tensor in tensors})

    monkeypatch.setattr(evaluate, "WITHOUT_FLOAT64", ("cuda",))
    monkeypatch.setattr(evaluate, "evaluate", see)
    with FakeTensorMode():
        indices = torch.zeros(4, dtype=torch.int64, device="cuda")
        weight = torch.zeros(16, 8, dtype=torch.bfloat16, device="cuda")
        evaluate.baseline_and_truth(ops["embedding"], {"indices": indices, "weight": weight})
    assert seen == [
        {("cuda", torch.int64), ("cuda", torch.bfloat16)},
        {("cpu", torch.int64), ("cpu", torch.float64)},
    ]


def test_comparison_is_made_where_the_truth_is() -> None:
    """Results of a device without float64 are moved before they are widened."""

    class Elsewhere(torch.Tensor):
        """Tensor of a device that has no arithmetic: all it can do is move."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            if name in ("to", "numel", "is_floating_point", "__get__"):
                result = super().__torch_function__(function, types, args, kwargs or {})
                return result.as_subclass(torch.Tensor) if name == "to" else result
            raise AssertionError(f"{name} where float64 may be missing")

    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    there = truth.float().as_subclass(Elsewhere)
    compare.compare("y", there, there, truth)
    with pytest.raises(compare.Mismatch):
        compare.compare("y", (truth.float() * 2).as_subclass(Elsewhere), there, truth)


def test_functions_of_a_watched_kernel_do_not_hold_what_they_saw(acme: BackendInfo) -> None:
    """cuda.tile keeps what a kernel's module held when it was compiled: so did tensors of gigabytes stay until the end."""
    device = liger_core.infer_device()
    target = Target(ops["rms_norm"], acme.language, device, acme, "passed")
    x, weight = (torch.ones(shape, device=device, requires_grad=True) for shape in ((2, 8), (8,)))
    with only(target) as observed:
        target.op(x, weight).sum().backward()
        recorded = target.kernel.forward, target.kernel.backward
    assert len(observed.saved) == len(observed.gradients) == 1
    seen = weakref.ref(observed)
    del observed
    assert seen() is None
    assert recorded != (target.kernel.forward, target.kernel.backward)
