"""gated_mlp: its reference, and the shared host code with activations that are PyTorch: gradients, what is kept, memory."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import liger_core
from liger_core import BackendInfo
from liger_core.contract import Needs, Saved
from liger_core.host.gated_mlp import GatedActivation, GatedMLP, GatedMLPBackward
from liger_core.host.linear import Linear
from liger_core.ops.gated_mlp import gated_mlp, least_memory, whole_memory

ROWS, HIDDEN, INNER, OUT = 96, 8, 320, 12
EVERY = (True, True, True, True)
OPTIONS: dict[str, Any] = {"activation": "silu", "gate_multiplier": 1.0, "down_multiplier": 1.0}


def silu(
    needs: Needs, gate: Tensor, up: Tensor, *, gate_multiplier: float, down_multiplier: float
) -> tuple[Tensor, Saved]:
    return F.silu(gate).mul_(up), (gate, up)


def silu_backward(
    needs: Needs, saved: Saved, dy: Tensor, *, gate_multiplier: float, down_multiplier: float
) -> tuple[Tensor | None, ...]:
    """Gradients of gate and up. They allocate two tensors and nothing else, as kernels do."""
    gate, up = saved
    dgate = torch.ops.aten.silu_backward(dy, gate).mul_(up) if needs[0] else None
    dup = torch.empty_like(dy) if needs[1] else None
    if dup is not None:
        torch.sigmoid(gate, out=dup)
        dup.mul_(gate).mul_(dy)
    return dgate, dup


def host() -> GatedMLP:
    activation = GatedActivation(silu, silu_backward)
    return GatedMLP(Linear(), activation, activation)


def arguments(
    dtype: torch.dtype = torch.float32, rows: int = ROWS, hidden: int = HIDDEN, inner: int = INNER
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, hidden), (inner, hidden), (inner, hidden), (OUT, inner)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 3 for shape in shapes)


class Allocated(TorchDispatchMode):
    """The memory that operations allocate and free, as a list of (storage, bytes or minus bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.names: dict[int, int] = {}
        self.alive: dict[int, int] = {}

    def given(self, *tensors: Tensor) -> None:
        """These aren't counted, nor views of them."""
        for tensor in tensors:
            self.names[tensor.untyped_storage().data_ptr()] = -1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if self.names.get(place) == -1:
            return
        if place not in self.names:
            self.names[place] = len(self.events)
            self.events.append((self.names[place], size))
        name = self.names[place]
        self.alive[name] = self.alive.get(name, 0) + 1
        weakref.finalize(tensor, self._free, place, name, size)

    def _free(self, place: int, name: int, size: int) -> None:
        self.alive[name] -= 1
        if self.alive[name] == 0:
            self.events.append((name, -size))
            if self.names.get(place) == name:
                del self.names[place]

    def peak(self, *results: Tensor | None) -> int:
        """The most bytes at a time, without those of the results."""
        apart = {self.names[t.untyped_storage().data_ptr()] for t in results if t is not None}
        now = most = 0
        for name, size in self.events:
            now += 0 if name in apart else size
            most = max(most, now)
        return most


def test_allocations_are_counted() -> None:
    x = torch.randn(10, 10)
    with Allocated() as allocated:
        allocated.given(x)
        y = x + 1
        z = y * 2
        del y
        w = z.view(-1) + 1
    assert allocated.peak(z, w) == 400
    assert allocated.peak(w) == 800


BUDGETS = {"least": 0, "some columns": 40_000, "half": whole_memory(arguments()[0], arguments()[1], True) // 2}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "needs", [EVERY, (True, False, False, False), (False, True, False, True), (False,) * 4], ids=str
)
def test_temporaries_fit_the_budget(budget: str, needs: Needs) -> None:
    inputs = arguments()
    least = least_memory(inputs[0], inputs[1], x_grad=needs[0], grad=True in needs)
    memory = max(BUDGETS[budget], least)
    with torch.no_grad(), Allocated() as allocated:
        allocated.given(*inputs)
        y, saved = host().forward(needs, *inputs, memory_budget=memory, **OPTIONS)
    assert 0 < allocated.peak(y) <= memory
    assert all(tensor is None or any(tensor is one for one in inputs) for tensor in saved)  # only x, and the weights
    if True not in needs:
        return
    dy = torch.ones(ROWS, OUT)
    with torch.no_grad(), Allocated() as allocated:
        allocated.given(*inputs, dy)
        grads = host().backward(needs, saved, dy, memory_budget=memory, **OPTIONS)
    assert memory // 2 < allocated.peak(*grads) <= memory


@pytest.mark.parametrize("budget", [None, *BUDGETS.values()])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (3,), (0, 3), (1, 2, 3)], ids=str)
def test_gradients_by_columns_are_those_of_the_reference(budget: int | None, frozen: tuple[int, ...]) -> None:
    inputs = arguments()
    needs = tuple(i not in frozen for i in range(4))
    memory = None if budget is None else max(budget, least_memory(inputs[0], inputs[1], x_grad=needs[0], grad=True))
    y, saved = host().forward(needs, *inputs, memory_budget=memory, **OPTIONS)
    dy = torch.ones(ROWS, OUT).double()
    leaves = [t.double().requires_grad_(n) for t, n in zip(inputs, needs, strict=True)]
    truth = gated_mlp.reference(*leaves)
    torch.testing.assert_close(y.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    expected = iter(torch.autograd.grad(truth, [leaf for leaf in leaves if leaf.requires_grad], dy))
    for _ in range(2):  # a second backward finds what the first one did
        grads = host().backward(needs, saved, dy.float(), memory_budget=memory, **OPTIONS)
        assert [t is not None for t in grads] == [*needs]
    for gradient in grads:
        if gradient is not None:
            torch.testing.assert_close(gradient.double(), next(expected), rtol=1e-5, atol=1e-4)


def serve(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a language, "toy", with this op alone."""
    kernel, gated = types.ModuleType("toy.ops.gated_mlp"), host()
    vars(kernel).update(forward=gated.forward, backward=gated.backward, saves_early=gated.saves_early)
    monkeypatch.setattr(BackendInfo, "has_kernel", lambda self, asked: asked == "gated_mlp")
    monkeypatch.setattr(BackendInfo, "kernel", lambda self, asked: kernel)
    install(BackendInfo("toy", ("cpu",), "torch", "toy", "pip install toy"))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", ["columns", "rows"])
def test_a_budget_in_compiled_code(
    way: str, dynamic: bool, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code is one graph, and its gradients are those of eager mode."""
    serve(install, monkeypatch)
    inputs = [t.requires_grad_() for t in arguments(**(MANY if way == "rows" else {}))]
    memory = whole_memory(inputs[0], inputs[1], grad=True) // 4

    def call(*given: Tensor) -> Tensor:
        return gated_mlp(*given, memory_budget=memory)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with liger_core.use("toy"):
        expected = torch.autograd.grad(call(*inputs).sum(), inputs)
        grads = torch.autograd.grad(compiled(*inputs).sum(), inputs)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [None, 30_000])
def test_in_checkpointing_the_products_are_those_of_other_code(
    budget: int | None, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward three, backward eight: the branches are made twice, and what follows them once."""
    serve(install, monkeypatch)
    inputs = [t.requires_grad_() for t in arguments()]
    flops: list[int] = []
    mm = torch.mm

    def counted(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        flops.append(a.shape[0] * a.shape[1] * b.shape[1])
        return mm(a, b, **options)

    monkeypatch.setattr(torch, "mm", counted)
    monkeypatch.setattr(
        Linear,
        "add_product",
        lambda self, total, a, b, dtype, adds=True: total.copy_(counted(a.t(), b) + (total if adds else 0)),
    )
    monkeypatch.setattr(Tensor, "addmm_", lambda total, a, b: total.add_(counted(a, b)))
    with liger_core.use("toy"):
        y = checkpoint(functools.partial(gated_mlp, memory_budget=budget), *inputs, use_reentrant=False)
        y.sum().backward()
    x, gate_weight, _, down_weight = inputs
    branch, last = (x.shape[0] * weight.numel() for weight in (gate_weight, down_weight))
    assert sum(flops) == 2 * branch + last + 2 * branch + 4 * branch + 2 * last


MANY: dict[str, int] = {"rows": 2000, "hidden": 24, "inner": 16}
"""Sizes of a call whose weights are much smaller than x: their sums move less than x's, so backward goes by rows."""


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (3,), (0, 1, 2), (1, 2, 3)], ids=str)
def test_gradients_by_rows_are_those_of_the_reference(frozen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = arguments(**MANY)
    needs = tuple(i not in frozen for i in range(4))
    memory = whole_memory(inputs[0], inputs[1], grad=True) // 6
    chunks: list[int] = []
    by_rows = GatedMLPBackward.by_rows
    monkeypatch.setattr(GatedMLPBackward, "by_rows", lambda self, most: (chunks.append(most), by_rows(self, most))[1])
    dy = torch.ones(MANY["rows"], OUT)
    leaves = [t.double().requires_grad_(n) for t, n in zip(inputs, needs, strict=True)]
    expected = iter(
        torch.autograd.grad(gated_mlp.reference(*leaves), [t for t in leaves if t.requires_grad], dy.double())
    )
    with torch.no_grad(), Allocated() as allocated:
        allocated.given(*inputs, dy)
        _, saved = host().forward(needs, *inputs, memory_budget=memory, **OPTIONS)
        grads = host().backward(needs, saved, dy, memory_budget=memory, **OPTIONS)
    assert len(chunks) == needs[0]  # x's gradient is the only sum of the other way
    assert all(most < MANY["rows"] // 2 for most in chunks)
    assert allocated.peak(*grads, _) <= memory
    assert [t is not None for t in grads] == [*needs]
    for gradient in grads:
        if gradient is not None:
            torch.testing.assert_close(gradient.double(), next(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [{}, MANY], ids=["columns", "rows"])
def test_the_error_does_not_grow_with_the_number_of_chunks(sizes: dict[str, int]) -> None:
    inputs = arguments(torch.bfloat16, **sizes)
    leaves = [t.double().requires_grad_() for t in inputs]
    dy = torch.ones(inputs[0].shape[0], OUT)
    truth = torch.autograd.grad(gated_mlp.reference(*leaves), leaves, dy.double())
    errors = []
    for memory in (None, least_memory(inputs[0], inputs[1], x_grad=True, grad=True)):
        _, saved = host().forward(EVERY, *inputs, memory_budget=memory, **OPTIONS)
        grads = host().backward(EVERY, saved, dy.bfloat16(), memory_budget=memory, **OPTIONS)
        errors.append([(g.double() - t).abs().max() for g, t in zip(grads, truth, strict=True) if g is not None])
    assert all(many <= 1.5 * once for once, many in zip(*errors, strict=True))


def test_the_least_budget() -> None:
    """By the formula of half precision: 6 · I of a row, 4 · N · H + 10 · N of a column."""
    x, gate_weight, *_ = arguments(torch.bfloat16)
    assert least_memory(x, gate_weight, x_grad=True, grad=True) == 4 * ROWS * HIDDEN + 10 * ROWS
    assert least_memory(x, gate_weight, x_grad=False, grad=False) == 6 * INNER
    assert least_memory(x[:1], gate_weight, x_grad=True, grad=True) == 6 * INNER


def test_reference_against_other_code() -> None:
    x, gate, up, down = arguments(torch.float64)
    y = gated_mlp(x, gate, up, down, gate_multiplier=1.7, down_multiplier=0.85)
    torch.testing.assert_close(y, 0.85 * (F.silu(1.7 * x @ gate.T) * (x @ up.T)) @ down.T)
    y = gated_mlp(x, gate, up, down, activation="gelu_tanh")
    torch.testing.assert_close(y, F.linear(F.gelu(x @ gate.T, approximate="tanh") * (x @ up.T), down))
