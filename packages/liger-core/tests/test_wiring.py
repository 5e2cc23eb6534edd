"""The autograd and torch.compile wiring, through toy kernels that take every branch of it."""

from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import liger_core
from liger_core import BackendInfo, Unsupported, checks, contract, dispatch
from liger_core.contract import Needs, Saved, op
from liger_core.custom_op import opaque


class FitOutput(NamedTuple):
    """The result of `fit`."""

    loss: Tensor
    worst: Tensor | None
    residual: Tensor


def serve(
    name: str,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    saves_early: Callable[..., Any] | None = None,
) -> None:
    """Install a language, "toy", with a kernel of one op."""
    kernel = types.ModuleType(f"toy.ops.{name}")
    kernel.forward, kernel.backward, kernel.saves_early = forward, backward, saves_early  # type: ignore[attr-defined]
    monkeypatch.setattr(BackendInfo, "has_kernel", lambda self, asked: asked == name)
    monkeypatch.setattr(BackendInfo, "kernel", lambda self, asked: kernel)
    install(BackendInfo("toy", ("cpu",), "torch", "toy", "pip install toy"))


@pytest.fixture
def fit(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Iterator[contract.Op[..., Any]]:
    """An op of several results, some without a gradient, whose kernel computes its gradients in forward."""

    @op(differentiable=("x", "weight"), result=FitOutput, grad_results=("loss", "residual"), autocast=("x",))
    def fit(x: Tensor, weight: Tensor, target: Tensor | None = None, *, worst: bool = False, bare: bool = False) -> Any:
        residual = x * weight - (0 if target is None else target.detach())
        loss = residual.square().sum()
        return loss if bare else FitOutput(loss, residual.detach().abs().argmax() if worst else None, residual)

    def forward(
        needs: Needs,
        x: Tensor,
        weight: Tensor,
        target: Tensor | None = None,
        *,
        worst: bool = False,
        bare: bool = False,
    ) -> tuple[Any, Saved]:
        residual = x * weight - (0 if target is None else target)
        dx = 2 * residual * weight if needs[0] else None
        dweight = (2 * residual * x).sum(0) if needs[1] else None
        saved = (dx, dweight, x if needs[1] else None, weight if needs[0] else None) if any(needs) else ()
        loss = residual.square().sum()
        return (loss if bare else (loss, residual.abs().argmax() if worst else None, residual)), saved

    def backward(
        needs: Needs, saved: Saved, dloss: Tensor | None, dresidual: Tensor | None = None, *, worst: bool, bare: bool
    ) -> tuple[Tensor | None, ...]:
        dx, dweight, x, weight = saved
        if dx is not None:
            dx = (0 if dloss is None else dx * dloss) + (0 if dresidual is None else dresidual * weight)
        if dweight is not None:
            dweight = (0 if dloss is None else dweight * dloss) + (0 if dresidual is None else (dresidual * x).sum(0))
        return dx, dweight

    serve("fit", install, monkeypatch, forward, backward)
    yield fit
    del contract.ops["fit"]


def differentiate(
    call: Callable[..., Any], x: Tensor, weight: Tensor, target: Tensor, **options: Any
) -> list[Tensor | None]:
    """Values, then gradients for those of x and weight that require one."""
    out = call(x, weight, target, **options)
    out = (out,) if isinstance(out, Tensor) else out
    outputs = [o for o in out if o is not None and o.requires_grad]
    leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, [torch.full_like(o, -0.5) for o in outputs]) if leaves else ()
    return [*(o if o is None else o.detach() for o in out), *grads]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
        lambda f: torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True),
    ],
    ids=["eager", "compiled", "dynamic"],
)
@pytest.mark.parametrize("options", [{}, {"worst": True}, {"bare": True}], ids=["plain", "worst", "bare"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
def test_several_results(
    fit: contract.Op[..., Any], needs: tuple[bool, bool], options: dict[str, bool], wrap: Callable[..., Any]
) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    x, weight, target = (
        torch.randn(3, 4, requires_grad=needs[0]),
        torch.randn(4, requires_grad=needs[1]),
        torch.randn(3, 4),
    )
    with liger_core.use("torch"):
        expected = differentiate(fit, x, weight, target, **options)
    with liger_core.use("toy"):
        actual = differentiate(wrap(fit), x, weight, target, **options)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_result_that_is_absent_has_no_gradient(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """In compiled code a tensor stands for it, and zeros for its gradient: a kernel would read what isn't there."""

    class Both(NamedTuple):
        half: Tensor
        double: Tensor | None

    @op(differentiable=("x",), result=Both)
    def both(x: Tensor, *, twice: bool = False) -> Any:
        return Both(x / 2, x * 2 if twice else None)

    def forward(needs: Needs, x: Tensor, *, twice: bool) -> tuple[Any, Saved]:
        return (x / 2, x * 2 if twice else None), (x,)

    def backward(
        needs: Needs, saved: Saved, dhalf: Tensor | None, ddouble: Tensor | None, *, twice: bool
    ) -> tuple[Tensor]:
        assert dhalf is not None
        return (dhalf / 2 if ddouble is None else dhalf / 2 + 2 * ddouble,)

    serve("both", install, monkeypatch, forward, backward)
    try:
        torch.compiler.reset()
        call = torch.compile(both, fullgraph=True, backend="aot_eager") if compiled else both
        for twice, expected in ((False, 0.5), (True, 2.5)):
            x = torch.ones(3, requires_grad=True)
            with liger_core.use("toy"):
                results = [r for r in call(x, twice=twice) if r is not None]
            assert len(results) == 1 + twice
            sum(r.sum() for r in results).backward()
            torch.testing.assert_close(x.grad, torch.full((3,), expected))
    finally:
        del contract.ops["both"]


@pytest.mark.parametrize("compiled", [False, True])
def test_one_tensor_as_two_arguments(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Its gradient is the sum of both. A traced Function that gets one tensor twice is wrong or refused, by torch's version."""

    @op(differentiable=("x", "y"))
    def ratio(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return x.square() / y * z.detach()

    def forward(needs: Needs, x: Tensor, y: Tensor, z: Tensor) -> tuple[Any, Saved]:
        return x.square() / y * z, (x, y, z)

    def backward(needs: Needs, saved: Saved, dratio: Tensor) -> tuple[Tensor | None, ...]:
        x, y, z = saved
        gradients = 2 * x / y * z * dratio, -x.square() / y.square() * z * dratio
        return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))

    serve("ratio", install, monkeypatch, forward, backward)
    try:
        torch.compiler.reset()
        call = torch.compile(ratio, fullgraph=True, backend="aot_eager") if compiled else ratio
        x, y = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0])
        for arguments, expected in (((x, x, x), 3.0), ((x, y, x), 3.6), ((x, y, y), 6.0), ((y, x, x), -25 / 3)):
            with liger_core.use("toy"):
                (actual,) = torch.autograd.grad(call(*arguments).sum(), x)
            torch.testing.assert_close(actual, torch.tensor([expected]))
    finally:
        del contract.ops["ratio"]


def test_named_result_and_what_has_a_gradient(fit: contract.Op[..., Any]) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    with liger_core.use("toy"):
        out = fit(x, weight, worst=True)
    assert type(out) is FitOutput
    assert out.loss.requires_grad
    assert out.residual.requires_grad
    assert not out.worst.requires_grad


@pytest.mark.parametrize("which", ["loss", "residual"])
def test_one_result_without_gradient(fit: contract.Op[..., Any], which: str) -> None:
    """The kernel sees None for the gradient of the result that nobody used."""
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    grads = {}
    for language in ("torch", "toy"):
        with liger_core.use(language):
            grads[language] = torch.autograd.grad(getattr(fit(x, weight), which).sum(), (x, weight))
    torch.testing.assert_close(grads["toy"], grads["torch"])


def test_nothing_saved_without_grad(fit: contract.Op[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    with liger_core.use("toy"):
        with torch.no_grad():
            assert not fit(x, weight).loss.requires_grad
        assert fit(x.detach(), weight).loss.grad_fn is None


def test_second_derivative_says_no(fit: contract.Op[..., Any]) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    with liger_core.use("toy"):
        (dx,) = torch.autograd.grad(fit(x, weight).loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="fit in toy has no second derivative"):
        dx.sum().backward()


def test_autocast_casts_what_the_contract_says(fit: contract.Op[..., Any]) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    for language in ("torch", "toy"):
        with liger_core.use(language), torch.autocast("cpu", torch.bfloat16):
            out = fit(x, weight)
            (dx,) = torch.autograd.grad(out.loss, x)
        with liger_core.use(language):
            expected = fit(x.bfloat16(), weight)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        assert dx.dtype is torch.float32


def test_a_references_compiled_backward_runs_without_autocast() -> None:
    """As its forward does. torch.compile would make the product of mhc_post's gradient in bfloat16."""
    torch.manual_seed(0)
    streams = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]

    def call(x: Tensor, res: Tensor) -> Tensor:
        return liger_core.mhc_post(x[0], x, res[0], res)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with liger_core.use("torch"):
        expected = torch.autograd.grad(call(*streams).square().sum(), streams)
        with torch.autocast("cpu", torch.bfloat16):
            actual = torch.autograd.grad(compiled(*streams).square().sum(), streams)
    torch.testing.assert_close(actual, expected)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return liger_core.rms_norm(x, weight, 1e-5, offset=1.0) * 2


@pytest.mark.parametrize("start", ["cold", "warm"])
@pytest.mark.parametrize("language", ["torch", "toy-traced", "toy-opaque"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, False)])
def test_compile_fullgraph(toys: None, language: str, start: str, needs: tuple[bool, bool]) -> None:
    """No graph break, forward and backward, with sizes that change, traced or hidden behind an opaque launch."""
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled = torch.compile(rms, fullgraph=True, backend="aot_eager")
    for rows in (3, 5, 7):
        x, weight = torch.randn(rows, 8, requires_grad=needs[0]), torch.randn(8, requires_grad=needs[1])
        with liger_core.use("torch"):
            expected = rms(x, weight)
        with liger_core.use(language):
            if start == "warm":
                rms(x, weight)
            actual = compiled(x, weight)
        torch.testing.assert_close(actual, expected)
        leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]
        if leaves:
            torch.testing.assert_close(
                torch.autograd.grad(actual.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
            )


def nested(x: Tensor) -> Tensor:
    with liger_core.use("toy-traced", embedding="torch"):
        y = liger_core.rms_norm(x, None)
        with liger_core.use(rms_norm="toy-opaque"):
            z = liger_core.rms_norm(x, None)
    return 10 * y + z


def decorated(x: Tensor) -> Tensor:
    return liger_core.use("toy-opaque")(liger_core.rms_norm)(x, None)


def bound(x: Tensor) -> Tensor:
    return liger_core.get_op("rms_norm", language="toy-opaque")(x, None)


def bound_to_what_is_requested(x: Tensor) -> Tensor:
    with liger_core.use("toy-opaque"):
        norm = liger_core.get_op(liger_core.rms_norm, device=x.device)
    return norm(x, None)


@pytest.mark.parametrize(
    ("function", "value"), [(nested, 75.0), (decorated, 5.0), (bound, 5.0), (bound_to_what_is_requested, 5.0)]
)
def test_a_language_is_requested_inside_of_compiled_code(
    toys: None, monkeypatch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor], value: float
) -> None:
    """Each kernel gives a number of its own. Behind the code the request is what it was before."""
    import toy_opaque.ops.rms_norm as opaque_kernel
    import toy_traced.ops.rms_norm as traced_kernel

    for kernel, number in ((opaque_kernel, 5.0), (traced_kernel, 7.0)):
        monkeypatch.setattr(kernel, "forward", lambda _, x, *args, n=number, **options: (torch.full_like(x, n), ()))
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for call in (function, compiled, compiled):
        assert call(torch.ones(2, 8)).unique().tolist() == [value]
        assert dispatch.state.demand is None


@pytest.mark.parametrize("request_it", [liger_core.use, lambda name: liger_core.get_op("rms_norm", language=name)])
def test_what_is_no_language_inside_of_compiled_code(toys: None, request_it: Callable[[str], Any]) -> None:
    torch.compiler.reset()

    def call(x: Tensor) -> Tensor:
        request_it("nothing")
        return x

    with pytest.raises(Exception, match="there is no language 'nothing'; installed: torch, toy-opaque, toy-traced"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(torch.ones(2))


def test_compiled_code_follows_use(toys: None) -> None:
    """A change of language recompiles; it is not baked in."""
    torch.compiler.reset()
    import toy_traced.ops.rms_norm as kernel

    compiled = torch.compile(lambda x: liger_core.rms_norm(x, None), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8)
    with liger_core.use("torch"):
        plain = compiled(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "forward", lambda needs, x, *args, **options: (torch.full_like(x, 7.0), ()))
        with liger_core.use("toy-traced"):
            assert (compiled(x) == 7).all()
    with liger_core.use("torch"):
        torch.testing.assert_close(compiled(x), plain)


def test_eager_opaque_launch_skips_torch_library(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls never cross a torch.library boundary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.namespace)
            return function(*args, **(kwargs or {}))

    x = torch.randn(2, 8, requires_grad=True)
    with Listen(), liger_core.use("toy-opaque"):
        liger_core.rms_norm(x, None).sum().backward()
    assert "aten" in seen
    assert "liger" not in seen


def test_a_compiled_launch_runs_no_python_but_its_own() -> None:
    """torch.library.custom_op runs Python for gradients and versions around each call."""

    def fill(y: Tensor, value: float) -> None:
        y.fill_(value)

    fill.__module__, fill.__qualname__ = "toy", "fill"
    opaque(writes=("y",))(fill)
    launch, y, called = torch.ops.liger.toy_fill.default, torch.zeros(2), list[str]()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        launch(y, 3.0)
    finally:
        sys.setprofile(before)
    assert y.tolist() == [3.0, 3.0]
    assert called == ["__call__", "fill"]  # OpOverload's, and ours


def copy_fit(written: FitOutput, addend: FitOutput | None, value: float) -> None:
    for name, y in written._asdict().items():
        x = None if addend is None else getattr(addend, name)
        if y is not None:
            y.copy_(value + (0.0 if x is None else x))


@pytest.mark.parametrize("with_worst", [True, False])
@pytest.mark.parametrize("addend", [True, False])
def test_a_launch_takes_named_tuples(with_worst: bool, addend: bool) -> None:
    """Also None in place of one, or of its fields."""
    copy_fit.__module__ = "toy"  # a part of the custom op's name
    launch = opaque(writes=("written",))(copy_fit)

    def run(x: Tensor) -> FitOutput:
        written = FitOutput(torch.empty_like(x), torch.empty_like(x) if with_worst else None, torch.empty_like(x))
        launch(written, FitOutput(x, None, 2 * x) if addend else None, 1.0)
        return written

    torch.compiler.reset()
    x = torch.randn(3)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert isinstance(compiled, FitOutput)
    for actual, expected in zip(compiled, run(x), strict=True):
        assert actual is expected if actual is None or expected is None else torch.equal(actual, expected)


def test_checkpoint_recomputes_in_the_same_language(toys: None) -> None:
    """Activation checkpointing runs the forward again inside backward, in autograd's own threads on an accelerator."""
    from torch.utils.checkpoint import checkpoint

    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    with liger_core.use("toy-traced"):
        plain = torch.autograd.grad(rms(x, weight).sum(), (x, weight))
        again = torch.autograd.grad(checkpoint(rms, x, weight, use_reentrant=False).sum(), (x, weight))
    torch.testing.assert_close(plain, again, rtol=0, atol=0)


def test_compiled_transforms_run_the_reference(toys: None) -> None:
    """Inside torch.func.grad nothing requires a gradient: a kernel there would give none, and no error."""
    torch.compiler.reset()
    x = torch.randn(8)
    for transform in (torch.func.grad, torch.func.jacrev):
        f = transform(lambda x: liger_core.rms_norm(x, None).pow(3).sum())
        with liger_core.use("torch"):
            expected = f(x)
        torch.testing.assert_close(torch.compile(f, backend="aot_eager")(x), expected)


def test_forward_mode_runs_the_reference(toys: None) -> None:
    from torch.autograd import forward_ad

    x, tangent = torch.randn(2, 8), torch.randn(2, 8)
    _, expected = torch.func.jvp(lambda x: liger_core.rms_norm(x, None), (x,), (tangent,))
    with forward_ad.dual_level():
        y = liger_core.rms_norm(forward_ad.make_dual(x, tangent), None)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, expected)
        with liger_core.use("toy-traced"), pytest.raises(Unsupported, match="forward-mode automatic differentiation"):
            liger_core.rms_norm(forward_ad.make_dual(x, tangent), None)


class NoGradient(torch.autograd.Function):
    """The identity, through which no gradient flows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def test_no_gradient_into_any_result(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is none to give, and the kernel's backward isn't asked."""
    import toy_traced.ops.rms_norm as kernel

    monkeypatch.delattr(kernel, "backward")
    x = torch.randn(2, 8, requires_grad=True)
    NoGradient.apply(liger_core.rms_norm(x, None)).sum().backward()
    assert x.grad is None


def test_backward_runs_without_autocast(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As forward does: what it computes again has the dtype that it had."""
    import toy_traced.ops.rms_norm as kernel

    actual: list[bool] = []
    backward = kernel.backward

    def spy(*args: Any, **options: Any) -> Any:
        actual.append(torch.is_autocast_enabled("cpu"))
        return backward(*args, **options)

    monkeypatch.setattr(kernel, "backward", spy)
    x = torch.randn(2, 8, requires_grad=True)
    for again in (False, True):
        y = liger_core.rms_norm(x, None)
        with torch.autocast("cpu", torch.bfloat16):
            (dx,) = torch.autograd.grad(y.sum(), x, create_graph=again)
        assert dx.requires_grad is again
    assert actual == [False, False]


@pytest.fixture
def early(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[contract.Op[..., Any], list[str]]]:
    """An op whose kernel keeps its arguments alone in checkpointing, and the passes that ran."""
    ran: list[str] = []

    @op(differentiable=("x", "weight"), autocast=("x", "weight"))
    def early(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
        return x @ weight.t() * factor

    def forward(needs: Needs, x: Tensor, weight: Tensor, *, factor: float = 1.0) -> tuple[Tensor, Saved]:
        ran.append(f"forward {needs}")
        y = x @ weight.t()
        return y * factor, (x, weight, y) if any(needs) else ()

    def saves_early(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> contract.SavedEarly:
        return contract.SavedEarly((x, weight, None), (*x.shape[:-1], weight.shape[0]))

    def backward(needs: Needs, saved: Saved, dy: Tensor, *, factor: float) -> tuple[Tensor | None, ...]:
        x, weight, y = saved
        ran.append("backward" if y is None else "backward of what forward kept")
        dy = dy * factor
        return dy @ weight if needs[0] else None, dy.t() @ x if needs[1] else None

    serve("early", install, monkeypatch, forward, backward, saves_early)
    with liger_core.use("toy"):
        yield early, ran
    del contract.ops["early"]


@pytest.mark.parametrize("place", ["alone", "in lean", "in autocast"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_what_is_kept_early_is_made_again_without_the_forward(
    early: tuple[contract.Op[..., Any], list[str]], needs: tuple[bool, bool], place: str
) -> None:
    """Checkpointing runs the region again until the kernel's arguments are there, which is before its forward."""
    from torch.utils.checkpoint import checkpoint

    call, ran = early
    torch.manual_seed(0)
    x, weight = (torch.randn(4, 4, requires_grad=need) for need in needs)
    leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]

    def region(x: Tensor, weight: Tensor, last: bool = True) -> Tensor:
        with liger_core.lean() if place == "in lean" else contextlib.nullcontext():
            y = call(x.sin(), weight, factor=-0.5)
            return x + y if last else y.sigmoid()

    with torch.autocast("cpu", enabled=place == "in autocast"):
        with liger_core.use("torch"):
            expected = torch.autograd.grad(region(x, weight).sum(), leaves)
        result = checkpoint(region, x, weight, use_reentrant=False)
        assert ran == ["forward (False, False)"]
        actual = torch.autograd.grad(result.sum(), leaves)
        torch.testing.assert_close(actual, expected)
        assert ran == ["forward (False, False)", "backward"]
        ran.clear()  # something after it keeps its result: the forward runs again
        torch.autograd.grad(checkpoint(region, x, weight, False, use_reentrant=False).sum(), leaves)
        assert ran == ["forward (False, False)"] * 2 + ["backward"]
        ran.clear()  # reentrant checkpointing runs the whole region again, with autograd
        torch.autograd.grad(region(x, weight).sum(), leaves)
        assert ran == [f"forward {needs}", "backward of what forward kept"]


def test_what_is_kept_early_in_other_uses(early: tuple[contract.Op[..., Any], list[str]]) -> None:
    """Retained graphs, selective checkpointing, hooks of other code, and gradients of gradients, which say what they lack."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    call, ran = early
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y = checkpoint(call, x, weight, use_reentrant=False)
    assert type(y.grad_fn).__name__ == "early[toy]Backward"
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, weight)), first)
    (dx,) = torch.autograd.grad(checkpoint(call, x, weight, use_reentrant=False).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()
    ran.clear()

    def context() -> Any:
        return create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)

    y = checkpoint(call, x, weight, use_reentrant=False, context_fn=context)
    assert ran == ["forward (True, True)"]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, weight)), first)
    ran.clear()
    with torch.autograd.graph.save_on_cpu():
        y = call(x, weight)
    assert ran == ["forward (True, True)"]


def test_checkpoint_with_create_graph(toys: None) -> None:
    """It gives what was saved no second time."""
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(3, 8, requires_grad=True)
    (plain,) = torch.autograd.grad(liger_core.rms_norm(x, None).sum(), x)
    (again,) = torch.autograd.grad(
        checkpoint(liger_core.rms_norm, x, None, use_reentrant=False).sum(), x, create_graph=True
    )
    torch.testing.assert_close(plain, again.detach(), rtol=0, atol=0)


def test_hooks_of_saved_tensors_leave_nothing_behind(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors kept for one backward don't go through the hooks: they are dropped, for backward to make anew."""
    import toy_traced.ops.rms_norm as kernel

    buffers: list[contract.SavedOnce] = []

    def forward(needs: Needs, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Saved]:
        buffers.append(contract.SavedOnce(torch.full_like(x, 2.0)))
        return x * 2, (x, buffers[-1])

    def backward(needs: Needs, saved: Saved, dy: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
        tensors = saved[-1].take()
        return dy * (3.0 if tensors is None else tensors[0]), None

    monkeypatch.setattr(kernel, "forward", forward)
    monkeypatch.setattr(kernel, "backward", backward)
    x = torch.ones(2, 8, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        hooked = liger_core.rms_norm(x, None)
    assert buffers[-1].take() is None
    assert (torch.autograd.grad(hooked.sum(), x)[0] == 3).all()
    assert (torch.autograd.grad(liger_core.rms_norm(x, None).sum(), x)[0] == 2).all()


def other_strides(tensor: Tensor) -> Tensor:
    """The same values, every other element of a larger tensor, and its dimensions in memory the other way round."""
    order = list(reversed(range(tensor.dim())))
    larger = torch.zeros([2 * size for size in reversed(tensor.shape)]).permute(order)
    view = larger[tuple([slice(None, None, 2)] * tensor.dim())]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("way", ["around-the-call", "on-single-tensors"])
def test_hooks_of_saved_tensors_may_change_strides(toys: None, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Backward gets what forward saved as it lay there, gaps aside, whatever a hook made of it."""
    import toy_traced.ops.rms_norm as kernel

    seen: list[list[tuple[int, ...]]] = []
    contiguous, swapped, gaps = torch.randn(3, 4), torch.randn(2, 4, 3).transpose(1, 2), torch.randn(3, 9)[:, :4]
    one = torch.randn(())

    def forward(needs: Needs, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Saved]:
        return x * 2, (contiguous, None, swapped, gaps, one)

    def backward(needs: Needs, saved: Saved, dy: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
        seen.append([t.stride() for t in saved if t is not None])
        for got, tensor in zip(saved, (contiguous, None, swapped, gaps, one), strict=True):
            assert got is tensor or torch.equal(got, tensor)
        return dy * 2, None

    monkeypatch.setattr(kernel, "forward", forward)
    monkeypatch.setattr(kernel, "backward", backward)
    x = torch.ones(2, 8, requires_grad=True)
    if way == "around-the-call":
        with torch.autograd.graph.saved_tensors_hooks(other_strides, lambda t: t):
            y = liger_core.rms_norm(x, None)
    else:
        y = liger_core.rms_norm(x, None)
        raw = y.grad_fn._raw_saved_tensors  # type: ignore[union-attr]
        for place in (0, 2, 3, 4):
            raw[place].register_hooks(other_strides, lambda t: t)
    y.sum().backward()
    liger_core.rms_norm(x, None).sum().backward()
    assert seen == [
        [contiguous.stride(), swapped.stride(), (4, 1), ()],
        [contiguous.stride(), swapped.stride(), gaps.stride(), ()],
    ]


def test_copies_and_pickles_are_the_op_itself() -> None:
    module = torch.nn.Module()
    module.norm = liger_core.rms_norm
    assert copy.deepcopy(module).norm is liger_core.rms_norm
    for each in contract.ops.values():
        assert pickle.loads(pickle.dumps(each)) is each


def test_fake_tensors_have_no_values_to_check() -> None:
    with FakeTensorMode():
        assert liger_core.embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(5, 8)).shape == (3, 8)


def test_sparse_tensors_are_refused(toys: None) -> None:
    x = torch.eye(4)
    liger_core.rms_norm(x, None)  # a call that is remembered has the same metadata but for the layout
    with pytest.raises(TypeError, match=r"rms_norm: x has layout torch\.sparse_coo; it takes a dense tensor"):
        liger_core.rms_norm(x.to_sparse(), None)


def test_equal_options_of_another_type_are_checked(install: Callable[..., None]) -> None:
    """A call is remembered by its options: (1, 1) equals (1.0, True)."""

    @op(differentiable=("x",))
    def grow(x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x * sum(sizes)

    @grow.checks
    def _(x: Tensor, sizes: Sequence[int]) -> None:
        for size in sizes:
            checks.integer("grow", sizes=size)

    try:
        with pytest.MonkeyPatch.context() as patch:
            serve("grow", install, patch, lambda needs, x, sizes: (x * sum(sizes), ()))
            with liger_core.use("toy"):
                assert grow(torch.ones(1), (1, 1)).item() == grow(torch.ones(1), (1, 1)).item() == 2
                for wrong in ((1.0, 1), (1, True)):
                    with pytest.raises(TypeError, match="grow: sizes is"):
                        grow(torch.ones(1), wrong)
    finally:
        del contract.ops["grow"]


IMPORTS = """
import sys, torch
before = set(sys.modules)
import liger_core
new = {name.partition(".")[0] for name in set(sys.modules) - before}
kernel_languages = {"triton", "cuda", "liger_triton", "liger_cutile", "liger_triton_ascend", "torch_npu"}
print(sorted(new & kernel_languages), [name for name in sys.modules if name.startswith("torch._dynamo")])
"""


def test_import_brings_no_kernel_language_and_no_dynamo() -> None:
    out = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[] []"


def test_a_hidden_function_may_return_a_tensor() -> None:
    """torch.compile knows only the fake. The function itself may look at values, which can't be traced."""

    def like(x: Tensor, places: Tensor) -> Tensor:
        return x.new_empty(places.shape[0], x.shape[1])

    @opaque(writes=(), fake=like)
    def rows_at(x: Tensor, places: Tensor) -> Tensor:
        return torch.stack([x[place] for place in places.tolist()])

    x, places = torch.randn(4, 3), torch.tensor([2, 0, 3])
    torch.compiler.reset()
    actual = torch.compile(lambda x, places: rows_at(x, places) + 1, backend="aot_eager", fullgraph=True)(x, places)
    assert torch.equal(actual, x[places] + 1)
    assert torch.equal(rows_at(x, places), x[places])
