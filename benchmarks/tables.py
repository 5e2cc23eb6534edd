"""Tables of records in pages: each stands in a README between two comments, which say what it is made of.

    python benchmarks/tables.py     write them anew

    <!-- benchmarks/tables.py: 2026-11-22-compare-h200 large ours-cutile ours-triton liger-cutile -->
    <!-- end -->

The words are a record of `compare.py`, the group of the cases, the provider whose times it shows, and those whose times
follow as multiples of these.
"""

from __future__ import annotations

import re
from pathlib import Path

import records
import report

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("packages/*/README.md"))

_TABLE = re.compile(r"(<!-- benchmarks/tables\.py: (.+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{_table(*found[2].split())}\n\n{found[3]}", page)


def _table(record: str, group: str, ours: str, *others: str) -> str:
    _, rows = records.read_csv(records.RECORDS / f"{record}.csv")
    return report.beside([row for row in rows if row["case"] == group], ours, others)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
