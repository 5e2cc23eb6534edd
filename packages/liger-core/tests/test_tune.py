"""`liger tune`: what is measured, and what is written of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_core
from liger_core import cli, measured, tune
from liger_core.tune import Cell, Found

SMALL = Cell("rms_norm", "small", compiled=False)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a few rows: this is no benchmark."""
    given = tune.arguments_of

    def short(cell: Cell, device: str) -> dict[str, Any]:
        arguments = given(cell, device)
        return arguments | {"x": arguments["x"].detach()[:4].clone().requires_grad_()}

    monkeypatch.setattr(tune, "arguments_of", short)


def test_languages_are_timed_and_failures_noted(toys: None, few: None) -> None:
    found = tune.measure(tune.prepare(SMALL, ["toy-traced", "toy-opaque", "torch"], "cpu"), "cpu")
    assert (found.cell, found.size, {*found.times}) == (SMALL, 4 * 2048, {"toy-traced", "torch"})
    assert all(us > 0 for us in found.times.values())
    why = "Unsupported: rms_norm on cpu: toy-opaque: x is torch.bfloat16; NumPy has float32 only"
    assert found.notes == {"toy-opaque": why}


@pytest.fixture
def device_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a device that isn't there is told, in order. An event comes 0.1 ms after any other."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 0.1

    class Module:
        @staticmethod
        def synchronize() -> None:
            log.append("synchronize")

    Module.Event = Event  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: log.append("flush"))
    return log


def test_a_compiled_call_is_timed_behind_other_work(device_log: list[str]) -> None:
    """As long as Python needs to queue it: else the device would wait for Python between the call's kernels."""
    assert tune.microseconds(lambda: device_log.append("call") or time.sleep(0.001), "meta", ahead=True) == 100.0
    assert device_log[-4:] == ["event", "call", "event", "synchronize"]
    assert device_log[-25:-4] == ["flush"] * 21


def test_eager_calls_are_timed_in_a_row(device_log: list[str]) -> None:
    """With nothing between them: neither does Python hide behind other work, nor is the device waited for after each."""
    us = tune.microseconds(lambda: device_log.append("call") or time.sleep(0.001), "meta", ahead=False)
    assert us >= 1000
    assert device_log[-4:] == ["call", "call", "call", "synchronize"]
    assert not {"flush", "event"} & {*device_log}


def test_short_memory_is_tried_again(toys: None, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes prepare at once, and one measures."""
    import toy_traced.ops.rms_norm as traced

    def short(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("too much")

    with monkeypatch.context() as patched:
        patched.setattr(traced, "forward", short)
        ready = tune.prepare(SMALL, ["toy-traced"], "cpu")
        assert tune.measure(ready, "cpu").notes == {"toy-traced": "OutOfMemoryError: too much"}
    assert {*tune.measure(ready, "cpu").times} == {"toy-traced"}


def test_a_compiled_call_has_the_addition_of_its_residual(
    toys: None, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    cell = SMALL._replace(compiled=True)
    given = tune.arguments_of(cell, "cpu")
    function = tune.function_of(cell)
    branch = torch.ones_like(given["x"])
    normed, total = function(**given, branch=branch)
    torch.testing.assert_close(total, given["x"] + branch)
    torch.testing.assert_close(normed, liger_core.rms_norm(given["x"] + branch, given["weight"]))
    assert len(tune.call_of(cell, function, given)()) == 3, "the gradients of both summands and of the weight"
    swiglu = Cell("swiglu", "small", compiled=True)
    assert tune.cases_of("swiglu").residual is None
    (product,) = tune.function_of(swiglu)(gate=branch, up=branch)
    assert product.shape == branch.shape


def test_a_compiled_call_ends_with_contiguous_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile makes other ones' gradients contiguous where its code ends, which a model's rope doesn't see."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setitem(tune.ops, "swiglu", lambda gate, up: (gate.transpose(1, 2), None, up[..., 0]))
    results = tune.function_of(Cell("swiglu", "small", compiled=True))(gate=torch.ones(2, 5, 3, 8), up=torch.ones(4, 1))
    assert [tuple(result.shape) for result in results] == [(2, 5, 3, 8), (4,)]
    assert all(result.is_contiguous() for result in results)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_of_several_results_the_loss_is_differentiated(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    cell = Cell("fused_linear_distillation", "small", compiled)
    given: dict[str, Any] = {
        "student_x": torch.randn(4, 3, requires_grad=True),
        "student_weight": torch.randn(5, 3, requires_grad=True),
        "teacher_x": torch.randn(4, 2),
        "teacher_weight": torch.randn(5, 2),
        "labels": torch.arange(4),
        "hard_weight": 0.5,
    }
    loss = liger_core.fused_linear_distillation(**given).loss
    right = torch.autograd.grad(loss, (given["student_x"], given["student_weight"]))
    torch.testing.assert_close(tune.call_of(cell, tune.function_of(cell), given)(), right)


def test_each_named_residual_is_an_argument() -> None:
    for name, op in liger_core.contract.ops.items():
        assert tune.cases_of(name).residual in (None, *op.tensors), name


def test_processes_measure_and_end() -> None:
    told: list[tuple[str, int]] = []
    (found,) = tune.tune([SMALL], "cpu", ["torch"], 300.0, 2, lambda *words: told.append(words))
    assert found.cell == SMALL
    assert found.times["torch"] > 0
    assert told == [("rms_norm", 1), ("rms_norm", 2)]


def test_what_there_is_no_time_for_is_left_out() -> None:
    assert [*tune.tune([SMALL], "cpu", ["torch"], 0.0, 1, lambda *words: None)] == []


def test_a_process_that_dies_is_told() -> None:
    """As one does whose kernel accesses memory that isn't its own. The other processes measure."""
    gone = Cell("no_such_op", "small", compiled=False)
    with pytest.warns(UserWarning, match="1 of 2 processes died, with exit code 1: their ops are not measured"):
        (found,) = tune.tune([SMALL, gone], "cpu", ["torch"], 300.0, 2, lambda *words: None)
    assert found.cell == SMALL


def test_the_command_writes_the_choice(
    toys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of other ops and chips stay as long as they are of the same versions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "chip", lambda device, index: "Toy 1")

    def pretend(cells: list[Cell], *rest: Any) -> Iterator[Found]:
        yield Found(cells[0], 4096, {"toy-traced": 9.0, "torch": 5.0}, {"toy-opaque": "LookupError: no"})

    monkeypatch.setattr(tune, "tune", pretend)
    assert cli.main(["tune", "--device=cpu", "--ops=rms_norm"]) == 0
    out = capsys.readouterr().out
    assert (
        "rms_norm large eager: torch  (toy-traced 9.0 µs, torch 5.0 µs)" in out or "rms_norm small eager: torch" in out
    )
    assert "toy-opaque: not measured: LookupError: no" in out
    assert "no time was left for 2 of 3 calls" in out
    assert cli.main(["tune", "--device=cpu", "--ops=softmax"]) == 0
    written = json.loads(measured.own_table().read_text())
    assert {*written["chips"]["Toy 1"]["eager"]} == {"rms_norm", "softmax"}
    measured._own.cache_clear()
    (figure,) = measured.figures("rms_norm", "Toy 1", False)
    assert (figure.size, figure.record.startswith("liger tune of 20")) == (4096, True)
    written["versions"] = {"torch": "1.0"}
    measured.own_table().write_text(json.dumps(written))
    assert cli.main(["tune", "--device=cpu", "--ops=dyt"]) == 0
    assert {*json.loads(measured.own_table().read_text())["chips"]["Toy 1"]["eager"]} == {"dyt"}
    measured._own.cache_clear()


def test_nothing_to_choose_from(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--device=cpu"]) == 2
    assert "tune: on cpu there is nothing to choose from" in capsys.readouterr().err
    assert cli.main(["tune", "--ops=rms_nrom"]) == 2
    assert "there is no op 'rms_nrom'" in capsys.readouterr().err


def test_the_cases_are_a_package_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="liger_conformance")

    monkeypatch.setattr(tune.importlib, "import_module", absent)
    with pytest.raises(liger_core.Unsupported, match="uv pip install liger-conformance"):
        tune.cases_of("rms_norm")
