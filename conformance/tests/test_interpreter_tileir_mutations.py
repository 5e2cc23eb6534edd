"""How many wrong kernels the interpreter catches: all of these, each by what it is wrong in.

Each breaks one place of test_interpreter_tileir_kernels.py and runs the tests that use it. Where values tell, they do so
without the other checks; the rest give the right values here, and wouldn't on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from liger_conformance.interpreters import tileir

pytest.importorskip("cuda.tile")
if os.environ.get("CUTILE_INTERPRET") != "1":
    pytest.skip("needs CUTILE_INTERPRET=1", allow_module_level=True)

SOURCE = Path(__file__).with_name("test_interpreter_tileir_kernels.py")


class Mutation(NamedTuple):
    """A change of the source, and what it breaks."""

    name: str
    old: str
    new: str
    test: str
    arguments: tuple[object, ...]
    caught_by: str


NORM = "check_norm", (torch.float32, 5, 100, False)
ATOMIC_NORM = "check_norm", (torch.float32, 5, 100, True)
SOFTMAX = "test_softmax", (torch.float32, 100, 32)
LOSS = "check_cross_entropy", (torch.float32, 513, 128)
GATED = "test_gated", (torch.float32,)
MATMUL = "check_matmul", (torch.float32, 50, 70, 90)
LOOK_UP = "test_look_up", (torch.float32,)
DIVERGENCE = "test_divergence", (torch.float32,)
TURNS = "test_turns_and_branches", ()
INTEGERS = "test_integer_arithmetic", ()

MUTATIONS = [
    Mutation("undetermined padding", "(1, BLOCK), padding_mode=ZERO), ct.float32)\n    r =",
             "(1, BLOCK)), ct.float32)\n    r =", *NORM, "values"),
    Mutation("mean over the tile", "keepdims=True) / COLUMNS + eps", "keepdims=True) / BLOCK + eps", *NORM, "values"),
    Mutation("a result is not stored", "    ct.store(inverse_rms, (row,), ct.reshape(r, (1,)))\n", "", *NORM,
             "uninitialised"),
    Mutation("a product in the output's dtype",
             "ct.astype(xs * r * ct.reshape(ws, (1, BLOCK)), y.dtype)",
             "ct.astype(ct.astype(xs * r, ct.bfloat16), ct.float32) * ct.reshape(ws, (1, BLOCK))", *NORM, "values"),
    Mutation("the last row is left out", "range(block, rows, ct", "range(block, rows - 1, ct", *NORM, "values"),
    Mutation("every block does all rows", "range(block, rows, ct.num_blocks(0))", "range(0, rows, 1)", *NORM, "values"),
    Mutation("a factor is missing", "(g - normed * mean) * r", "(g - normed * mean)", *NORM, "values"),
    Mutation("sums without atomics", "ct.atomic_add(dweight, ct.arange(BLOCK, dtype=ct.int32), ct.reshape(sums, (BLOCK,)))",
             "columns = ct.arange(BLOCK, dtype=ct.int32)\n"
             "        ct.scatter(dweight, columns, ct.gather(dweight, columns) + ct.reshape(sums, (BLOCK,)))",
             *ATOMIC_NORM, "race"),
    Mutation("blocks share a partial sum", "ct.store(dweight, (block, 0), sums)", "ct.store(dweight, (0, 0), sums)", *NORM,
             "values"),
    Mutation("blocks write each other's rows", "ct.store(dx, (row, 0), ct",
             "ct.store(dx, (0, 0), ct.zeros((1, BLOCK), dx.dtype))\n        ct.store(dx, (row, 0), ct", *NORM, "values"),
    Mutation("sums start from what was there", "sums = ct.zeros((1, BLOCK), ct.float32)\n    for row",
             "sums = ct.load(dweight, (block, 0), (1, BLOCK), padding_mode=ZERO) * 0.0 if not ATOMIC else "
             "ct.zeros((1, BLOCK), ct.float32)\n    for row", *NORM, "uninitialised"),
    Mutation("padding of a maximum is 0", "(1, BLOCK), padding_mode=NEG_INF), ct.float32)\n        higher",
             "(1, BLOCK), padding_mode=ZERO), ct.float32)\n        higher", *SOFTMAX, "values"),
    Mutation("no new scale", "total = total * ct.exp(most - higher)", "total = total", *SOFTMAX, "values"),
    Mutation("the next label", "ct.gather(x, (row, label))", "ct.gather(x, (row, label + 1))", *LOSS, "values"),
    Mutation("ignored are the others", "label == ignore_index", "label != ignore_index", *LOSS, "values"),
    Mutation("a tile short", "for column in range(ct.cdiv(columns, BLOCK))", "for column in range(columns // BLOCK)", *LOSS,
             "values"),
    Mutation("a sign", "ct.exp(-a)", "ct.exp(a)", *GATED, "values"),
    Mutation("the next tile", "ct.load(up, (row, column)", "ct.load(up, (row, column + 1)", *GATED, "bounds"),
    Mutation("a loop over the wrong axis", "ct.num_tiles(a, axis=1", "ct.num_tiles(a, axis=0", *MATMUL, "values"),
    Mutation("indices swapped", "ct.load(b, (k, column)", "ct.load(b, (column, k)", *MATMUL, "values"),
    Mutation("sums in bfloat16", "sums = ct.mma(left, right, sums)",
             "sums = ct.astype(ct.astype(ct.mma(left, right, sums), ct.bfloat16), ct.float32)", *MATMUL, "values"),
    Mutation("the first columns again", "column = tile * BLOCK + ct.arange(BLOCK, dtype=ct.int32)\n        ct.scatter",
             "column = ct.arange(BLOCK, dtype=ct.int32)\n        ct.scatter", *LOOK_UP, "values"),
    Mutation("rows of one index race", "ct.atomic_add(dtable, (index, column), ct.astype(ct.gather(dy, (row, column)), "
             "dtable.dtype))", "ct.scatter(dtable, (index, column), ct.gather(dtable, (index, column)) + "
             "ct.astype(ct.gather(dy, (row, column)), dtable.dtype))", *LOOK_UP, "race"),
    Mutation("bounds are not checked", "ct.scatter(y, (row, column), ct.gather(table, (index, column)))",
             "ct.scatter(y, (row, column), ct.gather(table, (index, column), check_bounds=False), check_bounds=False)",
             *LOOK_UP, "bounds"),
    Mutation("lanes outside count", "ct.where(inside, terms, 0.0)", "terms", *DIVERGENCE, "values"),
    Mutation("blocks do each other's turns", "range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(BLOCK,)), ct.num_blocks(0))",
             "range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(BLOCK,)))", *TURNS, "race"),
    Mutation("another branch", "elif i == 3", "elif i == 5", *TURNS, "values"),
    Mutation("a shift with sign", "ct.astype(ct.astype(a, ct.uint32) >> 28, ct.int32)", "a >> 28", *INTEGERS, "values"),
]  # fmt: skip


@pytest.fixture
def mutated(tmp_path, monkeypatch):
    """A function that loads a changed copy of the kernels and their tests."""

    def load(old, new):
        text = SOURCE.read_text()
        assert old in text, "the kernels have changed: bring the mutation up to date"
        path = tmp_path / "mutated_kernels.py"
        path.write_text(text.replace(old, new, 1))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    return load


def outcome(check, arguments, tracked):
    """Outcome of a check that catches a kernel: values, the kind of a KernelBug, or nothing."""
    torch.manual_seed(0)
    try:
        with tileir.tracking() if tracked else contextlib.nullcontext():
            check(*arguments)
    except AssertionError:
        return "values"
    except tileir.KernelBug as bug:
        return bug.kind
    return "nothing"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_mutation_is_caught(mutation, mutated):
    module = mutated(mutation.old, mutation.new)
    check = getattr(module, mutation.test)
    if mutation.caught_by in ("values", "bounds"):
        with tileir.checking(race=False):
            assert outcome(check, mutation.arguments, tracked=False) == mutation.caught_by
    else:
        assert outcome(check, mutation.arguments, tracked=True) == mutation.caught_by


@pytest.mark.parametrize(("test", "arguments"), sorted({(m.test, m.arguments) for m in MUTATIONS}, key=str))
def test_unchanged_kernels_pass(test, arguments, mutated):
    assert outcome(getattr(mutated("", ""), test), arguments, tracked=True) == "nothing"
