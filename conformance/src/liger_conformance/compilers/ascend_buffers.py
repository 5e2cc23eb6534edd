"""Unified Buffer bytes that a kernel takes, estimated from the adapter MLIR that triton-ascend lowers it to.

That MLIR has a static shape for each tile, and no memory yet: CANN's compiler plans that. Here a tile lives from where
it is made to its last use; elementwise operations write over an operand that ends there; a row of a tile takes whole
blocks of 32 bytes. With double buffers, as CANN's compiler makes them by default, what a loop loads or stores counts
twice, and a broadcast mask has 16 bits an element.

An estimate: the compiler may split tiles, or add temporaries. The number without double buffers is a lower bound in all
but name; the other one is right within about half for masked loads.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator

BLOCK = 32
"""Bytes of a block of the Unified Buffer."""

_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "index": 64}
_SHAPED = re.compile(r"(tensor|memref)<((?:\d+x)*)(\w+)[,>]")
_HEAD = re.compile(r'(?:(%[\w#:, %]+?) = )?"([\w.]+)"\(([^)]*)\)')
_TYPES = re.compile(r":\s*\((.*)\)\s*->\s*(.*)$")

# Their result is a view of an operand, which is given by its position.
_VIEWS = {
    "bufferization.to_memref": 0,
    "bufferization.to_tensor": 0,
    "memref.cast": 0,
    "memref.collapse_shape": 0,
    "memref.expand_shape": 0,
    "memref.memory_space_cast": 0,
    "memref.reinterpret_cast": 0,
    "memref.subview": 0,
    "tensor.cast": 0,
    "tensor.collapse_shape": 0,
    "tensor.expand_shape": 0,
    "tensor.extract_slice": 0,
    "tensor.insert_slice": 1,
    "tensor.reshape": 0,
}
_LOOPS = ("scf.for", "scf.while", "scf.parallel")
_ELEMENTWISE = ("arith.", "math.")
_INTO_AN_OPERAND = ("linalg.", "hfusion.")
_COPIES = {"memref.copy": (0, 1), "bufferization.materialize_in_destination": (1, 0), "hivm.hir.store": (1, 0)}
"""Between global memory and a tile, which are operands at these positions."""


@dataclasses.dataclass(eq=False)
class _Op:
    """An operation in MLIR's generic form; its place in the text, and the loops around it."""

    name: str
    operands: list[str]
    results: list[str]
    types: list[str] = dataclasses.field(default_factory=list[str])
    arguments: list[tuple[str, str]] = dataclasses.field(default_factory=list[tuple[str, str]])
    regions: list[list[_Op]] = dataclasses.field(default_factory=list[list["_Op"]])
    place: int = 0
    end: int = 0
    loops: tuple[_Op, ...] = ()


@dataclasses.dataclass(eq=False)
class _Tile:
    """A part of the Unified Buffer, and from where to where it is taken."""

    size: int
    made_by: _Op
    end: int
    copies: int = 1


def bytes_taken(generic: str) -> tuple[int, int]:
    """The most bytes that are taken at once, without double buffers and with them.

    Args:
        generic: the adapter MLIR of one kernel, printed in MLIR's generic form.
    """
    functions = [op for module in _parse(generic) for op in module.regions[0] if op.name == "func.func"]
    kernel = _Kernel(next(op for op in reversed(functions) if op.regions[0]))
    return kernel.most(double=False), kernel.most(double=True)


class _Kernel:
    """Where the tiles of a kernel live."""

    def __init__(self, function: _Op) -> None:
        self.ops = list(_in_order(function.regions[0], ()))
        for place, op in enumerate(self.ops):
            op.place = op.end = place
            for loop in op.loops:
                loop.end = place
        self.in_global_memory = {name for name, kind in function.arguments if kind.startswith("memref")}
        self.views = {result: viewed for op in self.ops for result, viewed in _views(op)}
        self.uses: dict[str, list[_Op]] = defaultdict(list)
        for op in self.ops:
            for operand in op.operands:
                self.uses[self.origin(operand)].append(op)

    def origin(self, name: str) -> str:
        """Name of the value that a value is a view of, or its own."""
        while name in self.views:
            name = self.views[name]
        return name

    def most(self, double: bool) -> int:
        """Bytes at the place where most are taken."""
        tiles = self._tiles(wide_masks=double)
        self._write_over_operands(tiles)
        if double:
            self._copy_what_loops_transfer(tiles)
        taken = set(tiles.values())
        return max((sum(_bytes_at(made.made_by.place, tile) for tile in taken) for made in taken), default=0)

    def _tiles(self, wide_masks: bool) -> dict[str, _Tile]:
        """A tile for each value that is one and no view, by its name."""
        tiles: dict[str, _Tile] = {}
        wide: set[str] = set()
        for op in self.ops:
            if op.name in ("tensor.empty", "scf.for", "scf.if") or self._is_folded(op):
                continue
            for result, kind in zip(op.results, op.types, strict=True):
                if result in self.views or (kind.startswith("memref") and not op.name.startswith("memref.alloc")):
                    continue
                if "xi1>" in kind and (op.name == "linalg.broadcast" or wide.intersection(op.operands)):
                    wide.add(result)
                if size := _size(kind, 16 if wide_masks and result in wide else None):
                    tiles[result] = _Tile(size, op, self._last_use(result, op))
        return tiles

    def _is_folded(self, op: _Op) -> bool:
        """Whether this fills a tile with a scalar that instructions take in its place."""
        uses = [use for result in op.results for use in self.uses[result]]
        return op.name == "linalg.fill" and all(use.name.startswith(_ELEMENTWISE) for use in uses)

    def _last_use(self, name: str, made_by: _Op) -> int:
        """The place of a value's last use; inside of a loop that the value is older than, the loop's end."""
        last = made_by.place
        for use in self.uses[name]:
            inner = [loop for loop in use.loops if loop not in made_by.loops]
            last = max(last, inner[0].end if inner else use.place)
        return last

    def _write_over_operands(self, tiles: dict[str, _Tile]) -> None:
        """Give a result the tile of an operand that isn't used later."""
        for result, tile in list(tiles.items()):
            op = tile.made_by
            if op.name.startswith(_ELEMENTWISE) and op.name != "arith.select":
                candidates = op.operands
            elif op.name.startswith(_INTO_AN_OPERAND):
                candidates = op.operands[-1:] + (op.operands[:-1] if op.name == "linalg.map" else [])
            else:
                continue
            for operand in candidates:
                other = tiles.get(self.origin(operand))
                if (
                    other is not None
                    and other is not tile
                    and other.end <= op.place
                    and other.size >= tile.size
                    and other.made_by.loops == op.loops
                ):
                    other.end = max(other.end, tile.end)
                    tiles[result] = other
                    break

    def _copy_what_loops_transfer(self, tiles: dict[str, _Tile]) -> None:
        """Two of each tile that a loop exchanges with global memory, so that it computes on one meanwhile."""
        for op in self.ops:
            if op.name in _COPIES:
                far, near = (self.origin(op.operands[position]) for position in _COPIES[op.name])
                tile = tiles.get(near)
                if tile is not None and tile.made_by.loops and far in self.in_global_memory:
                    tile.copies = 2


def _bytes_at(place: int, tile: _Tile) -> int:
    return tile.size * tile.copies if tile.made_by.place <= place <= tile.end else 0


def _size(kind: str, bits: int | None) -> int:
    """Bytes of a tile of an MLIR type, in blocks; 0 for a type of something else."""
    shaped = _SHAPED.match(kind)
    if shaped is None:
        return 0
    *rows, columns = [int(size) for size in shaped[2].split("x") if size] or [1]
    return math.prod(rows) * BLOCK * math.ceil(columns * (bits or _BITS[shaped[3]]) / 8 / BLOCK)


def _in_order(ops: list[_Op], loops: tuple[_Op, ...]) -> Iterator[_Op]:
    """Operations as they stand in the text, but for what is inside of one that isn't control flow."""
    for op in ops:
        op.loops = loops
        yield op
        for region in op.regions if op.name.startswith("scf.") else ():
            yield from _in_order(region, (*loops, op) if op.name in _LOOPS else loops)


def _views(op: _Op) -> Iterator[tuple[str, str]]:
    """The results of an operation that are views, and of what. A loop's variables are, of what they start from."""
    if op.name in _VIEWS:
        yield op.results[0], op.operands[_VIEWS[op.name]]
    elif op.name == "scf.for":
        for result, (variable, _), start in zip(op.results, op.arguments[1:], op.operands[3:], strict=True):
            yield variable, start
            yield result, start
    elif op.name == "scf.if" and op.results:
        yield from zip(op.results, op.regions[0][-1].operands, strict=True)


def _parse(text: str) -> list[_Op]:
    """The operations of MLIR's generic form, in which each has a line of its own, and those with regions several."""
    root = _Op("", [], [], regions=[[]])
    stack = [root]
    for line in map(str.strip, text.splitlines()):
        if line.startswith("^bb"):
            if "(" in line:
                pairs = (part.split(":", 1) for part in _split(line[line.index("(") + 1 : line.rindex(")")]))
                stack[-1].arguments += [(name.strip(), kind.strip()) for name, kind in pairs]
        elif line.startswith("}, {"):
            stack[-1].regions.append([])
        elif line.startswith("})"):
            _set_types(stack.pop(), line)
        elif head := _HEAD.match(line):
            op = _Op(head[2], _split(head[3]), list(_results(head[1] or "")))
            stack[-1].regions[-1].append(op)
            if line.endswith("({"):
                op.regions.append([])
                stack.append(op)
            else:
                _set_types(op, line)
    return root.regions[0]


def _results(text: str) -> Iterator[str]:
    for name in _split(text):
        base, several, count = name.partition(":")
        yield from (f"{base}#{i}" for i in range(int(count))) if several else (base,)


def _set_types(op: _Op, line: str) -> None:
    if types := _TYPES.search(line):
        op.types = _split(
            types[2].strip().removeprefix("(").removesuffix(")") if types[2].startswith("(") else types[2]
        )


def _split(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<([") - (character in ">)]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
