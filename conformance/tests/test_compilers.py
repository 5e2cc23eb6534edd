"""A compiler from outside: an entry point of the group `liger.compilers`, named by the language."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

ACME = Path(__file__).parent / "acme" / "liger_acme"

COMPILER = """
from contextlib import contextmanager

from liger_conformance.compilers import Compiled

class AcmeCompiler:
    chips = ("acme-1", "acme-2")
    slow = False

    def obstacle(self):
        return None

    @contextmanager
    def compiling(self, chip):
        raise RuntimeError(f"acme compiles for {chip}")
        yield

compiler = AcmeCompiler()
"""


def test_a_package_brings_a_compiler(
    tmp_path: Path, install_package: Callable[..., Path], run_suite: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Its chips are those that `--compile` takes, and it is called for them."""
    package = install_package(tmp_path / "site", "acme", ACME)
    (package / "compiler.py").write_text(COMPILER)
    options = ("--impl=acme", "--compile=acme-2", "-k", "odd and bfloat16")
    done = run_suite(package.parent, *options)
    assert "--compile: no chip acme-2" in done.stdout + done.stderr, done.stdout + done.stderr
    (entries,) = package.parent.glob("*.dist-info/entry_points.txt")
    with entries.open("a") as file:
        file.write("[liger.compilers]\nacme = liger_acme.compiler:compiler\n")
    done = run_suite(package.parent, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "acme compiles for acme-2" in done.stdout, done.stdout
    done = run_suite(package.parent, *options, "--execute")
    assert "nothing here runs what it compiles to" in done.stdout + done.stderr, done.stdout + done.stderr
