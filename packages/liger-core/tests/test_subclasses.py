"""Tensors that are not plain: whose package runs the ops on them, and what is said where there is none."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import liger_core
from liger_core import losses, subclasses

X, W = torch.tensor([[3.0, 4.0]]), torch.ones(2)


class Known(Tensor):
    """A type that is not plain, whatever it is called."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Known:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(a.inner if isinstance(a, Known) else a for a in args), **(kwargs or {}))


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch, toys: None) -> dict[str, list[Any]]:
    """The installed handlers by type, to add to, and under ``looked`` what was looked for."""
    handlers: dict[str, list[Any]] = {"looked": []}

    installed = importlib.metadata.entry_points

    def entry_points(**of: Any) -> Any:
        if of.get("group") != "liger.tensors":
            return installed(**of)
        name = of["name"]
        handlers["looked"].append(name)
        return [types.SimpleNamespace(load=lambda handler=handler: handler) for handler in handlers.get(name, [])]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    monkeypatch.setattr(subclasses, "_handlers", {})
    return handlers


def test_a_known_type_is_handed_over(entries: dict[str, list[Any]]) -> None:
    """With every argument by name, before anything is checked; and it is looked for once."""
    seen = []
    name = subclasses.full_name(Known)
    entries[name] = [lambda op, demand, arguments: seen.append((op.name, demand, arguments)) or X]
    for _ in range(2):
        with liger_core.use("torch"):
            assert liger_core.rms_norm(Known(X), None, 1e-5) is X
    op, demand, arguments = seen[1]
    assert (op, demand, list(arguments)) == ("rms_norm", "torch", list(liger_core.rms_norm.names))
    assert arguments["eps"] == 1e-5
    assert entries["looked"] == [name]


def test_explain_tells_of_the_kernel_that_runs_on_its_parts(entries: dict[str, list[Any]]) -> None:
    assert "toy-traced: no: x is a Known" in str(liger_core.explain("rms_norm", Known(X), W))
    subclasses._handlers.clear()
    entries[subclasses.full_name(Known)] = [lambda op, demand, arguments: X]
    assert "toy-traced: chosen" in str(liger_core.explain("rms_norm", Known(X), W))


def test_any_argument_may_be_of_the_type(entries: dict[str, list[Any]]) -> None:
    entries[subclasses.full_name(Known)] = [lambda op, demand, arguments: X]
    assert liger_core.rms_norm(torch.ones(1, 2), Known(W)) is X


def test_an_unknown_type_runs_the_reference(entries: dict[str, list[Any]]) -> None:
    torch.testing.assert_close(liger_core.rms_norm(Known(X), None), liger_core.rms_norm.reference(X, None))
    with liger_core.use("toy-traced"), pytest.raises(liger_core.Unsupported, match="x is a Known; kernels take plain"):
        liger_core.rms_norm(Known(X), None)


def test_a_known_type_is_traced(entries: dict[str, list[Any]]) -> None:
    """Within torch.compile, whole: finding the handler is no part of the graph."""

    def both(op: Any, demand: Any, arguments: Any) -> Any:
        parts = [op.call(demand, (), arguments | {"x": part}) for part in (arguments["x"].a, arguments["x"].b)]
        return TwoTensor(*parts)

    entries[subclasses.full_name(TwoTensor)] = [both]
    compiled = torch.compile(lambda x: liger_core.rms_norm(x, W) * 2, backend="aot_eager", fullgraph=True)
    actual = compiled(TwoTensor(X, X * 3))
    torch.testing.assert_close(actual.a, liger_core.rms_norm.reference(X, W) * 2)
    torch.testing.assert_close(actual.b, liger_core.rms_norm.reference(X * 3, W) * 2)


def test_what_is_in_flight_is_plain(entries: dict[str, list[Any]]) -> None:
    """A kernel runs on it, and not the reference."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with liger_core.use("toy-traced"):
        y = liger_core.rms_norm(AsyncCollectiveTensor(X), W)
    assert type(y) is Tensor
    torch.testing.assert_close(y, liger_core.rms_norm.reference(X, W))
    assert entries["looked"] == []


class Sent(torch.autograd.Function):
    """A stand-in for a DTensor's redistribution: its result is in flight, and the tensor inside of it has no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return AsyncCollectiveTensor(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@pytest.mark.parametrize("language", ["toy-traced", "toy-opaque", "torch"])
def test_what_is_in_flight_keeps_its_gradient(entries: dict[str, list[Any]], language: str) -> None:
    """For each use of it, in several ops and in PyTorch's own."""
    sent = [X.clone().requires_grad_(), W.clone().requires_grad_()]
    plain = [X.clone().requires_grad_(), W.clone().requires_grad_()]
    flying = [Sent.apply(tensor) for tensor in sent]
    for x, weight in (plain, flying):
        with liger_core.use(language):
            y = liger_core.rms_norm(x, weight) + 3 * liger_core.rms_norm(x, None)
        (y * torch.tensor([1.0, 5.0]) * x).sum().backward()
    for tensor, expected in zip(sent, plain, strict=True):
        assert tensor.grad.abs().min() > 0  # type: ignore[union-attr]
        torch.testing.assert_close(tensor.grad, expected.grad)


def test_what_is_in_flight_has_second_derivatives(entries: dict[str, list[Any]]) -> None:
    """The reference has second derivatives for a tensor in flight, as it has after arrival."""
    x, grads = X.clone().requires_grad_(), []
    for tensor in (x, Sent.apply(x)):
        with liger_core.use("torch"):
            y = liger_core.rms_norm(tensor, W) * torch.tensor([1.0, 5.0])
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        grads += torch.autograd.grad(first.square().sum(), x)
    assert grads[0].abs().min() > 0
    torch.testing.assert_close(grads[1], grads[0])


@pytest.fixture
def dtensor(monkeypatch: pytest.MonkeyPatch, entries: dict[str, list[Any]]) -> type[Known]:
    """A type of DTensor's name; importing the real one takes seconds."""
    module, _, name = subclasses.DTENSOR.rpartition(".")
    return type(name, (Known,), {"__module__": module})


def test_a_dtensor_without_its_package_names_the_command(dtensor: type[Known]) -> None:
    with liger_core.use("toy-traced"), pytest.raises(liger_core.Unsupported) as caught:
        liger_core.rms_norm(dtensor(X), None)
    assert 'x is a DTensor; kernels take plain tensors: uv pip install "liger-core[distributed]"' in str(caught.value)


def test_a_weight_that_fsdp_has_divided_is_an_error_that_teaches(dtensor: type[Known]) -> None:
    with pytest.raises(TypeError, match="rms_norm: x is a plain tensor and weight a DTensor") as caught:
        liger_core.rms_norm(X, dtensor(W))
    for words in ("fully_shard", "register_fsdp_forward_method", "DTensor.from_local(x, weight.device_mesh)"):
        assert words in str(caught.value)


def test_plain_calls_look_for_nothing(entries: dict[str, list[Any]]) -> None:
    liger_core.rms_norm(X, torch.nn.Parameter(W))
    assert entries["looked"] == []


def test_plain_calls_import_nothing_of_it() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import liger_core; liger_core.rms_norm(torch.ones(1, 2), None);"
        "print([name for name in set(sys.modules) - before if name.startswith(('torch.distributed', 'liger_distributed'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_weight_that_zero3_has_divided_is_an_error_that_teaches() -> None:
    """Outside of its module's forward DeepSpeed leaves an empty parameter, with its shape beside it."""
    for op, x in ((liger_core.rms_norm, X), (liger_core.layer_norm, X)):
        weight = torch.nn.Parameter(torch.empty(0))
        plain = weight.detach().clone()
        weight.ds_id, weight.ds_shape = 7, torch.Size([2])  # type: ignore[attr-defined]
        arguments = (x, weight) if op is liger_core.rms_norm else (x, weight, torch.zeros(2))
        with pytest.raises(
            ValueError, match=rf"{op.name}: weight is a parameter of shape \[2\] that DeepSpeed's ZeRO-3"
        ):
            op(*arguments)
        with pytest.raises(ValueError, match=r"GatheredParameters\(\[weight\]\)"):
            liger_core.explain(op, *arguments)
        with pytest.raises(ValueError, match="weight") as refused:
            op(x, plain, *arguments[2:])
        assert "DeepSpeed" not in str(refused.value)
    head = torch.nn.Parameter(torch.empty(0))
    head.ds_id, head.ds_shape = 8, torch.Size([5, 2])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"fused_linear_cross_entropy: linear_weight is a parameter of shape \[5, 2\]"):
        liger_core.fused_linear_cross_entropy(X, head, torch.tensor([1]))


def test_masks_of_other_tensors_are_not_read() -> None:
    """Parts of such a mask may lie on other processes: a check that reads it would wait for them."""
    logprobs = torch.tensor([[-1.0, -2.0]])
    both = TwoTensor(logprobs, logprobs)
    mask = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="mask holds 2"):
        losses.sequence_logprobs(logprobs, mask)
    assert losses.sequence_logprobs(both, TwoTensor(mask, mask)).a.tolist() == [-3.0]
