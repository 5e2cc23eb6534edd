"""Tables of pages are those that `tools/pages.py` writes."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from liger_conformance.suite.test_modes import MODES
from liger_core.contract import ops

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("pages", ROOT / "tools" / "pages.py")
assert _spec is not None
assert _spec.loader is not None
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)


def test_pages_are_current() -> None:
    assert pages.write(check=True) == [], "run: uv run python tools/pages.py"


def test_each_block_has_a_writer() -> None:
    names = {block[2] for path in pages.pages() for block in pages.BLOCK.finditer(path.read_text("utf-8"))}
    assert names == {*pages.BLOCKS, *pages.ELSEWHERE}


def test_a_block_is_written_and_the_rest_of_the_page_stays() -> None:
    page = "before\n<!-- tools/pages.py: new a b -->\nold\n<!-- end -->\n<!-- tools/pages.py: other -->\nold\n<!-- end -->\n"
    written = pages.filled(page, {"new": lambda *words: f"{words}\n"})
    assert written == page.replace("new a b -->\nold", "new a b -->\n('a', 'b')")


def test_an_op_that_a_language_lacks_is_named(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "liger-acme"
    folder = package / "src" / "liger_acme" / "ops"
    folder.mkdir(parents=True)
    (package / "pyproject.toml").write_text(
        '[project]\n[project.entry-points."liger.backends"]\nacme = "liger_acme:backend"\n'
    )
    for op in ops.keys() - {"rope", "cross_entropy"}:
        (folder / f"{op}.py").touch()
    assert f"| acme | {len(ops) - 2} of {len(ops)}, not `cross_entropy`, `rope` |" in pages.languages(tmp_path)
    (folder / "_cross_entropy.py").touch()  # core makes the op of it
    assert f"| acme | {len(ops) - 1} of {len(ops)}, not `rope` |" in pages.languages(tmp_path)


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()[2:]]


def test_the_page_of_modes_has_the_suites_modes() -> None:
    text = (ROOT / "docs/modes.md").read_text("utf-8")
    (table,) = re.findall(r"<!-- tools/pages.py: modes -->\n(.*?)<!-- end -->", text, re.S)
    rows = rows_of(table)
    assert [tuple(row[:2]) for row in rows] == [(mode.name, mode.promise) for mode in MODES], (
        "run tools/pages.py --modes"
    )
    assert not any("failed" in cell for row in rows for cell in row)


def test_reports_of_two_machines_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs/modes.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- tools/pages.py: modes -->\nold\n<!-- end -->\nafter\n")
    (tmp_path / "README.md").touch()
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    paths = []
    for device, outcome in (("cpu", "not run"), ("cuda", "passed"), ("cpu", "interpreted")):
        cells = [{"mode": mode.name, "language": "acme", "device": device, "outcome": outcome} for mode in MODES[:1]]
        paths.append(tmp_path / f"{len(paths)}.json")
        paths[-1].write_text(json.dumps({"modes": cells}))
    monkeypatch.setattr("sys.argv", ["pages.py", "--modes", *map(str, paths)])
    assert pages.main() == 0
    text = page.read_text()
    rows = rows_of(text.partition("modes -->\n")[2])
    assert rows[0][2] == "passed on cuda, interpreted on cpu"
    assert rows[1][2] == "not run"
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")


FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?) ?(ms|GB|MiB|µs)\b")
RECORD = re.compile(r"\]\((?:\.\./)?(benchmarks/records/[\w.-]+\.md)\)")


def unfounded(text: str, read: Callable[[str], str]) -> list[str]:
    """Figures with a unit that no record linked in the same paragraph, or row of a table, has, up to rounding."""
    places = [part for paragraph in text.split("\n\n") for part in re.split(r"\n(?=\|)", paragraph)]
    missing = []
    for place in places:
        if names := RECORD.findall(place):
            numbers = [float(number) for name in names for number in re.findall(r"\d+(?:\.\d+)?", read(name))]
            for figure, unit in FIGURE.findall(place):
                decimals = len(figure.partition(".")[2])
                if float(figure.replace(",", "")) not in [round(number, decimals) for number in numbers]:
                    missing.append(f"{figure} {unit}")
    return missing


@pytest.mark.parametrize("page", ["README.md", "docs/measured.md", "docs/memory.md", "docs/troubleshooting.md"])
def test_a_figure_is_in_the_record_beside_it(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert RECORD.search(text), "the page links to no record: this test would find nothing"
    missing = unfounded(text, lambda name: (ROOT / name).read_text("utf-8"))
    assert not missing, f"{page}: no record beside them has {', '.join(missing)}"


def test_a_figure_without_a_record_is_found() -> None:
    page = "It takes 2.5 ms, not 9 ms or 3.1 GB ([record](benchmarks/records/a.md)).\n\nElsewhere 7 ms."
    assert unfounded(page, lambda name: "2.46 | 3.149") == ["9 ms"]


def test_a_record_of_the_suite_is_a_cell() -> None:
    table = pages.tested()
    (row,) = (line for line in table.splitlines() if line.startswith("| `fused_moe` |"))
    assert "conformance-triton-h100-newer-ops.md): 2 failed" in row
    assert "conformance-h200-fused-moe.md)" in row
