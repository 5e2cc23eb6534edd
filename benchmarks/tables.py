"""Tables of records in pages: each stands in a README between two comments, which say what it is made of.

    python benchmarks/tables.py     write them anew

    <!-- benchmarks/tables.py: 2026-11-22-compare-h200 large ours-cutile ours-triton liger-cutile -->
    <!-- end -->

The words are a record of `compare.py`, or several joined by `+`, of which the last that has an op counts; the group of the
cases, the provider whose times it shows, and those whose times follow as multiples of these.
"""

from __future__ import annotations

import re
from operator import itemgetter
from pathlib import Path

import records
import report

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("packages/*/README.md"))

_TABLE = re.compile(r"(<!-- benchmarks/tables\.py: (.+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{_table(*found[2].split())}\n\n{found[3]}", page)


def _table(names: str, group: str, ours: str, *others: str) -> str:
    rows: list[dict[str, str]] = []
    for name in names.split("+"):
        _, newer = records.read_csv(records.RECORDS / f"{name}.csv")
        measured_again = {row["op"] for row in newer}
        rows = [row for row in rows if row["op"] not in measured_again] + newer
    return report.beside([row for row in sorted(rows, key=itemgetter("op")) if row["case"] == group], ours, others)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
