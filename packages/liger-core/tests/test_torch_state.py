"""Calls while PyTorch records, transforms, or does something in another thread; and tensors that are not what they look like."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import aot_function, nop  # pyright: ignore[reportMissingModuleSource]
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import liger_core
from liger_core import BackendInfo, Unsupported, contract
from liger_core.contract import op
from liger_core.custom_op import opaque

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


class Norm(torch.nn.Module):
    """rms_norm without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return liger_core.rms_norm(x, None)


RECORDERS: dict[str, Callable[[Callable[..., Any], Tensor], Callable[..., Any]]] = {
    "torch.jit.trace is active": lambda f, x: torch.jit.trace(f, x, check_trace=False),
    "make_fx is active": lambda f, x: make_fx(f)(x),
    "make_fx is active, ": lambda f, x: make_fx(f, pre_dispatch=True)(x),
    "make_fx is active, which": lambda f, x: make_fx(f, tracing_mode="fake")(x),
    "torch.export without strict=True is active": lambda f, x: torch.export.export(Norm(), (x,)).module(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("says", RECORDERS, ids=["jit", "make_fx", "pre_dispatch", "fake", "export"])
def test_what_records_no_launch_records_the_reference(toys: None, says: str) -> None:
    """A recorded program runs on other data, where a launch that is missing from it would leave memory unwritten."""

    def call(x: Tensor) -> Tensor:
        return liger_core.rms_norm(x, None)

    with liger_core.use("toy-opaque"), pytest.raises(Unsupported, match=f"toy-opaque: {says}"):
        RECORDERS[says](call, X)
    with liger_core.use():
        recorded = RECORDERS[says](call, X)
    torch.testing.assert_close(recorded(Y), liger_core.rms_norm.reference(Y, None))


def test_backward_while_recording(toys: None) -> None:
    """The forward ran before, in a kernel."""
    x = X.clone().requires_grad_()
    with liger_core.use("toy-opaque"):
        y = liger_core.rms_norm(x, None)
    with pytest.raises(RuntimeError, match="backward of rms_norm in toy-opaque: make_fx is active"):
        make_fx(lambda dy: torch.autograd.grad(y, x, dy))(Y)


@pytest.mark.parametrize("language", ["toy-opaque", "toy-traced"])
def test_export_strict_records_the_kernel(toys: None, language: str) -> None:
    with liger_core.use(language):
        exported = torch.export.export(Norm(), (X,), strict=True).module()
    with liger_core.use("torch"):
        torch.testing.assert_close(exported(Y), liger_core.rms_norm(Y, None))


@pytest.mark.slow
@pytest.mark.parametrize("language", ["torch", "toy-opaque", "toy-traced"])
def test_aot_inductor_packages_what_export_strict_records(toys: None, language: str, tmp_path: Path) -> None:
    with liger_core.use(language):
        exported = torch.export.export(Norm(), (X,), strict=True)
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "norm.pt2"))
    with liger_core.use("torch"):
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(Y), liger_core.rms_norm(Y, None))


def test_values_that_stand_for_others_are_not_read() -> None:
    table = torch.randn(5, 4, requires_grad=True)
    traced = aot_function(liger_core.embedding, fw_compiler=nop)
    torch.testing.assert_close(traced(torch.tensor([1, 2]), table), table[1:3])


def in_thread(call: Callable[[], Any]) -> Any:
    """The result of a call in another thread."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_an_export_in_another_thread_is_none_here(toys: None) -> None:
    """Another thread's state is not this thread's: values are read, and a launch is a launch."""
    wrong = torch.tensor([7])
    seen: list[Any] = []

    class Asks(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(in_thread(lambda: liger_core.cross_entropy(X, wrong.expand(3) + 7)))
            with liger_core.use("toy-opaque"):
                seen.append(in_thread(lambda: liger_core.rms_norm(X, None)))
            return x + 1

    torch.export.export(Asks(), (X,))
    assert isinstance(seen[0], IndexError)
    torch.testing.assert_close(seen[1], liger_core.rms_norm.reference(X, None))


def test_forward_mode_in_another_thread_is_none_here(toys: None) -> None:
    with forward_ad.dual_level(), liger_core.use("toy-opaque"):
        torch.testing.assert_close(
            in_thread(lambda: liger_core.rms_norm(X, None)), liger_core.rms_norm.reference(X, None)
        )


@pytest.mark.parametrize("language", ["toy-opaque", "toy-traced"])
def test_a_batch_of_gradients_says_no(toys: None, language: str) -> None:
    x = X.clone().requires_grad_()
    with liger_core.use(language):
        y = liger_core.rms_norm(x, None)
        with pytest.raises(RuntimeError, match=rf"rms_norm in {language} takes one incoming gradient.*use\('torch'\)"):
            torch.autograd.grad(y, x, torch.ones(4, 3, 8), is_grads_batched=True)
        with pytest.raises(RuntimeError, match="takes one incoming gradient"):
            torch.autograd.functional.jacobian(lambda x: liger_core.rms_norm(x, None), X, vectorize=True)
    with liger_core.use("torch"):
        y = liger_core.rms_norm(x, None)
        assert torch.autograd.grad(y, x, torch.ones(4, 3, 8), is_grads_batched=True)[0].shape == (4, 3, 8)


@pytest.mark.parametrize("language", ["toy-opaque", "toy-traced"])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, lambda f: torch.compile(f, backend="aot_eager")], ids=["eager", "compiled"]
)
def test_negative_views(toys: None, wrap: Callable[..., Any], language: str) -> None:
    """Kernels read memory, which holds such a view's values with the other sign. Calls alike but for that are remembered."""
    torch.compiler.reset()
    call = wrap(lambda x: liger_core.rms_norm(x, None))
    negative = torch._neg_view(X)
    with liger_core.use(language):
        for x in (X, negative, X, negative):
            torch.testing.assert_close(call(x), liger_core.rms_norm.reference(x, None))
        x = X.clone().requires_grad_()
        y = liger_core.rms_norm(x, None)
        expected = torch.autograd.grad(liger_core.rms_norm.reference(x, None), x, -Y)
        torch.testing.assert_close(torch.autograd.grad(y, x, torch._neg_view(Y)), expected)


@pytest.fixture
def complex_op(install: Callable[..., None]) -> Iterator[Callable[..., Tensor]]:
    """An op of complex numbers, whose kernel reads their memory."""

    @op(differentiable=("z",))
    def imaginary(z: Tensor) -> Tensor:
        return z.imag

    kernel = types.ModuleType("toy.ops.imaginary")
    kernel.forward = lambda needs, z: (torch.empty(0).set_(z.untyped_storage()).view(3, 4, 2)[..., 1].clone(), ())  # type: ignore[attr-defined]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackendInfo, "has_kernel", lambda self, name: name == "imaginary")
            patch.setattr(BackendInfo, "kernel", lambda self, name: kernel)
            install(BackendInfo("toy", ("cpu",), "torch", "toy", "pip install toy"))
            with liger_core.use("toy"):
                yield imaginary
    finally:
        del contract.ops["imaginary"]


def test_conjugate_views(complex_op: Callable[..., Tensor]) -> None:
    z = torch.view_as_complex(torch.randn(3, 4, 2))
    for tensor in (z, z.conj(), z, z.conj()):
        torch.testing.assert_close(complex_op(tensor), tensor.imag)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_strides(toys: None) -> None:
    rows = [torch.ones(2, 8), torch.ones(3, 8)]
    strided = torch.nested.nested_tensor(rows)
    with pytest.raises(TypeError, match=r"rms_norm: x is a nested tensor.*layout=torch\.jagged"):
        liger_core.rms_norm(strided, None)
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert liger_core.rms_norm(jagged, None).layout is torch.jagged


def test_forget_plans_in_the_midst_of_a_call(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may: the call goes on with what it found, and remembers nothing of it."""
    import toy_traced.ops.rms_norm as kernel

    norm = liger_core.rms_norm
    refuses = kernel.refuses

    def forgetful(*args: Any, **options: Any) -> Any:
        norm.forget_plans()
        return refuses(*args, **options)

    norm.forget_plans()
    monkeypatch.setattr(kernel, "refuses", forgetful)
    torch.testing.assert_close(norm(X, None), norm.reference(X, None))
    assert not norm._ready


@pytest.mark.parametrize("number", [np.float32(1e-3), np.float64(1e-3), np.float16(1e-3)])
def test_numpy_scalars_are_numbers(toys: None, monkeypatch: pytest.MonkeyPatch, number: Any) -> None:
    import toy_traced.ops.rms_norm as kernel

    seen: list[Any] = []
    forward = kernel.forward
    monkeypatch.setattr(
        kernel, "forward", lambda *args, **named: (seen.append(named["eps"]), forward(*args, **named))[1]
    )
    liger_core.rms_norm.forget_plans()
    for _ in range(2):
        y = liger_core.rms_norm(X, None, number)
        torch.testing.assert_close(y, liger_core.rms_norm.reference(X, None, float(number)))
    assert [type(eps) for eps in seen] == [float, float]
    loss = liger_core.cross_entropy(
        X, torch.zeros(3, dtype=torch.int64), ignore_index=np.int64(-1), return_z_loss=np.True_
    )  # type: ignore[arg-type]
    assert loss.z_loss is not None
    with pytest.raises(TypeError, match="eps is True"):
        liger_core.rms_norm(X, None, np.True_)  # type: ignore[arg-type]


def test_nodes_are_named_by_op_and_language(toys: None) -> None:
    """In profiles, in anomaly reports and in `grad_fn`."""
    x = X.clone().requires_grad_()
    for language in ("toy-opaque", "toy-traced"):
        with liger_core.use(language):
            y = liger_core.rms_norm(x, None)
        assert y.grad_fn is not None
        assert y.grad_fn.name() == f"rms_norm[{language}]Backward"
        with torch.profiler.profile() as profile:
            y.sum().backward()
        assert f"rms_norm[{language}]Backward" in {event.name for event in profile.events()}


def test_fx_records_the_op(toys: None) -> None:
    """As one call, which finds its kernel when the graph runs."""
    graph = torch.fx.symbolic_trace(lambda x: liger_core.rms_norm(x * 2, None, eps=1e-3))
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls[1:] == [liger_core.rms_norm]
    for language in ("torch", "toy-opaque"):
        with liger_core.use(language):
            torch.testing.assert_close(graph(X), liger_core.rms_norm.reference(X * 2, None, eps=1e-3))
    held = torch.fx.symbolic_trace(lambda x: liger_core.get_op("rms_norm", language="toy-opaque")(x, None))
    torch.testing.assert_close(held(X), liger_core.rms_norm.reference(X, None))


def test_launches_of_one_name_are_two() -> None:
    """`c` of `a.b` is not `b_c` of `a`, and what the same code makes twice is two functions."""

    def launch_of(value: float, module: str, name: str) -> Callable[[Tensor], None]:
        def launch(y: Tensor) -> None:
            y.fill_(value)

        launch.__module__, launch.__qualname__ = module, name
        return opaque(writes=("y",))(launch)

    launches = [launch_of(1.0, "a.b", "c"), launch_of(2.0, "a", "b_c"), launch_of(3.0, "a", "b_c")]
    for value, launch in enumerate(launches, 1):

        @torch.compile(fullgraph=True, backend="aot_eager")
        def call(x: Tensor, launch: Callable[[Tensor], None] = launch) -> Tensor:
            y = torch.empty_like(x)
            launch(y)
            return y

        assert (call(X) == value).all()


def test_tokens_of_fake_tensors_are_not_read() -> None:
    with FakeTensorMode():
        actual = liger_core.losses.token_logprobs(torch.ones(3, 5), torch.full((3,), 7))
    assert actual.shape == (3,)
