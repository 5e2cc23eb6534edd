"""The interface is the contract's: signatures, errors, the kernel that runs, and torch.compile."""

import importlib
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import Case, cases_of
from liger_conformance.compare import compare, same_bits
from liger_conformance.dividing import ends_of, place_of_rows, select_rows
from liger_conformance.evaluate import (
    Arguments,
    Outcome,
    baseline_and_truth,
    complete,
    evaluate,
    incoming_for,
    name_results,
    present,
    require,
)
from liger_conformance.known import KnownFailures, Unclaimed
from liger_conformance.route import only
from liger_conformance.suite.test_values import arguments_of, check, traced
from liger_conformance.target import Target, refusal
from liger_core import dispatch
from liger_core.contract import Op, ops


@pytest.mark.targets("kernel")
def test_signature(target: Target) -> None:
    """Parameters, kinds and defaults of `forward`, `refuses` and `saves_early` are the contract's, or ``**options``."""
    for name, extra in (("forward", 1), ("refuses", 0), ("saves_early", 0)):
        function: Callable[..., Any] | None = getattr(target.kernel, name, None)
        if function is not None:
            parameters = list(inspect.signature(function).parameters.values())[extra:]
            expected = list(target.op.signature.parameters.values())
            if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
                named = {p.name for p in parameters[:-1]}
                expected = [p for p in expected if p.kind is not p.KEYWORD_ONLY or p.name in named]
                parameters.pop()
            found, wanted = ([(p.name, p.kind, p.default) for p in each] for each in (parameters, expected))
            assert found == wanted, f"{name} has another signature than {target.op!r}"


@pytest.mark.targets("kernel", "differentiable")
def test_backward_signature(target: Target) -> None:
    """`backward` takes each option of the contract by keyword."""
    kernel = target.kernel
    assert kernel is not None
    parameters = inspect.signature(kernel.backward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(target.op.options)


@pytest.mark.cases(dtypes=(torch.bfloat16,), first=2)
def test_route(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The package that was asked for launches the kernels, all of them, also inside composed ops.

    Whichever gradients are wanted, `only` sees that forward and backward launch some.
    """
    arguments = complete(target.op, arguments_of(target, case, dtype))
    names = present(target.op, arguments)
    with interpreters.launches() as launches, only(target):
        with torch.no_grad():
            target.op(**arguments)
        for wanted in {names, *((name,) for name in names)}:
            evaluate(target.op, target.op, arguments, wanted)
    if target.backend is None:
        assert not launches, f"the reference launched {launches[0]}"
        return
    foreign = [launch for launch in launches if not launch.module.startswith(f"{target.backend.package}.")]
    assert not foreign, f"{foreign[0].kernel} of {foreign[0].module} ran where {target} was asked for"


@pytest.mark.targets("kernel")
@pytest.mark.cases(first=1, claimed=False)
def test_claims(target: Target, case: Case, dtype: torch.dtype, unclaimed: Unclaimed) -> None:
    """A kernel takes its op's first case in every dtype, or its package declares that it doesn't, and why."""
    why = refusal(target, arguments_of(target, case, dtype))
    declared = unclaimed.declares(target.language, f"{target.op.name}-{case}-{str(dtype).removeprefix('torch.')}")
    where = f"{target.backend.package}.unclaimed" if target.backend else ""
    if declared:
        assert why is not None, f"{where} declares what {target} takes: {case}"
    else:
        assert why is None, f"{target} owes the case {case}, which it refuses: {why}. Take it, or say why in {where}"


@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_bad_input(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The contract's checks come before any kernel: an int64 tensor is refused with the reference's error."""
    op, name = target.op, (target.op.differentiable or target.op.tensors)[0]
    arguments = arguments_of(target, case, dtype)
    arguments[name] = arguments[name].detach().long()
    texts: list[str] = []
    for language in ("torch", target.language):
        with liger_core.use(language), pytest.raises(TypeError, match=rf"{op.name}\b.*\b{name}\b.*int64") as caught:
            op(**arguments)
        assert type(caught.value) is TypeError
        texts.append(str(caught.value))
    assert texts[0] == texts[1], "another message than the reference's"


@pytest.mark.targets("out_of_range")
def test_values_out_of_range(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label or an index out of range is never read: NaN on an accelerator, IndexError under LIGER_KERNEL_CHECK=1."""
    op = target.op
    wrong = cases_of(op.name).out_of_range
    monkeypatch.setattr(op, "_check_values", None)  # what an accelerator does without LIGER_KERNEL_CHECK
    for case in wrong:
        with only(target):
            results = name_results(op, op(**arguments_of(target, case, torch.float32)))
        first = next(iter(results.values()))
        assert first is not None
        require(bool(first.isnan().any()), f"{case} gives a number")
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "settings", lambda: dispatch.Settings(None, False, True))
    for case in wrong:
        with liger_core.use(target.language), pytest.raises(IndexError, match=op.name):
            op(**arguments_of(target, case, torch.float32))


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_float64(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Only the reference takes float64; a kernel that is demanded says so."""
    arguments = arguments_of(target, case, torch.float64)
    with liger_core.use(target.language), pytest.raises(liger_core.Unsupported, match="float64"):
        target.op(**arguments)


@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_autocast(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Autocast casts the operands of a matmul and nothing else."""
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))

    def in_autocast(**given: Any) -> Any:
        with torch.autocast(target.device, torch.bfloat16):
            return op(**given)

    # A kernel's backward is in float32 inside a region too. PyTorch's own, which the reference has, is cast there.
    with only(target), torch.autocast(target.device, torch.bfloat16, enabled=target.backend is not None):
        actual = evaluate(op, in_autocast, arguments)
    cast = {n: v.bfloat16() if n in op.autocast and v is not None else v for n, v in arguments.items()}
    with only(target):
        expected = evaluate(op, op, cast)
    for name, value in actual.results.items():
        require(same_bits(value, expected.results[name]), f"{name} differs under autocast")
    for name, value in actual.gradients.items():
        wanted = expected.gradients[name]
        same = value is wanted or (wanted is not None and same_bits(value, wanted.to(arguments[name].dtype)))
        require(same, f"the gradient of {name} differs under autocast")


@pytest.mark.parametrize("start", ["cold", "warm"])
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_compile(target: Target, case: Case, dtype: torch.dtype, start: str) -> None:
    """`torch.compile(fullgraph=True)`, forward and backward, with sizes that change."""
    check_compiled(target, case, dtype, start)


@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_compile_dynamic(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The same with `dynamic=True`, in half precision: host code may go other ways there."""
    check_compiled(target, case, dtype, "dynamic")


@pytest.mark.slow
@pytest.mark.cases(groups=("option",), dtypes=(torch.float32,))
def test_compile_options(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The same, with every option."""
    check_compiled(target, case, dtype, "cold")


def check_compiled(target: Target, case: Case, dtype: torch.dtype, start: str) -> None:
    op = target.op
    compiled = traced(target, True if start == "dynamic" else None)
    repeats: tuple[Callable[[Arguments], Arguments], ...] = (
        lambda arguments: arguments,
        lambda arguments: more_rows(op, arguments),
    )
    with liger_core.use(target.language):
        if start == "warm":
            op(**arguments_of(target, case, dtype))
        for repeat in repeats:
            check(target, lambda draw, repeat=repeat: repeat(arguments_of(target, case, dtype, draw)), call=compiled)


def more_rows(op: Op[..., Any], arguments: Arguments) -> Arguments:
    """The arguments twice over, along the rows."""
    rows = place_of_rows(op, complete(op, arguments)).arguments
    return {n: torch.cat([v, v], rows[n]) if n in rows else v for n, v in arguments.items()}


@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_graph_capture(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Forward and backward are captured in a CUDA graph and replayed on other data: there is no host sync."""
    check_graph_capture(target, case, dtype)


def check_graph_capture(target: Target, case: Case, dtype: torch.dtype) -> None:
    if target.device != "cuda":
        pytest.skip("CUDA graphs need a CUDA device")
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))
    other = complete(op, arguments_of(target, case, dtype, draw=1))
    with only(target):
        expected = evaluate(op, op, other)
        incoming = {n: v.clone() for n, v in evaluate_incoming(target, arguments).items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            evaluate(op, op, arguments, None, incoming)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = evaluate(op, op, arguments, None, incoming)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            value.copy_(other[name])
    graph.replay()
    for name, value in expected.items().items():
        require(same_bits(value, captured.items()[name]), f"{name} differs when a graph is replayed")


def evaluate_incoming(target: Target, arguments: dict[str, Any]) -> dict[str, Tensor]:
    with torch.no_grad():
        return incoming_for(target.op, arguments, name_results(target.op, target.op(**arguments)))


@pytest.mark.slow
@pytest.mark.targets("huge")
@pytest.mark.cases(dtypes=(torch.bfloat16,))
def test_huge(target: Target, dtype: torch.dtype) -> None:
    """A tensor of more than 2^31 elements: the first and the last rows are right, and so are their gradients."""
    op = target.op
    huge = cases_of(op.name).huge
    assert huge is not None
    if target.device == "cpu":
        pytest.skip("more than 2^31 elements need an accelerator")
    arguments = complete(op, arguments_of(target, huge, dtype))
    rows = place_of_rows(op, arguments)
    ends = ends_of(rows, target.device)
    few = select_rows(arguments, rows.arguments, ends)
    wanted = tuple(name for name in present(op, arguments) if name in rows.arguments)
    try:
        with torch.no_grad(), only(target):
            results = name_results(op, op(**arguments))
        rows, incoming = place_of_rows(op, arguments, results), incoming_for(op, arguments, results)
        del results
        few_incoming = select_rows(incoming, rows.results, ends)
        with only(target):
            actual = evaluate(op, op, arguments, wanted, incoming)
    except torch.OutOfMemoryError:
        pytest.skip("the device has too little memory")
    del arguments, incoming
    baseline, truth = baseline_and_truth(op, few, wanted, few_incoming)
    by_row = {name: value for name, value in actual.results.items() if name in rows.results}
    require(bool(by_row), "no result has rows")
    found = Outcome(select_rows(by_row, rows.results, ends), select_rows(actual.gradients, rows.arguments, ends))
    for name, value in found.items().items():
        compare(name, value, baseline.items()[name], truth.items()[name], exact=cases_of(op.name).exact)


def test_kernel_files(language: str) -> None:
    """Every file of a package's ``ops/`` is the kernel of an op; one with another name would never be found."""
    backend = next(b for b in liger_core.backends() if b.language == language)
    folders = importlib.import_module(f"{backend.package}.ops").__path__
    for file in (file for folder in folders for file in sorted(Path(folder).glob("[!_]*.py"))):
        near = get_close_matches(file.stem, ops, 1)
        hint = f"is {near[0]} meant?" if near else "what kernels share has a name that starts with an underscore"
        assert file.stem in ops, f"{file} has the name of no op: {hint}"


def test_known_failures(language: str, known_failures: KnownFailures) -> None:
    """Every declared failure is of a test that exists."""
    unmatched = known_failures.unmatched(language)
    assert not unmatched, f"{language} declares failures of tests that don't exist: {', '.join(unmatched)}"
