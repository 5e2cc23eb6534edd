"""The report of a run: op × language × device × dtype. Outcomes are counted apart and never added up."""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

OUTCOMES = ("failed", "known failure", "passed", "interpreted", "executed", "compiled", "not claimed", "not run")
"""In the order of a cell. ``interpreted`` passed with no hardware involved, and so did ``executed``, which ran as it was
compiled for the chip that the report names; ``compiled`` was not run at all."""

WITH_REASONS = ("not claimed", "not run", "known failure")
"""The outcomes that say why."""

NOT_CLAIMED = "not claimed: "
"""How a skip's reason starts when the implementation refuses the case."""

Place = tuple[str, str, str, str]
"""op, language, device, dtype (``any``: the test is of no dtype)."""


def classify(report: Any, lane: str) -> str | None:
    """The outcome that a test's phase shows, or None when it shows nothing yet."""
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return "known failure"
        return "not claimed" if reason_of(report).startswith(NOT_CLAIMED) else "not run"
    if report.failed:
        return "failed"
    return lane if report.when == "call" else None


def reason_of(report: Any) -> str:
    """Why a test was skipped."""
    why: Any = report.longrepr
    text = str(cast("tuple[Any, ...]", why)[2] if isinstance(why, tuple) else why)
    return text.removeprefix("Skipped: ")


class Report:
    """Collects outcomes; prints and writes the matrix, and what compiled kernels take.

    Args:
        device: the device type of the run; None where nothing runs.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.counts: dict[Place, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[Place, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        self.languages_not_run: list[tuple[str, str, str]] = []
        self.kernels: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        self.reached: list[str] = []
        self.modes: dict[tuple[str, str, str], str] = {}
        self.ran = 0
        self.random = ""
        """How many random calls were asked for, and their seed."""

    def not_run(self, language: str, device: str, why: str) -> None:
        """A whole language that can't run here."""
        self.languages_not_run.append((language, device, why))

    def not_claimed(self, op: str, language: str, device: str) -> None:
        """An op that a language has no kernel for."""
        self.counts[op, language, device, "any"]["not claimed"] += 1

    def add(self, place: Place, outcome: str, report: Any) -> None:
        """A test's outcome."""
        self.ran += 1
        self.counts[place][outcome] += 1
        if outcome in WITH_REASONS:
            reason = report.wasxfail if outcome == "known failure" else reason_of(report).removeprefix(NOT_CLAIMED)
            self.reasons[place][outcome][reason] += 1

    def add_kernels(self, place: Place, case: str, kernels: list[dict[str, Any]]) -> None:
        """Kernels that the test of a case compiled, for the chip that is the place's device: `Compiled` by field."""
        op, language, chip, dtype = place
        for kernel in kernels:
            key = (language, chip, kernel["kernel"], kernel["variant"])
            entry = self.kernels.setdefault(key, {**kernel, "ops": set(), "calls": set()})
            entry["uses"] = {what: max(n, entry["uses"][what]) for what, n in kernel["uses"].items()}
            entry["ops"].add(op)
            entry["calls"].add(f"{op}-{case}-{dtype}")

    def add_mode(self, mode: str, language: str, device: str, outcome: str) -> None:
        """The outcome of a language in one of PyTorch's modes."""
        self.modes[mode, language, device] = outcome

    def heading(self) -> dict[str, str]:
        """Versions and hardware."""
        facts = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "machine": platform.machine(),
            "device": self.device or "none",
        }
        if self.random:
            facts["random"] = self.random
        if self.device not in ("cpu", None):
            facts["device"] = f"{self.device}: {getattr(torch, self.device).get_device_name()}"
        facts["python"] = platform.python_version()
        names = ["torch", "triton", "triton-ascend", "cuda-tile", "torch-npu", "liger-core", "liger-conformance"]
        names += [
            f"liger-{language}" for language in sorted({place[1] for place in self.counts}) if language != "torch"
        ]
        for name in names:
            try:
                facts[name] = version(name)
            except PackageNotFoundError:
                continue
        return facts

    def rows(self) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """The matrix: column heads, and for each op its cells."""
        columns = sorted(
            {place[1:] for place in self.counts}, key=lambda c: (c[0] != "torch", c[0], c[1], _DTYPE_ORDER.get(c[2], 9))
        )
        table: list[tuple[str, list[str]]] = []
        for op in sorted({place[0] for place in self.counts}):
            table.append((op, [_cell(self.counts.get((op, *column), Counter())) for column in columns]))
        return [f"{language}/{device} {dtype}" for language, device, dtype in columns], table

    def kernel_rows(self) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """The most that any variant of a compiled kernel takes: column heads, and for each kernel its cells."""
        columns = sorted({key[:2] for key in self.kernels})
        most: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
        for (language, chip, name, _), kernel in self.kernels.items():
            most[language, chip, name] |= Counter({**kernel["uses"], "spilled": kernel["spills"]})
        table = [
            (name, [", ".join(f"{n} {what}" for what, n in most[(*column, name)].items()) or "-" for column in columns])
            for name in sorted({key[2] for key in self.kernels})
        ]
        return [f"{language}/{chip}" for language, chip in columns], table

    def text(self) -> str:
        """The matrix for a terminal."""
        from rich.console import Console
        from rich.table import Table

        console = Console(width=1000, force_terminal=False, no_color=True)  # as wide as it needs
        title = ", ".join(f"{k} {v}" for k, v in self.heading().items())
        with console.capture() as capture:
            for name, (heads, table) in self._tables().items():
                grid = Table(title=title, title_justify="left")
                grid.add_column(name, no_wrap=True)
                for head in heads:
                    grid.add_column(head)
                for row, cells in _folded(table) if name == "op" else table:
                    grid.add_row(row, *cells)
                console.print(grid)
                title = None
        return capture.get() + "".join(f"{line}\n" for line in self._notes())

    def _tables(self) -> dict[str, tuple[list[str], list[tuple[str, list[str]]]]]:
        return {"op": self.rows()} | ({"kernel": self.kernel_rows()} if self.kernels else {})

    def _notes(self) -> list[str]:
        notes = [f"not run: {language} on {device}: {why}" for language, device, why in self.languages_not_run]
        for outcome, reasons in self._all_reasons().items():
            notes += [f"{outcome} ({count}): {reason}" for reason, count in sorted(reasons.items())]
        return notes + self.reached

    def _all_reasons(self) -> dict[str, Counter[str]]:
        """The reasons of all places together, by outcome."""
        totals = {outcome: Counter[str]() for outcome in WITH_REASONS}
        for outcomes in self.reasons.values():
            for outcome, reasons in outcomes.items():
                totals[outcome] += reasons
        return totals

    def write(self, directory: Path) -> None:
        """Write conformance.json and conformance.md."""
        directory.mkdir(parents=True, exist_ok=True)
        lines = ["# Conformance", "", ", ".join(f"{k} {v}" for k, v in self.heading().items())]
        for name, (heads, table) in self._tables().items():
            lines += ["", f"| {name} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
            lines += [f"| {row} | " + " | ".join(cells) + " |" for row, cells in table]
        lines += ["", *(f"- {note}" for note in self._notes())]
        (directory / "conformance.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
        cells = [
            dict(zip(("op", "language", "device", "dtype"), place, strict=True))
            | {"outcomes": dict(counts), "reasons": {o: dict(r) for o, r in self.reasons.get(place, {}).items()}}
            for place, counts in sorted(self.counts.items())
        ]
        whole = {
            "heading": self.heading(),
            "cells": cells,
            "kernels": [
                {"language": key[0], "chip": key[1], **kernel}
                | {"ops": sorted(kernel["ops"]), "calls": sorted(kernel["calls"])}
                for key, kernel in sorted(self.kernels.items())
            ],
            "modes": [
                dict(zip(("mode", "language", "device"), key, strict=True)) | {"outcome": outcome}
                for key, outcome in self.modes.items()
            ],
            "languages not run": [
                dict(zip(("language", "device", "why"), entry, strict=True)) for entry in self.languages_not_run
            ],
            "reasons": {outcome: dict(reasons) for outcome, reasons in self._all_reasons().items()},
        }
        (directory / "conformance.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


_DTYPE_ORDER = {"float32": 0, "bfloat16": 1, "float16": 2, "any": 3}


def _folded(table: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """The table with one row for all ops that no language has: of a new language these are nearly all."""
    idle = [row for row in table if set(row[1]) <= {"-", "not claimed"}]
    if len(idle) < 2 or len(idle) == len(table):
        return table
    cells = [
        "not claimed" if "not claimed" in column else "-" for column in zip(*(row[1] for row in idle), strict=True)
    ]
    return [*(row for row in table if row not in idle), (f"{len(idle)} other ops", cells)]


def _cell(counts: Counter[str]) -> str:
    parts: list[str] = []
    for outcome in OUTCOMES:
        if n := counts[outcome]:
            parts.append(outcome if outcome == "not claimed" and sum(counts.values()) == n else f"{n} {outcome}")
    return ", ".join(parts) or "-"
