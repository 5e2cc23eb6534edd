"""Write the table of PyTorch's modes in docs/modes.md, from the conformance suite's reports:

uv run pytest conformance --op=rms_norm -k test_mode --report=report
.venv-ascend/bin/pytest conformance --impl=triton-ascend --op=rms_norm -k test_mode --report=report-ascend
uv run python tools/modes_table.py report/conformance.json report-ascend/conformance.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_conformance.report import OUTCOMES
from liger_conformance.suite.test_modes import MODES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "modes.md"
START, END = "<!-- tools/modes_table.py -->\n", "<!-- end -->\n"


def table_of(reports: Sequence[dict[str, Any]]) -> str:
    """The table: a row per mode, with its promise and each language's outcomes."""
    found: dict[tuple[str, str], set[str]] = {}
    for report in reports:
        for cell in report["modes"]:
            place = "" if cell["outcome"] == "not run" else f" on {cell['device']}"
            found.setdefault((cell["mode"], cell["language"]), set()).add(cell["outcome"] + place)
    languages = sorted({language for _, language in found}, key=lambda language: (language != "torch", language))
    heads = ["mode", "what a kernel's language does", *languages]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for mode in MODES:
        cells = [best(found.get((mode.name, language), set())) for language in languages]
        lines.append(f"| {' | '.join([mode.name, mode.promise, *cells])} |")
    return "\n".join(lines) + "\n"


def best(outcomes: set[str]) -> str:
    """Outcomes of several reports in a cell: what was not run in one may have been in another."""
    ran = {outcome for outcome in outcomes if outcome != "not run"}
    return ", ".join(sorted(ran, key=lambda o: OUTCOMES.index(o.partition(" on ")[0]))) or "not run"


def main(paths: Sequence[str]) -> None:
    """Write the table of the reports at `paths` into the page."""
    table = table_of([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths])
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    PAGE.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
