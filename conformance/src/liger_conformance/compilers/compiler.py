"""Interface of a compiler of kernels to the suite, and its reports."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Compiled:
    """A kernel, compiled for a chip as one launch asks for it.

    Attributes:
        kernel: file and function, such as ``rms_norm._backward``.
        variant: what was compiled for beside the chip: constants, warps, types of the arguments.
        uses: what it takes of the chip, by name, such as ``{"registers": 50, "shared bytes": 4096}``.
        spills: registers of a thread that are kept in memory for want of more.
        over: what is more than the chip has, in words. Such a kernel compiles, and can't be launched.
        lost: loads, stores and matrix products that the chip has fast instructions for, which the compiler could not
            use, and why.
        close: what may be more than the chip has, where that is an estimate. A warning.
    """

    kernel: str
    variant: str
    uses: dict[str, int]
    spills: int
    over: tuple[str, ...]
    lost: tuple[str, ...] = ()
    close: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kernel}[{self.variant}]"


class Compiler(Protocol):
    """Compiles what host code launches, for chips that this machine need not have.

    Attributes:
        chips: their names. For the first one more cases are compiled than for the others.
        slow: a launch takes it half a second or so: fewer cases are compiled for each chip.
    """

    @property
    def chips(self) -> tuple[str, ...]: ...

    @property
    def slow(self) -> bool: ...

    def obstacle(self) -> str | None:
        """Why this process can't compile, and what mends that; or None."""
        ...

    def compiling(self, chip: str) -> AbstractContextManager[tuple[str, list[Compiled]]]:
        """Until the context ends, compile each launch and launch nothing.

        Yields the device to make tensors on, which needn't exist nor hold data, and a list that grows with each launch.
        What can't be compiled raises the compiler's own error, out of the launch.
        """
        ...


class Executor(Compiler, Protocol):
    """A compiler whose result runs on the CPU: what it computes is checked there, and not how fast."""

    def obstacle_to_execution(self) -> str | None:
        """Why this process can't execute, and what mends that; or None."""
        ...

    def executing(self, chip: str) -> AbstractContextManager[str]:
        """Until the context ends, compile each launch as for the chip, and run it on the CPU.

        Yields the device to make tensors on. A launch that can't be run raises `CannotExecute`.
        """
        ...


class CannotExecute(Exception):
    """A kernel compiles, and what it compiles to can't be run on the CPU."""
