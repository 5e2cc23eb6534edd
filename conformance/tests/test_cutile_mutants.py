"""Kernels of liger-cutile that are wrong in one way each are caught: by a GPU that runs cuTile, or else by the interpreter."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import liger_core

cutile = pytest.importorskip("liger_cutile").backend

# Where a GPU can't run cuTile, its kernels are interpreted on the CPU.
DEVICE = "cuda" if liger_core.infer_device() == "cuda" and cutile.missing("cuda") is None else "cpu"
if why := cutile.refuses(DEVICE):
    pytest.skip(why, allow_module_level=True)

VALUES, EVERY_ELEMENT = "test_values", "test_same_bits_again"
"""Elements that are never written may have had the right value before: the second runs over poisoned memory, too."""
DTYPES = {VALUES: "float32", EVERY_ELEMENT: "bfloat16"}
ERRORS = {VALUES: "Mismatch", EVERY_ELEMENT: "AssertionError"}


class Mutant(NamedTuple):
    """A change of one op, and the test that fails for it, with a case.

    What a GPU fails with is of `ERRORS`; the interpreter may find the bug before, as `interpreted`.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    case: str
    interpreted: str | None = None
    may_run_on_a_gpu: bool = True

    @property
    def language(self) -> str:
        return "mutant-" + re.sub(r"[\W_]+", "-", self.name)

    @property
    def error(self) -> str:
        return self.interpreted if DEVICE == "cpu" and self.interpreted else ERRORS[self.test]

    @property
    def id(self) -> str:
        """Name of the test in the suite."""
        return f"{self.test}[{self.file.removeprefix('_')}-{self.language}-{DEVICE}-{self.case}-{DTYPES[self.test]}]"


MUTANTS = [
    Mutant("a flipped sign", "rms_norm", "g * r - xs * slope", "g * r + xs * slope", VALUES, "odd"),
    Mutant("a block too few", "layer_norm", "(blocks(rows, tile_rows),)", "(blocks(rows, tile_rows) - 1,)",
           EVERY_ELEMENT, "long-row", "KernelBug: uninitialised"),
    Mutant("blocks share a partial sum", "rms_norm", "ct.store(partial, (ct.bid(0), 0)", "ct.store(partial, (0, 0)",
           EVERY_ELEMENT, "long-row", "KernelBug: race"),
    Mutant("padding that counts", "softmax", "(row, 0), ROWS, BLOCK), -math.inf)", "(row, 0), ROWS, BLOCK), 0.0)",
           VALUES, "odd"),
    Mutant("a sum that starts again", "softmax", "products += ys *", "products = ys *", VALUES, "very-long-row"),
    Mutant("a wrong constant", "swiglu", "ct.truediv(1.0, 1.0 + q", "ct.truediv(1.0, 1.0001 + q", VALUES, "odd"),
    Mutant("the first tile again", "swiglu", "us = gather(up, at)",
           "us = gather(up, (at[0], at[1] % BLOCK))", VALUES, "many-rows"),
    Mutant("a missing mask", "_cross_entropy", "inside = lanes < columns - tile * BLOCK", "inside = lanes < columns",
           VALUES, "long-row"),
    Mutant("the weights of the first tile again", "_cross_entropy", "load_vector(column_weight, tile, BLOCK)",
           "load_vector(column_weight, 0, BLOCK)", VALUES, "long-row"),
    Mutant("the column beside the label", "_cross_entropy", "lanes == label - tile", "lanes == label + 1 - tile",
           VALUES, "plain"),
    Mutant("a sign that stays", "rope", "sin1, sin2 = -sin2, -sin1", "sin1, sin2 = sin2, sin1", VALUES, "one-table"),
    Mutant("the angles of the first sample", "rope", "at = (ct.bid(1) if BATCHED else 0,", "at = (0,", VALUES, "odd"),
    Mutant("samples write to the first", "rope", "at = (ct.bid(1), head,", "at = (0, head,", EVERY_ELEMENT, "one-table",
           "KernelBug: race"),
    Mutant("bounds that are not checked", "rope", "tables > 1, not whole", "tables > 1, False", VALUES,
           "odd", "KernelBug: bounds", may_run_on_a_gpu=False),
]  # fmt: skip


def test_mutants_are_caught(
    tmp_path: Path,
    install_mutant: Callable[..., None],
    run_suite: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Each by the test that its op passes unchanged."""
    installed: list[str] = []
    expected: dict[str, str] = {}
    for mutant in MUTANTS:
        if DEVICE == "cuda" and not mutant.may_run_on_a_gpu:
            continue
        unchanged = mutant._replace(name=f"unchanged {mutant.file}", old="", new="")
        for kernels, outcome in ((mutant, mutant.error), (unchanged, "passed")):
            if kernels.language not in installed:
                install_mutant(tmp_path, cutile, kernels.language, kernels.file, kernels.old, kernels.new)
                installed.append(kernels.language)
            expected[kernels.id] = outcome

    implementations = [f"--impl={language}" for language in installed]
    chosen = " or ".join(expected)
    options = ("-k", chosen, "-m", "slow or not slow", "--tb=no", "-rpf")
    done = run_suite(tmp_path, f"--device={DEVICE}", *implementations, *options, COLUMNS="1000")
    passed = dict.fromkeys(re.findall(r"^PASSED \S+::(\S+)$", done.stdout, re.M), "passed")
    failed = re.findall(r"^FAILED \S+::(\S+) - (?:[\w.]*\b)?(KernelBug: \w+|\w+)", done.stdout, re.M)
    assert passed | dict(failed) == expected, done.stdout + done.stderr
