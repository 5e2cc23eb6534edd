"""Host code is recorded once for a metadata and replayed: with the same bits, or not at all."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import liger_core
from liger_core import BackendInfo, autograd, contract, replay
from liger_core.contract import Needs, Saved, SavedOnce, op


def launch(function: Callable[..., Any], *arguments: Any) -> None:
    """Launches as a language does that tells of them; a kernel is a function that writes to its first argument."""
    with torch.no_grad():
        replay.launch(function, *arguments)


def multiply(y: Tensor, x: Tensor, factor: Any) -> None:
    y.copy_(x * factor)


def replayed(host_code: Callable[..., Any], *inputs: Tensor | None) -> replay.Recorded:
    with torch.no_grad():
        return replay.record(lambda: host_code(*inputs), inputs)


def doubled(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    z = torch.empty_like(x)
    launch(multiply, z, x, 2.0)
    return z, x


def test_other_tensors_are_replayed() -> None:
    """A result is new each time, and an input that is returned is the new input."""
    recorded = replayed(doubled, torch.ones(3, 4), None)
    assert recorded.replay is not None
    x = torch.arange(12.0).view(3, 4)
    first, second = recorded.replay(x, None), recorded.replay(x, None)
    assert torch.equal(first[0], 2 * x)
    assert first[1] is x
    assert first[0].data_ptr() != second[0].data_ptr()


@pytest.mark.parametrize(
    "inputs",
    {
        "other strides": (torch.ones(4, 3).t(), None),
        "unaligned": (torch.ones(13)[1:].view(3, 4), None),
        "a subclass": (torch.nn.Parameter(torch.ones(3, 4)), None),
        "one more": (torch.ones(3, 4), torch.ones(3, 4)),
        "none": (None, None),
    }.items(),
    ids=lambda item: item[0],
)
def test_other_inputs_run_host_code(inputs: tuple[str, tuple[Any, ...]]) -> None:
    recorded = replayed(doubled, torch.ones(3, 4), None)
    assert recorded.replay is not None
    assert recorded.replay(*inputs[1]) is None


def test_a_profiler_sees_host_code_launch() -> None:
    watched = False

    def launches(x: Tensor) -> Tensor:
        assert replay.state.recorder is not None
        replay.state.recorder.launch(len, (x,), unless=lambda: watched)
        return x

    recorded = replayed(launches, torch.ones(3, 4))
    assert recorded.replay is not None
    assert recorded.replay(torch.ones(3, 4)) is not None
    watched = True
    assert recorded.replay(torch.ones(3, 4)) is None


def through_views(x: Tensor) -> Any:
    left, right = x.split(2, 1)
    rows = x.new_empty(6, 2)
    launch(multiply, rows[:3], left, 1)
    launch(multiply, rows[3:], right.unsqueeze(0)[0], torch.ones(1).item() if x.dim() > 9 else 3)
    return rows.view(2, 3, 2), None, (rows.t(), x.as_strided((2,), (1,)))


def test_views_are_made_anew() -> None:
    recorded = replayed(through_views, torch.ones(3, 4))
    assert recorded.replay is not None
    x = torch.arange(36.0).view(3, 3, 4)[2]
    result, nothing, (transposed, start) = recorded.replay(x)
    expected = through_views(x)
    assert torch.equal(result, expected[0])
    assert nothing is None
    assert torch.equal(transposed, expected[2][0])
    assert transposed.stride() == expected[2][0].stride()
    assert torch.equal(start, x[0, :2])


def test_a_view_of_which_an_address_is_needed_is_an_offset() -> None:
    seen: list[tuple[Any, ...]] = []

    def rows_apart(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        recorder = replay.state.recorder
        assert recorder is not None
        recorder.launch(
            lambda *arguments: seen.append(arguments), y[2:], x[1], replay.Each(len, ("two",)), addresses=True
        )
        return y

    recorded = replayed(rows_apart, torch.ones(3, 4))
    assert recorded.replay is not None
    x = torch.ones(3, 4)
    y = recorded.replay(x)
    assert seen == [(y.data_ptr() + 32, x.data_ptr() + 16, 3)]


@dataclasses.dataclass
class Descriptor:
    base: Tensor


ELSEWHERE = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("host_code", "why"),
    [
        (lambda x: x @ x.t(), "it calls mm"),
        (lambda x: x.t().contiguous(), "it calls clone"),
        (lambda x: x[0, 0].item(), "it calls _local_scalar_dense"),
        (lambda x: x.as_strided((2,), (1,), 0), "it calls as_strided"),
        (lambda x: ELSEWHERE, "a tensor of elsewhere"),
        (lambda x: ELSEWHERE[1:], "a tensor of elsewhere is viewed"),
        (lambda x: launch(multiply, x, ELSEWHERE, 2), "a launch gets a tensor of elsewhere"),
        (lambda x: launch(lambda *_: None, x, Descriptor(x)), "a launch takes a Descriptor, which may hold an address"),
    ],
)
def test_what_is_not_recorded(host_code: Callable[[Tensor], Any], why: str) -> None:
    inputs = torch.ones(3, 4)
    with torch.no_grad():
        recorded = replay.record(lambda: host_code(inputs), [inputs])
    assert recorded == (mock.ANY, None, why)


def test_one_tensor_given_twice_is_not_recorded() -> None:
    """Next time they may be two."""
    x = torch.ones(3, 4)
    assert replayed(doubled, x, x.view(3, 4)).why_not == "an input is given twice, or isn't aligned"


def test_an_error_of_host_code_ends_the_recording() -> None:
    def fails(x: Tensor) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        replayed(fails, torch.ones(1))
    assert replay.state.recorder is None
    assert torch._C._len_torch_dispatch_stack() == 0


class Runs:
    """An op of x and weight in a language that tells its launches, and how often its kernel's host code ran."""

    def __init__(self) -> None:
        self.forward, self.backward = 0, 0


@pytest.fixture
def scaled(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[contract.Op[..., Tensor], Runs]]:
    runs = Runs()

    @op(differentiable=("x", "weight"))
    def scaled(x: Tensor, weight: Tensor, *, factors: Sequence[float] = (1.0,)) -> Tensor:
        return x * weight * factors[0]

    def forward(needs: Needs, x: Tensor, weight: Tensor, *, factors: Sequence[float] = (1.0,)) -> tuple[Tensor, Saved]:
        runs.forward += 1
        y = torch.empty_like(x)
        launch(lambda y, x, weight: y.copy_(x * weight * factors[0]), y, x, weight)
        if not any(needs):
            return y, ()
        spare = torch.empty_like(x)
        launch(multiply, spare, x, 1.0)
        return y, (x, weight, SavedOnce(spare))

    def backward(needs: Needs, saved: Saved, dy: Tensor, *, factors: Sequence[float]) -> tuple[Tensor | None, ...]:
        runs.backward += 1
        x, weight, once = saved
        taken = once.take()
        spare = torch.empty_like(x) if taken is None else taken[0]
        dweight = torch.empty_like(weight)
        launch(lambda dw, dy, x: dw.copy_((dy * x * factors[0]).sum(0)), dweight, dy, x)
        launch(lambda dx, dy, weight: dx.copy_(dy * weight * factors[0]), spare, dy, weight)
        return spare, dweight

    kernel = types.ModuleType("toy.ops.scaled")
    kernel.forward, kernel.backward = forward, backward  # type: ignore[attr-defined]
    monkeypatch.setattr(BackendInfo, "has_kernel", lambda self, asked: asked == "scaled")
    monkeypatch.setattr(BackendInfo, "kernel", lambda self, asked: kernel)
    monkeypatch.setattr(autograd, "REPLAY_AFTER", 2)
    install(BackendInfo("toy", ("cpu",), "torch", "toy", "pip install toy", tells_launches=True))
    with liger_core.use("toy"):
        yield scaled, runs
    del contract.ops["scaled"]


def leaves(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(5, 8, generator=generator), torch.randn(8, generator=generator)
    return x.requires_grad_(), weight.requires_grad_()


def check_call(called: contract.Op[..., Tensor], seed: int, dy: Tensor | None = None, **options: Any) -> None:
    x, weight = leaves(seed)
    dy = torch.full((5, 8), 0.5) if dy is None else dy
    y = called(x, weight, **options)
    expected = called.reference(x, weight, **options)
    assert torch.equal(y, expected)
    gradients, expected_gradients = (torch.autograd.grad(r, (x, weight), dy) for r in (y, expected))
    torch.testing.assert_close(gradients, expected_gradients)


def recorded_both_ways(called: contract.Op[..., Tensor], runs: Runs) -> None:
    for seed in range(5):  # the first is remembered, the third recorded after it, and the next one's backward
        check_call(called, seed)
    assert (runs.forward, runs.backward) == (4, 5)


def test_calls_are_replayed(scaled: tuple[contract.Op[..., Tensor], Runs]) -> None:
    called, runs = scaled
    recorded_both_ways(called, runs)
    check_call(called, 9)
    assert (runs.forward, runs.backward) == (4, 5)
    check_call(called, 10, torch.full((8, 5), 0.5).t())  # of other strides
    assert (runs.forward, runs.backward) == (4, 6)


def test_an_option_of_a_list_is_replayed(scaled: tuple[contract.Op[..., Tensor], Runs]) -> None:
    """A call is remembered by a tuple of it, and what becomes of the list changes no call."""
    called, runs = scaled
    x, weight = leaves(0)
    factors = [2.0]
    for _ in range(5):
        result = called(x.detach(), weight.detach(), factors=factors)
    assert runs.forward == 4
    factors[0] = 3.0
    assert torch.equal(called(x.detach(), weight.detach(), factors=factors), x * weight * 3.0)
    assert torch.equal(result, x * weight * 2.0)


def test_a_graph_is_kept_and_run_again(scaled: tuple[contract.Op[..., Tensor], Runs]) -> None:
    """Only the first backward gets what it may overwrite."""
    called, runs = scaled
    recorded_both_ways(called, runs)
    x, weight = leaves(1)
    y = called(x, weight)
    dy = torch.full_like(y, 0.5)
    first = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), dy)
    assert runs.backward == 6
    assert all(map(torch.equal, first, second))


def test_what_watches_runs_host_code(scaled: tuple[contract.Op[..., Tensor], Runs]) -> None:
    called, runs = scaled
    recorded_both_ways(called, runs)
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        check_call(called, 2)
    assert (runs.forward, runs.backward) == (4, 6)  # a hook may have changed what is saved
    with torch.autocast("cpu", torch.bfloat16):
        check_call(called, 3)
    assert runs.forward == 5
    x, weight = leaves(3)
    gradients = torch.autograd.grad(called(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradients[0].sum().backward()


def test_nothing_is_recorded_while_a_cuda_graph_is(
    scaled: tuple[contract.Op[..., Tensor], Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    called, runs = scaled
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for seed in range(6):
        check_call(called, seed)
    assert (runs.forward, runs.backward) == (6, 6)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check_call(called, 7)
    check_call(called, 8)
    assert (runs.forward, runs.backward) == (7, 8)
