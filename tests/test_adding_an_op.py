"""An op is its contract, its cases, its calls in liger-core's tests, a kernel per language, and a name in `liger_core`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

COPIED = (
    "README.md",
    "conftest.py",
    "pyproject.toml",
    "benchmarks",
    "conformance/src",
    "packages/liger-core",
    "packages/liger-distributed/README.md",
    "packages/liger-triton/pyproject.toml",
    "packages/liger-triton/src",
    "tools/pages.py",
)

CONTRACT = '''
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast


@op(differentiable=("x",), dimensions="x: ... -> ...")
def tenfold(x: Tensor, *, factor: float = 10.0) -> Tensor:
    """Scale values: y = factor · x.

    Args:
        x: ``[...]``; any floating dtype.
        factor: what `x` is multiplied by.

    Returns:
        ``[...]``, of x's dtype.

    Raises:
        TypeError: x doesn't have floating-point values, or factor is not a number.

    Source:
        This test.
    """
    return (upcast(x) * factor).to(x.dtype)


@tenfold.checks
def _(x: Tensor, factor: float) -> None:
    checks.floating("tenfold", x=x)
    checks.number("tenfold", factor=factor)
'''

CASES = """
from typing import Any

from torch import Tensor

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import ROWS, Number, Size, Vary

KIND = "activation, embedding"


def build(make: Make, *, rows: int | tuple[int, ...], hidden: int, **options: Any) -> dict[str, Any]:
    return {"x": make.randn(*(rows if isinstance(rows, tuple) else (rows,)), hidden), **options}


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size()}, tensors=("rows hidden",), values={"factor": Number(-2.0, 2.0)}
)

CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("factor", "option", rows=4, hidden=96, factor=0.5),
    Case("small", "small", rows=2048, hidden=2048),
    Case("medium", "medium", rows=8192, hidden=4096),
    Case("large", "large", rows=16384, hidden=8192),
)

MOVES = Moves({"x": 2}, {"x": 2})


def eager(x: Tensor) -> Tensor:
    return x * 10


liger = None
"""

CALLS = """
from typing import Any

from op_calls import BadCall, integers, randn

BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: {"x": integers(0, 9, 3)}),
    BadCall("factor-not-a-number", TypeError, ("factor", "'2'"), lambda: {"x": randn(3), "factor": "2"}),
)


def small() -> dict[str, Any]:
    return {"x": randn(3, 8), "factor": 0.5}
"""

KERNEL = """
import torch
import triton.language as tl
from torch import Tensor

from liger_core import tenfold
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._launch import kernel


@kernel
def _scale(y, x, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, at < count, other=0.0).to(tl.float32)
    tl.store(y + at, values * tl.cast(factor, tl.float32), at < count)


def _launch(x: Tensor, factor: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    _scale[(-(-x.numel() // 1024),)](y, x, x.numel(), factor, BLOCK=1024)
    return y


@implements(tenfold)
def forward(needs: Needs, x: Tensor, *, factor: float = 10.0) -> tuple[Tensor, Saved]:
    return _launch(x, factor), ()


def backward(needs: Needs, saved: Saved, dy: Tensor, *, factor: float) -> tuple[Tensor | None, ...]:
    return (_launch(dy, factor),)
"""

CORE_TESTS = [
    f"packages/liger-core/tests/test_{name}.py" for name in ("bad_input", "dispatch", "references", "references_basic")
]

FILES = {
    "packages/liger-core/src/liger_core/ops/tenfold.py": CONTRACT,
    "conformance/src/liger_conformance/cases/tenfold.py": CASES,
    "packages/liger-core/tests/op_calls/tenfold.py": CALLS,
    "packages/liger-triton/src/liger_triton/ops/tenfold.py": KERNEL,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout, as far as an op concerns it, with an op more."""
    ignored = shutil.ignore_patterns("__pycache__", "records", "measured")
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    exports = tmp_path / "packages/liger-core/src/liger_core/__init__.py"
    text = exports.read_text("utf-8")
    for line, added in (
        ("from liger_core.ops.swiglu import swiglu\n", "from liger_core.ops.tenfold import tenfold\n"),
        ('    "swiglu",\n', '    "tenfold",\n'),
    ):
        assert line in text
        text = text.replace(line, line + added)
    exports.write_text(text, "utf-8")
    return tmp_path


def test_an_op_is_found_by_all_that_is_about_ops(checkout: Path) -> None:
    """The suite, the benchmarks, liger-core's tests and the tables of pages: nothing else names the op."""

    def run(*command: str) -> str:
        sources = ("packages/liger-core", "packages/liger-triton", "conformance")
        path = os.pathsep.join(str(checkout / folder / "src") for folder in sources)
        done = subprocess.run(
            [sys.executable, *command],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pytest = ("-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider")
    tests = run(
        *pytest,
        "conformance/src/liger_conformance/suite/test_interface.py",
        "conformance/src/liger_conformance/suite/test_values.py",
        "--impl=torch", "--impl=triton", "--op=tenfold", "-k", "bad_input or signature or route or test_values", "-rA",
    )  # fmt: skip
    for language in ("torch", "triton"):
        assert f"test_values[tenfold-{language}-cpu-odd-float32]" in tests
        assert f"test_bad_input[tenfold-{language}-cpu-odd-float32]" in tests
    tests = run(*pytest, "benchmarks/test_suite.py", *CORE_TESTS, "-k", "tenfold or every_op", "-rA")
    for test in (
        "test_eager_computes_what_the_contract_says[tenfold-forward]",
        "test_bad_input[tenfold-integer-x]",
        "test_gradients[tenfold]",
    ):
        assert test in tests
    assert "README.md" in run("tools/pages.py")
    page = (checkout / "README.md").read_text("utf-8")
    assert "`swiglu` `tenfold`" in page
