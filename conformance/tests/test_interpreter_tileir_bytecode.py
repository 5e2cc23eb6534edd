"""The decoder of Tile IR bytecode, against the encoder of the installed cuda-tile."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from liger_conformance.interpreters.tileir import accesses, bytecode, capture, control, floats, integers, opcodes

ct = pytest.importorskip("cuda.tile")
if os.environ.get("CUTILE_INTERPRET") != "1":
    pytest.skip("needs CUTILE_INTERPRET=1", allow_module_level=True)
from cuda.tile._bytecode import encodings  # noqa: E402

ATTRIBUTES = {
    "enum": "e", "int": "i", "bool": "b", "str": "s", "array": "T", "dense_typed_elements": "c", "tagged": "t",
    "optimization_hints": "h", "dense_int32_array": "I", "dense_bool_array": "B",
}  # fmt: skip
NAMES = {"powf": "FPowF", "powi": "FPowI", "mulhi": "MulhiI"}
NEVER_IN_A_FUNCTION = {"Entry", "Global", "Module"}


def encoders():
    tree = ast.parse(Path(encodings.__file__).read_text())
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.endswith("Op")]
    named = {f.name.removeprefix("encode_").removesuffix("Op"): f for f in functions}
    return {name: f for name, f in named.items() if name not in NEVER_IN_A_FUNCTION}


def calls(node, conditions=()):
    """The calls of an encoder in order, each with the conditions that it is under."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, conditions
        else:
            inner = (*conditions, ast.unparse(child.test)) if isinstance(child, ast.If) else conditions
            yield from calls(child, inner)


def encoded_fields(function):
    """Opcode that an encoder writes, and its fields as those of the table."""
    opcode, fields, counted = None, [], 0
    for call, conditions in calls(function):
        if any(re.search(r"V_13_[5-9]", condition) for condition in conditions):
            continue
        name = ast.unparse(call.func).rpartition(".")[2].removeprefix("encode_")
        optional = any("is not None" in condition for condition in conditions)
        since = any("V_13_4" in condition for condition in conditions)
        if name == "varint":
            argument = call.args[0]
            if opcode is None:
                opcode = argument.value
            elif "len(" in ast.unparse(argument) or isinstance(argument, ast.Constant):
                counted = True  # operands in one list, written one by one
                fields.append(("operands", "", False, False))
            else:
                fields.append(("flags", "", False, since))
        elif name.startswith("opattr_"):
            fields.append(("attribute", ATTRIBUTES[name.removeprefix("opattr_")], optional, since))
        elif name == "sized_variadic_operands":
            fields.append(("operands", "", False, False))
        elif name in ("operand", "optional_operand") and not counted:
            fields.append(("operand", "", name.startswith("optional"), False))
        elif name in ("typeid", "sized_typeid_seq"):
            fields.append(("result" if name == "typeid" else "results", "", False, False))
        elif name == "new_op_with_nested_blocks":
            fields.append(("regions", "", False, False))
    return opcode, fields


def test_table_is_the_encoder_s():
    """Every operation of the table has the encoder's opcode, name and fields."""
    by_opcode = {}
    for name, function in encoders().items():
        opcode, fields = encoded_fields(function)
        by_opcode[opcode] = name.removesuffix("Tko"), fields
    for opcode, spec in opcodes.SPECS.items():
        if opcode in by_opcode:
            name, fields = by_opcode[opcode]
            table = [(f.kind, f.code, f.optional, f.since_13_4) for f in spec.fields]
            assert NAMES.get(spec.name, spec.name.replace("_", "")).lower() == name.lower(), f"opcode {opcode}"
            assert table == fields, f"{opcode} {spec.name}"
    assert len(by_opcode.keys() & opcodes.SPECS.keys()) > 90


def test_what_is_not_decoded_is_newer():
    """Opcodes that the encoder can write and the table lacks belong to a later format than is asked for."""
    source = Path(encodings.__file__).read_text()
    for name, function in encoders().items():
        opcode, _ = encoded_fields(function)
        if opcode not in opcodes.SPECS:
            assert re.search(rf"def encode_{name}Op\(  # (since 13\.[5-9]|preview)", source), name


def numbers(kind):
    return {member.name: member.value[0] for member in kind if isinstance(member.value, bytes)}


def test_enumerators():
    """Numbers of attributes mean the same here."""
    predicates = ["EQUAL", "NOT_EQUAL", "LESS_THAN", "LESS_THAN_OR_EQUAL", "GREATER_THAN", "GREATER_THAN_OR_EQUAL"]
    functions = [torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge]
    codes = numbers(encodings.ComparisonPredicate)
    assert [integers.COMPARISONS[codes[name]] for name in predicates] == functions
    assert numbers(encodings.ComparisonOrdering) == {"UNORDERED": 0, "ORDERED": 1}
    assert numbers(encodings.Signedness) == {"Unsigned": 0, "Signed": 1}
    rounding = numbers(encodings.RoundingMode)
    assert (rounding["NEAREST_EVEN"], rounding["ZERO"]) == (floats.NEAREST_EVEN, floats.TOWARDS_ZERO)
    assert (rounding["NEGATIVE_INF"], rounding["POSITIVE_INF"]) == (floats.DOWN, floats.UP)
    assert numbers(encodings.MemoryOrderingSemantics)["WEAK"] == 0
    modes = ["AND", "OR", "XOR", "ADD", "ADDF", "MAX", "MIN", "UMAX", "UMIN", "XCHG"]
    assert list(numbers(encodings.AtomicRMWMode)) == modes
    assert len(accesses._UPDATES) == len(modes)


def test_element_types():
    """Tags of types mean the same here."""
    from cuda.tile._bytecode.type import SimpleType

    tags = {bytecode._Reader(member.value).varint(): member.name.lower() for member in SimpleType}
    assert bytecode._ELEMENTS.items() >= tags.items()


@ct.kernel
def _example(x, y, N: ct.Constant[int]):
    t = ct.load(x, (ct.bid(0),), (16,), padding_mode=ct.PaddingMode.NEG_INF)
    for _ in range(N):
        t = t + 1.0
    ct.store(y, (ct.bid(0),), t)


def example():
    arguments = torch.zeros(40), torch.zeros(40), 3
    return capture.bytecode(_example, capture.signature(_example, arguments))


def test_what_is_decoded():
    (function,) = bytecode.Module(example()).functions
    assert function.name.startswith("_example")
    ops = {op.name: op for op in function.body.ops}
    assert list(ops)[-1] == "return"
    load = ops["load_view"] if "load_view" in ops else next(o for o in ops["for"].regions[0].ops)
    assert load.types[0] == bytecode.Type("tile", "f32", (16,))
    assert [v.padding for op in function.body.ops for v in op.types if v.kind == "partition"].count("neg_inf") == 1
    (body,) = ops["for"].regions
    assert [op.name for op in body.ops] == ["addf", "continue"]
    assert body.ops[0].location.endswith(f"{Path(__file__).name}:{_line('t = t + 1.0')}")


@ct.kernel
def _nothing(x):
    pass


def test_a_kernel_without_constants():
    (function,) = bytecode.Module(capture.bytecode(_nothing, capture.signature(_nothing, (torch.zeros(40),)))).functions
    assert not any(op.name == "constant" for op in function.body.ops)


def _line(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


def test_dump_has_a_line_per_operation():
    (function,) = bytecode.Module(example()).functions
    text = bytecode.dump(function)
    assert re.search(r"%\d+ = addf %\d+, %\d+ .*: f32\[16\]  // .*:\d+", text)


def test_other_data():
    with pytest.raises(ValueError, match="not Tile IR bytecode"):
        bytecode.Module(b"\x7fELF" + bytes(20))
    newer = bytearray(example())
    newer[9] = 9
    with pytest.raises(NotImplementedError, match=r"13\.9; this decodes 13\.4, 13\.3"):
        bytecode.Module(bytes(newer))


def test_unknown_operation(monkeypatch):
    monkeypatch.delitem(opcodes.SPECS, 2)
    with pytest.raises(NotImplementedError, match=rf"operation 2 at .*{Path(__file__).name}:\d+"):
        bytecode.Module(example())


def test_operation_that_cannot_be_run(monkeypatch):
    monkeypatch.delitem(control.PURE, "addf")
    with pytest.raises(NotImplementedError, match=rf"operation addf at .*{Path(__file__).name}:\d+"):
        capture.launch(0, (1,), _example, (torch.zeros(16), torch.zeros(16), 7))


def test_older_format(monkeypatch):
    """The format before this one lacks fields, and means the same."""
    monkeypatch.setattr(capture, "bytecode_version", lambda: "13.3")
    old = bytecode.dump(bytecode.Module(example()).functions[0])
    monkeypatch.undo()
    new = bytecode.dump(bytecode.Module(example()).functions[0])
    attributes = re.compile(r"\{.*?\} ?")
    assert attributes.sub("", old).split() == attributes.sub("", new).split()


def test_import_is_cheap():
    """Neither cuda.tile nor a driver is needed to import the package."""
    code = "import sys, liger_conformance.interpreters.cutile; print('cuda.tile' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
