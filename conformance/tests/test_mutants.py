"""Mutants: which changes of a file there are, which are chosen, and the verdicts of the command."""

from __future__ import annotations

import ast
import json
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_conformance.mutants import __main__ as command
from liger_conformance.mutants import faults
from liger_conformance.mutants.changes import changes_of
from liger_conformance.mutants.running import Mutant, Suite

ACME = Path(__file__).parent / "acme" / "liger_acme" / "ops" / "rms_norm.py"

SOURCE = '''
"""A docstring + a number, 1."""

@kernel
def _double(y, x, x_stride, y_stride, columns, BLOCK: tl.constexpr):
    """Neither 1 + 1 here."""
    column = tl.arange(0, BLOCK)
    xs = tl.load(x + x_stride, column < columns, other=0.0)
    total += xs.to(tl.float32)


def launch(x: Tensor, rows: int = 1) -> Tensor:
    if x.is_contiguous() and rows:
        _double[(rows,)](x, rows, BLOCK=16, num_warps=4)
    return x.contiguous()
'''


def test_changes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "double.py"
    path.write_text(SOURCE)
    changes = changes_of(path)
    names = [change.name for change in changes]
    assert len(names) == len(set(names))
    for expected in (
        "double._double: operator: x + x_stride -> ((x) - (x_stride))",
        "double._double: bound: column < columns -> ((column) <= (columns))",
        "double._double: stride ignored: x_stride -> columns",
        "double._double: stride swapped: x_stride -> y_stride",
        "double._double: mask: tl.load(x + x_stride, column < columns, other=0.0) -> tl.load(x + x_stride)",
        "double._double: sum: total += xs.to(tl.float32) -> total = xs.to(tl.float32)",
        "double._double: cast dropped: xs.to(tl.float32) -> (xs)",
        "double.launch: condition dropped: x.is_contiguous() and rows -> ((rows))",
        "double.launch: condition fixed: x.is_contiguous() and rows -> True",
        "double.launch: arguments swapped: _double[(rows,)](x, rows, BLOCK=16, num_warps=4) -> "
        "_double[rows,](rows, x, BLOCK=16, num_warps=4)",
        "double.launch: grid: (rows,) -> (max(1, (rows) - 1),)",
        "double.launch: contiguous dropped: x.contiguous() -> (x)",
    ):
        assert expected in names, "\n".join(names)
    left_out = ("Neither", "docstring", "num_warps: ", "4 -> 5", "constant: 16 -> 17", "constant: 0.0 -> 0.01")
    assert not [name for name in names for text in left_out if text in name]
    for change in changes:
        assert change.text != SOURCE
        ast.parse(change.text)


def test_changes_of_a_kernel_are_python() -> None:
    changes = changes_of(ACME)
    assert len(changes) > 100
    for change in changes:
        ast.parse(change.text)


def test_kinds_are_chosen_in_turn_and_alike_for_a_seed() -> None:
    change = changes_of(ACME)[0]
    mutants = [Mutant("swiglu", f"{kind} {i}", kind, change) for kind in ("a", "b") for i in range(100)]
    mutants += [Mutant("swiglu", f"fault {i}", "fault", None) for i in range(5)]
    first, again = (command.chosen(mutants.copy(), 20, random.Random("1"), None) for _ in range(2))
    assert first == again
    assert [mutant.kind for mutant in first].count("fault") == 5
    assert {[mutant.kind for mutant in first].count(kind) for kind in "ab"} <= {7, 8}
    assert {mutant.kind for mutant in command.chosen(mutants.copy(), 5, random.Random("1"), "faults")} == {"fault"}


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_fault_does_something(fault: str) -> None:
    """Some call of a kernel that just copies fires it."""
    kernel = types.ModuleType("kernel")

    def forward(needs: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return x + 0 * weight, (x, weight) if any(needs) else ()

    def backward(needs: Any, saved: Any, dy: torch.Tensor) -> Any:
        return tuple(dy.clone() if need else None for need in needs)

    kernel.forward, kernel.backward = forward, backward  # type: ignore[attr-defined]
    faults.fired = False
    tf32, precision = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    faults.FAULTS[fault](kernel)
    try:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for columns in (8, 1024):
                x = torch.ones(3, columns, dtype=dtype)
                for one, other in ((x, x.clone()), (x, x), (x.mT.contiguous().mT,) * 2):
                    for needs in ((True, True), (True, False), (False, True), (False, False)):
                        _, saved = kernel.forward(needs, x=one, weight=other)
                        if saved:
                            kernel.backward(needs, saved, one.clone(memory_format=torch.preserve_format))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.set_float32_matmul_precision(precision)
    assert faults.fired


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """A function that runs the command, with verdicts in place of the suite, and with what the package declares."""
    pytest.importorskip("liger_triton")

    def run(verdicts: dict[str, str], known: dict[str, str], *options: str) -> int:
        def verdict(self: Any, mutant: Mutant) -> dict[str, Any]:
            return {"verdict": verdicts.get(mutant.name, "killed"), "by": "test_values", "seconds": 1.0}

        declared = types.ModuleType("liger_triton.known_mutants")
        declared.KNOWN_MUTANTS = known  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "liger_triton.known_mutants", declared)
        monkeypatch.setattr(command, "find_spec", lambda name: name)
        monkeypatch.setattr(Suite, "__init__", lambda self, *_: None)
        monkeypatch.setattr(Suite, "run", verdict)
        monkeypatch.setattr(
            sys, "argv", ["mutants", "--impl=triton", "--op=swiglu", "--only=faults", "--number=100", *options]
        )
        return command.main()

    return run


NAME = "fault: the random state moves"


def test_survivor_fails_unless_it_is_known(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command({}, {}) == 0
    assert run_command({NAME: "survived"}, {}) == 1
    assert f"swiglu {NAME}: survived" in capsys.readouterr().err
    assert run_command({NAME: "survived"}, {f"swiglu {NAME}": "harmless"}) == 0
    assert run_command({NAME: "survived"}, {}, "--name=TF32") == 0
    assert run_command({NAME: "never reached"}, {}) == 0


def test_declaration_is_strict(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command({}, {f"swiglu {NAME}": "harmless"}) == 1
    assert "declares that it survives, and it is killed" in capsys.readouterr().err
    assert run_command({}, {"swiglu fault: none such": "harmless"}) == 1
    assert "there is no such mutant" in capsys.readouterr().err
    with pytest.raises(ValueError, match="takes a reason"):
        run_command({}, {f"swiglu {NAME}": " "})


RECORDS = Path(__file__).parents[1] / "mutants"


@pytest.mark.parametrize("language", ["triton", "cutile", "triton-ascend"])
def test_survivors_of_the_record_are_declared(language: str) -> None:
    """Mutants that `known_mutants` declares exist, and all that survived in the record are among them."""
    package = f"liger_{language.replace('-', '_')}"
    known = command.known_mutants(package)
    lines = [json.loads(line) for line in (RECORDS / f"{language}.jsonl").read_text("utf-8").splitlines()]
    names = {f"{line['op']} {line['name']}": line["verdict"] for line in lines}
    assert len(names) == len(lines)
    assert {name for name, verdict in names.items() if verdict == "survived"} <= known.keys()
    assert not [name for name in known if names.get(name) == "killed"]
    ops = {name.partition(" ")[0] for name in (*known, *names)}
    assert {*known, *names} <= {f"{op} {mutant.name}" for op in ops for mutant in command.mutants_of(package, op)}


def test_record_is_resumed(run_command: Callable[..., int], tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    assert run_command({NAME: "survived"}, {}, f"--record={record}") == 1
    lines = record.read_text().splitlines()
    assert len(lines) == len(faults.FAULTS) == len({json.loads(line)["name"] for line in lines})
    assert run_command({}, {}, f"--record={record}") == 1, "the recorded survivor is killed: it was run again"
    assert record.read_text().splitlines() == lines
