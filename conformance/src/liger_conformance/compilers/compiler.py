"""What a compiler of kernels is to the suite, and what it reports."""

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
    """

    kernel: str
    variant: str
    uses: dict[str, int]
    spills: int
    over: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel}[{self.variant}]"


class Compiler(Protocol):
    """Compiles what host code launches, for chips that this machine need not have.

    Attributes:
        chips: their names. For the first one, the suite's small cases are compiled in every dtype.
    """

    @property
    def chips(self) -> tuple[str, ...]: ...

    def obstacle(self) -> str | None:
        """Why this process can't compile, and what mends that; or None."""
        ...

    def compiling(self, chip: str) -> AbstractContextManager[tuple[str, list[Compiled]]]:
        """Until the context ends, compile each launch and launch nothing.

        Yields the device to make tensors on, which needn't exist nor hold data, and a list that grows with each launch.
        What can't be compiled raises the compiler's own error, out of the launch.
        """
        ...
