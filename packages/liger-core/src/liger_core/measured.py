"""Which implementation of an op is the fastest on a chip, as it was measured there.

A table is JSON. Each kernel package may ship one, ``measured.json``, with the times of its own language; `liger tune` writes
one with the times of all languages into the user's cache directory::

    {chip: {"record": where the times come from,
            "eager": {op: [[size, {language: microseconds}], ...]}, "compiled": {...}}}

A time is that of a call with its backward. The size is the number of elements of the op's first argument. ``"torch"`` is the
reference: as it is, or in code that torch.compile made.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger_core.backend import backends

MARGIN = 1.05
"""A time has to be so many times another one to count as longer: less is what one call differs by from run to run."""

Table = dict[str, dict[str, Any]]


class Figure(NamedTuple):
    """What was measured of an op at one size: microseconds by language, and the record that they come from."""

    size: int
    times: Mapping[str, float]
    record: str

    def __str__(self) -> str:
        times = ", ".join(f"{language} {us:.1f} µs" for language, us in sorted(self.times.items(), key=lambda t: t[1]))
        return f"{times} ({self.record})"


def chip(device: str, index: int | None) -> str | None:
    """The name of an accelerator, such as ``"NVIDIA H200"``. None: nothing is measured there."""
    module = getattr(torch, device, None)
    if device in ("cpu", "meta") or module is None or not module.is_available():
        return None
    name = getattr(module, "get_device_name", None)
    return None if name is None else name(index)


def own_table() -> Path:
    """The file that `liger tune` writes: where torch.hub and others keep what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "liger" / "measured.json"


def versions() -> dict[str, str]:
    """What the times of this installation depend on."""
    found = {"torch": str(torch.__version__)}
    for package in sorted({b.package.partition(".")[0] for b in backends()} | {b.requires for b in backends()}):
        try:
            found[package] = version(package.replace("_", "-"))
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


@functools.cache
def _own() -> Table:
    """What `liger tune` wrote, unless other versions are installed by now."""
    try:
        written = json.loads(own_table().read_text("utf-8"))
        table: Table = written["chips"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"can't be read: {type(error).__name__}: {error}"
    else:
        if written.get("versions") == versions():
            return table
        why = f"is of {written.get('versions')}; installed are {versions()}"
    logging.getLogger("liger_core").warning("%s, which liger tune wrote, %s: it is not used", own_table(), why)
    return {}


@functools.cache
def shipped(package: str) -> Table:
    """The table that a kernel package ships; empty where it has none."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "measured.json"
        if file.exists():
            return json.loads(file.read_text("utf-8"))
    return {}


def _tables() -> Iterator[Sequence[Table]]:
    """The user's own, then all packages'. The second ones are asked where the first says nothing."""
    yield (_own(),)
    yield [shipped(b.package) for b in backends()]


def mentions(op: str) -> bool:
    """Whether a table has a line about an op, on any chip."""
    return any(
        op in on_chip.get(how, ())
        for tables in _tables()
        for table in tables
        for on_chip in table.values()
        for how in ("eager", "compiled")
    )


def figures(op: str, chip: str | None, compiled: bool) -> list[Figure]:
    """What was measured of an op on a chip, by size."""
    for tables in _tables():
        found: dict[int, Figure] = {}
        for table in tables:
            on_chip = table.get(chip or "", {})
            for size, times in on_chip.get("compiled" if compiled else "eager", {}).get(op, ()):
                others: Mapping[str, float] = found[size].times if size in found else {}
                found[size] = Figure(size, {**others, **times}, on_chip["record"])
        if found:
            return [found[size] for size in sorted(found)]
    return []


def between(smaller: Figure, larger: Figure) -> int:
    """The size from which on a call is more like the larger one."""
    return math.isqrt(smaller.size * larger.size)


def nearest(found: Sequence[Figure], size: int | None) -> Figure | None:
    """The figure of the size that is most like `size`; of None, the largest."""
    for smaller, larger in itertools.pairwise(found):
        if size is not None and size < between(smaller, larger):
            return smaller
    return found[-1] if found else None


def order(figure: Figure | None, defaults: Sequence[str], able: Collection[str]) -> list[str]:
    """The languages to try: ``["torch"]`` where the reference is the fastest, else without it.

    Args:
        figure: what was measured; None: nothing.
        defaults: the languages that are chosen unasked, in their order, of those that can run.
        able: all languages that can run. Those that are no default are taken where they are the fastest.
    """
    line = [*defaults, "torch"]
    times = {} if figure is None else {name: us for name, us in figure.times.items() if name in able or name == "torch"}
    if line[0] not in times:  # nothing to hold the others against
        return [*defaults]
    first = min(times, key=lambda name: times[name])
    if times[line[0]] <= times[first] * MARGIN:
        first = line[0]
    if first == "torch":
        return [first]
    slow = times.get("torch", math.inf) * MARGIN
    return [first, *(name for name in defaults if name != first and times.get(name, 0.0) <= slow)]
