"""Checks of the interpreter beside the values, and how it says what it found."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any, Literal

from liger_conformance.interpreters.tileir.bytecode import Op


class KernelBug(Exception):
    """A kernel did what a GPU gives no meaning to.

    Args:
        kind: bounds, assumption, arithmetic, assertion, livelock, overlap, race or uninitialised.
        what: what it did.
        op: the operation that did it.
    """

    def __init__(self, kind: str, what: str, op: Op | None = None) -> None:
        super().__init__(kind, what)
        self.kind, self.what = kind, what
        self.location = op.location if op else None
        self.block: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        place = f" at {self.location}" if self.location else ""
        block = f", in block {self.block}" if self.block else ""
        return f"{self.kind}: {self.what}{place}{block}"


@dataclasses.dataclass
class Checks:
    """Checks that can be switched. Bounds, assumptions, assertions and integer arithmetic are always checked."""

    race: bool = True
    """Two blocks touch an element and one of them writes it, other than both by atomics. Costs most: 2 to 4 times the
    time of a launch.
    """
    overlap: bool = True
    """Two arguments overlap and one is written to: the compiler assumes that they don't."""
    poison: bool = True
    """Padding that is undetermined reads as NaN, of integers as a number far from zero; else as zero."""
    order: Literal["forward", "backward"] = "forward"
    """In which order blocks run."""
    most_iterations: int = 1_000_000
    """Iterations of a loop without bounds, before it counts as waiting for another block forever."""


checks = Checks()
"""Checks in force."""


@contextlib.contextmanager
def checking(**changes: Any) -> Generator[None, None, None]:
    """Change fields of `checks` until the context ends."""
    before = dataclasses.asdict(checks)
    dataclasses.replace(checks, **changes)  # which refuses unknown names
    vars(checks).update(changes)
    try:
        yield
    finally:
        vars(checks).update(before)
