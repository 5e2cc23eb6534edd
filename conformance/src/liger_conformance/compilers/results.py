"""Results of compiling, kept in a file that is committed, so that a run compiles only what has changed.

A line has a chip, a kernel, a key and the result, as JSON. A key is a digest of all that the result depends on: versions of the
compiler, the kernel's sources, constants, types and options. A launch whose key is not in the file is compiled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

DIGITS = 16
"""Hexadecimal digits of a key."""


class Differs(AssertionError):
    """A launch compiles to something else than the file says."""


class Results:
    """The results of a file, and those that a run has used.

    Args:
        path: the file. It need not exist.
        share: of the launches in the file, those that are compiled nonetheless and compared: from 0 to 1.
        seed: which of them.
        writes: a launch that compiles to something else than the file says replaces its line, and is no error.
    """

    def __init__(self, path: Path, share: float = 0.0, seed: int = 0, writes: bool = False) -> None:
        self.path, self.share, self.seed, self.writes = path, share, seed, writes
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        words = (line.split(" ", 3) for line in lines)
        self.kept = {" ".join(name): result for *name, result in words}
        self.used: dict[str, str] = {}
        """The results of this run, by chip, kernel and key."""

    def of(
        self,
        chip: str,
        kernel: str,
        launch: str,
        compile: Callable[[], Any],
        is_current: Callable[[Any], bool] = lambda result: True,
    ) -> Any:
        """A launch's result.

        Args:
            chip: its name.
            kernel: file and function.
            launch: all that decides the result.
            compile: returns the result, of what JSON can hold.
            is_current: whether a result that was kept can be taken.

        Raises:
            Differs: the launch was compiled to be compared, and is not as the file says.
        """
        name = f"{chip} {kernel} {hashlib.sha256(launch.encode()).hexdigest()[:DIGITS]}"
        result = self.used.get(name) or self.kept.get(name)
        if result is None or not is_current(json.loads(result)):
            result = _text(compile())
        elif name not in self.used and self._is_compared(name):
            compiled = _text(compile())
            if compiled != result and not self.writes:
                raise Differs(f"{self.path.name} has {result} for {name}; it compiles to {compiled}")
            result = compiled
        self.used[name] = result
        return json.loads(result)

    def write(self, complete: Collection[str]) -> None:
        """Write the file anew, with the results of this run. Of chips that are `complete`, all others leave it."""
        others = {name: result for name, result in self.kept.items() if name.partition(" ")[0] not in complete}
        lines: Iterable[str] = (f"{name} {result}\n" for name, result in sorted({**others, **self.used}.items()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(lines), "utf-8")

    def _is_compared(self, name: str) -> bool:
        drawn = int(hashlib.sha256(f"{self.seed} {name}".encode()).hexdigest()[:8], 16)
        return drawn < self.share * 16**8


def _text(result: Any) -> str:
    return json.dumps(result, separators=(",", ":"))


current: Results | None = None
"""Results of this run. None: every launch is compiled."""
