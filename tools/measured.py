"""Write each kernel package's table of measured times, ``measured.json``, from the newest record of each chip:

uv run python tools/measured.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import choice  # noqa: E402
import records  # noqa: E402

from liger_core import measured, tune  # noqa: E402


def languages(root: Path) -> dict[str, Path]:
    """Where each language's table lies, by the entry points of the packages in this repository."""
    found = {}
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        points = tomllib.loads(project.read_text("utf-8"))["project"].get("entry-points", {})
        for language, target in points.get("liger.backends", {}).items():
            found[language] = project.parent / "src" / target.partition(":")[0] / "measured.json"
    return found


def tables(directory: Path, known: list[str]) -> dict[str, measured.Table]:
    """A table for each language that a record has times of. The newest record of a chip counts."""
    newest: dict[str, Path] = {}
    for path in sorted(directory.glob("*-choice-*.csv")):
        head, _ = records.read_csv(path)
        newest[head["machine"].split(",")[0]] = path
    made: dict[str, measured.Table] = {}
    for chip, path in newest.items():
        found = choice.found_in(records.read_csv(path)[1])
        for language in known:
            table = tune.table_of(chip, path.stem, found, [language])
            if table[chip]["eager"] or table[chip]["compiled"]:
                made.setdefault(language, {}).update(table)
    return made


def text_of(table: measured.Table) -> str:
    """JSON with a line for each op."""
    chips = []
    for chip, hows in table.items():
        parts = [f' "record": {json.dumps(hows["record"])}']
        for how in ("eager", "compiled"):
            lines = [f"   {json.dumps(op)}: {json.dumps(times)}" for op, times in hows[how].items()]
            parts.append(f' "{how}": {{\n' + ",\n".join(lines) + "\n }")
        chips.append(f"{json.dumps(chip)}: {{\n" + ",\n".join(parts) + "\n}")
    return "{\n" + ",\n".join(chips) + "\n}\n"


def stale(root: Path, directory: Path) -> dict[Path, str | None]:
    """The tables that are not those of the records, with what they should hold; None: they should not exist."""
    places = languages(root)
    made = tables(directory, [*places])
    wanted = {places[language]: text_of(table) for language, table in made.items()}
    return {
        path: wanted.get(path)
        for path in places.values()
        if (path.read_text("utf-8") if path.exists() else None) != wanted.get(path)
    }


if __name__ == "__main__":
    for path, text in stale(ROOT, records.RECORDS).items():
        if text is None:
            path.unlink()
        else:
            path.write_text(text, "utf-8")
        print(path.relative_to(ROOT), "removed" if text is None else "written")
