"""The suite has teeth: kernels that are wrong in one way each are caught, by the test that is there for it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_core
from liger_conformance.case import QUICK, TIMED, Case, cases_of
from liger_conformance.compare import Mismatch
from liger_conformance.suite import test_interface, test_layouts, test_purity, test_values
from liger_conformance.target import Target
from liger_core import BackendInfo
from liger_core.contract import Op, ops

pytest.importorskip("triton")

VALUES, INTERFACE = test_values.test_values, test_interface.test_signature

# what is wrong: (text of the kernel, the mutant's, the test that catches it, case)
MUTANTS: dict[str, tuple[str, str, Callable[..., None], str]] = {
    "eps dropped": ("/ hidden + eps", "/ hidden", VALUES, "eps"),
    "eps elsewhere": (
        "tl.rsqrt(tl.sum(xs * xs, 0) / hidden + eps)",
        "1 / (tl.sqrt(tl.sum(xs * xs, 0) / hidden) + eps)",
        VALUES,
        "eps",
    ),
    "bfloat16 accumulation": (
        "tl.sum(xs * xs, 0)",
        "tl.sum((xs * xs).to(tl.bfloat16), 0).to(tl.float32)",
        VALUES,
        "long-row",
    ),
    "bfloat16 weight gradient": ("parts.sum(0)", "sum(parts.bfloat16())", VALUES, "many-rows"),
    "mask one too wide": ("columns < hidden", "columns <= hidden", VALUES, "odd"),
    "mask one too narrow": ("columns < hidden", "columns < hidden - 1", VALUES, "odd"),
    "32-bit offsets": (".to(tl.int64)", "", test_layouts.test_offsets_beyond_32_bits, "odd"),
    "a row not written": (
        "_forward[(rows.shape[0],)]",
        "_forward[(rows.shape[0] - 1,)]",
        test_purity.test_same_bits_again,
        "odd",
    ),
    "a default changed": ("eps: float = 1e-6", "eps: float = 1e-5", INTERFACE, "odd"),
    "an option that is missing": ("    offset: float = 0.0,\n", "", INTERFACE, "odd"),
    "a gradient missing a term": ("(g - normed * mean) * r", "g * r", VALUES, "odd"),
    "a flipped sign": ("(g - normed * mean) * r", "(g + normed * mean) * r", VALUES, "odd"),
    "a row of small scale beside large ones is 0": (
        "(g - normed * mean) * r",
        "tl.where(r > 0.1, (g - normed * mean) * r, 0.0)",
        VALUES,
        "uneven-rows",
    ),
    "offset ignored in backward": ("g = ds * (offset + tl", "g = ds * (0.0 * offset + tl", VALUES, "one-offset"),
    "the contiguous stride assumed": ("rows.stride(0)", "x.shape[-1]", test_layouts.test_input_layouts, "odd"),
    "the gradient's stride assumed": ("dy.contiguous()", "dy", test_layouts.test_incoming_gradient_layouts, "odd"),
    "the stride of another dimension than the rows'": (
        "rows.stride(0)",
        "(rows if x.is_contiguous() else x).stride(0)",
        test_layouts.test_rows_apart,
        "batched",
    ),
    "writes to its input": (
        "    rows = _rows(x)\n    y =",
        "    rows = _rows(x)\n    x.mul_(1.25)\n    y =",
        test_purity.test_writes_to_nothing_it_is_given,
        "odd",
    ),
    "writes to a saved tensor": (
        "    return dx if needs[0]",
        "    inverse_rms.zero_()\n    return dx if needs[0]",
        test_purity.test_writes_to_nothing_it_is_given,
        "odd",
    ),
    "a gradient of another dtype": ("return dx if", "return dx.float() if", VALUES, "odd"),
    "a gradient of another shape": ("return dx if", "return dx[None] if", VALUES, "odd"),
    "32-bit strides": (
        "rows.stride(0), x.shape[-1], eps",
        "torch.tensor(x.stride(0), dtype=torch.int32).item(), x.shape[-1], eps",
        test_layouts.test_offsets_beyond_32_bits,
        "odd",
    ),
    "backward only once": (
        "    return dx if needs[0]",
        "    inverse_rms.zero_()\n    return dx if needs[0]",
        test_purity.test_backward_twice,
        "odd",
    ),
    "saves without need": ("if any(needs) else ()", "", test_purity.test_saves_nothing_without_gradients, "odd"),
    "gradients nobody wants": ("dx if needs[0] else None", "dx", test_values.test_partial_gradients, "odd"),
    "returns its incoming gradient": (
        "return dx if needs[0] else None",
        "return dy",
        test_purity.test_gradients_are_not_inputs,
        "odd",
    ),
    "computes by other means": (
        "    _forward[(rows.shape[0],)]",
        "    y.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps))\n    0 and _forward[(rows.shape[0],)]",
        test_interface.test_route,
        "odd",
    ),
    "calls the reference": (
        "    return y, (x",
        "    y.copy_(rms_norm.reference(x, weight))\n    return y, (x",
        VALUES,
        "odd",
    ),
    "another dtype": ("y, (x, weight", "y.float(), (x, weight", VALUES, "odd"),
    "differs from run to run": (
        "    return y, (x",
        "    y *= 1 + torch.rand(1).item() / 64\n    return y, (x",
        test_purity.test_same_bits_again,
        "odd",
    ),
}


def target_of(info: BackendInfo, op: str = "rms_norm") -> Target:
    device = liger_core.infer_device()
    return Target(ops[op], info.language, device, info, "interpreted" if device == "cpu" else "passed")


def run(test: Callable[..., None], target: Target, case: str) -> None:
    """A test of the suite, with every value of each parameter that it takes besides the target and the case."""
    chosen = next((c for c in cases_of(target.op.name).cases if c.id == case), None)
    chosen = chosen or Case("one-offset", "option", rows=4, hidden=96, offset=1.0)
    takes = inspect.signature(test).parameters
    rows: list[dict[str, Any]] = [{"target": target}]
    for name, values in (
        ("case", [chosen]),
        ("dtype", [torch.bfloat16, torch.float32]),
        ("layout", test_layouts.LAYOUTS),
    ):
        if name in takes:
            rows = [row | {name: value} for row in rows for value in values]
    for row in rows:
        test(**row)


@pytest.mark.parametrize("wrong", MUTANTS)
def test_mutants_are_caught(wrong: str, acme: BackendInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel passes the test; the mutant fails it."""
    text, mutant, test, case = MUTANTS[wrong]
    run(test, target_of(acme), case)
    mutate(text, mutant, tmp_path, monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        run(test, target_of(acme), case)


def test_what_a_kernel_spoils_is_no_error_of_its_values(
    acme: BackendInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The truth is that of what the kernel was given, so the one test that fails is the one that says what was written to."""
    spoils = "    x.zero_()\n    dy.zero_()\n    return dx if needs[0]"
    mutate("    return dx if needs[0]", spoils, tmp_path, monkeypatch)
    run(VALUES, target_of(acme), "odd")
    run(test_values.test_some_results_unused, target_of(acme), "odd")
    with pytest.raises(AssertionError, match="backward wrote to x"):
        run(test_purity.test_writes_to_nothing_it_is_given, target_of(acme), "odd")


def mutate(text: str, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a changed copy of acme's kernel in its place."""
    file = Path(importlib.import_module("liger_acme.ops.rms_norm").__file__ or "")
    source = file.read_text(encoding="utf-8")
    assert text in source, f"{text!r} is not in {file.name}: mend the mutant"
    path = tmp_path / "rms_norm.py"
    path.write_text(source.replace(text, mutant), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("liger_acme.ops.rms_norm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "liger_acme.ops.rms_norm", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(ops["rms_norm"], "_plans", {})
    monkeypatch.setattr(ops["rms_norm"], "_ready", {})


def test_tables_of_wide_strides_are_read_where_they_lie(
    tmp_path: Path, install_mutant: Callable[..., None], run_suite: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Moved alone, one of two tables that have to have the same strides is copied, and 32-bit offsets do no harm."""
    triton = pytest.importorskip("liger_triton").backend
    wide, narrow = "1, 2)).to(tl.int64)", "1, 2))"
    install_mutant(tmp_path, triton, "narrow", "_heads", wide, narrow, "qwen2vl_mrope")
    done = run_suite(tmp_path, "--impl=narrow", "--op=qwen2vl_mrope", "-k", "test_offsets_beyond_32_bits")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("name", "constant"),
    [
        # Each op takes one of the two in CI, in turn.
        pytest.param(name, constant, marks=[pytest.mark.slow] if (number + int(constant)) % 2 else [])
        for number, name in enumerate(sorted(ops))
        for constant in (0.0, 1.0)
    ],
)
def test_watermark_fails(
    name: str, constant: float, install: Callable[[BackendInfo], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants of the right shape, dtype and device are no implementation of any op."""
    info = BackendInfo("watermark", (liger_core.infer_device(),), "torch", "watermark", "pip install watermark")
    kernel = types.ModuleType(f"watermark.ops.{name}")
    monkeypatch.setattr(BackendInfo, "has_kernel", lambda self, op: op == name)
    monkeypatch.setattr(BackendInfo, "kernel", lambda self, op: kernel)
    install(info)
    case = cases_of(name).cases[0]
    stamp(kernel, ops[name], cases_of(name).build(case, torch.float32, info.devices[0]), constant)
    with pytest.raises(Mismatch):
        test_values.test_values(target_of(info, name), case, torch.float32)


def stamp(kernel: types.ModuleType, op: Op[..., Any], arguments: dict[str, Any], constant: float) -> None:
    """Make a kernel module that knows a call's shapes and dtypes, and nothing else."""

    def stamped(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(stamped, value))
        return value if value is None else torch.full_like(value, constant)

    result = stamped(op.reference(**op.bind((), arguments)))

    def forward(needs: tuple[bool, ...], **arguments: Any) -> Any:
        return stamped(result), tuple(arguments[name] for name in op.differentiable)

    def backward(needs: tuple[bool, ...], saved: Any, *grads: Any, **options: Any) -> Any:
        return tuple(stamped(value) if wanted else None for value, wanted in zip(saved, needs, strict=True))

    kernel.forward, kernel.backward = forward, backward  # type: ignore[attr-defined]


def test_every_op_has_cases() -> None:
    """Every contract has cases of each kind, and ids that are unique."""
    for name in ops:
        op_cases, file = cases_of(name), f"conformance/src/liger_conformance/cases/{name}.py"
        groups = {case.group for case in op_cases.cases}
        missing = {"odd", *TIMED} - groups
        assert not missing, f"add a case of the group {', '.join(sorted(missing))} to CASES in {file}"
        assert op_cases.cases[0].group == "odd", (
            f"{file}: the first case is taken where one is enough; it must be an odd size"
        )
        assert groups & set(QUICK) - {"odd"}, f"add a case of the group edge, option or extreme to CASES in {file}"
        ids = [case.id for case in (*op_cases.cases, *op_cases.out_of_range)]
        assert len(ids) == len(set(ids)), f"an id is there twice in {file}"
