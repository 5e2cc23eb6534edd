"""A kernel as a program of Python functions, and its launch: one block after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from liger_conformance.interpreters.tileir.accesses import Run
from liger_conformance.interpreters.tileir.bytecode import Function, Op, Type
from liger_conformance.interpreters.tileir.checks import KernelBug, checks
from liger_conformance.interpreters.tileir.control import PURE, Step, compile_block, execute
from liger_conformance.interpreters.tileir.memory import DTYPES, Array, Pointer, Shadow, Value, find_overlap

_INT32 = range(-(1 << 31), 1 << 31)


class Program:
    """A decoded kernel that can be launched on CPU tensors.

    Args:
        function: what was decoded.
        constraints: what it was compiled for, one per argument: the parameters of a cuda.tile KernelSignature.

    Raises:
        NotImplementedError: an operation that can't be run.
    """

    def __init__(self, function: Function, constraints: Sequence[Any]) -> None:
        self._function, self._constraints = function, constraints
        self._once, self._code = list[tuple[Op, Step]](), list[tuple[Op, Step]]()
        fixed = set(function.body.parameters)
        for op, step in compile_block(function.body):
            # Results of arguments alone are the same for every block.
            if op.name in PURE and fixed.issuperset(op.operands):
                fixed.update(op.results)
                self._once.append((op, step))
            else:
                self._code.append((op, step))

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Run every block of a grid.

        Raises:
            KernelBug: the kernel did what a GPU gives no meaning to.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiles are too small for more
        run = Run(grid, [])
        try:
            with torch.no_grad(), _disable_current_modes():
                values = list(self._bind(arguments, run.arrays))
                slots: list[Value] = values + [None] * (self._function.slots - len(values))
                execute(self._once, run, slots)
                for run.number, run.block in _blocks(grid):
                    execute(self._code, run, slots.copy())
                self._check_overlap(run.arrays)
        except KernelBug as bug:
            bug.block = run.block
            raise
        finally:
            torch.set_num_threads(threads)

    def _check_overlap(self, arrays: list[Array]) -> None:
        if checks.overlap and (pair := find_overlap(arrays)):
            one, other = pair
            raise KernelBug("overlap", f"{one.name} and {other.name} share memory, and one of them is written to")

    def _bind(self, arguments: Sequence[Any], arrays: list[Array]) -> Iterator[Value]:
        """The values of the function's parameters: of an array, a pointer, its sizes and its strides."""
        types, shadows = iter(self._function.body.types), dict[tuple[int, int], Shadow]()
        for position, (constraint, argument) in enumerate(zip(self._constraints, arguments, strict=True)):
            yield from self._bind_one(constraint, argument, f"argument {position}", types, arrays, shadows)

    def _bind_one(
        self,
        constraint: Any,
        argument: Any,
        name: str,
        types: Iterator[Type],
        arrays: list[Array],
        shadows: dict[tuple[int, int], Shadow],
    ) -> Iterator[Value]:
        from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, ScalarConstraint, TupleConstraint

        def scalar(value: Any) -> Tensor:
            return torch.tensor(value, dtype=DTYPES[next(types).element])

        def pointer(tensor: Tensor, name: str) -> Pointer:
            next(types)
            arrays.append(Array(tensor, name, shadows))
            return Pointer(arrays[-1], torch.tensor(0))

        if isinstance(constraint, ConstantConstraint):
            return
        if isinstance(constraint, TupleConstraint):
            for i, (inner, item) in enumerate(zip(constraint.items, argument, strict=True)):
                yield from self._bind_one(inner, item, f"{name}[{i}]", types, arrays, shadows)
        elif isinstance(constraint, ArrayConstraint):
            yield pointer(argument, name)
            for value in (*argument.shape, *argument.stride()):
                if constraint.index_dtype.bitwidth == 32 and value not in _INT32:
                    raise OverflowError(
                        f"{name} has shape {tuple(argument.shape)} and strides {argument.stride()}; a kernel's array "
                        "takes 32 bits of each, unless annotated with ct.IndexedWithInt64"
                    )
                yield scalar(value)
        elif isinstance(constraint, ScalarConstraint):
            yield scalar(argument)
        else:  # a list of arrays is a table: address, sizes and strides of each
            arrays.extend(Array(tensor, f"{name}[{i}]", shadows) for i, tensor in enumerate(argument))
            table = [[tensor.data_ptr(), *tensor.shape, *tensor.stride()] for tensor in argument]
            yield pointer(torch.tensor(table, dtype=torch.int64), f"{name}[]")
            yield scalar(len(argument))


def _blocks(grid: tuple[int, int, int]) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Numbers from 1 and places of blocks, in the order in which they run."""
    x, y, _ = grid
    total = grid[0] * grid[1] * grid[2]
    for i in range(total) if checks.order == "forward" else reversed(range(total)):
        yield i + 1, (i % x, i // x % y, i // (x * y))
