"""Rows that became faster or slower between two records of `compare.py`, told from noise.

    python benchmarks/verdict.py BEFORE.csv AFTER.csv

A change counts if it is larger than the noise of its row: the spread of its turns in either record, the largest change of a peer
in that case and mode (a peer's code is the same in both runs), and at least 2 %. Exits with 1 if anything of ours is slower.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import records
import report

LEAST_NOISE = 0.02
"""Two runs of the same kernel on an H200 differ by this much when nothing else does."""

FASTER, SLOWER, SAME = "faster", "slower", "same"

Place = tuple[str, str, str, str]
Times = Mapping[tuple[Place, str], Mapping[str, str]]


class Verdict(NamedTuple):
    """How one provider's row changed: `change` is time after over time before, less 1."""

    op: str
    case: str
    dtype: str
    mode: str
    provider: str
    before: float
    after: float
    noise: float

    @property
    def change(self) -> float:
        """0.1 is 10 % slower."""
        return self.after / self.before - 1

    @property
    def word(self) -> str:
        """Faster, slower or the same."""
        # A factor counts alike in both directions: twice as fast is as far as twice as slow.
        if max(self.after / self.before, self.before / self.after) <= 1 + self.noise:
            return SAME
        return FASTER if self.after < self.before else SLOWER


def verdicts(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> list[Verdict]:
    """Change of every row of ours that both records have."""
    old, new = _times(before), _times(after)
    both = [key for key in old if key in new]
    noise: dict[Place, float] = {}
    for place, provider in both:
        if not report.is_ours(provider):
            a, b = (float(times[place, provider]["ms"]) for times in (old, new))
            noise[place] = max(noise.get(place, 0.0), a / b - 1, b / a - 1)
    results = []
    for place, provider in both:
        if report.is_ours(provider):
            rows = old[place, provider], new[place, provider]
            spreads = [float(row.get("spread") or 0.0) for row in rows]
            limit = max(LEAST_NOISE, noise.get(place, 0.0), *spreads)
            results.append(Verdict(*place, provider, *(float(row["ms"]) for row in rows), limit))
    return results


def _times(rows: Sequence[Mapping[str, str]]) -> Times:
    return {((row["op"], row["case"], row["dtype"], row["mode"]), row["provider"]): row for row in rows if row["ms"]}


def table(results: Sequence[Verdict]) -> str:
    """The rows that changed, the largest change first, then a line that counts all."""
    changed = sorted((v for v in results if v.word != SAME), key=lambda v: -abs(v.after / v.before - 1))
    lines = [
        [
            v.op,
            v.case,
            v.mode,
            v.provider,
            f"{v.before:.4g}",
            f"{v.after:.4g}",
            f"{v.change:+.1%}",
            f"{v.noise:.1%}",
            v.word,
        ]
        for v in changed
    ]
    counts = ", ".join(f"{sum(v.word == word for v in results)} {word}" for word in (FASTER, SLOWER, SAME))
    columns = ["op", "case", "mode", "provider", "before, ms", "after, ms", "change", "noise", ""]
    return f"{records.table(columns, lines)}\n\n{counts}" if lines else counts


def main(words: Sequence[str] | None = None) -> int:
    """Print the verdicts. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(words)
    (old, before), (new, after) = records.read_csv(options.before), records.read_csv(options.after)
    for key in ("machine", "versions"):
        if old[key] != new[key]:
            print(f"{key} differs: {old[key]} / {new[key]}")
    results = verdicts(before, after)
    print(table(results))
    return int(any(v.word == SLOWER for v in results))


if __name__ == "__main__":
    sys.exit(main())
