"""Any strides: of inputs, of incoming gradients, and of what comes back of what was saved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from liger_conformance.case import QUICK, Case
from liger_conformance.compare import same_bits
from liger_conformance.dividing import place_of_rows
from liger_conformance.evaluate import Arguments, complete, evaluate, incoming_for, name_results, require
from liger_conformance.layouts import (
    apart,
    channels_last,
    expanded,
    outermost_last,
    padded,
    shifted,
    sliced,
    transposed,
)
from liger_conformance.route import only
from liger_conformance.suite.test_values import arguments_of, check
from liger_conformance.target import Target
from liger_core.contract import Op


def lazy(tensor: Tensor) -> Tensor:
    """The same values, their signs changed in memory: what PyTorch calls a negative, or of complex numbers a conjugate, view."""
    if tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor  # pyright: ignore[reportPrivateImportUsage]


LAYOUTS = (transposed, sliced, expanded, outermost_last, lazy)


def relaid(arguments: Arguments, layout: Callable[[Tensor], Tensor]) -> Arguments:
    """The arguments with every tensor in another layout. Scalars stay."""
    return {n: layout(v) if isinstance(v, Tensor) and v.dim() else v for n, v in arguments.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_input_layouts(target: Target, case: Case, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    """Non-contiguous inputs give the answer of contiguous ones."""
    check(target, lambda draw: relaid(arguments_of(target, case, dtype, draw), layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.targets("differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_incoming_gradient_layouts(
    target: Target, case: Case, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    """So do non-contiguous incoming gradients."""
    arguments = complete(target.op, arguments_of(target, case, dtype))
    with torch.no_grad():
        incoming = incoming_for(target.op, arguments, name_results(target.op, target.op.reference(**arguments)))
    check(target, lambda draw: arguments_of(target, case, dtype, draw), None, relaid(incoming, layout))


@pytest.mark.cases(dtypes=(torch.bfloat16,), first=2)
def test_rows_apart(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Rows that lie apart, by other strides in inputs than in incoming gradients. The second case has several dimensions of rows
    if the op takes them.
    """
    arguments = complete(target.op, arguments_of(target, case, dtype))
    with torch.no_grad():
        incoming = incoming_for(target.op, arguments, name_results(target.op, target.op.reference(**arguments)))
    check(target, lambda draw: relaid(arguments_of(target, case, dtype, draw), padded), None, relaid(incoming, apart))


AS_THE_INPUT = ("rope", "qwen2vl_mrope")
"""Ops whose results lie in memory as their reference's, in the order of their inputs. Those of other ops are contiguous."""


@pytest.mark.parametrize("layout", [Tensor.contiguous, transposed, channels_last], ids=lambda layout: layout.__name__)
@pytest.mark.cases(dtypes=(torch.bfloat16, torch.float32), first=1)
def test_result_strides(target: Target, case: Case, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    """Code that views a result runs with every language. The reference is free where inputs aren't contiguous."""
    arguments = complete(target.op, relaid(arguments_of(target, case, dtype), layout))
    with torch.no_grad():
        references = name_results(target.op, target.op.reference(**arguments))
        with only(target):
            results = name_results(target.op, target.op(**arguments))
    for name, value in results.items():
        if value is None:
            continue
        reference = references[name]
        assert reference is not None
        follows = target.backend is None or target.op.name in AS_THE_INPUT
        expected = reference if follows else torch.empty_like(value, memory_format=torch.contiguous_format)
        sizes = zip(value.shape, value.stride(), expected.stride(), strict=True)
        require(
            all(size == 1 or ours == theirs for size, ours, theirs in sizes),
            f"{name} of shape {tuple(value.shape)} has strides {value.stride()}; the contract says {expected.stride()}",
        )


def kept(layout: Callable[[Tensor], Tensor]) -> saved_tensors_hooks:
    """Hooks that give every saved tensor back in another layout. Scalars stay."""
    return saved_tensors_hooks(lambda t: layout(t) if t.dim() else t.clone(), lambda t: t)


@pytest.mark.parametrize(
    ("given", "back"),
    [
        ("contiguous", "transposed"),
        ("contiguous", "sliced"),
        ("contiguous", "shifted"),
        ("transposed", "contiguous"),
        ("transposed", "from-the-cpu"),
    ],
)
@pytest.mark.targets("differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_saved_layouts(target: Target, case: Case, dtype: torch.dtype, given: str, back: str) -> None:
    """Hooks of saved tensors may return other strides than they got, as offloading and compressing ones do."""
    layouts = {"contiguous": Tensor.contiguous, "transposed": transposed, "sliced": sliced, "shifted": shifted}
    build = layouts[given]
    # Pinned memory makes it forget strides, also where it finds no CUDA and so doesn't pin.
    place = "cuda" if target.device == "cpu" else target.device
    hooks = save_on_cpu(pin_memory=True, device_type=place) if back == "from-the-cpu" else kept(layouts[back])
    with hooks:
        check(target, lambda draw: relaid(arguments_of(target, case, dtype, draw), build))


@pytest.mark.targets("differentiable")
@pytest.mark.cases(groups=("option",), dtypes=(torch.bfloat16,), short=QUICK)
def test_saved_layouts_of_options(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Which tensors are saved, and how they lie, is the options' to say."""
    with kept(sliced):
        check(target, lambda draw: arguments_of(target, case, dtype, draw))


@pytest.mark.targets("differentiable")
@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_sum_backward(target: Target, case: Case, dtype: torch.dtype) -> None:
    """`result.sum().backward()` sends an incoming gradient of stride 0 in every dimension: the same bits as a full one."""
    arguments = complete(target.op, arguments_of(target, case, dtype))
    with torch.no_grad():
        incoming = incoming_for(target.op, arguments, name_results(target.op, target.op.reference(**arguments)))
    incoming = {name: value.new_full((), 2.0).expand(value.shape) for name, value in incoming.items()}
    with only(target):
        actual = evaluate(target.op, target.op, arguments, None, incoming)
        full = evaluate(target.op, target.op, arguments, None, {n: v.contiguous() for n, v in incoming.items()})
    for name, value in full.gradients.items():
        require(same_bits(actual.gradients[name], value), f"the gradient of {name} differs")


def with_far_apart(arguments: Arguments, *names: str) -> Arguments:
    """The named arguments, of one shape, with rows so far apart that their offsets pass 2^31 elements, side by side.

    Memory that is not touched is not taken on a CPU: the storage is mostly address space.
    """
    tensor = arguments[names[0]]
    rows = next(d for d in range(tensor.dim() - 1) if tensor.shape[d] > 1)
    strides = list(tensor.contiguous().stride())
    row = strides[rows]
    strides[rows] = max((1 << 31) // (tensor.shape[rows] - 1) + 8, row * len(names))
    length = len(names) * row + (tensor.shape[rows] - 1) * strides[rows]
    storage = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
    views = {name: storage.as_strided(tensor.shape, strides, i * row) for i, name in enumerate(names)}
    return {**arguments, **{name: view.copy_(arguments[name]) for name, view in views.items()}}


def with_one_row(op: Op[..., Any], arguments: Arguments) -> Arguments:
    """The first row alone, with a stride beyond 2^31 in the first argument: as `logits[:, -1]` of one long sequence has."""
    rows = place_of_rows(op, complete(op, arguments)).arguments
    few = {name: value.narrow(rows[name], 0, 1) if name in rows else value for name, value in arguments.items()}
    x, strides = few[op.names[0]], list(few[op.names[0]].stride())
    strides[rows[op.names[0]]] = (1 << 31) + 8
    return {**few, op.names[0]: x.as_strided(x.shape, strides)}


def with_rows(arguments: Arguments, dtype: torch.dtype) -> list[tuple[str, ...]]:
    """The arguments of a dtype that have several rows, in turn; and together those of one shape, which may share strides."""
    alike: dict[torch.Size, tuple[str, ...]] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dtype is dtype and any(size > 1 for size in value.shape[:-1]):
            alike[value.shape] = (*alike.get(value.shape, ()), name)
    return [(name,) for names in alike.values() for name in names] + [n for n in alike.values() if len(n) > 1]


@pytest.mark.cases(dtypes=(torch.bfloat16,), first=1)
def test_offsets_beyond_32_bits(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Offsets and strides are 64-bit: inputs have rows that end beyond 2^31 elements, and a single row of such a stride."""
    arguments, first = arguments_of(target, case, dtype), target.op.names[0]
    for names in with_rows(arguments, dtype):
        check(target, lambda draw, names=names: with_far_apart(arguments_of(target, case, dtype, draw), *names))
    if arguments[first].dtype is dtype and arguments[first].dim() > 1:
        check(target, lambda draw: with_one_row(target.op, arguments_of(target, case, dtype, draw)))
