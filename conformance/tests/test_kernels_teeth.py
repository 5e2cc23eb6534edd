"""The suite's `test_kernels` has teeth: each kind of wrong kernel is caught by the test that is there for it, and by none of the
others.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import QUICK, cases_of
from liger_conformance.suite import test_kernels, test_layouts, test_purity, test_values
from liger_conformance.target import Target
from liger_core import BackendInfo
from liger_core.contract import ops

pytest.importorskip("triton")
if liger_core.infer_device() != "cpu":
    pytest.skip("host code alone is run where an interpreter launches kernels", allow_module_level=True)

Test = Callable[..., None]


class Mutant(NamedTuple):
    """A wrong kernel of acme's, and the test that catches it.

    Attributes:
        changes: texts of the file, and what takes their places.
        caught_by: a test of the suite.
        message: what it says.
        grad: the value of the test's parameter `grad`; None: it has none.
    """

    changes: tuple[tuple[str, str], ...]
    caught_by: Test
    message: str
    grad: bool | None = None


def once(text: str, new: str) -> tuple[tuple[str, str], ...]:
    return ((text, new),)


Y = "    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)\n    inverse"
DX = "    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)\n    parts"
RETURN = "    return y, (x"
STATE = "_rows.__dict__"
"""A dictionary of acme's module that outlives a call."""

MUTANTS = {
    "one buffer of results": Mutant(
        once(Y, f"    y = {STATE}.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype)).detach()\n    inverse"),
        test_kernels.test_second_call, "a second call changes result", True,
    ),
    "one buffer of results without gradients": Mutant(
        once(Y, "    y = torch.empty(x.shape, dtype=x.dtype)\n    if not any(needs) and not x.is_inference():\n"
                f"        y = {STATE}.setdefault((x.shape, x.dtype), y).detach()\n    inverse"),
        test_kernels.test_second_call, "a second call changes result", False,
    ),
    "one buffer of gradients": Mutant(
        once(DX, f"    dx = {STATE}.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype)).detach()\n    parts"),
        test_kernels.test_second_call, "a second call changes gradient of x", True,
    ),
    "wrong without gradients in float32": Mutant(
        once(RETURN, "    if not any(needs) and x.dtype is torch.float32:\n        y *= 1.01\n" + RETURN),
        test_kernels.test_each_kernel, "no gradients",
    ),
    "dx wrong in long rows if the weight is frozen": Mutant(
        once("    return dx if", "    if not needs[1] and x.shape[-1] > 300:\n        dx *= 1.04\n    return dx if"),
        test_kernels.test_each_kernel, "x alone",
    ),
    "dweight wrong in float32 if x is frozen": Mutant(
        once("    return dx if", "    if not needs[0] and x.dtype is torch.float32:\n        dweight *= 1.01\n    return dx if"),
        test_kernels.test_each_kernel, "weight alone",
    ),
    "a float32 gradient written over the incoming one": Mutant(
        once(DX, "    dx = dy if dy.dtype is torch.float32 and dy.is_contiguous() else "
                 "torch.empty(x.shape, dtype=x.dtype)\n    parts"),
        test_kernels.test_second_call, "writes to the gradient of result", True,
    ),
    "a stride ignored in float32": Mutant(
        once("rows.stride(0), x.shape[-1], eps", "x.shape[-1] if x.element_size() == 4 else rows.stride(0), x.shape[-1], eps"),
        test_kernels.test_each_kernel, "rows apart",
    ),
    "a stride ignored in long rows": Mutant(
        once("rows.stride(0), x.shape[-1], eps", "x.shape[-1] if x.shape[-1] > 300 else rows.stride(0), x.shape[-1], eps"),
        test_kernels.test_each_kernel, "rows apart",
    ),
    "a copy of the weight that is kept": Mutant(
        once("    weight = weight.contiguous()", "    if not x.is_inference():\n        "
             f"weight = {STATE}.setdefault(weight.data_ptr(), (weight, weight.detach().clone()))[1]"),
        test_kernels.test_arguments_that_changed, "before they changed", False,
    ),
    "an input changed without gradients": Mutant(
        once(RETURN, "    if not any(needs) and not x.is_inference():\n        x.clamp_(max=1.0)\n" + RETURN),
        test_purity.test_saves_nothing_without_gradients, "wrote to x",
    ),
    "a random number drawn": Mutant(
        once(RETURN, "    torch.rand(1)\n" + RETURN), test_kernels.test_process_stays_as_it_was, "the random state",
    ),
    "TF32 allowed for good": Mutant(
        once(RETURN, "    torch.backends.cuda.matmul.allow_tf32 = True\n" + RETURN),
        test_kernels.test_process_stays_as_it_was, "allow_tf32",
    ),
    "a result transposed in memory": Mutant(
        once(RETURN, "    y = y.mT.contiguous().mT if y.dim() > 1 else y\n" + RETURN),
        test_layouts.test_result_strides, "has strides",
    ),
    "results that are kept": Mutant(
        once(RETURN, f"    {STATE}.setdefault('kept', []).append(y)\n" + RETURN),
        test_kernels.test_memory_is_freed, "aten::empty",
    ),
    "float32 copies that are kept": Mutant(
        once(RETURN, f"    {STATE}.setdefault('kept', []).append(x.double())\n" + RETURN),
        test_kernels.test_memory_is_freed, "aten::_to_copy",
    ),
    "a float32 copy that is saved": Mutant(
        (("    return y, (x, weight", "    return y, (x.float(), weight"),
         ("    rows = _rows(x)\n    dx =", "    x = x.to(dy.dtype)\n    rows = _rows(x)\n    dx =")),
        test_kernels.test_saves_no_copies, "saved a copy of x in torch.float32",
    ),
    "a workspace of the module": Mutant(
        once("    parts = torch.empty(rows.shape,", f"    parts = {STATE}['parts'] = torch.empty(rows.shape,")
        + once("parts.sum(0)", f"{STATE}['parts'].sum(0)"),
        test_kernels.test_calls_between_launches, "gradient of weight is another",
    ),
    "partial sums in bfloat16": Mutant(
        once("parts.sum(0)", "sum(part.sum(0).to(x.dtype).float() for part in parts.split(7))"),
        test_kernels.test_sums_over_rows, "gradient of weight: error",
    ),
    "rows in the second dimension of a grid": Mutant(
        (("_forward[(rows.shape[0],)]", "_forward[(1, rows.shape[0])]"),
         ("    row = tl.program_id(0).to(tl.int64)", "    row = tl.program_id(1).to(tl.int64)")),
        test_kernels.test_grids_fit, "has a grid of (1, ",
    ),
}  # fmt: skip

OTHERS = (
    test_values.test_values,
    test_values.test_partial_gradients,
    test_layouts.test_input_layouts,
    test_layouts.test_incoming_gradient_layouts,
    test_purity.test_writes_to_nothing_it_is_given,
    test_purity.test_same_bits_again,
    test_purity.test_gradients_are_not_inputs,
    test_purity.test_backward_twice,
)


def target_of(info: BackendInfo, op: str) -> Target:
    return Target(ops[op], info.language, "cpu", info, "interpreted")


def calls(test: Test, target: Target, grad: bool | None = None) -> Iterator[dict[str, Any]]:
    """Arguments of a test of the suite, of its op's first case where it takes one."""
    dtypes = next(
        (m.kwargs["dtypes"] for m in getattr(test, "pytestmark", ()) if "dtypes" in m.kwargs), (torch.float32,)
    )
    values = {
        "case": [cases_of(target.op.name).cases[0]],
        "dtype": dtypes,
        "layout": test_layouts.LAYOUTS,
        "grad": [grad],
    }
    takes = [name for name in inspect.signature(test).parameters if name != "target"]
    for chosen in itertools.product(*(values[name] for name in takes)):
        yield {"target": target, **dict(zip(takes, chosen, strict=True))}


def run(test: Test, target: Target, grad: bool | None = None) -> None:
    for arguments in calls(test, target, grad):
        test(**arguments)


def put_in_place(
    module: str, changes: tuple[tuple[str, str], ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put a changed copy of a module in its place, for an op of its name."""
    file = Path(importlib.import_module(module).__file__ or "")
    source = file.read_text("utf-8")
    for text, new in changes:
        assert text in source, f"{text!r} is not in {file.name}: bring the mutant up to date"
        source = source.replace(text, new, 1)
    path = folder / file.name
    path.write_text(source, "utf-8")
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module, changed)
    spec.loader.exec_module(changed)
    for cache in ("_plans", "_ready"):
        monkeypatch.setattr(ops[file.stem], cache, {})


@pytest.mark.parametrize("wrong", MUTANTS)
def test_mutants_are_caught(wrong: str, acme: BackendInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the test that the kernel passes unchanged."""
    mutant, target = MUTANTS[wrong], target_of(acme, "rms_norm")
    run(mutant.caught_by, target, mutant.grad)
    put_in_place("liger_acme.ops.rms_norm", mutant.changes, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=re.escape(mutant.message)):
        run(mutant.caught_by, target, mutant.grad)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", MUTANTS)
def test_other_tests_pass_mutants(
    wrong: str, acme: BackendInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the test that catches it, a mutant passes: it isn't there for nothing."""
    put_in_place("liger_acme.ops.rms_norm", MUTANTS[wrong].changes, tmp_path, monkeypatch)
    for test in OTHERS:
        run(test, target_of(acme, "rms_norm"))


@pytest.mark.parametrize("wanted", ["gradients", "no gradients"])
def test_one_tensor_as_two_arguments(
    wanted: str, install: Callable[[BackendInfo], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is wrong for gate and up in the same memory is caught, with and without gradients."""
    triton = pytest.importorskip("liger_triton").backend
    interpreters.repair(triton)
    install(triton)
    target = target_of(triton, "swiglu")
    run(test_kernels.test_same_tensor_twice, target)
    if wanted == "gradients":
        changes = once("    return dgate, dup", "    return dgate * (1 + (gate.data_ptr() == up.data_ptr())), dup")
    else:
        changes = once(
            "    return y, saved", "    return y * (1 + (not saved and gate.data_ptr() == up.data_ptr())), saved"
        )
    put_in_place("liger_triton.ops.swiglu", changes, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="gate is up"):
        run(test_kernels.test_same_tensor_twice, target)


def test_options_that_are_wrong_together(
    install: Callable[[BackendInfo], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    """A gradient that is wrong only if three options are not their defaults is caught, though no case of its op sees it."""
    triton = pytest.importorskip("liger_triton").backend
    interpreters.repair(triton)
    install(triton)
    monkeypatch.setattr(test_values, "turn", lambda config: None)  # --turn of this run draws other options
    target = target_of(triton, "layer_norm")
    test_values.test_options_together(target, torch.float32, pytestconfig)
    wrong = "        if bias is None and eps != 1e-5 and weight.dtype is not dy.dtype:\n            dweight *= 1.1\n"
    changes = once("        return dx, dweight, dbias\n", wrong + "        return dx, dweight, dbias\n")
    put_in_place("liger_triton.ops.layer_norm", changes, tmp_path, monkeypatch)
    for case in cases_of("layer_norm").cases:
        if case.group == "option" and not cases_of("layer_norm").is_long(case):
            test_values.test_values(target, case, torch.float32)
    with pytest.raises(AssertionError, match="together-0-.*gradient of weight: error"):
        test_values.test_options_together(target, torch.float32, pytestconfig)


def test_every_test_of_kernels_catches_something() -> None:
    tests = {name for name, value in vars(test_kernels).items() if name.startswith("test_") and callable(value)}
    caught = {mutant.caught_by.__name__ for mutant in MUTANTS.values()} | {"test_same_tensor_twice"}
    caught.add("test_stream")  # which needs a CUDA device
    assert tests <= caught, f"no mutant for {', '.join(sorted(tests - caught))}"
    assert {case.group for case in cases_of("rms_norm").cases} >= set(QUICK)
