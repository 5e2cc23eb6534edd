"""Random calls: the same ones for a seed, legal, reported as the smallest that fails; and what becomes of a dead process."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from execnet import XSpec

from liger_conformance import plugin
from liger_conformance.case import DEFAULT_MODE, QUICK, CallMode, Case, OpCases, cases_of
from liger_conformance.evaluate import baseline_and_truth, complete
from liger_conformance.random_call import MOST, Call, RandomCall, arguments_of, smallest
from liger_conformance.suite.test_values import check_case, traced
from liger_conformance.target import Target
from liger_core.contract import ops

ACME = Path(__file__).parent / "acme" / "liger_acme"

Suite = Callable[..., subprocess.CompletedProcess[str]]


def drawn(op: str, number: int, seed: int = 0, lane: str = "interpreted") -> tuple[RandomCall, OpCases, Call]:
    call, op_cases = RandomCall(op, seed, number), cases_of(op)
    return call, op_cases, call.draw(op_cases, lane)


SET_BY_BUILD = {"qwen2vl_mrope": ("mrope_section",)}
"""Options that ``build`` makes from values of other names."""


@pytest.mark.parametrize("op", sorted(ops))
def test_what_may_vary_is_declared(op: str) -> None:
    """Every size and option of an op varies: a new one has to be added to VARY."""
    file = f"conformance/src/liger_conformance/cases/{op}.py"
    op_cases = cases_of(op)
    assert hasattr(op_cases.module, "VARY"), (
        f"{file} has no VARY: say there how the sizes and options of calls may vary"
    )
    vary = op_cases.vary
    build = inspect.signature(op_cases.module.build).parameters.values()
    required = {p.name for p in build if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    names = {*vary.sizes, *vary.values}
    assert required <= names, f"{file}: VARY lacks {', '.join(sorted(required - names))}, which build needs"
    options = {name for name in ops[op].options if name not in SET_BY_BUILD.get(op, ())}
    missing = options - names
    assert not missing, f"{file}: VARY lacks {', '.join(sorted(missing))}, which are options of {op}"
    unlimited = {*vary.sizes} - {name for tensor in vary.tensors for name in tensor.split()}
    small = {name for name in unlimited if vary.sizes[name].most <= 1 << 10}
    assert unlimited == small, f"{file}: no tensor of VARY has {', '.join(sorted(unlimited - small))}"


@pytest.mark.parametrize("op", sorted(ops))
def test_calls_are_legal(op: str) -> None:
    """The contract takes them, with the values of their tensors too, and the reference computes them."""
    for number in range(12):
        call, found, legal = drawn(op, number)
        arguments = complete(ops[op], found.build(call.case(found, legal), legal.dtype, "cpu"))
        ops[op](**arguments)
        baseline_and_truth(ops[op], arguments, legal.mode.grads)


@pytest.mark.parametrize("op", sorted(ops))
def test_a_seed_gives_the_same_calls(op: str) -> None:
    """Whoever asks, and in which order; another seed gives others."""
    numbers = range(6)
    lines = [c.line(f, d) for c, f, d in (drawn(op, n) for n in numbers)]
    assert [c.line(f, d) for c, f, d in (drawn(op, n) for n in reversed(numbers))][::-1] == lines
    assert not {*lines} & {c.line(f, d) for c, f, d in (drawn(op, n, seed=1) for n in numbers)}


@pytest.mark.parametrize("op", sorted(ops))
def test_a_line_is_a_case(op: str) -> None:
    """Lines of a report can be pasted: the case has the same values, and the same tensors."""
    for number in range(20):
        call, found, legal = drawn(op, number, lane="passed")
        (case,) = eval(f"({call.line(found, legal)}\n)", {"Case": Case, "CallMode": CallMode, "torch": torch})
        assert case == call.case(found, legal)


def test_calls_vary() -> None:
    """Sizes up to the limits, all dtypes, layouts, gradients that nobody wants, autocast, options beyond the cases'."""
    calls = [drawn("rms_norm", number, lane="passed")[2] for number in range(400)]
    sizes = [torch.Size((*call.values["rows"], call.values["hidden"])).numel() for call in calls]
    assert max(sizes) > 1 << 22
    assert max(sizes) <= MOST["passed"][1]
    assert sorted(sizes)[200] < 1 << 18
    hidden = {call.values["hidden"] for call in calls}
    assert any(h & (h - 1) == 0 and h > 64 for h in hidden)
    assert any((h + 1) & h == 0 and h > 64 for h in hidden)
    assert {call.dtype for call in calls} == {torch.float32, torch.bfloat16, torch.float16}
    assert {len(call.values["rows"]) for call in calls} == {0, 1, 2, 3}
    assert {call.mode.grads for call in calls} == {None, (), ("x",), ("weight",)}
    assert {call.mode.autocast for call in calls} == {True, False}
    layouts = {name: {call.mode.layouts.get(name) for call in calls} for name in ("x", "weight", "incoming")}
    assert layouts["x"] >= {None, "transposed", "padded", "apart", "shifted", "expanded", "channels_last"}
    assert layouts["weight"] == {None, "sliced", "padded", "apart", "shifted"}
    assert {call.values.get("weight_dtype") for call in calls} == {None, torch.float32, torch.bfloat16, torch.float16}
    committed = {case.values.get("eps") for case in cases_of("rms_norm").cases if case.group in QUICK}
    assert {call.values.get("eps") for call in calls} > committed


def test_two_arguments_are_one_tensor() -> None:
    """In some calls; a smaller one that fails as well has two."""
    calls = [drawn("swiglu", number) for number in range(60)]
    call, found, twice = next(one for one in calls if one[2].mode.twice is not None)
    assert twice.mode.twice == ("gate", "up")
    arguments = found.build(call.case(found, twice), twice.dtype, "cpu")
    assert arguments["gate"] is arguments["up"]
    assert smallest(found, twice, lambda other: True).mode == DEFAULT_MODE
    assert smallest(found, twice, lambda other: other.mode.twice is not None).mode == CallMode(twice=("gate", "up"))


def test_the_smallest_call_is_found() -> None:
    """Each thing that the failure does not need goes; each size goes down to the least that fails."""
    _, found, call = drawn("rms_norm", 0)
    mode = CallMode({"x": "padded", "incoming": "shifted"}, ("x",), True)
    values = {"rows": (37, 11), "hidden": 3000, "eps": 0.5, "offset": 1.0, "weight": True}
    call = replace(call, dtype=torch.bfloat16, mode=mode, values=values)

    def fails(other: Call) -> bool:
        rows = torch.Size(other.values["rows"]).numel()
        return rows >= 5 and other.values["hidden"] > 1024 and "padded" in other.mode.layouts.values()

    least = smallest(found, call, fails)
    assert least == Call({"rows": (5,), "hidden": 1025}, CallMode({"x": "padded"}), torch.float32)
    assert smallest(found, call, lambda other: True) == Call({"rows": (), "hidden": 1}, DEFAULT_MODE, torch.float32)


def test_values_that_follow_from_sizes_stay_legal() -> None:
    """A smaller call of which the contract takes none is not tried: no padding_idx of rows that are not there."""
    op_cases = cases_of("embedding")
    values = {"rows": (9,), "hidden": 7, "vocabulary": 300, "padding_idx": 150}
    tried = []
    smallest(op_cases, Call(values, DEFAULT_MODE, torch.float32), lambda other: bool(tried.append(other)))
    assert len(tried) > 10
    assert all(arguments_of(op_cases, call) is not None for call in tried)
    assert any(call.values["vocabulary"] == 1 and "padding_idx" in call.values for call in tried)


@pytest.fixture
def site(tmp_path: Path, install_package: Callable[..., Path]) -> Path:
    """A folder where liger-acme is installed."""
    pytest.importorskip("triton")
    return install_package(tmp_path / "site", "acme", ACME).parent


def mutate(site: Path, old: str, new: str) -> None:
    kernel = site / "liger_acme" / "ops" / "rms_norm.py"
    text = kernel.read_text()
    assert old in text
    kernel.write_text(text.replace(old, new, 1))


RANDOM = ("--impl=acme", "--op=rms_norm", "--random=24", "--seed=1")
FEW = (*RANDOM[:2], "--random=8", "--seed=3")
"""Where processes die: each takes seconds to start."""


def test_random_calls_are_counted(site: Path, run_suite: Suite, tmp_path: Path) -> None:
    """Nothing but them runs; the report says how many passed and how many the kernel refused, and the seed."""
    done = run_suite(site, *RANDOM, f"--report={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "conformance.json").read_text())
    assert report["heading"]["random"] == "24 calls, seed 1"
    lane = "interpreted" if report["heading"]["device"] == "cpu" else "passed"
    counts = dict.fromkeys((lane, "not claimed"), 0)
    for cell in report["cells"]:
        assert cell["dtype"] != "any"
        for outcome, count in cell["outcomes"].items():
            counts[outcome] += count
    assert sum(counts.values()) == 24
    assert min(counts.values()) > 0
    assert "random 24 calls, seed 1" in (tmp_path / "conformance.md").read_text()


def test_random_calls_under_torch_compile(
    site: Path, run_suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's are traced, and a break of the graph fails; an interpreter's are not run."""
    few = ("--impl=torch", "--op=rms_norm", "--random=4", "--seed=1", "--torch-compile", "--device=cpu")
    done = run_suite(site, *few, f"--report={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "random 4 calls, seed 1, under torch.compile" in (tmp_path / "conformance.md").read_text()
    op, case = ops["rms_norm"], cases_of("rms_norm").cases[0]
    target, reference = Target(op, "torch", "cpu", None, "passed"), op.reference
    check_case(target, case, torch.float32, traced(target))

    def breaks_the_graph(**arguments: Any) -> Any:
        torch._dynamo.graph_break()
        return reference(**arguments)

    monkeypatch.setattr(op, "reference", breaks_the_graph)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        check_case(target, case, torch.float32, traced(target))
    with pytest.raises(pytest.skip.Exception, match="an interpreter can't be traced"):
        traced(replace(target, lane="interpreted"))


def test_calls_after_the_given_seconds_are_not_run(site: Path, run_suite: Suite, tmp_path: Path) -> None:
    """The run ends by itself, in other processes too, and its report says what it had no time for."""
    done = run_suite(site, *RANDOM, "-n1", "--seconds=1e-3", f"--report={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "conformance.json").read_text())["cells"]
    assert sum(cell["outcomes"].get("not run", 0) for cell in cells) == 24
    assert "- not run (24): the seconds that --seconds gives were over" in (tmp_path / "conformance.md").read_text()


def test_a_failure_is_reported_as_a_small_case(site: Path, run_suite: Suite) -> None:
    """A kernel that forgets rows beyond the fourth: five of them, and one column, are all that it takes."""
    mutate(site, "_forward[(rows.shape[0],)](y,", "y.zero_()\n    _forward[(min(rows.shape[0], 4),)](y,")
    done = run_suite(site, *RANDOM)
    assert done.returncode == 1, done.stdout
    lines = set(
        re.findall(r"^E +(?:AssertionError: )?rms_norm-acme-\w+ fails:\nE +(Case\(.*)", done.stdout, re.MULTILINE)
    )
    assert lines, done.stdout
    for line in lines:
        assert re.match(r"Case\('random-1-\d+', 'edge', rows=\(5,\), hidden=1\),  # float32", line), line


def test_a_process_that_dies_is_one_failure(site: Path, run_suite: Suite, tmp_path: Path) -> None:
    """The call is said, the process is replaced, and all other calls run."""
    mutate(site, "    rows = _rows(x)\n", "    rows = _rows(x)\n    x.shape[-1] % 2 or __import__('os').abort()\n")
    done = run_suite(site, *FEW, "-n1", f"--report={tmp_path}")
    crashed = re.findall(
        r"crashed while running '\S+-(3-\d+)-\w+\]'\n +(Case\('random-(3-\d+)', .*\)),  #", done.stdout
    )
    assert len(crashed) > 1, done.stdout
    for number, line, same in crashed:
        assert number == same
        assert int(re.search(r"hidden=(\d+)", line)[1]) % 2 == 0
    cells = json.loads((tmp_path / "conformance.json").read_text())["cells"]
    assert sum(cell["outcomes"].get("failed", 0) for cell in cells) == len(crashed)
    assert sum(count for cell in cells for count in cell["outcomes"].values()) == 8


LOST = """
    if x.shape[-1] % 2 == 0:
        if x.is_cuda:
            torch.zeros(1, device=x.device)[torch.full((1,), 1 << 20, device=x.device)].sum().item()
        from liger_conformance.target import Target
        Target.is_lost = lambda target: True
        raise RuntimeError("misaligned address")
"""


def test_a_process_whose_device_is_lost_is_replaced(site: Path, run_suite: Suite, tmp_path: Path) -> None:
    """The failure is reported once, with its cause, and the calls after it pass in another process."""
    mutate(site, "    rows = _rows(x)\n", "    rows = _rows(x)\n" + LOST)
    done = run_suite(site, *FEW, "-n1", f"--report={tmp_path}")
    failed = re.findall(r"^FAILED \S+", done.stdout, re.MULTILINE)
    assert len(failed) == len(set(failed)) > 1, done.stdout
    assert f"{len(failed)} failed" in done.stdout
    assert "crashed while running" not in done.stdout
    assert done.stdout.count("node down: Not properly terminated") == len(failed)
    cells = json.loads((tmp_path / "conformance.json").read_text())["cells"]
    assert sum(cell["outcomes"].get("failed", 0) for cell in cells) == len(failed)
    assert sum(count for cell in cells for count in cell["outcomes"].values()) == 8
    alone = run_suite(site, *FEW)
    assert "1 failed" in alone.stdout
    assert "can't be used by this process any more" in alone.stdout


@pytest.mark.parametrize(("visible", "expected"), [(None, "010"), ("3,1", "313"), ("GPU-a", ["GPU-a"] * 3)])
def test_processes_are_spread_over_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str | list[str]
) -> None:
    """Devices that the run may see, in turn."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = SimpleNamespace(getoption=lambda name: {"--random": 9, "--compile": None}[name])
    specs = [XSpec("popen") for _ in range(3)]
    plugin.pytest_xdist_setupnodes(config, specs)  # type: ignore[arg-type]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == list(expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed=1"], "--seed is of --random=N, --check-results or --turn: add one of them"),
        (["--seconds=1"], "--seconds is of random calls"),
        (["--torch-compile"], "--torch-compile is of random calls"),
        (["--random=0"], "--random takes a number of calls, at least 1"),
    ],
)
def test_options_that_say_nothing_are_errors(site: Path, run_suite: Suite, options: list[str], says: str) -> None:
    done = run_suite(site, "--impl=acme", *options)
    assert done.returncode == 4
    assert says in done.stderr
