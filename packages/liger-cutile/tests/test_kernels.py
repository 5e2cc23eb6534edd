"""What depends on how this package divides an op's work into tiles, and which the suite's sizes don't reach."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import Make
from liger_conformance.compare import compare
from liger_conformance.running import Target, baseline_and_truth, evaluate, only
from liger_core.contract import ops
from liger_cutile import backend

DEVICE = liger_core.infer_device()
if why := backend.missing(DEVICE):
    pytest.skip(why, allow_module_level=True)
if interpreters.interprets(backend, DEVICE):
    interpreters.repair(backend)

Build = Callable[[Make], dict[str, Any]]


def norm(rows: int, columns: int) -> Build:
    return lambda make: {"x": make.randn(rows, columns), "weight": make.randn(columns)}


def gates(*shape: int) -> Build:
    return lambda make: {"gate": make.randn(*shape), "up": make.randn(*shape)}


def halves(rows: int, columns: int) -> Build:
    return lambda make: dict(zip(("gate", "up"), make.randn(rows, 2 * columns).chunk(2, -1), strict=True))


CALLS = {
    # A row in one tile; forward in one, backward in several; both in several.
    "rms_norm-one-tile": ("rms_norm", norm(3, 8192)),
    "rms_norm-forward-tile": ("rms_norm", norm(3, 16384)),
    "rms_norm-long": ("rms_norm", norm(3, 16385)),
    # Several tiles of rows per block, and more blocks' sums than rows.
    "rms_norm-turns": ("rms_norm", norm(900, 16)),
    "rms_norm-one-row": ("rms_norm", norm(1, 300)),
    # Whole tensors in one row, several tiles; rows that stay apart, several to a tile.
    "swiglu-tiles": ("swiglu", gates(3, 700)),
    "swiglu-halves": ("swiglu", halves(37, 40)),
    "swiglu-long-halves": ("swiglu", halves(3, 1030)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
def test_call(call: str, dtype: torch.dtype) -> None:
    name, build = CALLS[call]
    op = ops[name]
    arguments = build(Make(dtype, DEVICE))
    lane = "interpreted" if interpreters.interprets(backend, DEVICE) else "passed"
    with only(Target(op, "cutile", DEVICE, backend, lane)):
        actual = evaluate(op, op, arguments)
    baseline, truth = baseline_and_truth(op, arguments)
    for result, value in actual.items().items():
        compare(result, value, baseline.items()[result], truth.items()[result])


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic: bool | None) -> None:
    """torch.compile gives the bits of eager mode, so it knows all that launches write to. An interpreter will do."""
    op = liger_core.rms_norm
    torch.compiler.reset()
    with liger_core.use("cutile"):
        compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for rows in (5, 7):
            make = Make(torch.float32, DEVICE)
            arguments = norm(rows, 123)(make)
            one, other = evaluate(op, compiled, arguments), evaluate(op, op, arguments)
            for name, value in other.items().items():
                assert torch.equal(one.items()[name], value), name
