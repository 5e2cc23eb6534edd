"""An op on two parts of an independent dimension gives the parts, or addends, of the whole: what `dimensions` declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_conformance.evaluate import Arguments, Outcome, complete, evaluate, has_rows, incoming_of, widen
from liger_core.contract import Op
from liger_core.dimensions import Dimensions, independent

TOLERANCE = 1e-12
"""Error of what is joined, in float64, beside the largest value: sums are in another order."""


def declared(op: Op[..., Any]) -> Dimensions:
    """The dimensions that an op declares.

    Raises:
        AssertionError: it doesn't.
    """
    if op.dimensions is None:
        example = 'dimensions="x: ... H, weight: H -> ... H"'
        raise AssertionError(f"{op.name} doesn't say which of its dimensions are independent; @op takes {example}")
    return op.dimensions


def names_of(op: Op[..., Any], arguments: Arguments) -> dict[str, tuple[str, ...]]:
    """The name of each dimension of each tensor of a call, which has all its arguments."""
    tensors = {name: arguments[name] for name in op.tensors if arguments[name] is not None}
    return {name: declared(op).of(name, tensor.dim(), arguments) for name, tensor in tensors.items()}


def divisible(op: Op[..., Any], arguments: Arguments) -> dict[str, int]:
    """The independent names that have more than one element in a call, with their sizes."""
    sizes: dict[str, int] = {}
    arguments = complete(op, arguments)
    for tensor, names in names_of(op, arguments).items():
        for name, size in zip(names, arguments[tensor].shape, strict=True):
            if independent(name) and not name.endswith("'"):
                sizes[name] = max(size, sizes.get(name, 0))
    return {name: size for name, size in sizes.items() if size > 1}


class Rows(NamedTuple):
    """The rows of a call: how many there are, and in which dimension each argument and each result has them, by name."""

    number: int
    arguments: dict[str, int]
    results: dict[str, int]


def place_of_rows(op: Op[..., Any], arguments: Arguments, results: Mapping[str, Tensor | None] | None = None) -> Rows:
    """Rows are the first independent dimension of the first argument. A tensor in which its size is 1 has none.

    Args:
        op: the contract. If it declares no independent dimension, all tensors with as many rows as the first argument have them.
        arguments: by name, all of them.
        results: by name, if their places are wanted.
    """
    results, first = results or {}, op.names[0]
    names = {} if op.dimensions is None else names_of(op, arguments)
    if not any(independent(name) for name in names.get(first, ())):
        number = arguments[first].shape[0]
        leading = [{name: 0 for name, v in values.items() if has_rows(v, number)} for values in (arguments, results)]
        return Rows(number, *leading)
    result_names = {
        name: declared(op).of_result(i, value.dim(), arguments)
        for i, (name, value) in enumerate(results.items())
        if value is not None
    }
    rows = next(name for name in names[first] if independent(name))
    number = arguments[first].shape[names[first].index(rows)]

    def places(values: Mapping[str, Any], dims: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
        named = {name: each.index(rows) for name, each in dims.items() if rows in each}
        return {name: at for name, at in named.items() if values[name].shape[at] == number}

    return Rows(number, places(arguments, names), places(results, result_names))


def ends_of(rows: Rows, device: str) -> Tensor:
    """The first two rows, and the last two: those that are checked of a huge tensor."""
    return torch.tensor([0, 1, rows.number - 2, rows.number - 1], device=device)


def select_rows(values: Mapping[str, Any], places: Mapping[str, int], rows: Tensor) -> dict[str, Any]:
    """The given rows of each value that has rows, and the other values as they are."""
    return {n: v.index_select(places[n], rows) if n in places else v for n, v in values.items()}


def check_divided(op: Op[..., Any], arguments: Arguments, over: str) -> None:
    """Hold the reference, called on two parts of a dimension and joined as declared, against the reference on all of it.

    Args:
        op: the contract.
        arguments: by name. They are taken in float64.
        over: one of the `divisible` names.

    Raises:
        AssertionError: which result or gradient differs.
    """
    whole = {name: widen(value) for name, value in complete(op, arguments).items()}
    size, named = divisible(op, whole)[over], names_of(op, whole)
    places = {name: _place(names, over) for name, names in named.items()}
    # A tensor with one element where others have more is in both parts, as is one that lacks the name.
    places = {
        name: at if at is not None and (whole[name].shape[at] == size or named[name][at].endswith("'")) else None
        for name, at in places.items()
    }
    parts = [
        {
            name: value if (at := places.get(name)) is None else value.tensor_split(2, at)[i]
            for name, value in whole.items()
        }
        for i in range(2)
    ]
    incoming = incoming_of(op, whole)
    truth = evaluate(op, op.reference, whole, incoming=incoming)
    layout: dict[str, tuple[int | None, list[float]]] = {}
    for number, (name, value) in enumerate(truth.results.items()):
        dims = 0 if value is None else value.dim()
        at = _place(declared(op).of_result(number, dims, whole), over) if dims else None
        layout[name] = at, [_share(op, number, part, whole) for part in parts]

    outcomes: list[Outcome] = []
    for i, part in enumerate(parts):
        pieces = {
            name: gradient * layout[name][1][i] if (at := layout[name][0]) is None else gradient.tensor_split(2, at)[i]
            for name, gradient in incoming.items()
        }
        outcomes.append(evaluate(op, op.reference, part, incoming=pieces))

    for name, value in truth.results.items():
        if value is not None:
            at, shares = layout[name]
            _hold(f"{op.name} divided over {over}: {name}", [o.results[name] for o in outcomes], at, shares, value)
        if whole.get("reduction") == "sum":
            break  # the others are no sums
    for name, gradient in truth.gradients.items():
        if gradient is not None:
            pieces = [outcome.gradients[name] for outcome in outcomes]
            _hold(f"{op.name} divided over {over}: gradient of {name}", pieces, places[name], (1.0, 1.0), gradient)


def _place(names: tuple[str, ...], over: str) -> int | None:
    return next((at for at, name in enumerate(names) if name.rstrip("'") == over), None)


def _share(op: Op[..., Any], number: int, part: Arguments, whole: Arguments) -> float:
    """The weight of a part in a result that is a mean; 1 where it is a sum."""
    labels = declared(op).results[number].counted
    return 1.0 if labels is None else _count(op, labels, part) / max(_count(op, labels, whole), 1)


def _count(op: Op[..., Any], labels: str, call: Arguments) -> int:
    if call[labels] is not None:
        return int((call[labels] != call["ignore_index"]).sum())
    (dim,) = declared(op).tensors[labels]
    return next(call[name].shape[names.index(dim)] for name, names in names_of(op, call).items() if dim in names)


def _hold(what: str, pieces: list[Any], at: int | None, shares: Sequence[float], truth: Tensor) -> None:
    joined = pieces[0] * shares[0] + pieces[1] * shares[1] if at is None else torch.cat(pieces, at)
    largest = truth.abs().nan_to_num().max().item() if truth.numel() else 0.0
    torch.testing.assert_close(
        joined,
        truth,
        rtol=0.0,
        atol=TOLERANCE * max(1.0, largest),
        equal_nan=True,
        check_dtype=False,
        msg=lambda message: f"{what}\n{message}",
    )
