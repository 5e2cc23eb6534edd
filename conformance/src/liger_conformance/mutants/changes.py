"""Changes of one place of a file of kernels and host code, found in its syntax."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from liger_conformance.reach import DEVICE

FOR_SPEED = (
    "num_warps",
    "num_stages",
    "num_ctas",
    "eviction_policy",
    "latency",
    "allow_tma",
    "occupancy",
    "cache_modifier",
)
"""Named arguments that no value depends on."""

TILE = 16
"""Integers of host code from here on are sizes of tiles, and lengths up to which one of two right paths is faster."""

MASKED = {"tl.load": 1, "tl.store": 2}
"""Functions of a language that take a mask, and where."""

OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("{} <= {}", "{} < {} - 1"),
    ast.LtE: ("{} < {}",),
    ast.Gt: ("{} >= {}",),
    ast.GtE: ("{} > {}",),
    ast.Eq: ("{} != {}",),
    ast.NotEq: ("{} == {}",),
}
REDUCTIONS = {"maximum": "minimum", "minimum": "maximum", "max": "sum", "sum": "max"}


@dataclass(frozen=True)
class Change:
    """A change of one place.

    Attributes:
        name: unique among the changes of a package: file, function, kind and texts, but no line.
        kind: of change.
        file: the stem of its name.
        function: the outermost one that the place is in.
        line: of the place.
        text: the whole file, changed.
    """

    name: str
    kind: str
    file: str
    function: str
    line: int
    text: str


def changes_of(path: Path) -> list[Change]:
    """All changes of a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[bytes, Change] = {}
    names = Counter[str]()
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for kind, node, new in _places(function):
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            text = source[:first] + new.encode() + source[last:]
            if text == source or text in found:
                continue
            old, shown = (" ".join(words.split())[:100] for words in (source[first:last].decode(), new))
            name = f"{path.stem}.{function.name}: {kind}: {old} -> {shown}"
            names[name] += 1
            if names[name] > 1:
                name += f" ({names[name]})"
            found[text] = Change(name, kind, path.stem, function.name, node.lineno, text.decode())
    return list(found.values())


Place = tuple[str, ast.expr | ast.stmt, str]
"""A kind of change, the node that is replaced, and the text that takes its place."""


def _places(function: ast.FunctionDef) -> Iterator[Place]:
    names = {decorator.split("(")[0].rpartition(".")[2] for decorator in map(ast.unparse, function.decorator_list)}
    on_device = not names.isdisjoint(DEVICE)
    strides = [arg.arg for arg in function.args.args if arg.arg.endswith("_stride")]
    tensors = [arg.arg for arg in function.args.args if arg.annotation and ast.unparse(arg.annotation) == "Tensor"]
    for statement in function.body:
        for node in _walk(statement):
            if isinstance(node, ast.keyword) and node.arg == "dtype" and ast.unparse(node.value) == "torch.float32":
                yield from (("buffer narrowed", node.value, f"{tensor}.dtype") for tensor in tensors[:1])
            for change in (*_ANYWHERE, *(_ON_DEVICE if on_device else _ON_HOST)):
                yield from change(node)
            if isinstance(node, ast.Name) and node.id in strides and isinstance(node.ctx, ast.Load):
                yield from (("stride swapped", node, other) for other in strides if other != node.id)
                if any(arg.arg == "columns" for arg in function.args.args):
                    yield "stride ignored", node, "columns"


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that a value may depend on: neither docstrings nor annotations, options of speed, or what "padding" changes."""
    if isinstance(node, ast.keyword) and node.arg in (*FOR_SPEED, "other"):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    typing = (getattr(node, "annotation", None), getattr(node, "returns", None))
    for child in ast.iter_child_nodes(node):
        if child not in typing:
            yield from _walk(child)


def _operators(node: ast.AST) -> Iterator[Place]:
    if not isinstance(node, ast.BinOp):
        return
    left, right = ast.unparse(node.left), ast.unparse(node.right)
    if type(node.op) in OPERATORS:
        yield "operator", node, f"(({left}) {OPERATORS[type(node.op)]} ({right}))"
    if isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr)):
        kind = "mask" if isinstance(node.op, (ast.BitAnd, ast.BitOr)) else "term dropped"
        yield kind, node, f"({left})"
        if not isinstance(node.op, (ast.Sub, ast.Div)):
            yield kind, node, f"({right})"


def _signs(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield "sign dropped", node, f"({ast.unparse(node.operand)})"


def _comparisons(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = f"({ast.unparse(node.left)})", f"({ast.unparse(node.comparators[0])})"
        for form in COMPARISONS.get(type(node.ops[0]), ()):
            yield "bound", node, f"({form.format(*sides)})"


def _conditions(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "condition negated", node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            rest = [f"({ast.unparse(value)})" for value in node.values if value is not left_out]
            yield "condition dropped", node, f"({word.join(rest)})"


def _sums(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.AugAssign):
        target, value = ast.unparse(node.target), ast.unparse(node.value)
        yield "sum", node, f"{target} = {value}"
        if isinstance(node.op, ast.Add):
            yield "sum", node, f"{target} -= {value}"


def _loops(node: ast.AST) -> Iterator[Place]:
    """A loop that ends one early, or after its first step; tiles that are counted for one element less."""
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
        called, texts = ast.unparse(node.iter.func), [*map(ast.unparse, node.iter.args)]
        if called.rpartition(".")[2] in ("range", "static_range") and len(texts) == len(node.iter.args) > 0:
            first, *rest = texts if len(texts) > 1 else ["0", *texts]
            named = [ast.unparse(keyword) for keyword in node.iter.keywords]
            for end in (f"({rest[0]}) - 1", f"({first}) + 1"):
                yield "loop", node.iter, f"{called}({', '.join([first, end, *rest[1:], *named])})"
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "cdiv" and len(node.args) == 2:
        size, tile = map(ast.unparse, node.args)
        yield "loop", node, f"{ast.unparse(node.func)}(({size}) - 1, {tile})"


def _constants(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        value = node.value
        new = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 1.01 or 0.01
        yield "constant", node, repr(new)


def _host_constants(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Constant) and not (isinstance(node.value, int) and node.value >= TILE):
        yield from _constants(node)


def _device_calls(node: ast.AST) -> Iterator[Place]:
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    at = MASKED.get(name, len(node.args))
    if len(node.args) > at:
        kept = [*map(ast.unparse, node.args[:at])]
        rest = [ast.unparse(keyword) for keyword in node.keywords if keyword.arg != "other"]
        yield "mask", node, f"{name}({', '.join([*kept, *rest])})"
        if any(keyword.arg == "other" for keyword in node.keywords):
            yield "padding", node, f"{name}({', '.join([*map(ast.unparse, node.args), *rest, 'other=1.0'])})"
    if last == "to" and isinstance(node.func, ast.Attribute) and node.args:
        yield "cast dropped", node, f"({ast.unparse(node.func.value)})"
    if last == "astype" and len(node.args) == 2:
        yield "cast dropped", node, f"({ast.unparse(node.args[0])})"
    if last == "where" and len(node.args) == 3:
        condition, yes, no = map(ast.unparse, node.args)
        yield "where", node, f"{name}({condition}, {no}, {yes})"
        yield "where", node, f"({yes})"
        yield "where", node, f"({no})"
    if last in REDUCTIONS and isinstance(node.func, ast.Attribute):
        yield "reduction", node.func, f"{ast.unparse(node.func.value)}.{REDUCTIONS[last]}"


def _launches(node: ast.AST) -> Iterator[Place]:
    """Arguments of a launch swapped, and a grid that is one too small."""
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Subscript):
        first, grid = 0, node.func.slice
    elif ast.unparse(node.func).rpartition(".")[2] == "launch" and len(node.args) > 1:
        first, grid = 2, node.args[1]
    else:
        return
    texts = [*map(ast.unparse, node.args)]
    named = [ast.unparse(keyword) for keyword in node.keywords]
    for i in range(first, len(texts) - 1):
        if texts[i] != texts[i + 1]:
            swapped = [*texts[:i], texts[i + 1], texts[i], *texts[i + 2 :], *named]
            yield "arguments swapped", node, f"{ast.unparse(node.func)}({', '.join(swapped)})"
    if isinstance(grid, ast.Tuple):
        sizes = [*map(ast.unparse, grid.elts)]
        for i, size in enumerate(sizes):
            yield "grid", grid, f"({', '.join([*sizes[:i], f'max(1, ({size}) - 1)', *sizes[i + 1 :]])},)"


def _host_calls(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, (ast.If, ast.IfExp)):
        yield from (("condition fixed", node.test, value) for value in ("True", "False"))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "contiguous":
        yield "contiguous dropped", node, f"({ast.unparse(node.func.value)})"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "as_rows" and len(node.args) == 1:
        x = ast.unparse(node.args[0])
        yield "stride ignored", node, f"({x}, {x}.shape[-1])"
    if isinstance(node, ast.Attribute) and node.attr in ("zeros", "zeros_like"):
        yield "not zeroed", node, f"{ast.unparse(node.value)}.{node.attr.replace('zeros', 'empty')}"


_Change = Callable[[ast.AST], Iterator[Place]]

_ANYWHERE: tuple[_Change, ...] = (_operators, _signs, _comparisons, _conditions, _sums, _loops)
_ON_DEVICE: tuple[_Change, ...] = (_constants, _device_calls)
_ON_HOST: tuple[_Change, ...] = (_host_constants, _launches, _host_calls)
