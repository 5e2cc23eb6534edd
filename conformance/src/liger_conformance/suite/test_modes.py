"""Every way in which PyTorch runs a call: a kernel runs, or the reference does, or an error says what to do.

One op stands for all: what decides is liger_core, which asks nothing of the op.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import Case
from liger_conformance.compare import same_bits
from liger_conformance.evaluate import complete, evaluate, name_results, present, require
from liger_conformance.route import only
from liger_conformance.suite.test_interface import check_compiled, check_graph_capture
from liger_conformance.suite.test_values import arguments_of
from liger_conformance.target import Target
from liger_core import resolve

KERNEL = "the kernel runs"
REFERENCE = "the reference runs; a request raises `Unsupported`"
ERROR = "an error that says what to do"


class Call:
    """A target's call as a function of its tensors alone, which tracers want."""

    def __init__(self, target: Target, case: Case, dtype: torch.dtype) -> None:
        self.target, self.case, self.dtype, self.op = target, case, dtype, target.op
        arguments = complete(self.op, arguments_of(target, case, dtype))
        other = complete(self.op, arguments_of(target, case, dtype, draw=1))
        self.names = tuple(name for name in self.op.tensors if arguments[name] is not None)
        self.rest = {name: value for name, value in arguments.items() if name not in self.names}
        self.tensors = [arguments[name] for name in self.names]
        self.others = [other[name] for name in self.names]
        self.wanted = [i for i, name in enumerate(self.names) if name in present(self.op, arguments)]

    def arguments(self, *tensors: Tensor) -> dict[str, Any]:
        """Every argument of the call by name."""
        return dict(zip(self.names, tensors, strict=True)) | self.rest

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = name_results(self.op, self.op(**self.arguments(*tensors)))
        return tuple(result for result in results.values() if result is not None)

    def reference(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Results of the contract's function."""
        results = name_results(self.op, self.op.reference(**self.arguments(*tensors)))
        return tuple(result for result in results.values() if result is not None)

    def leaves(self) -> list[Tensor]:
        """The tensors, those that can requiring a gradient."""
        return [t.detach().requires_grad_(i in self.wanted) for i, t in enumerate(self.tensors)]


class Module(torch.nn.Module):
    """The call as a module, which torch.export wants."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.call(*tensors)


@contextlib.contextmanager
def as_default(target: Target) -> Generator[None, None, None]:
    """The target's language is the one that its device has without being asked, and nothing is demanded."""
    op, device = target.op, target.device
    plans, ready = op._plans, op._ready
    plan = op.plan(device, target.language)
    *kernels, reference = plan.candidates
    if kernels:
        plan = resolve.resolution(op.name, device, None, (*kernels, reference._replace(why_not=None)))
    with liger_core.use():
        op._plans, op._ready = {(device, None): plan}, {}
        try:
            yield
        finally:
            op._plans, op._ready = plans, ready


def close(actual: Any, expected: Any) -> None:
    """The values of two programs of the same formula."""
    torch.testing.assert_close(actual, expected, equal_nan=True)


def runs_the_reference(target: Target, says: str, run: Callable[[], Any], expected: Callable[[], Any]) -> None:
    """Without a demand the reference runs and nothing is launched; what demands a kernel is told why that can't be."""
    if target.backend is not None:
        with liger_core.use(target.language), pytest.raises(liger_core.Unsupported, match=says):
            run()
    with as_default(target), interpreters.launches() as launches:
        actual = run()
    assert not launches, f"{target} launched {launches[0].kernel}"
    close(actual, expected())


def records_the_reference(call: Call, says: str, record: Callable[[Call], Any]) -> None:
    """The record is right on other data, and lacks nothing."""

    def run() -> tuple[Tensor, ...]:
        return record(call)(*call.others)

    runs_the_reference(call.target, says, run, lambda: call.reference(*call.others))


def needs_tracing(target: Target) -> None:
    """Skip what Dynamo traces, where kernels are interpreted."""
    if target.lane == "interpreted":
        pytest.skip("an interpreter can't be traced by torch.compile")


def compiles(call: Call) -> None:
    check_compiled(call.target, call.case, call.dtype, "cold")


def exports_strictly(call: Call) -> None:
    needs_tracing(call.target)
    with liger_core.use(call.target.language):
        exported = torch.export.export(Module(call), tuple(call.tensors), strict=True).module()
        expected = call(*call.others)
    close(exported(*call.others), expected)


def exports(call: Call) -> None:
    says = r"torch\.export without strict=True is active.*with strict=True it does"
    records_the_reference(
        call, says, lambda call: torch.export.export(Module(call), tuple(call.tensors), strict=False).module()
    )


def is_recorded_by_make_fx(call: Call) -> None:
    records_the_reference(call, "make_fx is active", lambda call: make_fx(call)(*call.tensors))


def is_traced_by_jit(call: Call) -> None:
    says = r"torch\.jit\.trace is active"
    records_the_reference(
        call,
        says,
        lambda call: torch.jit.trace(  # pyright: ignore[reportUnknownLambdaType]
            call.__call__, tuple(call.tensors), check_trace=False
        ),
    )


def is_a_node_of_fx(call: Call) -> None:
    class Leaf(torch.nn.Module):
        def forward(self, first: Tensor) -> Any:
            return call.op(**call.arguments(first, *call.tensors[1:]))

    graph = torch.fx.symbolic_trace(Leaf())
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [call.op]
    with only(call.target):
        actual, expected = graph(call.tensors[0]), call.op(**call.arguments(*call.tensors))
    for one, other in zip(*(name_results(call.op, r).values() for r in (actual, expected)), strict=True):
        require(one is other or same_bits(one, other), "the graph gives other bits than the call")


def is_mapped(call: Call) -> None:
    stacked = [torch.stack([t, o]) for t, o in zip(call.tensors, call.others, strict=True)]
    rows = [call.reference(*call.tensors), call.reference(*call.others)]
    expected = tuple(map(torch.stack, zip(*rows, strict=True)))
    says = r"a torch\.func transform is active"
    runs_the_reference(call.target, says, lambda: torch.func.vmap(call)(*stacked), lambda: expected)


def _scalar(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    def total(*tensors: Tensor) -> Tensor:
        return torch.stack([r.float().square().sum() for r in function(*tensors) if r.is_floating_point()]).sum()

    return total


def is_differentiated_by_func(call: Call) -> None:
    def run(function: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return torch.func.grad(_scalar(function), argnums=tuple(call.wanted))(*call.tensors)

    says = r"a torch\.func transform is active"
    runs_the_reference(call.target, says, lambda: run(call), lambda: run(call.reference))


def is_differentiated_forward(call: Call) -> None:
    tangents = [torch.ones_like(t) if i in call.wanted else None for i, t in enumerate(call.tensors)]

    def by_duals(function: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor | None, ...]:
        with forward_ad.dual_level():
            duals = [
                t if d is None else forward_ad.make_dual(t, d) for t, d in zip(call.tensors, tangents, strict=True)
            ]
            return tuple(forward_ad.unpack_dual(result).tangent for result in function(*duals))

    def by_func(function: Callable[..., tuple[Tensor, ...]]) -> Any:
        def of_wanted(*wanted: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(call.wanted, wanted, strict=True))
            return function(*[given.get(i, t) for i, t in enumerate(call.tensors)])

        return torch.func.jvp(
            of_wanted, tuple(call.tensors[i] for i in call.wanted), tuple(tangents[i] for i in call.wanted)
        )

    for run, says in (
        (by_duals, "forward-mode automatic differentiation is active"),
        (by_func, r"a torch\.func transform is active"),
    ):
        runs_the_reference(call.target, says, lambda run=run: run(call), lambda run=run: run(call.reference))


def _of_a_gradient(call: Call, says: str, differentiate: Callable[..., Any]) -> None:
    """Only the reference's gradient can do it, and a kernel's says that it can't."""
    leaves = call.leaves()
    with only(call.target):
        results = [r for r in call(*leaves) if r.requires_grad]
    wanted = [leaves[i] for i in call.wanted]
    if call.target.backend is None:
        differentiate(results, wanted)
        return
    with pytest.raises(RuntimeError, match=f"{call.op.name} in {call.target.language} {says}.*use\\('torch'\\)"):
        differentiate(results, wanted)


def takes_one_gradient_at_a_time(call: Call) -> None:
    def batched(results: list[Tensor], wanted: list[Tensor]) -> None:
        incoming = [torch.stack([torch.ones_like(r), torch.zeros_like(r)]) for r in results]
        found = torch.autograd.grad(results, wanted, incoming, is_grads_batched=True)
        assert all(gradient.shape == (2, *leaf.shape) for gradient, leaf in zip(found, wanted, strict=True))

    _of_a_gradient(call, "takes one incoming gradient", batched)


def has_no_second_derivative(call: Call) -> None:
    def twice(results: list[Tensor], wanted: list[Tensor]) -> None:
        total = torch.stack([r.square().sum() for r in results]).sum()
        first = torch.autograd.grad(total, wanted, create_graph=True)
        torch.autograd.grad(first[0].square().sum(), wanted, allow_unused=True)

    _of_a_gradient(call, "has no second derivative", twice)


def is_checkpointed(call: Call) -> None:
    def again(**given: Any) -> Any:
        return checkpoint(call.op, use_reentrant=False, **given)  # pyright: ignore[reportUnknownVariableType]

    arguments = call.arguments(*call.tensors)
    with only(call.target):
        expected = evaluate(call.op, call.op, arguments).items()
        actual = evaluate(call.op, again, arguments).items()
    for name, value in expected.items():
        require(value is actual[name] or same_bits(value, actual[name]), f"{name} differs under checkpointing")


def is_captured(call: Call) -> None:
    check_graph_capture(call.target, call.case, call.dtype)


def runs_in_inference_mode(call: Call) -> None:
    with only(call.target), torch.no_grad():
        expected = call(*call.tensors)
        with torch.inference_mode():
            actual = call(*call.tensors)
    assert all(result.is_inference() for result in actual)
    assert all(same_bits(one, other) for one, other in zip(actual, expected, strict=True))


def _shapes(results: tuple[Tensor, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(result.shape, result.dtype) for result in results]


def takes_meta_tensors(call: Call) -> None:
    meta = [t.to("meta") for t in call.tensors]
    if call.target.backend is not None:
        with (
            liger_core.use(call.target.language),
            pytest.raises(liger_core.Unsupported, match=f"{call.op.name} on meta"),
        ):
            call(*meta)
    with liger_core.use("torch"):
        results = call(*meta)
    assert {result.device.type for result in results} == {"meta"}
    assert _shapes(results) == _shapes(call.reference(*call.tensors))


def takes_fake_tensors(call: Call) -> None:
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in call.tensors]
        if call.target.backend is not None:
            with liger_core.use(call.target.language), pytest.raises(liger_core.Unsupported, match="is a FakeTensor"):
                call(*fake)
        with as_default(call.target):
            results = call(*fake)
    assert _shapes(results) == _shapes(call.reference(*call.tensors))


class Mode(NamedTuple):
    """A way of running a call: what users write, what a kernel's language does then, and the check of that."""

    name: str
    promise: str
    check: Callable[[Call], None]

    def __str__(self) -> str:
        return self.check.__name__


MODES = (
    Mode("`torch.compile(fullgraph=True)`", KERNEL, compiles),
    Mode("`torch.export(strict=True)`", KERNEL, exports_strictly),
    Mode("`torch.export` without `strict=True`", REFERENCE, exports),
    Mode("`make_fx`", REFERENCE, is_recorded_by_make_fx),
    Mode("`torch.jit.trace`", REFERENCE, is_traced_by_jit),
    Mode("`torch.fx.symbolic_trace`", KERNEL, is_a_node_of_fx),
    Mode("`torch.func.vmap`", REFERENCE, is_mapped),
    Mode("`torch.func.grad`", REFERENCE, is_differentiated_by_func),
    Mode("`torch.func.jvp`, dual tensors", REFERENCE, is_differentiated_forward),
    Mode("`is_grads_batched=True`", ERROR, takes_one_gradient_at_a_time),
    Mode("double backward", ERROR, has_no_second_derivative),
    Mode("`torch.utils.checkpoint`", KERNEL, is_checkpointed),
    Mode("CUDA graph", KERNEL, is_captured),
    Mode("`torch.inference_mode`", KERNEL, runs_in_inference_mode),
    Mode("meta tensors", REFERENCE, takes_meta_tensors),
    Mode("fake tensors", REFERENCE, takes_fake_tensors),
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.targets("one_op")
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_mode(target: Target, case: Case, dtype: torch.dtype, mode: Mode) -> None:
    """The documentation's words for a mode, in its table."""
    mode.check(Call(target, case, dtype))
