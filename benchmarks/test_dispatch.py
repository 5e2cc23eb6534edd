"""Host time of a call beside its kernel, against liger-kernel's dispatcher: any machine will do.

Both run kernels that do nothing, each registered as the library takes them from outside: `noop_language` for liger_core,
`liger_kernel.backends.register_impl` for liger-kernel, preferred to its own. What is left is finding the kernel,
checking the arguments and, with gradients, autograd, whose own part is timed too: a bare `torch.autograd.Function`.

Nothing is asserted about time; `report.TARGETS` says what is aimed at, and the table whether it is met.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, NoReturn

import noop_language
import pytest
import report
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from timing import clock
from torch import Tensor

from liger_core import backend, dispatch, rms_norm, use

Call = Callable[[], Any]


def _nothing_to_resolve() -> NoReturn:
    raise TypeError("autograd alone chooses no kernel")


class Library(NamedTuple):
    """A library with a no-op kernel for rms_norm, and the calls that are timed."""

    name: str
    rms_norm: Callable[[Tensor, Tensor], Tensor]
    resolve: Call = _nothing_to_resolve
    demand: Call = _nothing_to_resolve
    """`resolve` when a language is demanded: by `use`, or by the argument ``impl``."""
    run: Call = _nothing_to_resolve


class Noop(torch.autograd.Function):
    """Returns its first argument, as the no-op kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


@pytest.fixture
def tensors(device: str) -> tuple[Tensor, Tensor]:
    return torch.ones(2, 8, device=device), torch.ones(8, device=device)


@pytest.fixture
def ours(tensors: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """liger_core with no language installed but the no-op one, which is the device's default."""
    device = tensors[0].device.type
    discovered = (noop_language.on(device),), ()
    monkeypatch.setattr(backend, "discover", lambda: discovered)
    rms_norm.forget_plans()
    with use("noop"):
        demand = dispatch.state.demand
        rms_norm(*tensors)
    rms_norm(*tensors)
    arguments = rms_norm.bind(tensors, {})
    options = {name: arguments[name] for name in rms_norm.options}
    resolve = partial(rms_norm.resolve, device, None, None, arguments)
    yield Library(
        report.OURS,
        rms_norm,
        resolve=resolve,
        demand=partial(rms_norm.resolve, device, demand, None, arguments),
        run=lambda: resolve().run(arguments, (False, False), options),
    )
    rms_norm.forget_plans()


@pytest.fixture(scope="session")
def peer_backends() -> Any:
    """`liger_kernel.backends`, with a no-op rms_norm that is preferred to every other."""
    if find_spec("liger_kernel") is None:
        pytest.skip("not run: liger-kernel is not installed: uv run --group bench pytest benchmarks/test_dispatch.py")
    backends: Any = import_module("liger_kernel.backends")

    @backends.register_impl("rms_norm", impl_name="noop-python", preference_rank=-1)
    def noop(x: Tensor, weight: Tensor, *options: Any, mode: str | None = None) -> Tensor:
        return Noop.apply(x, weight) if torch.is_grad_enabled() and x.requires_grad else x

    return backends


@pytest.fixture
def peer(peer_backends: Any, tensors: tuple[Tensor, Tensor]) -> Library:
    """liger-kernel. It resolves by the device of the first CUDA tensor, or by none."""
    resolve = peer_backends.resolve_impl
    on = tensors[0].device if tensors[0].is_cuda else None
    options = (1e-6, 0.0, "llama", False, None)
    return Library(
        report.PEER,
        import_module("liger_kernel.functional").rms_norm,
        resolve=lambda: resolve("rms_norm", device=on),
        demand=lambda: resolve("rms_norm", "noop-python", device=on),
        run=partial(peer_backends.dispatch, "rms_norm", *tensors, *options),
    )


@pytest.fixture
def bare() -> Library:
    """autograd alone: what any call with gradients costs."""
    return Library(report.AUTOGRAD, Noop.apply)


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Library:
    return request.getfixturevalue(request.param)


of_both = pytest.mark.parametrize("library", ["ours", "peer"], indirect=True)
of_all = pytest.mark.parametrize("library", ["ours", "peer", "bare"], indirect=True)


def measure(benchmark: BenchmarkFixture, what: str, library: Library, call: Call) -> Any:
    benchmark.group = what
    benchmark.extra_info.update(suite="dispatch", measure=what, library=library.name)
    return benchmark(call)


@of_both
def test_resolve(benchmark: BenchmarkFixture, library: Library) -> None:
    assert "noop" in repr(measure(benchmark, report.RESOLVE, library, library.resolve))


@of_both
def test_resolve_demanded(benchmark: BenchmarkFixture, library: Library) -> None:
    assert "noop" in repr(measure(benchmark, report.RESOLVE_DEMANDED, library, library.demand))


@of_both
def test_resolve_and_run(benchmark: BenchmarkFixture, library: Library, tensors: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        assert measure(benchmark, report.RESOLVE_AND_RUN, library, library.run) is tensors[0]


@of_both
def test_call(benchmark: BenchmarkFixture, library: Library, tensors: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        assert measure(benchmark, report.CALL, library, partial(library.rms_norm, *tensors)) is tensors[0]


@of_all
def test_call_grad(benchmark: BenchmarkFixture, library: Library, tensors: tuple[Tensor, Tensor]) -> None:
    x, weight = (t.requires_grad_() for t in tensors)
    y = measure(benchmark, report.CALL_GRAD, library, partial(library.rms_norm, x, weight))
    assert y.requires_grad
    assert y.data_ptr() == x.data_ptr()


@of_all
def test_call_and_backward(benchmark: BenchmarkFixture, library: Library, tensors: tuple[Tensor, Tensor]) -> None:
    x, weight = (t.requires_grad_() for t in tensors)
    dy = torch.ones_like(x)

    def call() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(library.rms_norm(x, weight), (x, weight), dy, allow_unused=True)

    dx, dweight = measure(benchmark, report.CALL_BACKWARD, library, call)
    assert dx is not None
    assert dx.data_ptr() == dy.data_ptr()
    assert dweight is None


IMPORTS = {report.OURS: "liger_core", report.PEER: "liger_kernel.functional"}

HEAVY = ("triton", "cuda.tile", "torch._dynamo", "liger_triton.ops", "liger_cutile.ops", "transformers")
"""Modules that a dispatcher can do without until a kernel runs."""

TIMED_IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start, start_cpu = time.perf_counter(), time.process_time()
import {module}
seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
added = set(sys.modules) - before
print(json.dumps(dict(seconds=seconds, cpu=cpu, modules=len(added), heavy=[name for name in {heavy} if name in added])))
"""


def time_import(module: str) -> dict[str, Any]:
    """Import a module after torch in a new process, without what a test run sets: bytecode is cached, as for a user."""
    unset = ("TRITON_INTERPRET", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    program = TIMED_IMPORT.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.benchmark(timer=clock.read)
@pytest.mark.parametrize("name", [report.OURS, report.PEER])
def test_import(benchmark: BenchmarkFixture, name: str) -> None:
    module = IMPORTS[name]
    if find_spec(module.split(".")[0]) is None:
        pytest.skip(f"not run: {name} is not installed")
    facts = time_import(module)  # untimed: it compiles the bytecode
    benchmark.group = report.IMPORT
    benchmark.extra_info.update(suite="dispatch", measure=report.IMPORT, library=name, module=module)
    benchmark.extra_info.update(modules=facts["modules"], heavy=facts["heavy"])
    runs = [time_import(module) for _ in range(5 if benchmark.enabled else 1)]
    benchmark.extra_info["cpu"] = statistics.median(run["cpu"] for run in runs)
    clock.replay(benchmark, [run["seconds"] for run in runs])
    if name == report.OURS:
        assert not facts["heavy"], (
            f"import {module} brings {', '.join(facts['heavy'])}; kernels are imported when one is called"
        )
