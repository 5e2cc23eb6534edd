"""Rules of these sources that no linter has; and the linter's answer doesn't change with the files beside them."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

import liger_core
from liger_core.contract import ops
from liger_core.custom_op import opaque

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(ROOT.glob("packages/*/src/**/*.py"))
SOURCES = PACKAGES + [
    path for folder in ("conformance/src", "benchmarks", "tools") for path in ROOT.glob(f"{folder}/**/*.py")
]

OF_THE_PROCESS = {"is_compiling", "is_exporting", "_is_compiling_flag", "_current_level"}
"""PyTorch's answers for all threads at once: true in one while another one exports, or differentiates forward."""


def test_reports_change_no_import_order(tmp_path: Path) -> None:
    """`--report=report` makes a folder, and benchmarks have a module of that name."""
    pytest.importorskip("ruff")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    for file in (ROOT / "benchmarks").glob("*.py"):
        shutil.copy(file, tmp_path / "benchmarks")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "conformance.json").write_text("{}")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=I", "benchmarks"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def asked_of(path: Path) -> set[str]:
    """Which of `OF_THE_PROCESS` a file has the names of."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return OF_THE_PROCESS & (names | {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names})


def test_a_mode_is_asked_of_this_thread() -> None:
    torch_state = ROOT / "packages/liger-core/src/liger_core/torch_state.py"
    assert asked_of(torch_state), "the names are out of date: this test would find nothing"
    uses = [
        f"{name_of(path)}: {', '.join(asked_of(path))}" for path in PACKAGES if path != torch_state and asked_of(path)
    ]
    assert not uses, f"ask liger_core.contract.compiling(), or what liger_core/torch_state.py has: {'; '.join(uses)}"


def test_kernel_is_one_thing() -> None:
    """A class of that name is a launcher's; what the conformance suite records of launches and files has other names."""
    files = [
        name_of(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == "Kernel"
    ]
    assert files == ["packages/liger-triton/src/liger_triton/ops/_launch.py"], "give the others a name of their own"


NAMES = (
    r"get_current_backend|LIGER_KERNEL_BACKEND|liger\.backends|liger_core\.backend|`backends`|backends\(\)|[\w/-]+\.md"
)
"""Names with the word in them: the package's entry points and file, and those that liger-kernel's users write."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a file, docstrings among them, and their lines; `__all__`'s are names."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isidentifier():
            yield node.lineno, re.sub(NAMES, "", node.value)


def test_a_language_is_called_a_language() -> None:
    """A backend is a package. liger-kernel's users say it for a language too, which one docstring tells them."""
    places = [
        f"{name_of(path)}:{line}"
        for path in ROOT.glob("packages/liger-core/src/**/*.py")
        for line, text in texts(path)
        if re.search(r"\b[Bb]ackends?\b", text) and "A backend is a package; what it brings is a *language*" not in text
    ]
    assert not places, f"say language, or kernel package, at {', '.join(places)}"


FIRST_WORDS = re.compile(r"\s*(?:What|That|Those|Such|Of|One)\b")
"""Beginnings that make a reader guess the noun. A sentence begins with one that exists in the code."""

KEYED = {
    "conformance/src/liger_conformance/compilers/alignment.py",
    "conformance/src/liger_conformance/compilers/triton.py",
    "conformance/src/liger_conformance/interpreters/tileir/capture.py",
}
"""Files with attributes' docstrings that are in the keys of kept results. Rewrite them when results are compiled again."""


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a file, those of attributes among them, and the first lines of its blocks of comments, by line."""
    source = path.read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    block_end = 0
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__) if "#" in source else ():
        if token.type == tokenize.COMMENT:
            row, alone = token.start[0], not token.line[: token.start[1]].strip()
            if not alone or row != block_end + 1:
                yield row, token.string.lstrip("#:")
            block_end = row if alone else 0


def guessed(path: Path) -> list[int]:
    """Lines of a file's docstrings and comments whose first word names nothing."""
    if not re.search(rf"""["'#:]{FIRST_WORDS.pattern}""", path.read_text("utf-8")):  # quicker than to parse every file
        return []
    return sorted(line for line, text in words_of(path) if FIRST_WORDS.match(text))


def test_a_sentence_begins_with_its_noun() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in tracked.split() if name not in KEYED]
    lines = [f"{name_of(path)}:{line}" for path in paths if path.exists() for line in guessed(path)]
    assert len(paths) > 200, "the files are not where this test looks for them"
    assert not lines, f"begin with a noun that exists in the code, not with What, That, Of, ...: {', '.join(lines)}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""What a module does."""', [1]),
        ('def f():\n    """\n    One value."""', [2]),
        ('class A:\n    """Rows."""\n\n    b = 1\n    r"""Of a row."""', [5]),
        ("x = 1  # Such as it is\n# That is it", [1, 2]),
        ("x = 1\n#: Those of a row\n\n# Rows, and\n# What follows is one block\n\n# What begins another", [2, 7]),
        ('"""Whatever: Ones, Often."""\nx = "What a string, # What"\n# one, in lower case', []),
    ],
)
def test_a_sentence_without_its_noun_is_told(source: str, lines: list[int], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert guessed(path) == lines


def test_every_variable_is_documented() -> None:
    pages = (ROOT / "docs/choice.md").read_text("utf-8")
    names = {name for path in PACKAGES for name in re.findall(r"\bLIGER_[A-Z_]+\b", path.read_text("utf-8"))}
    assert {"LIGER_LANGUAGE", "LIGER_STRICT", "LIGER_KERNEL_BACKEND", "LIGER_KERNEL_STRICT"} <= names
    missing = sorted(name for name in names if f"`{name}" not in pages)
    assert not missing, f"docs/choice.md says nothing of {', '.join(missing)}"


def test_the_public_interface_is_checked_strictly() -> None:
    """Exports of `liger_core`, and imports of authors of ops and kernels, are in a file that pyright reads strictly."""
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]["strict"]
    exported = [getattr(liger_core, name) for name in liger_core.__all__]
    functions = [op.reference if op in ops.values() else op for op in exported] + [opaque, *map(type, ops.values())]
    files = {name_of(Path(inspect.getsourcefile(inspect.unwrap(function)) or "")) for function in functions}
    missing = sorted(file for file in files if not any(file == name or file.startswith(f"{name}/") for name in strict))
    assert not missing, f"add {', '.join(missing)} to tool.pyright.strict"


MODULES = {".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :]) for path in PACKAGES}


def private_names(tree: ast.Module) -> set[str]:
    """Names with an underscore that a file takes from another module of ours. The name of a module may have one."""
    modules: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("liger_")):
            of_modules = {alias for alias in node.names if f"{node.module}.{alias.name}" in MODULES}
            modules |= {alias.asname or alias.name for alias in of_modules}
            names |= {alias.name for alias in node.names if alias not in of_modules and alias.name.startswith("_")}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return names | {
        f"{node.value.id}.{node.attr}"
        for node in attributes
        if node.attr.startswith("_") and isinstance(node.value, ast.Name) and node.value.id in modules
    }


def test_what_another_module_takes_has_a_public_name() -> None:
    source = "from liger_core import checks\nfrom liger_core.op import _hidden\nfrom liger_triton.ops import _rows\nchecks._own()"
    assert private_names(ast.parse(source)) == {"_hidden", "checks._own"}
    taken = {name_of(path): names for path in PACKAGES if (names := private_names(ast.parse(path.read_text("utf-8"))))}
    assert not taken, f"another file takes these names, so they begin without an underscore: {taken}"
