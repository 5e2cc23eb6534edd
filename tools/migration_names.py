"""Which public names and flags of the installed liger-kernel the migration page lacks; it ends with 1 if there are any:

uv run --group bench python tools/migration_names.py

liger-kernel is read, not imported: no GPU is needed.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs/migrating-from-liger-kernel.md"
PUBLIC = (
    "transformers/__init__.py",
    "transformers/functional.py",
    "chunked_loss/__init__.py",
    "chunked_loss/functional.py",
)


def public(path: Path) -> set[str]:
    """What a file defines or imports that has the library's name; an autograd function is below one of these."""
    tree = ast.parse(path.read_text("utf-8"))
    found = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {
        name for name in found if re.match("liger|apply_liger|AutoLiger", name, re.I) and not name.endswith("Function")
    }


def flags(path: Path) -> set[str]:
    """The parameters of the functions that patch a model."""
    patches = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    patches = [node for node in patches if node.name.startswith("apply_liger_kernel_to_")]
    return {argument.arg for node in patches for argument in (*node.args.args, *node.args.kwonlyargs)}


def main() -> int:
    """Print what is missing."""
    spec = find_spec("liger_kernel")
    if spec is None or not spec.submodule_search_locations:
        print("liger-kernel is not installed: uv run --group bench python tools/migration_names.py", file=sys.stderr)
        return 2
    root = Path(spec.submodule_search_locations[0])
    names = set[str]().union(*(public(root / file) for file in PUBLIC if (root / file).exists()))
    patches = {name for name in names if name.startswith("apply_liger_kernel_to_")}
    every = (names - patches) | flags(root / "transformers/monkey_patch.py")
    text = PAGE.read_text("utf-8")
    missing = sorted(every - {*re.findall(r"\w+", text)})
    if f"the {len(patches)} of them" not in text:
        missing.append(f"{len(patches)} apply_liger_kernel_to_*")
    print(
        f"{len(every)} names and flags, {len(patches)} functions that patch a model; missing: {', '.join(missing) or 'none'}"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
