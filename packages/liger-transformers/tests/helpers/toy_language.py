"""A language for the CPU: kernels of `swiglu` and `gated_mlp` that keep and allocate what those for GPUs do."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import liger_core as liger
from liger_core import BackendInfo, backend, contract
from liger_core.contract import Needs, Saved
from liger_core.host.gated_mlp import GatedActivation, GatedMLP
from liger_core.host.linear import Linear


def silu(
    needs: Needs, gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> tuple[Tensor, Saved]:
    return F.silu(gate * gate_multiplier if gate_multiplier != 1.0 else gate).mul_(up).mul_(down_multiplier), (gate, up)


def silu_backward(
    needs: Needs, saved: Saved, dy: Tensor, *, gate_multiplier: float, down_multiplier: float
) -> tuple[Tensor | None, ...]:
    gate, up = saved
    gate = gate * gate_multiplier if gate_multiplier != 1.0 else gate
    dgate = torch.ops.aten.silu_backward(dy, gate).mul_(up).mul_(gate_multiplier * down_multiplier)
    return dgate, torch.sigmoid(gate).mul_(gate).mul_(dy).mul_(down_multiplier)


@contextmanager
def toy_language(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls of both ops run its kernels."""
    activation = GatedActivation(silu, silu_backward)
    host = GatedMLP(Linear(), activation, activation)
    kernels = {"swiglu": types.ModuleType("toy.ops.swiglu"), "gated_mlp": types.ModuleType("toy.ops.gated_mlp")}
    vars(kernels["swiglu"]).update(forward=silu, backward=silu_backward)
    vars(kernels["gated_mlp"]).update(forward=host.forward, backward=host.backward, saves_early=host.saves_early)
    info = BackendInfo("toy", ("cpu",), "torch", "toy", "pip install toy")
    with monkeypatch.context() as patch:
        patch.setattr(BackendInfo, "has_kernel", lambda self, asked: asked in kernels)
        patch.setattr(BackendInfo, "kernel", lambda self, asked: kernels[asked])
        patch.setattr(backend, "discover", lambda: ((info,), ()))
        _forget()
        with liger.use(swiglu="toy", gated_mlp="toy"):
            yield
    _forget()


def _forget() -> None:
    for op in contract.ops.values():
        op.forget_plans()


class Seen(TorchDispatchMode):
    """The matrix products that ran, and the most bytes of results of operations that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.peak = 0, 0
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
            torch.ops.aten.bmm,
        ):
            self.products += 1
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: held for key, held in self.held.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return result
