"""The gates of liger-triton-ascend have teeth: kernels that are wrong in one way each are caught, by the gates that should."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import liger_triton_ascend
from liger_conformance.compilers import ascend_execute

if find_spec("triton") is None or find_spec("triton.triton_patch") is None:
    pytest.skip("needs triton-ascend", allow_module_level=True)

Suite = Callable[..., subprocess.CompletedProcess[str]]
Gate = Callable[..., dict[str, Any]]


class Mutant(NamedTuple):
    """A change of one op's file, and the gates that catch it.

    Where `executed` may not run it, it would read memory that isn't its own.
    """

    name: str
    op: str
    old: str
    new: str
    caught_by: frozenset[str]
    may_execute: bool = True


VALUES = frozenset({"interpreted", "executed"})

MUTANTS = (
    Mutant("a flipped sign", "rms_norm", "dys - normed * slope", "dys + normed * slope", VALUES),
    Mutant("a sum that starts again", "rms_norm", "dweight += tl.sum", "dweight = tl.sum", VALUES),
    Mutant("a wrong constant", "geglu", "0.07135481627260025 *", "0.07035481627260025 *", VALUES),
    Mutant("padding that counts", "softmax", 'other=float("-inf")', "other=0.0", VALUES),
    Mutant("a missing mask", "softmax", 'column, inside, other=float("-inf"))', "column)", frozenset({"interpreted"}), False),
    Mutant("offsets of 32 bits", "softmax", "tl.cast(tile, tl.int64) * ROWS", "tile * ROWS", frozenset({"interpreted"})),
    Mutant("a tile too large", "swiglu", "FORWARD_TILES = {2: 4, 4: 5}", "FORWARD_TILES = {2: 1, 4: 1}",
           frozenset({"Unified Buffer"})),
    Mutant("a program for each row", "rms_norm", "_forward[(programs,)]", "_forward[(rows,)]", frozenset({"programs"})),
    Mutant("a choice of pointers", "geglu", "tl.load(up + row * up_stride + column",
           "tl.load(tl.where(column < 0, gate, up) + row * up_stride + column", frozenset({"lowered", "executed"})),
)  # fmt: skip
UNCHANGED = [Mutant(f"{op} unchanged", op, "", "", frozenset()) for op in sorted({m.op for m in MUTANTS})]
ALL = [*MUTANTS, *UNCHANGED]


def language_of(mutant: Mutant) -> str:
    return "mutant-" + re.sub(r"[\W_]", "-", mutant.name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, install_mutant: Callable[..., None]) -> Path:
    """A folder where each mutant is installed as a language of its own."""
    site = tmp_path_factory.mktemp("mutants")
    for mutant in ALL:
        install_mutant(site, liger_triton_ascend.backend, language_of(mutant), mutant.op, mutant.old, mutant.new)
    return site


@pytest.fixture
def gate(site: Path, run_suite: Suite) -> Gate:
    """A function that runs the suite for mutants, on the ops that they change, and returns its report."""

    def run(mutants: list[Mutant], *options: str, **variables: str) -> dict[str, Any]:
        languages = [f"--impl={language_of(mutant)}" for mutant in mutants]
        ops = [f"--op={op}" for op in sorted({mutant.op for mutant in mutants})]  # not those that core composes
        done = run_suite(site, "--tb=no", f"--report={site}", *languages, *ops, *options, **variables)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return json.loads((site / "conformance.json").read_text("utf-8"))

    return run


def failed(report: dict[str, Any], mutant: Mutant) -> bool:
    """Whether a test of a mutant failed. Each has some that ran."""
    cells = [c["outcomes"] for c in report["cells"] if (c["language"], c["op"]) == (language_of(mutant), mutant.op)]
    assert any(set(outcomes) - {"not claimed", "not run"} for outcomes in cells), f"{mutant.name}: nothing ran"
    return any("failed" in outcomes for outcomes in cells)


def test_the_interpreter_catches_wrong_values_and_accesses(gate: Gate) -> None:
    options = ["-k", "test_values and -odd- or test_offsets_beyond_32_bits"]
    report = gate(ALL, *options, TRITON_INTERPRET="1")
    caught = {mutant.name: failed(report, mutant) for mutant in ALL}
    assert caught == {mutant.name: "interpreted" in mutant.caught_by for mutant in ALL}


def test_lowering_catches_what_does_not_compile_or_fit(gate: Gate) -> None:
    report = gate(ALL, "--compile=ascend910b", "-k", "test_compiled and (-large- or -huge-)")
    caught = {}
    for mutant in ALL:
        over = [what for k in report["kernels"] if k["language"] == language_of(mutant) for what in k["over"]]
        kinds = {kind for kind in ("Unified Buffer", "programs") if any(kind in what for what in over)}
        caught[mutant.name] = kinds or ({"lowered"} if failed(report, mutant) else set())
    assert caught == {mutant.name: mutant.caught_by - {"interpreted", "executed"} for mutant in ALL}


@pytest.mark.skipif(ascend_execute.obstacle() is not None, reason=str(ascend_execute.obstacle()))
def test_execution_catches_wrong_values(gate: Gate) -> None:
    mutants = [mutant for mutant in ALL if mutant.may_execute]
    report = gate(mutants, "--compile=ascend910b", "--execute", "-k=-odd-float32")
    caught = {mutant.name: failed(report, mutant) for mutant in mutants}
    assert caught == {mutant.name: "executed" in mutant.caught_by for mutant in mutants}
