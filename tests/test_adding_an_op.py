"""An op is its contract, its cases, its calls in liger-core's tests, a kernel per language, and a name in `liger_core`."""

import os
import re
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

PAGE = (ROOT / "docs/adding-an-op.md").read_text("utf-8")
FILES = dict(re.findall(r'^```python title="([^"]*)"\n(.*?)^```$', PAGE, re.M | re.S))
"""The files of the op `tenfold`, which the page shows whole."""

CORE_TESTS = [
    f"packages/liger-core/tests/test_{name}.py" for name in ("bad_input", "dispatch", "references", "references_basic")
]


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
    assert len(FILES) == 4
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
