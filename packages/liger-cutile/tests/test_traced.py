"""torch.compile traces the host code of every op, also where there is no GPU to run it on."""

import ast
import os
import sys
from pathlib import Path

import pytest

import liger_cutile
from liger_conformance.traces import run_tracing
from liger_core.contract import ops
from liger_cutile import backend

FILES = sorted(Path(liger_cutile.__file__).with_name("ops").glob("*.py"))


def test_host_code_is_traced_with_sizes_that_vary() -> None:
    """In a process that doesn't interpret kernels, and where a warning of Dynamo's is an error."""
    names = [name for name in sorted(ops) if backend.has_kernel(name)]
    names += ["rope@gradients", "qwen2vl_mrope@gradients"]
    environment = {name: value for name, value in os.environ.items() if name != "CUTILE_INTERPRET"}
    command = [sys.executable, "-W", "error::UserWarning", Path(__file__).with_name("traced.py"), *names]
    assert f"{len(names)} traced" in run_tracing(command, environment)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_bool_is_an_index(file: Path) -> None:
    """Torch 2.11 and before trace none, whatever is installed here: write `a if held else b`."""
    subscripts = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Subscript)]
    by_bool = [node for node in subscripts if isinstance(node.slice, ast.Compare | ast.BoolOp) or _is_not(node.slice)]
    assert not by_bool, f"{file.name}:{by_bool[0].lineno}: {ast.unparse(by_bool[0])}"


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
