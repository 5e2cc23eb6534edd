"""The suite compiles for chips that aren't there, and catches what doesn't compile, doesn't fit, or spills."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from liger_conformance.compilers.triton import scattered_reductions
from liger_conformance.known import KnownSpills

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # .ci/run has them beside the lane that they test

BENT = Path(__file__).parent / "bent" / "liger_bent"

Suite = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, install_package: Callable[..., Path]) -> Path:
    """A folder where liger-bent is installed."""
    return install_package(tmp_path_factory.mktemp("bent"), "bent", BENT).parent


@dataclass
class Run:
    """Results of a run of the suite: the error of each failed test by name, and the report."""

    errors: dict[str, str]
    report: dict[str, Any]

    def outcomes(self, op: str, chip: str) -> set[str]:
        return {
            outcome
            for cell in self.report["cells"]
            if (cell["op"], cell["device"]) == (op, chip)
            for outcome in cell["outcomes"]
        }

    def kernels(self, name: str, chip: str) -> list[dict[str, Any]]:
        return [k for k in self.report["kernels"] if (k["kernel"], k["chip"]) == (name, chip)]


@pytest.fixture(scope="module")
def run(site: Path, run_suite: Suite) -> Run:
    """Every kernel of bent at one size, for a chip with much shared memory and one with little."""
    chosen = "test_compiled and -large- or test_known_spills"
    done = run_suite(site, "--impl=bent", "--compile=sm_90,sm_120", f"--report={site}", "-k", chosen)
    assert done.returncode == 1, done.stdout + done.stderr
    parts = re.split(r"^_+ (test_\S+) _+$", done.stdout.partition("= conformance =")[0], flags=re.M)
    return Run(
        dict(zip(parts[1::2], parts[2::2], strict=True)), json.loads((site / "conformance.json").read_text("utf-8"))
    )


@pytest.mark.parametrize(
    ("op", "chips", "says"),
    [
        ("rms_norm", ("sm_90", "sm_120"), "mistyped is not defined"),
        ("embedding", ("sm_90", "sm_120"), "mistyped"),
        ("swiglu", ("sm_120",), "bytes of shared memory, of 101376"),
        ("geglu", ("sm_90", "sm_120"), "or declare in known_spills.py that this is faster"),
        ("sparsemax", ("sm_90", "sm_120"), "DataDependentOutputException"),
        ("jsd", ("sm_90", "sm_120"), "the reference of jsd ran where jsd-bent-"),
        ("kl_div", ("sm_90", "sm_120"), "calls another op, which takes no tensors without data"),
    ],
)
def test_wrong_kernels_are_caught(run: Run, op: str, chips: tuple[str, ...], says: str) -> None:
    """Kernels that don't compile, at any stage, take too much, or spill; and host code that can't be followed."""
    for chip in ("sm_90", "sm_120"):
        for dtype in ("float32", "bfloat16"):
            error = run.errors.get(f"test_compiled[{op}-bent-{chip}-large-{dtype}]")
            assert (error is not None) == (chip in chips), error
            assert error is None or says in error
    assert {chip for chip in ("sm_90", "sm_120") if "failed" in run.outcomes(op, chip)} == set(chips)


def test_right_kernels_are_reported(run: Run) -> None:
    """A kernel that is right is `compiled`, and never `passed`: for what its chip has, and for each alignment."""
    for chip, multiprocessors in (("sm_90", 132), ("sm_120", 170)):
        assert run.outcomes("softmax", chip) == {"compiled"}
        assert run.outcomes("tvd", chip) == {"not claimed"}
        kernels = run.kernels("softmax._row", chip)
        assert len(kernels) == 4
        variants = [kernel["variant"] for kernel in kernels]
        assert all(f"MULTIPROCESSORS={multiprocessors}, BLOCK=1024, num_warps=4, " in variant for variant in variants)
        types = {variant.partition("; ")[2] for variant in variants}
        assert types == {f"*{t}:16, *{t}{at}, i32:16" for t in ("bf16", "fp32") for at in ("", ":16")}
        for kernel in kernels:
            assert kernel["uses"]["registers"] > 8
            assert kernel["uses"]["bytes shared"] == 16
            assert kernel["spills"] == 0
            assert kernel["ops"] == ["softmax"]
    assert run.report["heading"]["device"] == "none"
    assert not any("passed" in cell["outcomes"] for cell in run.report["cells"])


def test_every_configuration_is_compiled(run: Run) -> None:
    """Configurations of an autotuned kernel are all compiled: the chosen one is not known without the chip."""
    for chip in ("sm_90", "sm_120"):
        variants = [kernel["variant"].partition(", num_stages")[0] for kernel in run.kernels("poly_norm._row", chip)]
        assert sorted(variants) == sorted(["BLOCK=1024, num_warps=2", "BLOCK=1024, num_warps=4"] * 2)


def test_known_spills_are_strict(run: Run) -> None:
    """Kernels with declared spills may spill, up to what is declared, and have to."""
    for chip in ("sm_90", "sm_120"):
        assert run.outcomes("dyt", chip) == {"compiled"}
        assert all(kernel["spills"] > 0 for kernel in run.kernels("dyt._row", chip))
    stale = {name for name in run.errors if "test_known_spills" in name}
    assert stale == {"test_known_spills[layer_norm-bent-sm_90]"}
    assert "none of these is so any more" in run.errors["test_known_spills[layer_norm-bent-sm_90]"]


def test_any_spills(site: Path, run_suite: Suite) -> None:
    """Spills pass, declared or not, and declared ones needn't happen. Everything else fails as it does."""
    chosen = "test_compiled and -large-bfloat16 or test_known_spills"
    ops = ("geglu", "dyt", "layer_norm", "swiglu", "jsd")
    asked = [f"--op={op}" for op in ops]
    done = run_suite(
        site, "--impl=bent", "--compile=sm_120", "--any-spills", f"--report={site / 'any'}", *asked, "-k", chosen
    )
    report = json.loads((site / "any" / "conformance.json").read_text("utf-8"))
    outcomes = {cell["op"]: set(cell["outcomes"]) for cell in report["cells"] if cell["outcomes"]}
    wrong = ("swiglu", "jsd")  # which takes too much shared memory, and whose reference ran
    assert outcomes == {op: {"failed"} if op in wrong else {"compiled"} for op in ops}, done.stdout
    assert any(kernel["spills"] for kernel in report["kernels"] if kernel["kernel"] == "geglu._row")


def test_results_of_a_file(site: Path, run_suite: Suite, tmp_path: Path) -> None:
    """They are judged anew in each run; one that is compared has to agree; a changed kernel and a wrong one are compiled."""
    file, package = tmp_path / "bent.txt", site / "liger_bent"
    ops = [f"--op={op}" for op in ("softmax", "geglu", "embedding")]
    asked = ("--impl=bent", "--compile=sm_120", *ops, f"--results={file}", "-k", "test_compiled and -large-")

    def failed(*options: str) -> set[str]:
        done = run_suite(site, *asked, *options)
        return set(re.findall(r"^FAILED \S+\[(\w+)-bent-", done.stdout, re.M))

    wrong = failed("--write-results")
    assert wrong == {"geglu", "embedding"}
    text = file.read_text("utf-8")
    assert failed("--check-results=1") == failed() == failed("-n2") == wrong
    softmax = re.compile(r"^(\w+ softmax\._row \w+ \[)(\d+),(\d+),", re.M)
    file.write_text(softmax.sub(r"\g<1>255,400,", text), "utf-8")
    assert failed() == wrong | {"softmax"}  # it spills
    file.write_text(softmax.sub(r"\g<1>9,\3,", text), "utf-8")
    assert failed() == wrong
    assert failed("--check-results=1") == wrong | {"softmax"}
    assert failed("--check-results=1", "--write-results", "-n2") == wrong
    assert file.read_text("utf-8") == text
    kernel = package / "ops" / "softmax.py"
    right = kernel.read_text("utf-8")
    kernel.write_text(f"# Lines move.\n{right}", "utf-8")
    failed("--write-results")
    assert file.read_text("utf-8") == text
    kernel.write_text(right.replace("x, columns, BLOCK)\n\n", "x, columns + 1, BLOCK)\n\n"), "utf-8")
    try:
        failed("--write-results")
    finally:
        kernel.write_text(right, "utf-8")
    assert len(file.read_text("utf-8").splitlines()) > len(text.splitlines())


@pytest.mark.parametrize(
    ("key", "reason", "says"),
    [
        ("softmax-bent-sm_90 softmax._row[*", " ", "takes a reason"),
        ("softmax-bent-sm_91 softmax._row[*", "it is fast", "is of no op, language and chip"),
        ("softmax._row[*", "it is fast", "is of no op, language and chip"),
    ],
)
def test_declarations_are_checked(
    key: str, reason: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"liger_{tmp_path.name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "known_spills.py").write_text(f"KNOWN_SPILLS = {{{key!r}: (8, {reason!r})}}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=says):
        KnownSpills({"bent": package.name}, ["softmax-bent-sm_90"])


@pytest.mark.parametrize(
    ("options", "variables", "says"),
    [
        (
            ["--impl=bent", "--compile=sm_91"],
            {},
            "--compile: no chip sm_91; it takes gfx942, sm_100, sm_120, sm_80, sm_90",
        ),
        (["--impl=bent", "--any-spills"], {}, "--any-spills is about what --compile finds: name the chips"),
        (["--impl=bent", "--results=bent.txt"], {}, "--results are those of --compile: name the chips"),
        (["--impl=bent", "--compile=sm_90", "--write-results"], {}, "--write-results takes a file: --results=FILE"),
        (
            ["--impl=bent", "--impl=triton", "--compile=sm_90", "--results=bent.txt"],
            {},
            "--results is a file of one language: --impl is one of bent, triton",
        ),
        (["--impl=bent", "--compile=all", "--device=cuda"], {}, "--compile runs on no device: leave out --device"),
        (
            ["--impl=bent", "--compile=all"],
            {"TRITON_INTERPRET": "1"},
            "--impl=bent can't be compiled: TRITON_INTERPRET=1",
        ),
        (
            ["--compile=all"],
            {"TRITON_INTERPRET": "1", "CUTILE_INTERPRET": "1"},
            "bent: TRITON_INTERPRET=1 is set",
        ),
    ],
)
def test_what_cannot_compile_is_an_error(
    site: Path, run_suite: Suite, options: list[str], variables: dict[str, str], says: str
) -> None:
    done = run_suite(site, *options, **variables)
    assert done.returncode == 4
    assert says in done.stderr


@pytest.mark.parametrize(
    ("lanes", "axis", "scattered"),
    [
        ("[[0, 1], [1, 0], [2, 0], [0, 2], [0, 4]]", 1, 1),
        ("[[0, 1], [1, 0], [2, 0], [0, 2], [0, 4]]", 0, 0),
        ("[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]]", 1, 0),
        ("[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]", 0, 0),
    ],
)
def test_reductions_over_scattered_lanes(lanes: str, axis: int, scattered: int) -> None:
    """Lanes that Triton 3.6 made of four groups of 232 x 2 elements, reshaped to rows: 1 and 2 are other groups'."""
    ttgir = f"""
#blocked = #ttg.blocked<{{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4], order = [1, 0]}}>
#linear = #ttg.linear<{{register = [[0, 32]], lane = {lanes}, warp = [[0, 8], [0, 16]], block = []}}>
    %other = "tt.reduce"(%ys) <{{axis = 1 : i32}}> ({{
    ^bb0(%a: f32, %b: f32):
      tt.reduce.return %a : f32
    }}) : (tensor<4x512xf32, #blocked>) -> tensor<4xf32, #ttg.slice<{{dim = 1, parent = #blocked}}>>
    %mean = "tt.reduce"(%xs) <{{axis = {axis} : i32}}> ({{
    ^bb0(%a: f32, %b: f32):
      tt.reduce.return %a : f32
    }}) : (tensor<4x512xf32, #linear>) -> tensor<4xf32, #ttg.slice<{{dim = 1, parent = #linear}}>>
"""
    assert scattered_reductions(ttgir) == scattered
