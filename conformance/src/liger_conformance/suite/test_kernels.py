"""Each launched kernel in each way, not each op; and what calls leave behind."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import liger_core
from liger_conformance import interpreters
from liger_conformance.case import Case, cases_of
from liger_conformance.compare import Mismatch, compare, same_bits
from liger_conformance.dispatch import Allocated
from liger_conformance.dividing import divisible, names_of, place_of_rows, select_rows
from liger_conformance.evaluate import (
    Arguments,
    Outcome,
    baseline_and_truth,
    complete,
    evaluate,
    incoming_of,
    name_results,
    present,
    require,
    with_leaves,
)
from liger_conformance.kernel_calls import as_called, kernel_calls, plain_calls
from liger_conformance.rounding import Samples
from liger_conformance.route import only
from liger_conformance.suite.test_values import arguments_of
from liger_conformance.target import Target

Answers = tuple[Outcome, Outcome]


def tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class Bits:
    """Tensors as they are now, for a later look at whether they still are."""

    def __init__(self, *named: Mapping[str, Any]) -> None:
        self.watched = [(name, value, value.clone()) for values in named for name, value in tensors(values).items()]

    def require_unchanged(self, how: str) -> None:
        for name, value, before in self.watched:
            require(same_bits(value, before), f"{how} {name}")


def judge(how: str, actual: Outcome, answers: Answers, samples: Samples) -> None:
    """Compare results and gradients, which may be some of the answers, by the rule."""
    baseline, truth = (outcome.items() for outcome in answers)
    try:
        for name, value in actual.items().items():
            compare(name, value, baseline[name], truth[name], samples, exact=cases_of(samples.op.name).exact)
    except Mismatch as wrong:
        raise Mismatch(f"{how}: {wrong}") from None


def needs_interpreter(target: Target) -> None:
    """Skip where host code can't be run alone."""
    if target.lane != "interpreted":
        pytest.skip("host code alone is run where an interpreter launches kernels")


@pytest.mark.targets("kernel")
def test_each_kernel(target: Target) -> None:
    """Each kernel is right for rows far apart, for each gradient alone and without gradients. It writes to nothing given."""
    needs_interpreter(target)
    op = target.op
    for case, dtype, ways in kernel_calls(target):
        answers: dict[bool, tuple[Answers, Samples]] = {}
        for way in ways:
            arguments, incoming = as_called(target, complete(op, arguments_of(target, case, dtype)), way)
            if way.apart not in answers:
                expected = baseline_and_truth(op, arguments, None, incoming)
                answers[way.apart] = expected, Samples(op, arguments, None, incoming)
            how = f"{case}, {dtype}, {way}"
            bits = Bits(arguments, {f"the gradient of {name}": value for name, value in incoming.items()})
            with only(target), torch.set_grad_enabled(way.grads != ()):
                actual = evaluate(op, op, arguments, way.grads, incoming)
            judge(how, actual, *answers[way.apart])
            bits.require_unchanged(f"{how} wrote to")


def state_of_process() -> dict[str, Any]:
    """State that a call leaves as it is."""
    cuda = torch.backends.cuda.matmul
    return {
        "the random state": torch.get_rng_state().tolist(),
        "torch.backends.cuda.matmul.allow_tf32": cuda.allow_tf32,
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "allow_bf16_reduced_precision_reduction": cuda.allow_bf16_reduced_precision_reduction,
        "allow_fp16_reduced_precision_reduction": cuda.allow_fp16_reduced_precision_reduction,
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
    }


@pytest.fixture
def _strict_precision() -> Any:
    """Settings that a kernel may be tempted to change, as they are by default: an earlier call may have changed them."""
    allowed, precision = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.usefixtures("_strict_precision")
@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_process_stays_as_it_was(target: Target, case: Case, dtype: torch.dtype) -> None:
    """The random state, and what torch is set to, are those before the call."""
    arguments = complete(target.op, arguments_of(target, case, dtype))
    incoming = incoming_of(target.op, arguments)
    before = state_of_process()
    with only(target):
        evaluate(target.op, target.op, arguments, None, incoming)
        with torch.no_grad():
            evaluate(target.op, target.op, arguments, (), incoming)
    after = state_of_process()
    for name, value in before.items():
        require(value == after[name], f"a call changes {name}")


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no-gradients"])
@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_second_call(target: Target, case: Case, dtype: torch.dtype, grad: bool) -> None:
    """A second call, with other values, changes nothing of the first one's results; nor does it write to what it is given."""
    op, wanted = target.op, None if grad else ()
    first, second = (complete(op, arguments_of(target, case, dtype, draw)) for draw in (0, 1))
    incoming = incoming_of(op, first)
    given = Bits(first, {f"the gradient of {name}": value for name, value in incoming.items()})
    with only(target), torch.set_grad_enabled(grad):
        results = evaluate(op, op, first, wanted, incoming).items()
        given.require_unchanged("a call writes to")
        kept = Bits(results)
        evaluate(op, op, second, wanted, incoming)
        kept.require_unchanged("a second call changes")


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_calls_between_launches(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Calls with other values before and after launches, as other threads make them, change nothing: no module holds state."""
    needs_interpreter(target)
    op = target.op
    assert target.backend is not None
    first, second = (complete(op, arguments_of(target, case, dtype, draw)) for draw in (0, 1))
    incoming = incoming_of(op, first)

    def call() -> None:
        with torch.enable_grad():
            evaluate(op, op, second)

    with only(target):
        expected = evaluate(op, op, first, None, incoming).items()
        with interpreters.around_launches(target.backend, call):
            actual = evaluate(op, op, first, None, incoming).items()
    for name, value in expected.items():
        require(same_bits(value, actual[name]), f"{name} is another with calls between launches")


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no-gradients"])
@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_arguments_that_changed(target: Target, case: Case, dtype: torch.dtype, grad: bool) -> None:
    """A call sees values that were written to the same tensors after another call, as an optimizer does."""
    op, wanted = target.op, None if grad else ()
    first, second = (complete(op, arguments_of(target, case, dtype, draw)) for draw in (0, 1))
    # In some cases a mask's sum is the size of a tensor.
    second = {n: v if isinstance(v, Tensor) and v.shape == first[n].shape else first[n] for n, v in second.items()}
    held = with_leaves(op, {n: v.clone() if isinstance(v, Tensor) else v for n, v in first.items()}, ())

    def call(arguments: Arguments) -> dict[str, Tensor | None]:
        """The op on these very tensors, as they require gradients."""
        results = name_results(op, op(**arguments))
        outputs = [r for r in results.values() if r is not None and r.requires_grad]
        if not outputs:
            return results
        leaves = {n: v for n, v in tensors(arguments).items() if v.requires_grad}
        ones = [torch.ones_like(output) for output in outputs]
        found = torch.autograd.grad(outputs, list(leaves.values()), ones, allow_unused=True)
        return results | {f"the gradient of {n}": g for n, g in zip(leaves, found, strict=True)}

    names = present(op, first) if wanted is None else wanted
    for name in names:
        held[name].requires_grad_()
    with only(target), torch.set_grad_enabled(grad):
        call(held)
        with torch.no_grad():
            for name, value in tensors(held).items():
                value.copy_(second[name])
        again, expected = call(held), call(with_leaves(op, second, names))
    for name, value in expected.items():
        require(same_bits(value, again[name]), f"{name} is that of values before they changed")


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_memory_is_freed(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Nothing that a call allocates is alive once the caller has let go of its results."""
    op = target.op
    for draw in (0, 1):  # the first call may make what all of them use
        arguments = complete(op, arguments_of(target, case, dtype, draw))
        incoming = incoming_of(op, arguments)
        allocated: list[tuple[str, StorageWeakRef]] = []
        with only(target) as observed:
            with Allocated(allocated):
                evaluate(op, op, arguments, None, incoming)
            observed.saved[:] = [()]
            observed.gradients.clear()
    if any(not storage.expired() for _, storage in allocated):
        gc.collect()  # of an exception's frames, say; it takes a second, and is seldom needed
    alive = [name for name, storage in allocated if not storage.expired()]
    require(not alive, f"still alive: the memory that {', '.join(sorted(set(alive)))} allocated")


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_saves_no_copies(target: Target, case: Case, dtype: torch.dtype) -> None:
    """An argument that lies without gaps is saved itself, and no copy of it, in whatever dtype."""
    op = target.op
    arguments = complete(op, arguments_of(target, case, dtype))
    floats = {
        n: v for n, v in tensors(arguments).items() if v.is_floating_point() and v.is_contiguous() and v.numel() > 1
    }
    with only(target) as observed:
        results = name_results(op, op(**with_leaves(op, arguments, present(op, arguments))))
    places = {value.data_ptr() for value in (*floats.values(), *tensors(results).values())}
    for value in observed.saved[0]:
        if isinstance(value, Tensor) and value.data_ptr() not in places:
            for name, argument in floats.items():
                copied = value.numel() == argument.numel() and torch.equal(
                    value.double().view(-1), argument.double().view(-1)
                )
                require(not copied, f"saved a copy of {name} in {value.dtype}")


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.float32,), first=1)
def test_same_tensor_twice(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Two arguments of one shape may be one tensor."""
    op = target.op
    given = complete(op, arguments_of(target, case, dtype))
    floats = {n: v for n, v in tensors(given).items() if v.is_floating_point() and v.dim()}
    for one, other in itertools.combinations(floats, 2):
        if floats[one].shape != floats[other].shape or floats[one].dtype is not floats[other].dtype:
            continue
        arguments = {**given, other: given[one]}
        incoming = incoming_of(op, arguments)
        answers, samples = baseline_and_truth(op, arguments, None, incoming), Samples(op, arguments, None, incoming)
        for wanted in (None, ()):
            with only(target), torch.set_grad_enabled(wanted is None):
                actual = evaluate(op, op, arguments, wanted, incoming)
            judge(f"{one} is {other}", actual, answers, samples)


@pytest.mark.targets("kernel")
def test_stream(target: Target) -> None:
    """All launches go to the current stream. Arguments get their values late there, and another stream doesn't wait for them."""
    if target.device != "cuda":
        pytest.skip("streams need a CUDA device")
    op = target.op
    for case, dtype, late in plain_calls(target):
        early = complete(op, arguments_of(target, case, dtype, 1))
        # In some cases a mask's sum is the size of a tensor.
        alike = {n: v for n, v in tensors(early).items() if v.shape == late[n].shape}
        held, incoming = late | {n: v.clone() for n, v in alike.items()}, incoming_of(op, late)
        with only(target):
            expected = evaluate(op, op, late, None, incoming).items()
            evaluate(op, op, held, None, incoming)  # compiles what it needs
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(SLEEP)
                for name in alike:
                    held[name].copy_(late[name])
                actual = evaluate(op, op, held, None, incoming).items()
            torch.cuda.synchronize()
        for name, value in expected.items():
            require(same_bits(value, actual[name]), f"{case}, {dtype}: {name} is another on another stream")


SLEEP = 50_000_000
"""Cycles of a GPU, some 25 ms: the host makes all launches of a call meanwhile."""


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_sums_over_rows(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Gradients that are sums over rows are right if the terms of all rows but one cancel: partial sums are not rounded.

    The last row has the values of the first one, the last but one those of the second one, and so on, and opposite incoming
    gradients. A partial sum is about 100 times as large as the total, and the reference's is nearly exact.
    """
    op = target.op
    given = complete(op, arguments_of(target, case, dtype))
    results = name_results(op, op.reference(**given))
    rows = place_of_rows(op, given, results)
    sums = tuple(name for name in present(op, given) if name not in rows.arguments)
    places = {name: at for name, at in rows.results.items() if name in incoming_of(op, given)}
    if not sums or not places:
        pytest.skip("no gradient is a sum over rows that have incoming gradients of their own")
    index = torch.arange(PAIRS, device=target.device) % rows.number
    arguments = select_rows(given, rows.arguments, torch.cat([index, index.flip(0)]))
    incoming = {name: value for name, value in incoming_of(op, arguments).items() if name in places}
    for name, at in places.items():
        one, other = incoming[name].movedim(at, 0).tensor_split(2)
        one[1:] *= 100
        other[:] = -one.flip(0)
        other[-1] = 0
    baseline, truth = baseline_and_truth(op, arguments, sums, incoming)
    with only(target):
        actual = evaluate(op, op, arguments, sums, incoming)
    for name, value in actual.gradients.items():
        compare(f"gradient of {name}", value, baseline.gradients[name], truth.gradients[name])


PAIRS = 40
"""Pairs of rows that cancel: more than one program has some."""

MOST_PROGRAMS = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)
"""Programs of a CUDA grid in each dimension."""


@pytest.mark.targets("kernel")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_grids_fit(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Grids are such that CUDA takes them with 70000 elements in any one independent dimension. Nothing is launched."""
    needs_interpreter(target)
    op = target.op
    assert target.backend is not None
    given = complete(op, arguments_of(target, case, dtype))
    names = names_of(op, given)
    for long in divisible(op, given):
        arguments = dict(given)
        for name, dims in names.items():
            if long in dims:
                at = dims.index(long)
                sizes = [70000 if d == at else -1 for d in range(len(dims))]
                arguments[name] = given[name].narrow(at, 0, 1).expand(sizes)
        with interpreters.without_launching(target.backend) as launches, liger_core.use(target.language):
            results = name_results(op, op(**with_leaves(op, arguments, present(op, arguments))))
            outputs = [r for r in results.values() if r is not None and r.requires_grad]
            torch.autograd.backward(outputs, [torch.ones((), dtype=r.dtype).expand(r.shape) for r in outputs])
        for launch in launches:
            fits = all(size <= most for size, most in zip(launch.grid, MOST_PROGRAMS, strict=True))
            require(fits, f"70000 of {long}: {launch} has a grid of {launch.grid}")
