"""Any strides, of inputs and of incoming gradients."""

import pytest
import torch
from torch import Tensor

from liger_conformance.case import QUICK, Case
from liger_conformance.compare import same_bits
from liger_conformance.running import (
    Arguments,
    Target,
    complete,
    evaluate,
    incoming_for,
    name_results,
    only,
)
from liger_conformance.suite.test_values import arguments_of, check


def transposed(tensor: Tensor) -> Tensor:
    """The same values, the last two dimensions swapped in memory."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else sliced(tensor)


def sliced(tensor: Tensor) -> Tensor:
    """The same values, every other element of a larger tensor, after an odd offset."""
    larger = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 3)
    view = larger[..., 3::2]
    view.copy_(tensor)
    return view


def padded(tensor: Tensor) -> Tensor:
    """The same values, as the first columns of longer rows."""
    longer = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 5)
    view = longer[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def expanded(tensor: Tensor) -> Tensor:
    """The first row, seen as every row (stride 0)."""
    return tensor[:1].expand(tensor.shape) if tensor.dim() > 1 else tensor


def outermost_last(tensor: Tensor) -> Tensor:
    """The same values, the first dimension innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor


LAYOUTS = (transposed, sliced, padded, expanded, outermost_last)


def relaid(arguments: Arguments, layout: object) -> Arguments:
    """The arguments with every tensor in another layout. Scalars stay."""
    return {n: layout(v) if isinstance(v, Tensor) and v.dim() else v for n, v in arguments.items()}  # type: ignore[operator]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.cases(groups=QUICK, dtypes=(torch.bfloat16,), first=1)
def test_input_layouts(target: Target, case: Case, dtype: torch.dtype, layout: object) -> None:
    """Non-contiguous inputs give the answer of contiguous ones."""
    check(target, lambda draw: relaid(arguments_of(target, case, dtype, draw), layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.cases(groups=QUICK, dtypes=(torch.bfloat16,), first=1)
def test_incoming_gradient_layouts(target: Target, case: Case, dtype: torch.dtype, layout: object) -> None:
    """So do non-contiguous incoming gradients."""
    arguments = complete(target.op, arguments_of(target, case, dtype))
    with torch.no_grad():
        incoming = incoming_for(target.op, name_results(target.op, target.op.reference(**arguments)))
    check(target, lambda draw: arguments_of(target, case, dtype, draw), None, relaid(incoming, layout))


@pytest.mark.cases(groups=QUICK, dtypes=(torch.bfloat16,), first=1)
def test_sum_backward(target: Target, case: Case, dtype: torch.dtype) -> None:
    """`result.sum().backward()` sends an incoming gradient of stride 0 in every dimension: the same bits as a full one."""
    arguments = complete(target.op, arguments_of(target, case, dtype))
    with torch.no_grad():
        incoming = incoming_for(target.op, name_results(target.op, target.op.reference(**arguments)))
    incoming = {name: value.new_full((), 2.0).expand(value.shape) for name, value in incoming.items()}
    with only(target):
        actual = evaluate(target.op, target.op, arguments, None, incoming)
        full = evaluate(target.op, target.op, arguments, None, {n: v.contiguous() for n, v in incoming.items()})
    for name, value in full.gradients.items():
        assert same_bits(actual.gradients[name], value), f"the gradient of {name} differs"


def with_far_apart(arguments: Arguments, name: str) -> Arguments:
    """One argument's rows so far apart that their offsets pass 2^31 elements.

    Memory that is not touched is not taken on a CPU: the storage is mostly address space.
    """
    tensor = arguments[name]
    rows = next(d for d in range(tensor.dim() - 1) if tensor.shape[d] > 1)
    strides = list(tensor.contiguous().stride())
    strides[rows] = max((1 << 31) // (tensor.shape[rows] - 1) + 8, strides[rows])
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    view = torch.empty(length, dtype=tensor.dtype, device=tensor.device).as_strided(tensor.shape, strides)
    return {**arguments, name: view.copy_(tensor)}


@pytest.mark.cases(groups=QUICK, dtypes=(torch.bfloat16,), first=1)
def test_offsets_beyond_32_bits(target: Target, case: Case, dtype: torch.dtype) -> None:
    """Element offsets are 64-bit: each input in turn has rows that end beyond 2^31 elements."""
    for name, value in arguments_of(target, case, dtype).items():
        if isinstance(value, Tensor) and value.dtype is dtype and any(size > 1 for size in value.shape[:-1]):
            check(target, lambda draw, name=name: with_far_apart(arguments_of(target, case, dtype, draw), name))
