"""The reach of the cases in a package: the kernels that it launches, and the branches of its host code.

Host code is what a package's ``ops`` folder holds beside kernels and device functions. Python's tracing shows its
branches, by coverage.py, while a test of the suite calls an op; launches are left out, because an interpreter of kernels is
Python too.

Names, by which a package declares what is not reached, don't change when a line is added above:

    layer_norm._dx_long                                     a kernel that is not launched, or a function that is not called
    layer_norm.forward: columns <= LONGEST_FORWARD is false a branch that is not taken
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

LANES = ("interpreted", "compiled")
"""Where what is reached can be seen: where no accelerator launches a kernel."""

DEVICE = ("jit", "kernel", "function")
"""The last names of the decorators of what runs on a device: `triton.jit`, `kernel` and `ct.kernel`, `ct.function`."""

ENTRY = "kernel"
"""The one of them that says that host code launches it. Of `triton.jit`, that is what host code mentions."""


@dataclass
class Source:
    """A file of kernels and host code, as it is written.

    Attributes:
        path: where it is.
        kernels: entry points, by name.
        functions: host functions, by qualified name.
    """

    path: Path
    kernels: set[str] = field(default_factory=set[str])
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict[str, ast.FunctionDef])

    @property
    def name(self) -> str:
        return self.path.stem


def sources_of(package: str) -> list[Source]:
    """The files of a package's ``ops`` folder, none of which is imported."""
    paths = sorted(path for folder in _folders(package) for path in Path(folder, "ops").glob("*.py"))
    trees = {path: ast.parse(path.read_text("utf-8")) for path in paths}
    sources = {path.stem: Source(path) for path in paths}
    jitted, mentioned = set[tuple[str, str]](), set[tuple[str, str]]()
    for path, tree in trees.items():
        source = sources[path.stem]
        imported = {
            alias.asname or alias.name: (node.module.rpartition(".")[2], alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        for name, function in _functions(tree):
            decorators = {_last_name(decorator) for decorator in function.decorator_list}
            if decorators.isdisjoint(DEVICE):
                source.functions[name] = function
            elif ENTRY in decorators:
                source.kernels.add(name)
            elif "jit" in decorators:
                jitted.add((source.name, name))
        for function in source.functions.values():
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            mentioned |= {imported.get(name, (source.name, name)) for name in names}
    for name, kernel in jitted & mentioned:
        sources[name].kernels.add(kernel)
    return list(sources.values())


def _folders(package: str) -> Iterable[str]:
    spec = importlib.util.find_spec(package)
    return (spec and spec.submodule_search_locations) or ()


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; what a kernel defines inside is its own."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{within}{node.name}", node
            if {_last_name(decorator) for decorator in node.decorator_list}.isdisjoint(DEVICE):
                yield from _functions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{within}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from _functions(node, within)


def _last_name(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


class Watch:
    """Kernels and branches that the tests of one process reach.

    Args:
        packages: import names of the packages whose host code is watched.

    Raises:
        ModuleNotFoundError: coverage.py is not installed.
    """

    def __init__(self, packages: Iterable[str]) -> None:
        from coverage import Coverage

        self.packages = tuple(packages)
        self.launched: set[tuple[str, str]] = set()
        """Packages and kernels, such as ``("liger_triton", "layer_norm._forward")``."""
        files = [f"{folder}/ops/*" for package in self.packages for folder in _folders(package)]
        # Without a file, and without the settings of whoever runs the tests.
        self._coverage = Coverage(data_file=None, branch=True, include=files, config_file=False, messages=False)
        self._coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])

    @contextlib.contextmanager
    def tracing(self) -> Generator[None, None, None]:
        """Until the context ends, see which branches of host code are taken. Inside another one, nothing happens."""
        if sys.gettrace() is not None:
            yield
            return
        self._coverage.start()
        try:
            yield
        finally:
            self._coverage.stop()

    def add(self, others: bytes, launched: Iterable[tuple[str, str]]) -> None:
        """Add what another process reached: its `branches`, and what it launched."""
        from coverage import CoverageData

        data = CoverageData(no_disk=True)
        data.loads(others)
        self._coverage.get_data().update(data)
        self.launched.update((package, launch) for package, launch in launched)

    @property
    def branches(self) -> bytes:
        """Which branches were taken, for `add` in another process."""
        return self._coverage.get_data().dumps()

    def uncovered(self, package: str) -> Reach:
        """Kernels and branches of a package that no test reached."""
        sources = sources_of(package)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "coverage.json")
            self._coverage.json_report([str(source.path) for source in sources], outfile=str(report))
            files = {
                Path(name).resolve(): coverage for name, coverage in json.loads(report.read_text())["files"].items()
            }
        reach = Reach()
        for source in sources:
            reach.kernels += len(source.kernels)
            launched = {kernel for name, kernel in self.launched if name == package}
            reach.uncovered += [
                f"{source.name}.{k}" for k in sorted(source.kernels) if f"{source.name}.{k}" not in launched
            ]
            if source.functions:
                _add_branches(reach, source, files[source.path.resolve()])
        return reach


@dataclass
class Reach:
    """Kernels and branches that a package has, and those that are not reached.

    Attributes:
        kernels: how many kernels host code can launch.
        branches: how many branches host code has.
        uncovered: the names of what is not reached.
    """

    kernels: int = 0
    branches: int = 0
    uncovered: list[str] = field(default_factory=list[str])


def _add_branches(reach: Reach, source: Source, coverage: dict[str, Any]) -> None:
    """Add a file's host functions that are never called, and of the others the branches that are never taken.

    Args:
        reach: where they are added.
        source: the file.
        coverage: what coverage.py's JSON says of it.
    """
    executed = set(coverage["executed_lines"])
    missing = {tuple(arc) for arc in coverage["missing_branches"]}
    taken = {tuple(arc) for arc in coverage["executed_branches"]}
    for name, function in source.functions.items():
        statements = list(_statements(function.body))
        named, seen = dict[int, tuple[Any, str]](), Counter[str]()
        for statement in statements:
            first, branch = _branch(statement)
            if branch:
                seen[branch] += 1
                named[first] = statement, branch if seen[branch] == 1 else f"{branch} ({seen[branch]})"
        arcs = sorted(arc for arc in missing | taken if arc[0] in named)
        reach.branches += len(arcs)
        if not any(statement.lineno in executed for statement in statements):
            reach.uncovered.append(f"{source.name}.{name}")
            continue
        for line, to in arcs:
            if (line, to) in missing:
                statement, branch = named[line]
                reach.uncovered.append(f"{source.name}.{name}: {branch} {_outcome(statement, to)}")


def _statements(body: Iterable[ast.AST]) -> Iterator[Any]:
    """A function's own statements and cases; what functions and classes inside it hold is theirs."""
    for node in body:
        if isinstance(node, (ast.stmt, ast.match_case)):
            if (isinstance(node, ast.stmt) and not _is_docstring(node)) or isinstance(node, ast.match_case):
                yield node
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
        if not isinstance(node, ast.expr):
            yield from _statements(ast.iter_child_nodes(node))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _branch(node: Any) -> tuple[int, str]:
    """The line where a statement branches, and what it asks there; nothing where it doesn't branch."""
    if isinstance(node, (ast.If, ast.While)):
        return node.lineno, ast.unparse(node.test)
    if isinstance(node, ast.For):
        return node.lineno, f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, f"case {ast.unparse(node.pattern)}"
    return 0, ""


def _outcome(node: Any, to: int) -> str:
    """In words, what the branch that goes to a line means."""
    enters = to == node.body[0].lineno
    if isinstance(node, ast.For):
        return "has an item" if enters else "ends"
    if isinstance(node, ast.match_case):
        return "matches" if enters else "doesn't match"
    return "is true" if enters else "is false"


current: Watch | None = None
"""While a test of the suite runs, and is to be watched."""


@contextlib.contextmanager
def watching(watch: Watch | None) -> Generator[None, None, None]:
    """Until the context ends, see what is reached, if there is a watch."""
    global current
    before, current = current, watch
    try:
        yield
    finally:
        current = before


def record(package: str, kernels: Iterable[str]) -> None:
    """Say what a package launched, by file and function such as ``rms_norm._backward``."""
    if current is not None:
        current.launched.update((package, kernel) for kernel in kernels)


def untraced(launch: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """A function that is not traced, and nothing that it calls: what runs or compiles a kernel.

    The trace function comes back in the frame in which it went, since a tracer counts the frames that it saw.
    """

    @functools.wraps(launch)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if current is None:
            return launch(*args, **kwargs)
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return launch(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    return run
