"""Blocks of operations as Python functions: control flow, reductions and scans, and all the rest in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_conformance.interpreters.tileir import accesses, floats, integers, shapes
from liger_conformance.interpreters.tileir.accesses import Run
from liger_conformance.interpreters.tileir.bytecode import DYNAMIC, Block, Op
from liger_conformance.interpreters.tileir.checks import KernelBug, checks
from liger_conformance.interpreters.tileir.memory import Value, dtype_named

PURE = {**integers.OPERATIONS, **floats.OPERATIONS, **shapes.OPERATIONS}
"""Operations that depend on their operands alone."""


class Signal(NamedTuple):
    """How a block ended, and with which values: yield, continue, break or return."""

    kind: str
    values: list[Value]


Slots = list[Value]
Step = Callable[[Run, Slots], Signal | None]


class InterpreterError(RuntimeError):
    """The interpreter failed, not the kernel."""


def compile_block(block: Block) -> list[tuple[Op, Step]]:
    """A function for each operation of a block, which reads and writes the slots of values.

    Raises:
        NotImplementedError: an operation that can't be run.
    """
    unused = _assumptions_without_effect(block)
    return [(op, _nothing(op) if op.name == "assume" and op.results[0] in unused else _compile(op)) for op in block.ops]


def execute(code: list[tuple[Op, Step]], run: Run, slots: Slots) -> Signal | None:
    """Run a block until an operation ends it."""
    entry = None
    try:
        for entry in code:
            if (signal := entry[1](run, slots)) is not None:
                return signal
    except InterpreterError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        where = f" {entry[0].name} at {entry[0].location}" if entry else ""
        raise InterpreterError(f"Tile IR operation{where}, in block {run.block}: {error}") from error
    return None


def _assumptions_without_effect(block: Block) -> set[int]:
    """The strides of axes of one element: cuda.tile assumes of them what need not be true, and nothing reads them."""
    assumed = set[int]()
    for op in block.ops:
        if op.name == "make_tensor_view":
            dynamic = iter(op.named["strides"])
            for size, stride in zip(op.types[0].shape, op.types[0].strides, strict=True):
                slot = next(dynamic) if stride == DYNAMIC else None
                if size == 1 and slot is not None:
                    assumed.add(slot)
    return assumed


def _nothing(op: Op) -> Step:
    (result,), (operand,) = op.results, op.operands

    def step(run: Run, slots: Slots) -> None:
        slots[result] = slots[operand]

    return step


def _compile(op: Op) -> Step:
    if op.name in PURE:
        return _pure(op)
    if op.name in accesses.OPERATIONS:
        return _access(op)
    if op.name in _ENDS:
        return _end(op)
    if op.name in _REGIONS:
        return _REGIONS[op.name](op)
    raise NotImplementedError(f"Tile IR operation {op.name} at {op.location}")


def _pure(op: Op) -> Step:
    function, results, operands = PURE[op.name](op), op.results, op.operands
    if op.name in ("get_tensor_shape", "get_index_space_shape"):

        def step(run: Run, slots: Slots) -> None:
            _set(slots, results, function(slots[operands[0]]))

    elif len(operands) == 1:
        (result,), (only,) = results, operands

        def step(run: Run, slots: Slots) -> None:
            slots[result] = function(slots[only])

    elif len(operands) == 2:
        (result,), (left, right) = results, operands

        def step(run: Run, slots: Slots) -> None:
            slots[result] = function(slots[left], slots[right])

    else:
        (result,) = results

        def step(run: Run, slots: Slots) -> None:
            slots[result] = function(*(slots[operand] for operand in operands))

    return step


def _access(op: Op) -> Step:
    function, results, named = accesses.OPERATIONS[op.name], op.results, op.named

    def value(slots: Slots, place: int | list[int] | None) -> Any:
        if place is None:
            return None
        return [slots[slot] for slot in place] if isinstance(place, list) else slots[place]

    def step(run: Run, slots: Slots) -> None:
        _set(slots, results, function(run, op, {name: value(slots, place) for name, place in named.items()}))

    return step


_ENDS = ("yield", "continue", "break", "return")


def _end(op: Op) -> Step:
    def step(run: Run, slots: Slots) -> Signal:
        return Signal(op.name, [slots[operand] for operand in op.operands])

    return step


def _set(slots: Slots, places: list[int], values: Any) -> None:
    for place, value in zip(places, values, strict=True):
        slots[place] = value


def _if(op: Op) -> Step:
    bodies = [compile_block(region) for region in op.regions]

    def step(run: Run, slots: Slots) -> Signal | None:
        signal = execute(bodies[0 if bool(slots[op.operands[0]]) else 1], run, slots)
        if signal is None or signal.kind != "yield":
            return signal
        _set(slots, op.results, signal.values)
        return None

    return step


def _for(op: Op) -> Step:
    (region,) = op.regions
    body = compile_block(region)
    dtype = dtype_named(region.types[0].element, op)
    first, end, every, *carried = op.operands
    mask = (1 << 8 * dtype.itemsize) - 1 if op.attributes["unsigned"] else -1

    def step(run: Run, slots: Slots) -> Signal | None:
        values = [slots[slot] for slot in carried]
        start, stop, stride = (int(slots[slot]) & mask for slot in (first, end, every))
        if stride <= 0:
            raise KernelBug("bounds", f"a loop has the step {stride}", op)
        for i in range(start, stop, stride):
            _set(slots, region.parameters, [torch.tensor(i, dtype=dtype), *values])
            signal = execute(body, run, slots)
            if signal is not None:
                if signal.kind == "return":
                    return signal
                values = signal.values
        _set(slots, op.results, values)
        return None

    return step


def _loop(op: Op) -> Step:
    (region,) = op.regions
    body = compile_block(region)

    def step(run: Run, slots: Slots) -> Signal | None:
        values = [slots[slot] for slot in op.operands]
        for _ in range(checks.most_iterations):
            _set(slots, region.parameters, values)
            signal = execute(body, run, slots)
            if signal is None or signal.kind == "return":
                return signal
            values = signal.values
            if signal.kind == "break":
                _set(slots, op.results, values)
                return None
        raise KernelBug("livelock", f"a loop passed {checks.most_iterations} iterations: does it wait for a block?", op)

    return step


Combine = Callable[[Run, Slots, list[Tensor], list[Tensor]], list[Tensor]]


def _combiner(op: Op) -> Combine:
    """The body of a reduction, on whole tiles at once. It is written for scalars: shaping those is left out."""
    (region,) = op.regions
    for inner in region.ops:
        if inner.regions:
            raise NotImplementedError(f"Tile IR operation {inner.name} in the body of {op.name} at {inner.location}")
    code = [
        (inner, _nothing(inner) if inner.name in ("reshape", "broadcast") else _compile(inner)) for inner in region.ops
    ]

    def combine(run: Run, slots: Slots, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        _set(slots, region.parameters, [x for pair in zip(left, right, strict=True) for x in pair])
        signal = execute(code, run, slots)
        if signal is None:
            raise InterpreterError(f"the body of {op.name} at {op.location} yields nothing")
        return signal.values

    return combine


def _is_sum(op: Op) -> bool:
    """Whether a reduction is a sum, which PyTorch adds up in fewer steps."""
    first, *others = op.regions[0].ops
    return (
        len(op.operands) == len(others) == 1
        and first.name in ("addf", "addi")
        and first.types[0].element in ("f32", "f64", "i32", "i64")
        and not first.attributes.get("rounding")
        and not first.attributes.get("ftz")
    )


def _reduce(op: Op) -> Step:
    combine, axis, is_sum = _combiner(op), op.attributes["dim"], _is_sum(op)

    def step(run: Run, slots: Slots) -> None:
        tiles = [slots[slot] for slot in op.operands]
        if is_sum:
            slots[op.results[0]] = tiles[0].sum(axis, dtype=tiles[0].dtype)
            return
        size = tiles[0].shape[axis]
        while size > 1:  # sizes of tiles are powers of two
            size //= 2
            halves = ([tile.narrow(axis, start, size) for tile in tiles] for start in (0, size))
            tiles = combine(run, slots, *halves)
        _set(slots, op.results, [tile.squeeze(axis) for tile in tiles])

    return step


def _scan(op: Op) -> Step:
    combine, axis, backward = _combiner(op), op.attributes["dim"], op.attributes["reverse"]

    def step(run: Run, slots: Slots) -> None:
        tiles = [slots[slot].flip(axis) if backward else slots[slot] for slot in op.operands]
        size, distance = tiles[0].shape[axis], 1
        while distance < size:
            earlier = [tile.narrow(axis, 0, size - distance) for tile in tiles]
            later = [tile.narrow(axis, distance, size - distance) for tile in tiles]
            combined = combine(run, slots, earlier, later)
            unchanged = [tile.narrow(axis, 0, distance) for tile in tiles]
            tiles = [torch.cat(pair, axis) for pair in zip(unchanged, combined, strict=True)]
            distance *= 2
        _set(slots, op.results, [tile.flip(axis) if backward else tile for tile in tiles])

    return step


_REGIONS: dict[str, Callable[[Op], Step]] = {"if": _if, "for": _for, "loop": _loop, "reduce": _reduce, "scan": _scan}
