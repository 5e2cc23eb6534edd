"""The documentation's table of PyTorch's modes is that of the suite's tests, and `tools/modes_table.py` writes it."""

import importlib.util
import json
from pathlib import Path

import pytest

from liger_conformance.suite.test_modes import MODES

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("modes_table", ROOT / "tools" / "modes_table.py")
assert _spec is not None
assert _spec.loader is not None
modes_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(modes_table)


def cells_of(text: str) -> list[list[str]]:
    """The rows of the page's table, without its head."""
    table = text[text.index(modes_table.START) : text.index(modes_table.END)]
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()[3:]]


def test_the_page_has_the_tests_modes() -> None:
    rows = cells_of(modes_table.PAGE.read_text(encoding="utf-8"))
    assert [tuple(row[:2]) for row in rows] == [(mode.name, mode.promise) for mode in MODES], "run tools/modes_table.py"
    assert not any("failed" in cell for row in rows for cell in row)


def test_reports_of_two_machines_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "modes.md"
    page.write_text(f"before\n{modes_table.START}old\n{modes_table.END}after\n")
    monkeypatch.setattr(modes_table, "PAGE", page)
    paths = []
    for device, outcome in (("cpu", "not run"), ("cuda", "passed"), ("cpu", "interpreted")):
        cells = [{"mode": mode.name, "language": "acme", "device": device, "outcome": outcome} for mode in MODES[:1]]
        paths.append(tmp_path / f"{len(paths)}.json")
        paths[-1].write_text(json.dumps({"modes": cells}))
    modes_table.main([str(path) for path in paths])
    text = page.read_text()
    assert cells_of(text)[0][2] == "passed on cuda, interpreted on cpu"
    assert cells_of(text)[1][2] == "not run"
    assert text.startswith("before\n")
    assert text.endswith("after\n")
