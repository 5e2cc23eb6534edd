"""The command line of a program that writes a record: lists of names, the device, the record's directory, and --smoke."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import records

import liger_core


class Command(argparse.ArgumentParser):
    """The options that all of these programs have, and those that are lists of names.

    Args:
        doc: the program's docstring, of which the first paragraph is shown.
        smoke: what ``--smoke`` runs.
    """

    def __init__(self, doc: str | None, smoke: str) -> None:
        super().__init__(description=(doc or "").split("\n\n")[0])
        self.known: dict[str, Sequence[str]] = {}
        self.add_argument("--device", default=liger_core.infer_device())
        self.add_argument("--out", type=Path, default=records.RECORDS, help="directory of the record")
        self.add_argument("--smoke", action="store_true", help=f"tiny sizes on the CPU, {smoke}: no record")

    def add_names(
        self, option: str, known: Sequence[str], default: Sequence[str] | None = None, note: str = ""
    ) -> None:
        """An option that takes names, joined by commas, of those that are `known`."""
        self.known[option] = known
        default = None if default is None else [*default]
        choices = f"of {', '.join(known)}{note}"
        self.add_argument(f"--{option}", type=lambda text: text.split(","), default=default, help=choices)

    def check(self, options: argparse.Namespace, measures: bool = True) -> None:
        """End the program where a name isn't known, or where it `measures` and there is nothing to measure on."""
        for option, known in self.known.items():
            if unknown := [name for name in getattr(options, option) if name not in known]:
                self.error(f"--{option}: {', '.join(unknown)}; it takes {', '.join(known)}")
        if measures and options.device == "cpu" and not options.smoke:
            self.error("not run: there is no accelerator here; --smoke runs tiny sizes on the CPU")
