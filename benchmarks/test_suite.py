"""Checks of the benchmarks themselves, on any machine: their data fit the contracts, and the peers compute the same."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import budgets
import compare
import divided_loss
import dtensors
import end_to_end
import host
import jobs
import losses
import noop_language
import peers
import pytest
import records
import report
import small
import timing
import torch
from calls import arguments_of, make_call, shrunk
from jobs import COLUMNS, Job, error_of, measure, truth_of
from traffic import FORWARD, FULL, MODES, modes_of, work_of

import liger_core
from liger_conformance.case import Case, cases_of
from liger_core.backend import backends
from liger_core.contract import SavedOnce, ops


@pytest.fixture(autouse=True)
def _little_garbage() -> None:
    # A benchmark collects garbage before it measures. What other tests left, such as compiled code, would take a second each
    # time.
    gc.freeze()


def small_job(op: str, mode: str) -> Job:
    case = next((case for case in cases_of(op).cases if case.group == "small"), None)
    assert case, f"add a case of the group small to CASES in conformance/src/liger_conformance/cases/{op}.py"
    return Job(ops[op], shrunk(case), torch.float32, "cpu", mode)


@pytest.mark.parametrize("op", sorted(ops))
def test_traffic_counts_tensors_of_the_contract(op: str) -> None:
    cases = cases_of(op)
    passes = [*cases.moves.forward, *cases.moves.backward] if cases.moves else []
    named = {*passes, *(name for product in cases.products for name in (product.x, product.weight))}
    assert named, f"declare the least work, MOVES or PRODUCTS, in conformance/src/liger_conformance/cases/{op}.py"
    assert named <= {*ops[op].tensors, "result"}


def test_work_of_a_norm_and_of_a_linear_loss() -> None:
    x, weight = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(32, 16)
    assert work_of("rms_norm", FORWARD, {"x": x}) == (2 * x.nbytes, None)
    assert work_of("rms_norm", FULL, {"x": x}) == (5 * x.nbytes, None)
    flops = 2 * 8 * 16 * 32
    assert work_of("fused_linear_cross_entropy", FORWARD, {"x": x, "linear_weight": weight}) == (None, flops)
    assert work_of("fused_linear_cross_entropy", FULL, {"x": x, "linear_weight": weight}) == (None, 3 * flops)


def test_work_of_experts_is_that_of_the_tokens_that_they_get() -> None:
    tensors = {
        "expert_indices": torch.zeros(8, 2, dtype=torch.int64),
        "gate_up_weight": torch.ones(5, 6, 4),
        "down_weight": torch.ones(5, 4, 3),
    }
    assert work_of("fused_moe", FORWARD, tensors) == (None, 6 * 8 * 2 * 4 * 3)
    assert work_of("fused_moe", FULL, tensors) == (None, 18 * 8 * 2 * 4 * 3)


@pytest.mark.parametrize(("op", "mode"), [(op, mode) for op in sorted(ops) for mode in modes_of(ops[op])])
def test_eager_computes_what_the_contract_says(op: str, mode: str) -> None:
    job = small_job(op, mode)
    result = make_call(peers.eager()[op], job.arguments(), mode, job.dtype)()
    assert error_of(result, truth_of(job)) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_grouped_products_compute_what_the_contract_says(mode: str) -> None:
    job = small_job("fused_moe", mode)
    result = make_call(peers.grouped()["fused_moe"], job.arguments(), mode, job.dtype)()
    assert error_of(result, truth_of(job)) < 1e-5


@pytest.mark.parametrize("op", [op for op in sorted(ops) if cases_of(op).liger is not None])
def test_liger_takes_the_arguments_of_the_timed_cases(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "import_module", lambda name: None)
    inspect.signature(peers.liger()[op]).bind(**small_job(op, FORWARD).arguments())


@pytest.mark.parametrize("functions", [peers.liger_cutedsl, peers.quack], ids=lambda functions: functions.__name__)
def test_other_peers_take_the_arguments_of_the_timed_cases(
    functions: Callable[[], peers.Functions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "0")  # what `functions` does to it ends with the test
    monkeypatch.setattr(peers, "import_module", lambda name: None)
    for op, function in functions().items():
        inspect.signature(function).bind(**small_job(op, FORWARD).arguments())


def test_what_is_demanded_in_cutedsl_never_runs_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "0")
    monkeypatch.setattr(peers, "import_module", lambda name: None)
    peers.liger_cutedsl()
    assert os.environ["LIGER_KERNEL_STRICT"] == "1"


def test_a_peer_that_is_absent_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("quack", "liger_kernel"):
        for imported in [name for name in sys.modules if name.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, imported)
        monkeypatch.setitem(sys.modules, module, None)
    rows = compare.main(["--smoke", "--ops=softmax", "--providers=quack,liger-cutedsl", "--modes=forward"])
    assert [row["provider"] for row in rows] == ["quack", "liger-cutedsl"]
    for row, module in zip(rows, ("quack", "liger_kernel"), strict=True):
        assert row["note"].startswith("ModuleNotFoundError")
        assert module in row["note"]


def test_peers_in_cutedsl_are_compared_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "find_spec", lambda module: None)
    alone = compare.default_providers("cpu")
    assert alone[-3:] == ["eager", "compile", "liger"]
    monkeypatch.setattr(compare, "find_spec", lambda module: None if module == "cutlass" else module)
    assert compare.default_providers("cpu") == [*alone, "quack"]
    monkeypatch.setattr(compare, "find_spec", lambda module: module)
    assert compare.default_providers("cpu") == [*alone, "liger-cutedsl", "quack"]


def test_bytes_of_an_embedding_are_those_of_the_rows_looked_up() -> None:
    case = Case("few-rows", "small", rows=4, hidden=8, vocabulary=32)
    job = Job(ops["embedding"], case, torch.float32, "cpu", FULL)
    row = measure(job, ops["embedding"], None).row(job, "ours-torch", [2.0, 2.5])
    looked_up, weight = 4 * 8 * 4, 32 * 8 * 4
    assert float(row["gbps"]) == pytest.approx((3 * looked_up + weight) / float(row["ms"]) / 1e6, rel=0.01)
    assert row["note"].startswith("not checked")


def test_comparison_of_the_reference_with_eager() -> None:
    rows = compare.main(["--smoke", "--ops=rms_norm"])
    assert [(row["provider"], row["mode"]) for row in rows] == [
        (provider, mode) for mode in MODES for provider in ("ours-torch", "eager")
    ]
    for row in rows:
        assert float(row["ms"]) > 0
        assert float(row["error"]) < 0.01
        assert not row["note"]
    ours, eager = (float(row["ms"]) for row in rows[:2])
    assert f"({eager / ours:.2f}×)" in report.comparison(rows)
    assert f"| {eager / ours:.2f}× eager" in report.best_peers(rows, "ours-torch")
    assert f"| {eager / ours:.2f}×" in report.beside(rows, "ours-torch", ["eager"])


def test_a_provider_that_fails_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(cases_of("rms_norm").module, "eager", refuse)
    rows = compare.main(["--smoke", "--ops=rms_norm", "--providers=eager", "--modes=forward"])
    assert [row["note"] for row in rows] == ["ValueError: not today"]
    assert "eager, rms_norm small-shrunk forward: ValueError: not today" in report.comparison(rows)


def test_a_provider_that_takes_too_long_is_left_out_of_the_other_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compile_for_hours(**arguments: Any) -> None:
        calls.append(arguments)
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(cases_of("rms_norm").module, "eager", compile_for_hours)
    rows = compare.main(["--smoke", "--ops=rms_norm,swiglu", "--limit=0.2"])
    notes = [row["note"] for row in rows if (row["op"], row["provider"]) == ("rms_norm", "eager")]
    assert notes == ["took longer than 0.2 s for small-shrunk forward"] * 2
    assert len(calls) == 1
    assert [bool(row["ms"]) for row in rows] == [True, False] * 2 + [True] * 4


def test_providers_are_timed_in_turns_and_the_least_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 50.0, 40.0, 2.0, 4.0, 60.0])
    monkeypatch.setattr(compare, "median_ms", lambda call, device: next(times))
    rows = compare.main(["--smoke", "--ops=rms_norm", "--modes=forward"])
    # The reference, eager; eager, the reference; the reference, eager.
    assert [(row["provider"], row["ms"], row["ratio"]) for row in rows] == [
        ("ours-torch", "2.00000", "1.000"),
        ("eager", "40.00000", "20.000"),
    ]


def test_a_provider_that_fails_in_a_later_turn_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([3.0, ValueError("not again")])

    def median_ms(call: Any, device: str) -> float:
        if isinstance(turn := next(turns), Exception):
            raise turn
        return turn

    monkeypatch.setattr(compare, "median_ms", median_ms)
    rows = compare.main(["--smoke", "--ops=rms_norm", "--providers=eager", "--modes=forward"])
    assert [(row["ms"], row["note"]) for row in rows] == [("", "ValueError: not again")]


@pytest.mark.parametrize(
    ("program", "words", "says"),
    [
        (compare, ["--smoke", "--ops=rms_nrom"], "rms_nrom; it takes attn_res, cross_entropy,"),
        (compare, ["--smoke", "--providers=ours-acme"], "ours-acme; it takes ours-torch,"),
        (compare, ["--smoke", "--modes=backward"], "it takes forward, forward+backward"),
        (compare, ["--device=cpu"], "no accelerator here"),
        (budgets, ["--device=cpu"], "not run: there is no accelerator here"),
        (divided_loss, ["--device=cpu"], "not run: there is no accelerator here"),
        (budgets, ["--device=cuda", "--cases=huge"], "huge; it takes small,"),
        (budgets, ["--device=cuda", "--languages=acme"], "acme; it takes torch,"),
        (losses, ["--device=cpu"], "not run: there is no accelerator here"),
        (losses, ["--smoke", "--subjects=kto"], "kto; it takes logprobs,"),
        (host, ["--device=cpu"], "not run: there is no accelerator here"),
        (host, ["--smoke", "--ops=rms_nrom"], "rms_nrom; it takes attn_res, cross_entropy,"),
        (host, ["--device=cuda", "--languages=acme"], "acme; it takes torch,"),
    ],
)
def test_wrong_arguments(program: Any, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parse(words)
    assert says in capsys.readouterr().err


def test_render_joins_the_runs_of_one_machine(tmp_path: Path) -> None:
    head = {"machine": "A100", "versions": "torch 2", "date": "2026-01-02", "commit": "abc"}
    blank = dict.fromkeys(COLUMNS, "")
    files = []
    for op, ms in (("rms_norm", "1.5"), ("swiglu", "2.5")):
        row = blank | {"op": op, "case": "small", "provider": "ours-x", "mode": FORWARD, "ms": ms, "gbps": "7"}
        files.append(records.write_csv(tmp_path / op, head, [row], COLUMNS))
    compare.main(["--render", *map(str, files), "--out", str(tmp_path), "--name=both"])
    joined, rows = records.read_csv(tmp_path / "2026-01-02-both-a100.csv")
    assert joined == head
    assert [row["ms"] for row in rows] == ["1.5", "2.5"]
    assert "| swiglu   | small | forward | 2.5" in (tmp_path / "2026-01-02-both-a100.md").read_text()

    files.append(records.write_csv(tmp_path / "other", head | {"machine": "H200"}, [], COLUMNS))
    with pytest.raises(ValueError, match="differ in machine: A100; H200"):
        compare.main(["--render", *map(str, files), "--out", str(tmp_path)])


def test_render_keeps_the_order_of_a_run_per_group(tmp_path: Path) -> None:
    head = {"machine": "H200", "versions": "torch 2", "date": "2026-01-02", "commit": "abc"}
    groups, files = ("large", "medium", "small"), []
    for group in groups:
        name = compare.parse(["--device=cuda", f"--groups={group}"]).name
        rows = [
            dict.fromkeys(COLUMNS, "") | {"op": op, "case": group, "provider": provider, "mode": FORWARD, "ms": "2"}
            for op in ("rms_norm", "swiglu")
            for provider in ("ours-x", "eager")
        ]
        head["load"] = f"{len(files)} of 64 cores"
        files.append(records.write_csv(records.path_of(name, head, tmp_path), head, rows, COLUMNS))
    assert len(set(files)) == 3, "runs at the same time must not write over each other's records"
    compare.main(["--render", *map(str, files), "--out", str(tmp_path)])
    _, rows = records.read_csv(tmp_path / "2026-01-02-compare-h200.csv")
    assert [row["case"] for row in rows] == [group for group in groups for _ in range(4)]
    page = (tmp_path / "2026-01-02-compare-h200.md").read_text()
    assert "| op       | large, forward | medium, forward | small, forward |" in page
    assert "| swiglu   | 1.00× eager    | 1.00× eager     | 1.00× eager    |" in page


def test_commit_can_be_given_to_a_tree_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGER_COMMIT", "1c208ca")
    assert records.head_of("cpu")["commit"] == "1c208ca"
    monkeypatch.delenv("LIGER_COMMIT")
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # no repository
    assert records.head_of("cpu")["commit"] == "unknown"


def test_host_costs_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    rows = host.main(["--smoke", "--ops=rms_norm"])
    assert [(row["what"], row["measure"]) for row in rows] == [
        (what, measure)
        for what in (report.AUTOGRAD, "F.rms_norm", "rms_norm")
        for measure in (report.CALL, report.CALL_GRAD, report.CALL_BACKWARD)
    ]
    assert all(float(row["us"]) > 0 and row["language"] == "torch" and not row["note"] for row in rows)
    assert ",".join(rows[-1].values()) in capsys.readouterr().out
    *_, line = report.host_tables(rows).splitlines()
    assert line.split("|")[1:3] == [f" {'rms_norm':23} ", " torch    "]
    assert [float(cell) for cell in line.split("|")[6:9]] == [float(row["us"]) for row in rows[-3:]]


def test_host_costs_of_a_kernel() -> None:
    arguments = ops["rms_norm"].bind((), {"x": torch.ones(2, 8), "weight": torch.ones(8)})
    kernel = noop_language.on("cpu").kernel("rms_norm")
    seconds = host.kernel_times(kernel, ops["rms_norm"], arguments, "cpu")
    assert list(seconds) == [report.KERNEL, report.KERNEL_SAVING, report.KERNEL_BACKWARD]
    assert all(0 < time < 1e-3 for time in seconds.values())


def test_host_costs_of_a_call_that_is_refused_are_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*call: Any) -> None:
        raise liger_core.Unsupported("not on this machine")

    monkeypatch.setattr(ops["rms_norm"], "call", refuse)
    rows = host.measure(ops["rms_norm"], host.small_case("rms_norm", smoke=True), "torch", "cpu")
    assert [row["note"] for row in rows] == ["not run: not on this machine"]
    assert "- rms_norm in torch: not run: not on this machine" in report.host_tables(rows)


def test_each_backward_of_the_host_costs_gets_its_tensors() -> None:
    taken = []

    def backward(needs: Any, saved: Any, dy: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        taken.append(saved[-1].take())
        return dy, None

    kernel: Any = SimpleNamespace(forward=lambda needs, x, **_: (x, (None, SavedOnce(x))), backward=backward)
    x = torch.ones(2, 8)
    host.kernel_times(kernel, ops["rms_norm"], ops["rms_norm"].bind((), {"x": x, "weight": torch.ones(8)}), "cpu")
    assert len(taken) > 1
    assert all(tensors is not None and tensors[0] is x for tensors in taken)


def entered(call: Callable[[], Any]) -> int:
    """How many functions a call enters, of Python and of C, when it has been made before."""
    for _ in range(3):
        call()
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    call()
    sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def test_a_call_on_dtensors_does_little_more_than_a_plain_one() -> None:
    """By the number of functions that it enters, since a time needs a machine to itself; `dtensors` measures that."""
    with dtensors.ways() as ways:
        for name, call in ways["DTensors"].items():
            assert entered(call) <= 2.5 * entered(ways["plain tensors"][name]), name


def test_losses_of_a_divided_vocabulary_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    # Once main has returned, a thread of gloo's may end the second process by std::terminate while Python shuts down.
    program = "import os, divided_loss; divided_loss.main(['--smoke']); os._exit(0)"
    words, folder = [sys.executable, "-c", program], Path(divided_loss.__file__).parent
    with subprocess.Popen(words, cwd=folder, env=os.environ | {"RANK": "1"}) as second:
        one, *divided = divided_loss.main(["--smoke"])
    assert second.returncode == 0
    assert [row["way"] for row in divided] == ["process group", "DTensors"]
    assert (one["processes"], one["sent_forward"], one["sent_backward"]) == ("1", "0", "0")
    rows, hidden, _ = divided_loss.TINY
    for row in divided:
        assert row["processes"] == "2"
        # Before it sends more, a process on a CPU compares three numbers.
        agreed = 24 if row["way"] == "process group" else 0
        assert int(row["sent_forward"]) == 8 * rows + 4 + agreed  # two statistics of each row, and the vocabulary
        assert int(row["sent_backward"]) == 4 * rows * hidden
        assert all(float(row[column]) < 1e-5 for column in ("loss_off", "dx_off", "dweight_off"))
        assert float(row["ms"]) > 0
        assert float(row["forward_ms"]) > 0


def test_several_processes_are_started_by_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        divided_loss.parse(["--smoke"])
    assert "torchrun --nproc-per-node 2 benchmarks/divided_loss.py" in capsys.readouterr().err


def test_budgets_of_the_reference() -> None:
    rows = budgets.main(["--smoke"])
    assert [(row["accum_dtype"], row["memory_budget"] or None) for row in rows] == list(budgets.SETTINGS)
    assert all(float(row["ms"]) > 0 and row["error"] == rows[0]["error"] for row in rows)


def test_budgets_count_what_is_beyond_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases_of("fused_linear_cross_entropy").cases[0]
    arguments = arguments_of(budgets.OP, case, torch.bfloat16, "cpu")
    gradients = sum(arguments[name].nbytes for name in ("x", "linear_weight", "bias"))
    monkeypatch.setattr(jobs, "peak_memory", lambda call, device: gradients + 3 * 2**20)
    monkeypatch.setattr(budgets, "median_ms", lambda call, device: 1.0)
    assert [row["extra_mb"] for row in budgets.measure_case(case, ["torch"], "cpu")] == ["3"] * len(budgets.SETTINGS)


def test_losses_of_the_reference() -> None:
    rows = losses.main(["--smoke"])
    assert {row["subject"] for row in rows} == {*losses.SUBJECTS}
    assert not [row["note"] for row in rows if row["note"]]
    off = {row["provider"]: float(row["error"]) for row in rows if row["mode"].endswith("float64")}
    assert off["ours-torch"] < 1e-5 < 1e-4 < off["eager"]
    modes = [(row["provider"], row["mode"]) for row in rows if row["subject"] == "logprobs"]
    assert ("ours-torch", "held") in modes
    assert ("eager", "held") not in modes
    curve = [(row["mode"], row["rows"]) for row in rows if row["subject"] == "length" and row["provider"] == "eager"]
    assert curve == [("dpo", 8), ("grpo", 8), ("dpo", 12), ("grpo", 12)]


def test_losses_that_would_start_too_late_are_rows_that_say_so() -> None:
    rows = losses.main(["--smoke", "--seconds=0", "--subjects=grpo,ratio,length"])
    assert {row["subject"] for row in rows} == {"grpo", "ratio", "length"}
    assert {row["note"] for row in rows} == {"not run: the time was up"}


@pytest.mark.parametrize("make", [losses.dpo_of, losses.grpo_of], ids=["dpo", "grpo"])
def test_providers_compute_one_loss(make: Callable[[str], Callable[..., torch.Tensor]]) -> None:
    torch.manual_seed(0)
    x, weight, target = torch.randn(4, 5, 8), torch.randn(24, 8) * 0.1, torch.randint(24, (4, 5))
    rest = (
        (torch.randn(4, 5, 8), torch.randn(24, 8))
        if make is losses.dpo_of
        else (torch.ones(4, 5), torch.randn(4), torch.rand(4, 5) - 4, torch.rand(4, 5) - 4)
    )
    torch.testing.assert_close(make("ours-torch")(x, weight, target, *rest), make("eager")(x, weight, target, *rest))


@pytest.mark.parametrize("language", host.LAUNCHES)
def test_both_launches_run_the_kernel(language: str, device: str) -> None:
    backend = next((backend for backend in backends() if backend.language == language), None)
    if backend is None:
        pytest.skip(f"not run: liger-{language} is not installed")
    if why := backend.missing(device):
        pytest.skip(f"not run: {why}")
    for launch in import_module(f"launches.{language}").launches(device):
        y = launch()
        torch.testing.assert_close(y, torch.full_like(y, 1 + 1 + 1e-6 + 0.5 + 8))
        y.zero_()


class FakeDevice:
    """The module of a device whose clock goes on by one millisecond a call."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ms = 0.0

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        return FakeEvent(self)

    def synchronize(self) -> None:
        self.log.append("wait")

    def empty_cache(self) -> None:
        self.log.append("release")

    def memory_allocated(self) -> int:
        return 100

    def reset_peak_memory_stats(self) -> None:
        self.log.append("reset")

    def max_memory_allocated(self) -> int:
        return 350


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.device.log.append("event")
        self.at = self.device.ms

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_device_times_lie_between_events_and_after_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()

    def work(name: str, ms: float) -> Callable[..., None]:
        def do(*args: object) -> None:
            device.log.append(name)
            device.ms += ms

        return do

    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    monkeypatch.setattr(torch.Tensor, "zero_", work("flush", 5.0))
    monkeypatch.setattr(timing, "FLUSH", 1)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **options: torch.zeros(sizes))
    times = timing.times_of(work("call", 2.0), "fake", seconds=0.06)
    assert times == pytest.approx([2e-3] * 30)
    one = ["flush", "event", "call", "event"]
    assert device.log == ["call"] * 2 + one * 5 + ["wait"] + one * 30 + ["wait"]


def test_host_times_await_nothing_inside_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    ends = iter([0.0, 9.0, 20.0, 26.0, 30.0, 39.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ends))
    assert timing.host_time(lambda: device.log.append("call"), "fake", calls=2, repeats=3) == 3.0
    assert device.log == ["call"] * 5 + ["wait", "call", "call"] * 3 + ["wait"]


def test_peak_memory_is_that_of_one_call_beyond_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    assert timing.peak_memory(lambda: device.log.append("call"), "fake") == 250
    assert device.log == ["call", "wait", "release", "reset", "call", "wait"]
    assert timing.peak_memory(lambda: None, "cpu") is None


def test_replay_clock_shows_pytest_benchmark_the_times_it_was_given() -> None:
    clock, seen = timing.ReplayClock(), []

    class Recorder:
        def pedantic(self, target: Callable[..., None], setup: Callable[[], Any], rounds: int) -> None:
            for _ in range(rounds):
                args, _ = setup()
                start = clock.read()
                target(*args)
                seen.append(clock.read() - start)

    clock.replay(Recorder(), [1.0, 3.0, 2.0])  # type: ignore[arg-type]
    assert sorted(seen) == [1.0, 2.0, 3.0]


def test_targets_are_met_or_missed_by_both_limits() -> None:
    target = report.Target(1e-6, share=1 / 5)
    assert target.verdict(0.5e-6, 5e-6).endswith("met")
    assert target.verdict(2e-6, 50e-6).endswith("MISSED")
    assert target.verdict(0.9e-6, 2e-6).endswith("MISSED")
    assert target.verdict(0.5e-6, None).endswith("met, the latter not run")


def test_a_way_that_ends_is_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends by itself, or since it takes too long. The others go on."""
    code = (
        "import json, os, sys, time\n"
        "job = json.loads(sys.argv[2])\n"
        "if job[1] == 'dies': sys.exit(3)\n"
        "if job[1] == 'is killed': os.kill(os.getpid(), 9)\n"
        "time.sleep(60 if job[1] == 'sleeps' else 0)\n"
        "print('noise\\n#ready', flush=True); sys.stdin.readline()\n"
        "print('#row ' + json.dumps({'ms': job[1]}), flush=True)\n"
    )
    started = end_to_end.subprocess.Popen

    def run(words: list[str], **options: Any) -> Any:
        return started([words[0], "-c", code, *words[2:]], **options)

    monkeypatch.setattr(end_to_end.subprocess, "Popen", run)
    jobs = [
        end_to_end.Job("llama-1b", way, 1, 1, 1, False, "cpu", True)
        for way in ("plain", "dies", "is killed", "sleeps", "liger")
    ]
    results = [*end_to_end.in_their_processes(jobs, 2.0)]
    assert results == [
        {"ms": "plain"},
        {"note": "ended with 3"},
        {"note": "ended with -9"},
        {"note": "took longer than 2 s"},
        {"ms": "liger"},
    ]


def test_a_run_that_is_cut_off_has_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A record has the ways before the cut: plain, then ours, of all models. The way that is cut off has no row."""
    asked: list[tuple[str, str]] = []

    def measured(jobs: list[end_to_end.Job], limit: float) -> Iterator[dict[str, Any]]:
        for job in jobs:
            asked.append((job.model, job.way))
            if job.way == "liger":
                raise KeyboardInterrupt
            yield {"ms": "1.0", "losses": [2.0, 1.0]} if job.model == "llama-1b" else {"note": "took longer than 40 s"}

    monkeypatch.setattr(end_to_end, "in_their_processes", measured)
    head = dict.fromkeys(("machine", "versions", "load", "date", "commit"), "one")
    monkeypatch.setattr(records, "head_of", lambda device: head)
    models, ways = ["llama-1b", "qwen3-moe-8-layers"], ["plain", "triton-lean", "liger"]
    words = [f"--models={','.join(models)}", "--ways=liger,triton-lean,plain", "--device=cuda", f"--out={tmp_path}"]
    with pytest.raises(KeyboardInterrupt):
        end_to_end.main(words)
    assert asked == [*((model, way) for way in ways[:2] for model in models), ("llama-1b", "liger")]
    (path,) = tmp_path.glob("*.csv")
    _, rows = records.read_csv(path)
    assert [(row["model"], row["way"]) for row in rows] == [*itertools.product(models, ways[:2])]
    assert [row["note"] for row in rows] == ["", "", "took longer than 40 s", "took longer than 40 s"]
    assert rows[1]["loss_off"] == "0.0e+00"
    assert "took longer than 40 s" in next(tmp_path.glob("*.md")).read_text()


def test_each_way_has_the_memory_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        end_to_end.parse(["--longest", "--together=2", "--device=cuda"])
    assert "--longest takes --together 1" in capsys.readouterr().err


def test_ways_that_leave_ops_to_the_reference() -> None:
    options = end_to_end.parse(["--smoke", "--ways=torch+rms_norm.rope-lean,default-lean-mlp-compile"])
    assert options.ways == ["torch+rms_norm.rope-lean", "default-lean-mlp-compile"]
    with pytest.raises(SystemExit):
        end_to_end.parse(["--smoke", "--ways=nonsense+rms_norm"])


def test_small_calls_of_the_reference() -> None:
    rows = small.main(["--smoke", "--ops=softmax"])
    assert [row["provider"] for row in rows] == ["ours-torch", "eager"]
    assert all(float(row["call_us"]) > 0 and float(row["one_thread_us"]) > 0 for row in rows)
    assert {row["graph_us"] for row in rows} == {""}, "there are no CUDA graphs on a CPU"


def test_a_call_in_one_thread() -> None:
    call = small.in_one_thread(torch.autograd.is_multithreading_enabled)
    assert (call(), torch.autograd.is_multithreading_enabled()) == (False, True)


def test_the_longest_sequence_is_searched_from_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 100 GB: 10 GB are always taken, a token takes 1 MB, and from 60000 tokens on 2 % more."""
    held = SimpleNamespace(peak=0)
    tried: list[int] = []

    def forward(tokens: int) -> torch.Tensor:
        tried.append(tokens)
        held.peak = 10_000_000_000 + int(tokens * 1_000_000 * (1.02 if tokens > 60000 else 1.0))
        if held.peak > 100_000_000_000:
            raise torch.OutOfMemoryError
        return torch.zeros(())

    device = SimpleNamespace(
        empty_cache=lambda: None,
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: held.peak,
        mem_get_info=lambda: (90_000_000_000, 100_000_000_000),
        memory_reserved=lambda: 10_000_000_000,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    monkeypatch.setattr(end_to_end, "trainer", lambda job: (forward, lambda loss: None, 7))
    result = end_to_end.longest(end_to_end.Job("llama-1b", "plain", 8, 2048, 1, False, "cuda", False, longest=True))
    assert 90e9 / 1.02e6 * end_to_end.FEWER - end_to_end.FINER <= result["longest"] <= 90e9 / 1.02e6
    assert result["longest"] % end_to_end.FINER == 0
    assert result["longest"] == tried[-1] < tried[-2] < 1.05 * 90_000
    assert all(tokens > 2 * end_to_end.SHORT for tokens in tried[3:])
    assert result["peak_gb"] == f"{held.peak / 1e9:.2f}"


def test_memory_that_a_failed_step_keeps_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for the longest sequence: the shorter of them did fit before."""
    taken = {"kept": 0}

    def forward(tokens: int) -> torch.Tensor:
        if taken["kept"] or tokens > 100_000:
            taken["kept"] = 1
            raise torch.OutOfMemoryError
        taken["peak"] = tokens * 1_000_000
        return torch.zeros(())

    device = SimpleNamespace(
        empty_cache=lambda: None,
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: taken["peak"],
        mem_get_info=lambda: (100_000_000_000, 100_000_000_000),
        memory_reserved=lambda: 0,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    monkeypatch.setattr(end_to_end, "trainer", lambda job: (forward, lambda loss: None, 7))
    result = end_to_end.longest(end_to_end.Job("llama-1b", "plain", 8, 2048, 1, False, "cuda", False, longest=True))
    assert result == {"note": "16384 tokens fit, but not after a step that didn't: memory is kept"}
