"""The kernel packages' tables of measured times are those of the records."""

import importlib.util
import json
from pathlib import Path

from liger_core import tune

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("measured_tables", ROOT / "tools" / "measured.py")
assert _spec is not None
assert _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def record(directory: Path, date: str, us: dict[str, float], machine: str = "NVIDIA H200, a processor") -> None:
    cells = [tune.Cell("rms_norm", "small", False), tune.Cell("rms_norm", "medium", True)]
    found = [tune.Found(cell, 4096, us, {"cutile": "RuntimeError: no, nothing"}) for cell in cells]
    rows = [row for one in found for row in tool.choice.rows_of(one)]
    tool.records.write_csv(directory / f"{date}-choice-h200", {"machine": machine}, rows, tool.choice.COLUMNS)


def test_the_tables_are_current() -> None:
    stale = tool.stale(ROOT, tool.records.RECORDS)
    assert not stale, f"run tools/measured.py: {', '.join(path.parent.name for path in stale)}"


def test_a_table_is_of_the_newest_record_of_each_chip(tmp_path: Path) -> None:
    record(tmp_path, "2026-01-02", {"triton": 5.0, "torch": 7.0})
    record(tmp_path, "2026-01-03", {"triton": 4.0, "torch": 8.0})
    record(tmp_path, "2026-01-01", {"triton": 3.0, "torch": 9.0}, "AMD Instinct MI300X, another")
    made = tool.tables(tmp_path, ["triton", "cutile"])
    assert {*made} == {"triton"}, "a language without a time has no table"
    assert {*made["triton"]} == {"NVIDIA H200", "AMD Instinct MI300X"}
    h200 = json.loads(tool.text_of(made["triton"]))["NVIDIA H200"]
    assert h200["record"] == "2026-01-03-choice-h200"
    assert h200["eager"] == h200["compiled"] == {"rms_norm": [[4096, {"triton": 4.0, "torch": 8.0}]]}


def test_a_table_of_another_record_is_stale(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "liger-acme"
    (package / "src" / "liger_acme").mkdir(parents=True)
    (package / "pyproject.toml").write_text(
        '[project]\n[project.entry-points."liger.backends"]\nacme = "liger_acme:backend"\n'
    )
    assert not tool.stale(tmp_path, tmp_path)
    record(tmp_path, "2026-01-02", {"acme": 5.0, "torch": 7.0})
    ((path, text),) = tool.stale(tmp_path, tmp_path).items()
    path.write_text(text)
    assert not tool.stale(tmp_path, tmp_path)
    record(tmp_path, "2026-01-02", {"acme": 6.0, "torch": 7.0})
    assert tool.stale(tmp_path, tmp_path)
