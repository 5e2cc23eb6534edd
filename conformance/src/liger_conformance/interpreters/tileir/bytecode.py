"""Decode Tile IR bytecode: bytes to a small tree of operations.

The caller pins the format (`export_kernel(..., bytecode_version="13.4")`), so that one table describes every operation.
Nothing here imports cuda.tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from liger_conformance.interpreters.tileir.opcodes import SPECS, VERSIONS, Field

DYNAMIC = -(1 << 63)
"""A size or stride of a tensor view that is known at run time only."""

_MAGIC = b"\x7fTileIR\x00"
_ELEMENTS = {
    0x00: "i1", 0x01: "i8", 0x02: "i16", 0x03: "i32", 0x04: "i64", 0x05: "f16", 0x06: "bf16", 0x07: "f32", 0x08: "tf32",
    0x09: "f64", 0x0A: "f8e4m3fn", 0x0B: "f8e5m2", 0x11: "token", 0x12: "f8e8m0fnu", 0x13: "f4e2m1fn", 0x16: "i4",
    0x82: "fnv8e5m3fnu",
}  # fmt: skip
_POINTER, _TILE, _TENSOR, _PARTITION, _FUNCTION, _GATHER, _STRIDED = 0x0C, 0x0D, 0x0E, 0x0F, 0x10, 0x14, 0x15
_VIEWS = {_PARTITION: "partition", _GATHER: "gather", _STRIDED: "strided"}
_PADDING = {0: "zero", 1: "neg_zero", 2: "nan", 3: "pos_inf", 4: "neg_inf"}
_STRINGS, _CODE, _DEBUG, _CONSTANTS, _TYPES = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Type:
    """The type of a value."""

    kind: str
    """simple, pointer, tile, tensor, partition, strided, gather, or function."""
    element: Any = None
    """Name of the element type; of a tile of pointers, the pointer's Type."""
    shape: tuple[Any, ...] = ()
    """Shape; of a function, the types of its parameters."""
    strides: tuple[int, ...] = ()
    """Strides of a tensor view; of a strided view, the steps from tile to tile."""
    axes: tuple[int, ...] = ()
    """Axes of a view of tiles: the tensor's axis of each of the tile's; of a gather view, the axis that is gathered."""
    padding: str | None = None
    """Padding that a view reads outside of the tensor; None: undetermined."""


@dataclass
class Op:
    """An operation. Values are numbered; a number is a slot of the function."""

    name: str
    results: list[int] = field(default_factory=list[int])
    types: list[Type] = field(default_factory=list[Type])
    """Types of the results."""
    operands: list[int] = field(default_factory=list[int])
    """All of them, as encoded."""
    named: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same by name: a slot, a list of slots, or None."""
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    regions: list[Block] = field(default_factory=list["Block"])
    location: str = "?"
    """file:line, and `<- file:line` of each caller."""


@dataclass
class Block:
    """The body of a function or region: its parameters and operations."""

    parameters: list[int]
    types: list[Type]
    ops: list[Op]


@dataclass
class Function:
    """A kernel."""

    name: str
    body: Block
    slots: int


class _Reader:
    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data, self.position = data, position

    def byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def fixed(self, width: int) -> int:
        self.position += width
        return int.from_bytes(self.data[self.position - width : self.position], "little")

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def signed_varint(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def integers(self, width: int) -> tuple[int, ...]:
        """A counted list of signed integers."""
        count = self.varint()
        start = self.position
        self.position += count * width
        places = range(start, self.position, width)
        return tuple(int.from_bytes(self.data[p : p + width], "little", signed=True) for p in places)

    def align(self, width: int) -> None:
        self.position += -self.position % width

    def table(self, width: int) -> list[bytes]:
        """A counted list of byte strings: their offsets, of `width` bytes each, then the strings."""
        count = self.varint()
        self.align(width)
        offsets = [self.fixed(width) for _ in range(count)]
        rest = self.data[self.position :]
        return [rest[start:end] for start, end in zip(offsets, [*offsets, None][1:], strict=True)]


class Module:
    """A decoded module, which is its `functions`.

    Args:
        data: bytecode of one of `VERSIONS`.

    Raises:
        ValueError: `data` is something else than bytecode.
        NotImplementedError: a format, an operation or an attribute that this decoder doesn't know.
    """

    def __init__(self, data: bytes) -> None:
        if data[:8] != _MAGIC:
            raise ValueError("not Tile IR bytecode")
        version = f"{data[8]}.{data[9]}"
        if version not in VERSIONS:
            raise NotImplementedError(f"Tile IR bytecode {version}; this decodes {', '.join(VERSIONS)}")
        self._13_4 = version != "13.3"
        sections = dict(_sections(data))
        self._strings = [text.decode("utf-8", "replace") for text in _Reader(sections[_STRINGS]).table(4)]
        self._encoded_types = _Reader(sections[_TYPES]).table(4)
        self._types: dict[int, Type] = {}
        self._constants = list[bytes]()
        for constant in _Reader(sections[_CONSTANTS]).table(8):
            reader = _Reader(constant)
            reader.varint()  # its length
            self._constants.append(constant[reader.position :])
        self._read_debug_section(_Reader(sections[_DEBUG]))
        code = _Reader(sections[_CODE])
        self.functions = [self._function(code, index) for index in range(code.varint())]

    def _read_debug_section(self, reader: _Reader) -> None:
        count = reader.varint()
        reader.align(4)
        starts = [reader.fixed(4) for _ in range(count)]
        total = reader.varint()
        reader.align(8)
        numbers = [reader.fixed(8) for _ in range(total)]
        ends = [*starts[1:], total]
        self._locations = [numbers[start:end] for start, end in zip(starts, ends, strict=True)]
        self._debug_attributes = reader.table(4)

    def _location(self, number: int) -> str:
        if number == 0:
            return "?"
        reader = _Reader(self._debug_attributes[number - 1])
        tag = reader.byte()
        if tag == 4:  # a place
            reader.varint()
            return f"{self._strings[reader.varint()]}:{reader.varint()}"
        if tag == 6:  # a call
            return f"{self._location(reader.varint())} <- {self._location(reader.varint())}"
        return "?"

    def _type(self, number: int) -> Type:
        if number not in self._types:
            self._types[number] = self._decode_type(_Reader(self._encoded_types[number]))
        return self._types[number]

    def _decode_type(self, reader: _Reader) -> Type:
        tag = reader.varint()
        if tag in _ELEMENTS:
            return Type("simple", _ELEMENTS[tag])
        if tag == _FUNCTION:
            return Type("function", shape=tuple(self._type(reader.varint()) for _ in range(reader.varint())))
        if tag == _TILE:
            element = self._type(reader.varint())
            return Type("tile", element if element.kind == "pointer" else element.element, reader.integers(8))
        if tag in (_POINTER, _TENSOR):
            if self._13_4:
                reader.varint()  # flags
            element = self._type(reader.varint()).element
            if tag == _POINTER:
                return Type("pointer", element)
            return Type("tensor", element, reader.integers(8), reader.integers(8))
        if tag not in _VIEWS:
            raise NotImplementedError(f"Tile IR type {tag:#x}")
        flags, shape = reader.varint(), reader.integers(4)
        steps = reader.integers(4) if tag == _STRIDED else ()
        element = self._type(reader.varint()).element
        axes = (reader.varint(),) if tag == _GATHER else reader.integers(4)
        padding = _PADDING[reader.byte()] if flags & 1 else None
        return Type(_VIEWS[tag], element, shape, steps, axes, padding)

    def _tagged(self, reader: _Reader) -> Any:
        match tag := reader.byte():
            case 1:  # an integer
                return self._type(reader.varint()).element, reader.varint()
            case 2:  # a float
                element = self._type(reader.varint()).element
                return element, reader.byte() if element.startswith("f8") else reader.signed_varint()
            case 3:
                return bool(reader.byte())
            case 5:
                return self._strings[reader.varint()]
            case 6:
                return [self._tagged(reader) for _ in range(reader.varint())]
            case 8:  # a divisor, every and along
                divisor, flags = reader.varint(), reader.byte()
                return "div_by", divisor, *(reader.signed_varint() if flags & bit else None for bit in (1, 2))
            case 10 | 11:
                return self._dictionary(reader)
            case 12:  # a least and a most
                flags = reader.byte()
                return "bounded", *(reader.signed_varint() if flags & bit else None for bit in (1, 2))
            case _:
                raise NotImplementedError(f"Tile IR attribute {tag}")

    def _dictionary(self, reader: _Reader) -> dict[str, Any]:
        return {self._strings[reader.varint()]: self._tagged(reader) for _ in range(reader.varint())}

    def _function(self, reader: _Reader, index: int) -> Function:
        name, signature, flags = self._strings[reader.varint()], self._type(reader.varint()), reader.byte()
        reader.varint()  # its number in the debug section
        if flags & 4:
            self._tagged(reader)  # hints
        end = reader.varint() + reader.position
        self._op_locations = iter(self._locations[index][1:])
        self._slots, self._visible = 0, list[int]()  # visible: from the bytecode's number of a value to its slot
        parameters, ops = self._new_slots(len(signature.shape)), list[Op]()
        while reader.position < end:
            ops.append(self._op(reader))
        return Function(name, Block(parameters, list(signature.shape), ops), self._slots)

    def _new_slots(self, count: int) -> list[int]:
        slots = list(range(self._slots, self._slots + count))
        self._slots += count
        self._visible += slots
        return slots

    def _op(self, reader: _Reader) -> Op:
        opcode, location = reader.varint(), self._location(next(self._op_locations))
        if opcode not in SPECS:
            raise NotImplementedError(f"Tile IR operation {opcode} at {location}")
        spec = SPECS[opcode]
        op = Op(spec.name, location=location)
        absent: set[str] = set()
        for part in spec.fields:
            if part.since_13_4 and not self._13_4:
                continue
            if part.kind == "flags":
                absent |= _read_flags(part, reader.varint(), op)
            else:
                self._read_field(part, reader, op, bool(absent.intersection(part.names)))
        op.results = self._new_slots(len(op.types))
        return op

    def _read_field(self, part: Field, reader: _Reader, op: Op, absent: bool) -> None:
        match part.kind:
            case "result":
                op.types.append(self._type(reader.varint()))
            case "results":
                op.types += [self._type(reader.varint()) for _ in range(reader.varint())]
            case "attribute":
                op.attributes[part.names[0]] = None if absent else self._attribute(reader, part.code)
            case "operand":
                op.named[part.names[0]] = None if absent else self._visible[reader.varint()]
                op.operands += [] if absent else [op.named[part.names[0]]]
            case "operands":
                op.named[part.names[0]] = [self._visible[reader.varint()] for _ in range(reader.varint())]
                op.operands += op.named[part.names[0]]
            case "regions":
                op.regions = [self._region(reader, op) for _ in range(reader.varint())]
            case _:
                raise ValueError(f"the table has a field of kind {part.kind!r}")

    def _attribute(self, reader: _Reader, code: str) -> Any:
        match code:
            case "e":
                return reader.byte()
            case "i":
                return reader.varint()
            case "b":
                return bool(reader.byte())
            case "s":
                return self._strings[reader.varint()]
            case "c":
                return self._constants[reader.varint()]
            case "t":
                return self._tagged(reader)
            case "h":
                return self._dictionary(reader)
            case "I":
                return reader.integers(4)
            case "B":
                return tuple(bool(value) for value in reader.integers(1))
            case "T":
                return [self._tagged(reader) for _ in range(reader.varint())]
            case _:
                raise ValueError(f"the table has an attribute of type {code!r}")

    def _region(self, reader: _Reader, op: Op) -> Block:
        if (blocks := reader.varint()) != 1:
            raise NotImplementedError(f"Tile IR operation {op.name} at {op.location}: a region of {blocks} blocks")
        types = [self._type(reader.varint()) for _ in range(reader.varint())]
        outside = len(self._visible)
        parameters = self._new_slots(len(types))
        ops = [self._op(reader) for _ in range(reader.varint())]
        del self._visible[outside:]  # what follows the region uses its numbers again
        return Block(parameters, types, ops)


def _sections(data: bytes) -> Iterator[tuple[int, bytes]]:
    reader = _Reader(data, 12)
    while (tag := reader.byte()) != 0:
        length = reader.varint()
        if tag & 0x80:
            reader.align(reader.varint())
        yield tag & 0x7F, data[reader.position : reader.position + length]
        reader.position += length


def _read_flags(part: Field, bits: int, op: Op) -> set[str]:
    """Set the attributes among the flags; return the fields that the others say are absent."""
    flags = {name: bool(bits >> place & 1) for place, name in enumerate(part.names)}
    op.attributes.update({name: flag for name, flag in flags.items() if name[0] != "?"})
    return {name[1:] for name, flag in flags.items() if name[0] == "?" and not flag}


def dump(function: Function) -> str:
    """A function as text, an operation per line."""
    return "\n".join(_lines(function.body, ""))


def _lines(block: Block, indent: str) -> Iterator[str]:
    for op in block.ops:
        results = ", ".join(f"%{slot}" for slot in op.results)
        operands = ", ".join(f"%{slot}" for slot in op.operands)
        attributes = {name: value for name, value in op.attributes.items() if value not in (None, False)}
        types = ", ".join(f"{t.element}{list(t.shape)}" for t in op.types)
        yield f"{indent}{results} = {op.name} {operands} {attributes or ''} : {types}  // {op.location}"
        for region in op.regions:
            yield f"{indent}  ({', '.join(f'%{slot}' for slot in region.parameters)}):"
            yield from _lines(region, indent + "    ")
