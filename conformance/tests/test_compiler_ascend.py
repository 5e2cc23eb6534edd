"""The suite lowers kernels for an NPU that isn't there, and catches what doesn't lower, and what doesn't fit."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from liger_conformance.compilers import ascend_execute
from liger_conformance.compilers.ascend_buffers import bytes_taken

if find_spec("triton") is None or find_spec("triton.triton_patch") is None:
    pytest.skip("needs triton-ascend", allow_module_level=True)

BENT = Path(__file__).parent / "bent_ascend" / "liger_bent_ascend"
UNIFIED_BUFFER = 192 << 10

Suite = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, install_package: Callable[..., Path]) -> Path:
    """A folder where liger-bent-ascend is installed."""
    return install_package(tmp_path_factory.mktemp("bent"), "bent-ascend", BENT).parent


@pytest.fixture(scope="module")
def run(site: Path, run_suite: Suite) -> tuple[str, dict[str, Any]]:
    """Every kernel of bent-ascend at one size: what pytest printed, and the report."""
    done = run_suite(
        site, "--impl=bent-ascend", "--compile=ascend910b", f"--report={site}", "-k", "test_compiled and -large-"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, json.loads((site / "conformance.json").read_text("utf-8"))


def outcomes(run: tuple[str, dict[str, Any]], op: str, dtype: str) -> set[str]:
    return {o for cell in run[1]["cells"] if (cell["op"], cell["dtype"]) == (op, dtype) for o in cell["outcomes"]}


def bytes_of(run: tuple[str, dict[str, Any]], op: str) -> set[tuple[int, int]]:
    kernels = (kernel for kernel in run[1]["kernels"] if op in kernel["ops"])
    return {(kernel["uses"]["bytes"], kernel["uses"]["bytes with double buffers"]) for kernel in kernels}


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("geglu", "_geglu._forward[BLOCK=32768, SUB_BLOCK=32768; "),
        ("rms_norm", "takes 65536 programs, of 65535"),
        ("softmax", "'dtype' object is not callable"),
        ("tvd", "_choose can't be lowered"),
    ],
)
def test_wrong_kernels_are_caught(run: tuple[str, dict[str, Any]], op: str, says: str) -> None:
    errors = re.split(r"^_+ (test_\S+) _+$", run[0].partition("= conformance =")[0], flags=re.M)
    errors = dict(zip(errors[1::2], errors[2::2], strict=True))
    for dtype in ("float32", "bfloat16"):
        assert outcomes(run, op, dtype) == {"failed"}
        assert says in errors[f"test_compiled[{op}-bent-ascend-ascend910b-large-{dtype}]"]


def test_a_block_too_large_passes_in_sub_blocks(run: tuple[str, dict[str, Any]]) -> None:
    """Three tiles are alive at once: 32768 float32 take 384 KiB, 1024 take 12; with double buffers 20, or 16 of bfloat16."""
    assert {outcome for dtype in ("float32", "bfloat16") for outcome in outcomes(run, "swiglu", dtype)} == {"compiled"}
    assert bytes_of(run, "geglu") == {(384 << 10, 384 << 10)}
    assert bytes_of(run, "swiglu") == {(12 << 10, 20 << 10), (12 << 10, 16 << 10)}


def test_what_fits_without_double_buffers_only_is_a_warning(run: tuple[str, dict[str, Any]]) -> None:
    assert outcomes(run, "dyt", "float32") == {"compiled"}
    assert (128 << 10, 256 << 10) in bytes_of(run, "dyt")
    assert "ascend910b may have less: _double._double[BLOCK=32768; " in run[0]
    assert f"about {256 << 10} bytes of Unified Buffer with double buffers, of {UNIFIED_BUFFER}" in run[0]


def test_tiles_of_tiling_are_what_the_estimate_finds(run: tuple[str, dict[str, Any]]) -> None:
    """Three tiles of 16384 float32 fill 192 KiB. With double buffers there are five, of which 8192 fit, or four of bfloat16."""
    taken = {
        (re.search(r"SUB_BLOCK=(\d+); \*(\w+)", kernel["variant"]).groups()): kernel["uses"]
        for kernel in run[1]["kernels"]
        if "layer_norm" in kernel["ops"]
    }
    assert {key: (uses["bytes"] >> 10, uses["bytes with double buffers"] >> 10) for key, uses in taken.items()} == {
        ("16384", "fp32"): (192, 320),
        ("16384", "bf16"): (192, 256),
        ("8192", "fp32"): (96, 160),
        ("8192", "bf16"): (96, 128),
    }
    assert {outcome for dtype in ("float32", "bfloat16") for outcome in outcomes(run, "layer_norm", dtype)} == {
        "compiled"
    }


@pytest.mark.parametrize(
    ("options", "variables", "says"),
    [
        (["--impl=bent-ascend", "--compile=sm_90"], {}, "--compile: no chip sm_90; it takes ascend910b"),
        (["--impl=bent-ascend", "--compile=all", "--execute"], {"PATH": ""}, "mlir-opt is not on PATH"),
        (["--impl=bent-ascend", "--execute"], {}, "--execute runs what --compile compiles"),
        (
            ["--impl=bent-ascend", "--compile=all"],
            {"TRITON_INTERPRET": "1"},
            "--impl=bent-ascend can't be compiled: TRITON_INTERPRET=1 is set",
        ),
    ],
)
def test_what_cannot_compile_is_an_error(
    site: Path, run_suite: Suite, options: list[str], variables: dict[str, str], says: str
) -> None:
    done = run_suite(site, *options, **variables)
    assert done.returncode == 4
    assert says in done.stderr


@pytest.mark.skipif(ascend_execute.obstacle() is not None, reason=str(ascend_execute.obstacle()))
def test_execution(site: Path, run_suite: Suite) -> None:
    """Lowered kernels are run, wrong results are caught, and a kernel that can't be run is no success."""
    ops = [f"--op={op}" for op in ("geglu", "swiglu", "sparsemax")]
    options = ["--impl=bent-ascend", "--compile=ascend910b", "--execute", f"--report={site}", "-k=-odd-float32"]
    done = run_suite(site, *options, *ops)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"Mismatch: result: error \S+ is more than", done.stdout), "of swiglu"
    assert "gradient of gate is None; the contract says a tensor" in done.stdout, "of geglu, whose result is right"
    report = json.loads((site / "conformance.json").read_text("utf-8"))
    outcomes = {cell["op"]: set(cell["outcomes"]) for cell in report["cells"] if cell["dtype"] == "float32"}
    assert outcomes == {"geglu": {"failed"}, "swiglu": {"failed"}, "sparsemax": {"not run"}}
    assert any(reason.startswith("sparsemax can't be executed: ") for reason in report["reasons"]["not run"])


# Estimates from MLIR as triton-adapter-opt prints it.

LOOP = """
"builtin.module"() ({
  "func.func"() <{sym_name = "k"}> ({
  ^bb0(%arg0: memref<?xf32>, %arg1: memref<?xf32>):
    %0 = "memref.alloc"() : () -> memref<1024xf32>
    %1 = "bufferization.to_tensor"(%0) : (memref<1024xf32>) -> tensor<1024xf32>
    %2:2 = "scf.for"(%a, %b, %c, %1, %1) ({
    ^bb0(%i: i32, %s: tensor<1024xf32>, %t: tensor<1024xf32>):
      %3 = "memref.alloc"() : () -> memref<1000xf32>
      "memref.copy"(%arg0, %3) : (memref<?xf32>, memref<1000xf32>) -> ()
      %4 = "bufferization.to_tensor"(%3) : (memref<1000xf32>) -> tensor<1000xf32>
      %5 = "math.exp"(%4) : (tensor<1000xf32>) -> tensor<1000xf32>
      %6 = "arith.mulf"(%5, %4) : (tensor<1000xf32>, tensor<1000xf32>) -> tensor<1000xf32>
      "scf.yield"(%s, %t) : (tensor<1024xf32>, tensor<1024xf32>) -> ()
    }) : (i32, i32, i32, tensor<1024xf32>, tensor<1024xf32>) -> (tensor<1024xf32>, tensor<1024xf32>)
    "bufferization.materialize_in_destination"(%2#0, %arg1) : (tensor<1024xf32>, memref<?xf32>) -> ()
    "func.return"() : () -> ()
  }) : () -> ()
}) : () -> ()
"""


def test_estimate_of_a_loop() -> None:
    """Tiles of the loop: the carried one, the loaded one and its exponential; the product takes one of those.

    Double buffers are of what is loaded in the loop: 1000 float32 are 125 blocks of 32 bytes.
    """
    assert bytes_taken(LOOP) == (4096 + 2 * 4000, 4096 + 3 * 4000)


def test_estimate_rounds_rows_up_to_blocks() -> None:
    """A row of 17 float32 takes 3 blocks of 32 bytes."""
    narrow = LOOP.replace("1000xf32", "64x17xf32")
    assert bytes_taken(narrow) == (4096 + 2 * 64 * 96, 4096 + 3 * 64 * 96)
