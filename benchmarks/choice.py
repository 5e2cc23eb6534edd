"""What each language and the reference take per op and size, eager and compiled: the kernel packages' tables are made of it.

    python benchmarks/choice.py --seconds 300
    python benchmarks/choice.py --render compiled.csv eager.csv        # one record of several runs on one machine
    python tools/measured.py                                           # packages/*/src/*/measured.json of the records
    python benchmarks/choice.py --smoke

It measures as `liger tune` does on a user's machine; `liger_core.tune` says how.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import records
from command import Command

from liger_core import dispatch, measured, tune
from liger_core.backend import backends
from liger_core.contract import ops

TITLE = "Who is the fastest, per op and size"
HOWS = ("eager", "compiled")
COLUMNS = ("op", "case", "how", "size", "language", "us", "note")


def rows_of(found: tune.Found) -> list[dict[str, str]]:
    """A row for each language."""
    how = HOWS[found.cell.compiled]
    place = (found.cell.op, found.cell.group, how, str(found.size))
    rows = [(*place, language, f"{us:.1f}", "") for language, us in found.times.items()]
    rows += [(*place, language, "", note) for language, note in found.notes.items()]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def found_in(rows: Sequence[dict[str, str]]) -> list[tune.Found]:
    """What `rows_of` made rows of."""
    cells: dict[tune.Cell, tune.Found] = {}
    for row in rows:
        cell = tune.Cell(row["op"], row["case"], row["how"] == "compiled")
        found = cells.setdefault(cell, tune.Found(cell, int(row["size"]), {}, {}))
        if row["us"]:
            found.times[row["language"]] = float(row["us"])
        else:
            found.notes[row["language"]] = row["note"]
    return [*cells.values()]


def page(found: Sequence[tune.Found], languages: Sequence[str], defaults: Sequence[str]) -> str:
    """A line for each call, and what is chosen there."""
    lines = []
    for one in sorted(found):
        figure = measured.Figure(one.size, one.times, "")
        first = [*measured.order(figure, defaults, languages), "torch"][0]
        how = HOWS[one.cell.compiled]
        times = [f"{one.times[x]:.1f}" if x in one.times else "" for x in languages]
        lines.append([one.cell.op, one.cell.group, how, str(one.size), *times, first])
    return records.table(["op", "case", "how", "size", *(f"{x}, µs" for x in languages), "chosen"], lines)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a name that doesn't exist ends the program with those that do."""
    command = Command(__doc__, smoke="the reference alone")
    command.add_names("ops", sorted(ops), default=sorted(ops))
    command.add_names("hows", HOWS, default=HOWS)
    command.add_argument("--seconds", type=float, default=300.0, help="that it takes at most")
    command.add_argument(
        "--render",
        type=Path,
        nargs="+",
        metavar="CSV",
        help="measure nothing: make one record of these; the last counts",
    )
    options = command.parse_args(words)
    if options.smoke:
        options.device = "cpu"
    command.check(options, measures=not options.render)
    return options


def render(files: Sequence[Path], out: Path) -> list[dict[str, str]]:
    """Make one record of several CSVs of one kind of machine. Returns the rows.

    Raises:
        ValueError: device or versions are not the same in all of them.
    """
    heads, tables = zip(*map(records.read_csv, files), strict=True)
    devices = {head["machine"].partition(",")[0] for head in heads}
    records.check_alike({"device": devices, "versions": {head["versions"] for head in heads}})
    cells = {one.cell: one for table in tables for one in found_in(table) if one.times}
    found = sorted(cells.values())
    languages = sorted({name for one in found for name in one.times} - {"torch"})
    defaults = [b.language for b in backends() if b.default_devices and b.language in languages]
    head = heads[-1] | {"commit": ", ".join(dict.fromkeys(head["commit"] for head in heads))}
    rows = [row for one in found for row in rows_of(one)]
    records.write("choice", head, rows, COLUMNS, TITLE, page(found, [*languages, "torch"], defaults), out)
    return rows


def main(words: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Measure, print as it goes, and write the record. Returns the rows."""
    options = parse(words)
    if options.render:
        return render(options.render, options.out)
    if options.smoke:
        cell = tune.Cell(options.ops[0], "small", compiled=False)
        return rows_of(tune.measure(tune.prepare(cell, ["torch"], "cpu"), "cpu"))
    head = records.head_of(options.device)
    languages = tune.able(options.device)
    print(records.comment(head) + ",".join(COLUMNS), flush=True)
    found: list[tune.Found] = []
    rows: list[dict[str, str]] = []
    processes = tune.processes_for(options.device)

    cells = [cell for cell in tune.cells_of(options.ops) if HOWS[cell.compiled] in options.hows]

    def progress(what: str, done: int) -> None:
        if done % 50 == 0:
            print(f"# {done} of {2 * len(cells)}: {what}", file=sys.stderr, flush=True)

    for one in tune.tune(cells, options.device, languages, options.seconds, processes, progress):
        found.append(one)
        rows += rows_of(one)
        print("\n".join(",".join(row.values()) for row in rows_of(one)), flush=True)
    missing = sorted(set(cells) - {one.cell for one in found})
    print(f"# not measured, {len(missing)}: {missing}", file=sys.stderr)
    defaults = [b.language for b in dispatch.default_backends(options.device) if b.language in languages]
    body = page(found, languages, defaults)
    records.write("choice", head, rows, COLUMNS, TITLE, body, options.out)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
