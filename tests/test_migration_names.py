"""docs/migrating-from-liger-kernel.md has all public names and flags of the installed liger-kernel: read, not imported."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs/migrating-from-liger-kernel.md"
PUBLIC = (
    "transformers/__init__.py",
    "transformers/functional.py",
    "chunked_loss/__init__.py",
    "chunked_loss/functional.py",
)
PATCH = "apply_liger_kernel_to_"


def public(path: Path) -> set[str]:
    """The names of the library that a file defines or imports, without autograd functions."""
    tree = ast.parse(path.read_text("utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return {
        name for name in names if re.match("liger|apply_liger|AutoLiger", name, re.I) and "Function" not in name[-8:]
    }


def flags(path: Path) -> set[str]:
    """The parameters of the functions that patch a model."""
    functions = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    patches = [node for node in functions if node.name.startswith(PATCH)]
    return {argument.arg for node in patches for argument in (*node.args.args, *node.args.kwonlyargs)}


def test_the_migration_page_has_all_names() -> None:
    spec = find_spec("liger_kernel")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("not run: liger-kernel is not installed: uv run --group bench pytest tests/test_migration_names.py")
    root = Path(spec.submodule_search_locations[0])
    names = set[str]().union(*(public(root / file) for file in PUBLIC if (root / file).exists()))
    patches = {name for name in names if name.startswith(PATCH)}
    text = PAGE.read_text("utf-8")
    assert sorted((names - patches | flags(root / "transformers/monkey_patch.py")) - {*re.findall(r"\w+", text)}) == []
    assert f"`{PATCH}*()`, {len(patches)} functions" in text
