"""The choice by measured times: per op, chip, size and whether torch.compile traces."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_core
from liger_core import BackendInfo, Unsupported, dispatch, measured

W = torch.ones(4)
CHIP = "Toy 1"
Tell = Callable[..., None]


def rows(count: int) -> torch.Tensor:
    return torch.arange(4.0).expand(count, 4).contiguous()


@pytest.fixture
def tell(toys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tell:
    """Give the CPU a chip's name, and the toy languages tables of rms_norm."""
    tables: dict[str, Any] = {}
    monkeypatch.setattr(measured, "chip", lambda device, index: CHIP)
    monkeypatch.setattr(measured, "shipped", lambda package: tables.get(package, {}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured._own.cache_clear()

    def tell(chip: str = CHIP, **hows: list[Any]) -> None:
        """Times by size, of all languages: each package's table has its own and the reference's."""
        for package, language in (("toy_traced", "toy-traced"), ("toy_opaque", "toy-opaque")):
            tables[package] = {chip: {"record": "a record", "eager": {}, "compiled": {}}}
            for how, lines in hows.items():
                own = [[s, {k: v for k, v in t.items() if k in (language, "torch")}] for s, t in lines]
                tables[package][chip][how]["rms_norm"] = own
        liger_core.rms_norm.forget_plans()

    return tell


@pytest.fixture
def ran(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The languages that ran rms_norm, in order, eager."""
    import toy_opaque.ops.rms_norm as opaque
    import toy_traced.ops.rms_norm as traced

    seen: list[str] = []
    for name, module in (("toy-traced", traced), ("toy-opaque", opaque)):

        def forward(*args: Any, name: str = name, inner: Any = module.forward, **kwargs: Any) -> Any:
            seen.append(name)
            return inner(*args, **kwargs)

        monkeypatch.setattr(module, "forward", forward)
    reference = liger_core.rms_norm.reference
    monkeypatch.setattr(liger_core.rms_norm, "reference", lambda **kw: (seen.append("torch"), reference(**kw))[1])
    return seen


FASTER_WHEN_LARGE = [[16, {"toy-traced": 50.0, "torch": 20.0}], [400, {"toy-traced": 60.0, "torch": 90.0}]]


def test_the_reference_runs_where_it_is_faster(tell: Tell, ran: list[str]) -> None:
    """Sizes between two measured ones are like the nearer one, by ratio: 80 elements are the middle."""
    tell(eager=FASTER_WHEN_LARGE)
    for count in (1, 4, 19, 20, 100, 5000):
        for _ in range(2):
            liger_core.rms_norm(rows(count), W)
    assert ran == ["torch"] * 6 + ["toy-traced"] * 6


def test_a_language_that_is_no_default_is_taken_where_it_is_the_fastest(tell: Tell, ran: list[str]) -> None:
    tell(eager=[[16, {"toy-traced": 50.0, "toy-opaque": 40.0, "torch": 200.0}]])
    liger_core.rms_norm(rows(4), W)
    tell(eager=[[16, {"toy-traced": 50.0, "toy-opaque": 48.0, "torch": 48.5}]])
    liger_core.rms_norm(rows(4), W)
    assert ran == ["toy-opaque", "toy-traced"], "a twentieth is noise: the default stays"


def test_no_record_of_the_chip(tell: Tell, ran: list[str]) -> None:
    tell(chip="Toy 2", eager=FASTER_WHEN_LARGE)
    liger_core.rms_norm(rows(4), W)
    assert ran == ["toy-traced"]
    assert liger_core.explain("rms_norm", rows(4), W).measured is None


def test_a_kernel_without_a_time_stays(tell: Tell, ran: list[str]) -> None:
    tell(eager=[[16, {"torch": 20.0}]])
    liger_core.rms_norm(rows(4), W)
    assert ran == ["toy-traced"]


def test_one_setting_turns_it_off(tell: Tell, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tell(eager=FASTER_WHEN_LARGE)
    monkeypatch.setenv("LIGER_MEASURED", "0")
    dispatch.settings.cache_clear()
    liger_core.rms_norm(rows(4), W)
    assert ran == ["toy-traced"]
    assert liger_core.explain("rms_norm", rows(4), W).measured is None
    monkeypatch.setenv("LIGER_MEASURED", "no")
    dispatch.settings.cache_clear()
    liger_core.rms_norm.forget_plans()
    with pytest.raises(ValueError, match="LIGER_MEASURED is 'no'; it takes 0 or 1"):
        liger_core.rms_norm(rows(4), W)


def test_a_demand_is_obeyed(tell: Tell, ran: list[str]) -> None:
    tell(eager=FASTER_WHEN_LARGE)
    with liger_core.use("toy-traced"):
        liger_core.rms_norm(rows(4), W)
    with liger_core.use("torch"):
        liger_core.rms_norm(rows(400), W)
    liger_core.get_op("rms_norm", language="toy-opaque")(rows(4), W)
    assert ran == ["toy-traced", "torch", "toy-opaque"]


def test_get_op_leaves_the_choice_to_the_sizes(tell: Tell, ran: list[str]) -> None:
    tell(eager=FASTER_WHEN_LARGE)
    op = liger_core.get_op("rms_norm", device="cpu")
    assert op.language is None
    op(rows(4), W)
    op(rows(400), W)
    assert ran == ["torch", "toy-traced"]


def test_a_refusal_after_a_choice_is_a_fallback(
    tell: Tell, ran: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chosen reference is none, and LIGER_STRICT=1 lets it run."""
    caplog.set_level(logging.INFO, logger="liger_core")
    tell(eager=FASTER_WHEN_LARGE)
    liger_core.rms_norm(rows(4), W, casting_mode="none")
    assert not caplog.records
    liger_core.rms_norm(rows(400), W, casting_mode="none")
    assert "toy-traced: casting_mode 'none' is not written" in caplog.records[0].message
    monkeypatch.setenv("LIGER_STRICT", "1")
    dispatch.settings.cache_clear()
    dispatch._said.clear()
    liger_core.rms_norm.forget_plans()
    liger_core.rms_norm(rows(4), W, casting_mode="none")
    with pytest.raises(Unsupported, match="LIGER_STRICT=1 forbids"):
        liger_core.rms_norm(rows(401), W, casting_mode="none")


def test_a_call_with_a_gradient_of_the_chosen_reference(tell: Tell, ran: list[str]) -> None:
    tell(eager=FASTER_WHEN_LARGE)
    for _ in range(2):
        x = rows(3).requires_grad_()
        liger_core.rms_norm(x, W).sum().backward()
        assert x.grad is not None
    assert ran == ["torch", "torch"]
    with torch.autocast("cpu", torch.bfloat16):
        liger_core.rms_norm(rows(3), W)
    with liger_core.lean():
        liger_core.rms_norm(rows(3).requires_grad_(), W).sum().backward()
    assert set(ran) == {"torch"}


def test_what_was_found_once_is_one_look_up(tell: Tell, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tell(eager=FASTER_WHEN_LARGE)
    liger_core.rms_norm(rows(4), W)

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("searched again")

    for name in ("resolve", "routes", "inspect"):
        monkeypatch.setattr(liger_core.rms_norm, name, forbidden)
    for name in ("figures", "mentions", "chip", "order"):
        monkeypatch.setattr(measured, name, forbidden)
    liger_core.rms_norm(rows(4), W)
    assert ran == ["torch", "torch"]


def test_explain_shows_the_figure_that_decided(tell: Tell) -> None:
    tell(eager=FASTER_WHEN_LARGE, compiled=[[400, {"toy-traced": 60.0, "toy-opaque": 30.0, "torch": 90.0}]])
    small = liger_core.explain("rms_norm", rows(4), W)
    assert [c.language for c in small.candidates] == ["torch", "toy-traced", "toy-opaque"]
    assert small.chosen.language == "torch"  # type: ignore[union-attr]
    assert "toy-traced: no: torch was measured to be faster" in str(small)
    assert "measured: torch 20.0 µs, toy-traced 50.0 µs (a record), x of 16 elements" in str(small)
    large = liger_core.explain("rms_norm", device="cpu")
    assert large.chosen.language == "toy-traced"  # type: ignore[union-attr]
    assert 'toy-opaque: no: only on demand: liger_core.use("toy-opaque")' in str(large)
    compiled = liger_core.explain("rms_norm", rows(4), W, compiled=True)
    assert [c.language for c in compiled.candidates] == ["toy-opaque", "toy-traced", "torch"]
    assert "would run next" in str(compiled)
    with liger_core.use("toy-opaque"):
        assert liger_core.explain("rms_norm", rows(4), W).measured is None


def test_compiled_code_has_times_of_its_own(tell: Tell) -> None:
    """Neither a break nor a guard: one graph for the first length and one for all others, which has the times of large calls."""
    tell(
        eager=[[16, {"toy-traced": 50.0, "torch": 20.0}]],
        compiled=[[16, {"toy-traced": 50.0, "torch": 20.0}], [400, {"toy-traced": 60.0, "torch": 90.0}]],
    )
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        recorded = any("autograd_function_apply" in str(node.target) for node in graph.graph.nodes)
        graphs.append("kernel" if recorded else "reference")
        return graph.forward

    compiled = torch.compile(liger_core.rms_norm, backend=backend, fullgraph=True)
    for count in (2, 100, 101, 3, 5000, 4):
        x = rows(count).requires_grad_()
        torch.testing.assert_close(compiled(x, W), liger_core.rms_norm.reference(x, W))
        liger_core.rms_norm(rows(count), W)  # what it remembers invalidates no graph
    assert graphs == ["reference", "kernel"]


def test_export_takes_the_times_of_compiled_code(tell: Tell) -> None:
    tell(compiled=[[16, {"toy-traced": 50.0, "torch": 20.0}]], eager=[[16, {"toy-traced": 20.0, "torch": 50.0}]])

    class Norm(torch.nn.Module):
        weight: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", W)  # torch 2.9 exports no tensor that is neither the module's nor an input

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return liger_core.rms_norm(x, self.weight)

    length = torch.export.Dim("length", min=2, max=10000)
    exported = torch.export.export(Norm(), (rows(3),), dynamic_shapes=({0: length},), strict=True)
    x = rows(7)
    torch.testing.assert_close(exported.module()(x), liger_core.rms_norm.reference(x, W))


def test_threads_choose_alike(tell: Tell, ran: list[str]) -> None:
    tell(eager=FASTER_WHEN_LARGE)
    start = threading.Barrier(4)

    def call() -> None:
        start.wait()
        for count in range(1, 19):
            liger_core.rms_norm(rows(count), W)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran == ["torch"] * 72


def test_what_tune_wrote_comes_first(tell: Tell, ran: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """For what it has a line on; and while the versions are those that it was measured with."""
    tell(eager=FASTER_WHEN_LARGE, compiled=FASTER_WHEN_LARGE)
    table = {CHIP: {"record": "tune", "eager": {"rms_norm": [[16, {"toy-traced": 5.0, "torch": 20.0}]]}}}
    measured.own_table().parent.mkdir()
    measured.own_table().write_text(json.dumps({"versions": measured.versions(), "chips": table}))
    measured._own.cache_clear()
    assert [f.record for f in measured.figures("rms_norm", CHIP, False)] == ["tune"]
    assert [f.record for f in measured.figures("rms_norm", CHIP, True)] == ["a record"] * 2
    liger_core.rms_norm(rows(4), W)
    assert ran == ["toy-traced"]
    for content, says in (
        (json.dumps({"versions": {"torch": "1.0"}, "chips": table}), "is of {'torch': '1.0'}"),
        ("{", "can't be read: JSONDecodeError"),
        ("{}", "can't be read: KeyError"),
    ):
        measured.own_table().write_text(content)
        measured._own.cache_clear()
        caplog.clear()
        assert [f.record for f in measured.figures("rms_norm", CHIP, False)] == ["a record"] * 2
        assert says in caplog.text
    measured._own.cache_clear()


def test_a_package_ships_its_table(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "liger_timed" / "ops").mkdir(parents=True)
    table = {CHIP: {"record": "a record", "eager": {"rms_norm": [[16, {"acme": 5.0, "torch": 20.0}]]}}}
    (tmp_path / "liger_timed" / "measured.json").write_text(json.dumps(table))
    monkeypatch.syspath_prepend(tmp_path)
    install(BackendInfo("acme", ("cpu",), "torch", "liger_timed", "pip install acme"))
    assert measured.mentions("rms_norm")
    assert not measured.mentions("softmax")
    (figure,) = measured.figures("rms_norm", CHIP, False)
    assert (figure.size, dict(figure.times)) == (16, {"acme": 5.0, "torch": 20.0})


def test_a_cpu_is_no_chip() -> None:
    assert measured.chip("cpu", None) is None
    assert measured.chip("npu", 0) is None
