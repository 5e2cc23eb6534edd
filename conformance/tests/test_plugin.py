"""The plugin from outside: `pytest --pyargs liger_conformance --impl=acme` where the package acme is installed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

import liger_conformance.suite
from liger_conformance.case import cases_of
from liger_conformance.plugin import outcomes, selection
from liger_conformance.plugin.stash import known_key, report_key, targets_key
from liger_conformance.report import Report
from liger_conformance.target import Target
from liger_core.contract import ops

pytest.importorskip("triton")

ACME = Path(__file__).parent / "acme" / "liger_acme"
PICKY = Path(__file__).parent / "picky" / "liger_picky"

Suite = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def site(tmp_path: Path, install_package: Callable[..., Path]) -> Path:
    """A folder where liger-acme is installed."""
    return install_package(tmp_path / "site", "acme", ACME).parent


QUICK = ("-k", "test_values and (odd or no-weight) and not partial and not unused or test_known_failures")


def test_out_of_tree_package_is_checked(site: Path, run_suite: Suite, tmp_path: Path) -> None:
    """Found, dispatched to and checked, with no line changed elsewhere; and reported."""
    done = run_suite(site, "--impl=acme", f"--report={tmp_path / 'report'}", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "conformance.json").read_text())
    cells = {(cell["op"], cell["dtype"]): cell["outcomes"] for cell in report["cells"]}
    lane = "interpreted" if report["heading"]["device"] == "cpu" else "passed"
    assert cells["rms_norm", "bfloat16"] == {lane: 1, "not claimed": 1}
    assert cells["softmax", "any"] == {"not claimed": 1}
    assert f"{len(ops) - 1} other ops" in done.stdout  # and no line for each
    assert "softmax" not in done.stdout
    assert report["heading"]["liger-acme"] == "0.1"
    assert "| rms_norm |" in (tmp_path / "report" / "conformance.md").read_text()


def test_what_calls_the_same_kernels_is_together(site: Path, run_suite: Suite) -> None:
    """Tests go by op and dtype, not by file: a process that compiles a kernel has most of the tests that call it."""
    done = run_suite(site, "--impl=acme", "--collect-only")
    names = re.findall(r"(test_values|test_same_bits_again)\[(\w+)-acme-.*-(\w+)\]", done.stdout)
    order = [what for what, _ in itertools.groupby(names, lambda name: name[1:])]
    assert order == [("rms_norm", "bfloat16"), ("rms_norm", "float16"), ("rms_norm", "float32")], done.stdout


def test_a_kernel_file_of_no_op_fails(site: Path, run_suite: Suite) -> None:
    """It would never be found: here it is the only one, and no other test has anything to check."""
    folder = site / "liger_acme" / "ops"
    (folder / "rms_norm.py").rename(folder / "rmsnorm.py")
    done = run_suite(site, "--impl=acme")
    assert done.returncode == 1, done.stdout
    assert "rmsnorm.py has the name of no op: is rms_norm meant?" in done.stdout


def test_known_failures_are_strict(site: Path, run_suite: Suite) -> None:
    """A failure that is declared is a known failure; a declared test that passes fails; so does an id that is stale."""
    kernel = site / "liger_acme" / "ops" / "rms_norm.py"
    kernel.write_text(kernel.read_text().replace("(g - normed * mean) * r", "g * r"))
    known = site / "liger_acme" / "known_failures.py"
    link = "see https://example.org/1"
    names = [f"test_values[rms_norm-acme-*-odd-{dtype}]" for dtype in ("float32", "bfloat16", "float16")]
    names.append("test_values[rms_norm-acme-*-long-row-float16]")  # left to -m slow in an interpreter
    known.write_text(f"KNOWN_FAILURES = {dict.fromkeys(names, link)!r}")
    done = run_suite(site, "--impl=acme", *QUICK)
    assert done.returncode == 0, done.stdout
    assert "1 known failure" in done.stdout
    assert "interpreted" not in done.stdout.partition("conformance ==")[2].partition("not claimed")[0]
    names = ["test_values[rms_norm-acme-*]", "test_values[rms_norm-gone]"]
    known.write_text(f"KNOWN_FAILURES = {dict.fromkeys(names, link)!r}")
    done = run_suite(site, "--impl=acme", *QUICK)
    assert done.returncode == 1
    assert "declares failures of tests that don't exist: test_values[rms_norm-gone]" in done.stdout


def test_an_unexpected_pass_fails(site: Path, run_suite: Suite) -> None:
    (site / "liger_acme" / "known_failures.py").write_text(
        "KNOWN_FAILURES = {'test_values[rms_norm-acme-*-odd-float32]': 'see https://example.org/1'}"
    )
    done = run_suite(site, "--impl=acme", *QUICK)
    assert done.returncode == 1
    assert "[XPASS(strict)]" in done.stdout


def test_a_kernel_that_hangs_has_failed(site: Path, run_suite: Suite, tmp_path: Path) -> None:
    """Its process is ended, the tests after it run in another one, and the report says which it was."""
    kernel = site / "liger_acme" / "ops" / "rms_norm.py"
    hangs = "    while x.dtype is torch.bfloat16:\n        pass\n"
    kernel.write_text(kernel.read_text().replace("    rows = _rows(x)\n", hangs + "    rows = _rows(x)\n", 1))
    timeout = ("-n1", "-o", "faulthandler_timeout=5", "-o", "faulthandler_exit_on_timeout=true")
    done = run_suite(site, "--impl=acme", f"--report={tmp_path / 'report'}", *timeout, *QUICK)
    assert done.returncode == 1, done.stdout + done.stderr
    ended = set(re.findall(r"crashed while running '.*test_values\[rms_norm-acme-\w+-(\S+)\]'", done.stdout))
    assert ended == {"odd-bfloat16"}, done.stdout
    cells = json.loads((tmp_path / "report" / "conformance.json").read_text())["cells"]
    outcomes = {cell["dtype"]: cell["outcomes"] for cell in cells if cell["op"] == "rms_norm"}
    assert outcomes["bfloat16"] == {"failed": 1, "not claimed": 1}
    assert "failed" not in outcomes["float32"]


def test_a_test_of_one_case_takes_the_first_that_is_claimed(
    install_package: Callable[..., Path], run_suite: Suite, tmp_path: Path
) -> None:
    """The case `odd` is refused: no test of one case or two goes without, and torch.compile is none of the reasons."""
    site = install_package(tmp_path / "site", "picky", PICKY).parent
    done = run_suite(
        site, "--impl=picky", "--op=swiglu", "--device=cpu", "-vv", "-k", "not graph_capture and not captured"
    )
    assert done.returncode == 0, done.stdout
    outcomes = dict(re.findall(r"::(test_\w+\[\S+\]) (\w+)", done.stdout))
    every_case = (
        "test_values", "test_same_bits_again", "test_saves_nothing_without", "test_writes_to_nothing", "test_replayed_calls"
    )  # fmt: skip
    interpreted = ("test_each_kernel", "test_grids_fit", "test_calls_between_launches")
    of_few = {name: outcome for name, outcome in outcomes.items() if not name.startswith(every_case + interpreted)}
    assert {name for name in of_few if name.startswith(("test_compile[", "test_compile_dynamic["))} == {
        *(f"test_compile[swiglu-picky-cpu-odd-float32-{start}]" for start in ("cold", "warm")),
        "test_compile_dynamic[swiglu-picky-cpu-odd-bfloat16]",
    }
    others = {name.partition("[")[0] for name, outcome in of_few.items() if outcome != "PASSED"}
    assert others == {"test_sums_over_rows", "test_options_together", "test_stream"}, of_few
    assert outcomes["test_values[swiglu-picky-cpu-odd-float32]"] == "SKIPPED"


def test_what_a_kernel_refuses_is_not_claimed_where_it_is_compiled(
    install_package: Callable[..., Path], run_suite: Suite, tmp_path: Path
) -> None:
    """Also with the options, and where no case is left to be taken instead."""
    package = install_package(tmp_path / "site", "picky", PICKY)
    kernel = package / "ops" / "swiglu.py"
    kernel.write_text(kernel.read_text().replace(" % 16 else", " else"))
    options = ("--impl=picky", "--op=swiglu", "--device=cpu", "-m", "slow or not slow", "-k", "test_compile", "-rs")
    done = run_suite(package.parent, *options)
    assert "failed" not in done.stdout, done.stdout
    assert "6 skipped" in done.stdout, done.stdout
    assert done.stdout.count("not claimed (3): swiglu on cpu: picky: last dimension ") == 2, done.stdout


def test_failures_show_no_tensors(site: Path, run_suite: Suite) -> None:
    """Error texts say what is wrong; the elements would fill the screen."""
    kernel = site / "liger_acme" / "ops" / "rms_norm.py"
    text = kernel.read_text().replace("if any(needs) else ()", "")
    kernel.write_text(text.replace("return dx if needs[0] else None", "inverse_rms.zero_()\n    return dx"))
    done = run_suite(site, "--impl=acme", "--tb=short", "-k", "odd and (test_purity or partial)")
    errors = re.findall(r"^E +(.*)", done.stdout, re.MULTILINE)
    for says in (
        "backward wrote to saved tensor 2",
        "saved 3 values that no backward will read",
        "x: ('weight',) want a gradient",
    ):
        assert any(says in line for line in errors), f"{says}: {done.stdout}"
    assert not [line for line in errors if "tensor(" in line]


def test_a_declaration_needs_a_link(site: Path, run_suite: Suite) -> None:
    (site / "liger_acme" / "known_failures.py").write_text("KNOWN_FAILURES = {'test_values[x]': 'just because'}")
    done = run_suite(site, "--impl=acme", *QUICK)
    assert done.returncode != 0
    assert "it takes a reason and a link" in done.stdout + done.stderr


VALUES = selection.Cases()
PURITY = selection.Cases(dtypes=(torch.bfloat16,), short=("odd", "option"))


def slow(lane: str, case: str, dtype: torch.dtype, cases: selection.Cases = VALUES, turn: int | None = None) -> bool:
    """Whether a test of a case of rms_norm is left to `-m slow`."""
    target = Target(ops["rms_norm"], "acme", "cpu", None, lane)
    (chosen,) = (chosen for chosen in cases_of("rms_norm").cases if chosen.id == case)
    return selection.is_slow(target, chosen, dtype, cases, turn)


def test_an_interpreter_leaves_long_cases_to_the_slow_lane() -> None:
    """All but their values, in one dtype of two; a device, and a compiler, leave none."""
    left = set()
    for case in cases_of("rms_norm").cases[1:]:
        if case.group in ("odd", "option") and cases_of("rms_norm").is_long(case):
            (dtype,) = (dtype for dtype in (torch.float32, torch.bfloat16) if slow("interpreted", case.id, dtype))
            left.add(dtype)
            assert not slow("passed", case.id, dtype)
    assert left == {torch.float32, torch.bfloat16}
    assert slow("interpreted", "long-row", torch.bfloat16, PURITY)
    assert not slow("interpreted", "long-row", torch.bfloat16, dataclasses.replace(PURITY, short=()))
    assert not slow("interpreted", "odd", torch.bfloat16, PURITY)
    assert not slow("interpreted", "no-weight", torch.bfloat16, PURITY)
    assert slow("interpreted", "vector", torch.bfloat16, PURITY)
    for lane in ("passed", "compiled", "executed"):
        assert not slow(lane, "long-row", torch.bfloat16, PURITY)


def test_two_turns_check_the_values_of_each_case_in_both_dtypes() -> None:
    dtypes = torch.float32, torch.bfloat16
    for case in (case.id for case in cases_of("rms_norm").cases[1:] if case.group in ("odd", "edge", "option")):
        left = [[slow("interpreted", case, dtype, turn=turn) for dtype in dtypes] for turn in (0, 1, 2)]
        assert left[0] == left[2] == left[1][::-1]
        assert sum(left[0]) == 1
    extreme = next(case.id for case in cases_of("rms_norm").cases if case.group == "extreme")
    for case in ("odd", extreme):
        assert not any(slow("interpreted", case, dtype, turn=1) for dtype in dtypes)
    assert not any(slow("passed", "no-weight", dtype, turn=1) for dtype in dtypes)


def test_four_turns_compile_each_reference(run_suite: Suite, site: Path) -> None:
    taken = []
    for turn in range(4):
        done = run_suite(
            site, "--impl=torch", "--turn", f"--seed={turn}", "--collect-only", "-k", "test_compile and cold"
        )
        taken += re.findall(r"test_compile\[(\w+)-torch", done.stdout)
    assert sorted(taken) == sorted([*ops, *["rms_norm"] * 3])


def test_an_interpreter_leaves_most_of_float16_to_the_slow_lane() -> None:
    """The first case and the extreme ones stay, and so do tests of the first case."""
    extreme = [case.id for case in cases_of("rms_norm").cases if case.group == "extreme"]
    assert extreme
    for case in ("odd", *extreme):
        assert not slow("interpreted", case, torch.float16)
    for case in ("long-row", "no-weight"):
        assert slow("interpreted", case, torch.float16)
        assert not slow("interpreted", case, torch.float16, selection.Cases(first=1))
        assert not slow("passed", case, torch.float16)


def test_dtypes_with_kernels_of_their_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of a long case, if the op's case file says so."""
    monkeypatch.setattr(cases_of("rms_norm").module, "DTYPES_APART", True, raising=False)
    for dtype in (torch.float32, torch.bfloat16):
        assert not slow("interpreted", "long-row", dtype)


def test_float16_with_kernels_of_its_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short cases stay, if the op's case file says so."""
    monkeypatch.setattr(cases_of("rms_norm").module, "FLOAT16_APART", True, raising=False)
    assert not slow("interpreted", "no-weight", torch.float16)
    assert slow("interpreted", "long-row", torch.float16)


def test_what_a_quick_run_leaves_a_slow_one_takes(site: Path, run_suite: Suite) -> None:
    """Tests of values and of purity, on the CPU: none is in both runs, and none in neither."""

    def collected(*options: str) -> set[str]:
        chosen = ("-k", "(test_values or test_purity) and not model_sizes", "--collect-only")
        done = run_suite(site, "--impl=acme", "--op=rms_norm", "--device=cpu", *chosen, *options)
        return set(re.findall(r"::(\w+\[\S+\])", done.stdout))

    whole = run_suite(site, "--impl=acme", "--op=rms_norm", "--device=cpu", "--collect-only")
    assert "deselected" not in whole.stdout, whole.stdout  # what is left to -m slow isn't made
    quick, slow, every = collected(), collected("-m", "slow"), collected("-m", "slow or not slow")
    assert quick | slow == every
    assert not quick & slow
    assert "test_values[rms_norm-acme-cpu-long-row-bfloat16]" in quick
    assert "test_same_bits_again[rms_norm-acme-cpu-long-row-bfloat16]" in slow
    assert "test_values[rms_norm-acme-cpu-long-row-float16]" in slow


SLOW = """
import gc, weakref
import pytest

gc.disable()
pytestmark = pytest.mark.slow
left = []

class Memory:
    pass

def take():
    held = Memory()
    left.append(weakref.ref(held))
    raise MemoryError

def test_skips():
    try:
        take()
    except MemoryError:
        pytest.skip("too large")

def test_after_skip():
    assert [memory() for memory in left] == [None]

def test_fails():
    take()

def test_after_failure():
    assert [memory() for memory in left] == [None, None]
"""


def test_a_slow_test_starts_without_what_others_left(tmp_path: Path) -> None:
    """A test that fails or skips for want of memory leaves its frames in a cycle, and with them what they hold."""
    shutil.copy(Path(liger_conformance.suite.__path__[0]) / "conftest.py", tmp_path)
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--impl=nope"], "there is no language 'nope'; installed: torch, acme"),
        (
            ["--impl=acme", "--device=npu"],
            "--impl=acme can't run here: --device=npu was asked for, and acme runs on cpu, cuda",
        ),
        (["--impl=acme", "--op=nope"], "--op=nope: there is no such op; the ops are attn_res, cross_entropy, "),
    ],
)
def test_what_cannot_run_is_an_error(site: Path, run_suite: Suite, options: list[str], says: str) -> None:
    done = run_suite(site, *options)
    assert done.returncode == 4
    assert says in done.stderr


def test_runs_within_a_run_keep_their_outcomes_apart(pytestconfig: pytest.Config) -> None:
    """Each run listens for itself: what a nested one ends doesn't end the report of the run around it."""
    names = ("outer", "inner")
    configs = [types.SimpleNamespace(stash={report_key: Report("cpu")}) for _ in names]
    outer, inner = (outcomes.Listener(cast("pytest.Config", config)) for config in configs)
    for listener, op in ((outer, "rms_norm"), (inner, "softmax"), (outer, "rms_norm")):
        report = pytest.TestReport("node", ("", 0, ""), {}, "failed", "said", "call")
        report.user_properties = [("liger", (op, "torch", "cpu", "float32", "passed")), ("liger case", "odd")]
        listener.pytest_runtest_logreport(report)
    assert [dict(config.stash[report_key].counts) for config in configs] == [
        {("rms_norm", "torch", "cpu", "float32"): {"failed": 2}},
        {("softmax", "torch", "cpu", "float32"): {"failed": 1}},
    ]
    (listener,) = [each for each in pytestconfig.pluginmanager.get_plugins() if isinstance(each, outcomes.Listener)]
    assert listener.config is pytestconfig


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        (pytest.mark.cases(kernel=True), "test_x: cases takes groups, dtypes.*'kernel'"),
        (pytest.mark.targets("kernels"), "test_x: targets has no kernels; it takes kernel, differentiable, one_op"),
    ],
)
def test_a_misspelt_mark_fails(mark: pytest.MarkDecorator, error: str) -> None:
    """It would be ignored, and the test taken for more or fewer cases and targets than it says."""

    class Definition:
        name = "test_x"

        @staticmethod
        def iter_markers(name: str) -> list[pytest.Mark]:
            return [mark.mark] if name == mark.name else []

        def get_closest_marker(self, name: str) -> pytest.Mark | None:
            return next(iter(self.iter_markers(name)), None)

    class Metafunc:
        module = types.SimpleNamespace(__name__=f"{selection.SUITE}.test_values")
        fixturenames = ("target",)
        config = types.SimpleNamespace(
            stash={targets_key: [], known_key: types.SimpleNamespace(declares_any=False)},
            getoption=lambda name: None,
            option=types.SimpleNamespace(markexpr=""),
            args=(),
        )
        definition = Definition()

    with pytest.raises(pytest.UsageError, match=error):
        selection.pytest_generate_tests(cast("pytest.Metafunc", Metafunc))
