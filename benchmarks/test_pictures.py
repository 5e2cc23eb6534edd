"""Checks of what is made of records: pictures that are not stale, and verdicts that know the noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pictures
import pytest
import records
import verdict
from jobs import COLUMNS


def rows(times: dict[str, float], spread: str = "") -> list[dict[str, str]]:
    """A row for each provider: rms_norm, large, forward."""
    blank = dict.fromkeys(COLUMNS, "") | {"op": "rms_norm", "case": "large", "mode": "forward", "spread": spread}
    return [blank | {"provider": provider, "ms": str(ms)} for provider, ms in times.items()]


def write(directory: Path, name: str, lines: Sequence[dict[str, str]], columns: Sequence[str] = COLUMNS) -> Path:
    """A record of an H200."""
    head = {"machine": "NVIDIA H200, a processor", "versions": "torch 2"}
    return records.write_csv(directory / f"2026-01-02-{name}-h200", head, lines, columns)


def test_pictures_are_of_the_records() -> None:
    drawn = pictures.Records.of().pictures()
    there = {path.stem: path.read_text("utf-8") for path in pictures.PICTURES.iterdir()}
    stale = sorted(name for name in drawn.keys() | there if drawn.get(name) != there.get(name))
    assert not stale, "run: python benchmarks/pictures.py"


def test_a_picture_is_of_its_records(tmp_path: Path) -> None:
    """Drawing removes pictures that no record has."""
    write(tmp_path, "compare", rows({"ours-triton": 1.0, "eager": 2.5}))
    (tmp_path / "swiglu.svg").touch()
    pictures.draw(pictures.Records.of(tmp_path), tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == [pictures.HEAT_MAP, "rms_norm"]
    drawn = (tmp_path / "rms_norm.svg").read_text("utf-8")
    assert all(
        words in drawn for words in (">2.5<", ">PyTorch<", ">liger, Triton<", ">16384 × 8192<", pictures.MACHINE)
    )
    assert ">2.50×<" in (tmp_path / f"{pictures.HEAT_MAP}.svg").read_text("utf-8")


def test_each_cell_of_a_picture_is_of_the_machine_that_it_names(tmp_path: Path) -> None:
    """A newer record of another machine replaces nothing."""
    everything = pictures.Records.of()
    machines = {cell.machine for op in everything.ops.values() for cells in op.values() for cell in cells.values()}
    assert machines == {pictures.MACHINE}
    write(tmp_path, "compare", rows({"ours-triton": 1.0, "eager": 2.0}))
    other = {"machine": "NVIDIA H100 80GB HBM3, a processor", "versions": "torch 2"}
    newer = tmp_path / "2026-01-03-compare-h100"
    records.write_csv(newer, other, rows({"ours-triton": 1.0, "eager": 9.0}), COLUMNS)
    assert pictures.ratio(pictures.Records.of(tmp_path).ops["rms_norm"], "large", "forward") == (2.0, "eager")


def test_sizes_are_counted_by_verdict() -> None:
    cells = {name: pictures.Cell(ms, mib, None, "") for name, ms, mib in (("ours-triton", 1, 0.0), ("liger", 2, 0.0))}
    more = cells | {"liger-cutile": pictures.Cell(0.5, 9.0, None, "")}
    ops = {"a": {("small", "forward"): cells, ("large", "forward"): more}}
    assert pictures.counts(ops)[:3:2] == [
        ("time, beside the fastest peer, forward", 1, 0, 1),
        ("memory, beside liger-kernel, forward", 0, 2, 0),
    ]


def test_the_last_measurement_of_an_op_counts(tmp_path: Path) -> None:
    whole = [row | {"op": op} for op in ("rms_norm", "swiglu") for row in rows({"ours-triton": 1.0, "eager": 2.0})]
    write(tmp_path, "compare-a-second-look", rows({"ours-triton": 0.5, "eager": 2.0}))
    write(tmp_path, "compare", whole)
    ops = pictures.Records.of(tmp_path).ops
    ratios = {op: pictures.ratio(ops[op], "large", "forward") for op in ops}
    assert ratios == {"rms_norm": (4.0, "eager"), "swiglu": (2.0, "eager")}


def test_whole_steps_are_of_one_model_and_without_checkpointing(tmp_path: Path) -> None:
    columns = ("model", "way", "tokens", "checkpointing", "parameters", "ms", "peak_gb")
    step = {
        "model": pictures.MODEL,
        "way": "liger",
        "tokens": "8 x 8",
        "checkpointing": "",
        "parameters": "9",
        "ms": "2",
        "peak_gb": "3",
    }
    steps = [
        step,
        step | {"way": "triton", "ms": "1"},
        step | {"model": "b", "way": "plain"},
        step | {"way": "compile", "ms": ""},
    ]
    write(tmp_path, "end-to-end", [*steps, step | {"checkpointing": "yes", "ms": "9"}], columns)
    everything = pictures.Records.of(tmp_path)
    assert {way: row["ms"] for way, row in everything.steps.items()} == {"liger": "2", "triton": "1"}
    assert list(everything.pictures()) == [pictures.END_TO_END]


def test_the_limit_is_the_machine_s() -> None:
    row = rows({"ours-triton": 2.0})[0]
    assert pictures.cell(row | {"gbps": "2125"}, pictures.MACHINE).limit_ms == 1.0
    assert pictures.cell(row | {"tflops": "395"}, pictures.MACHINE).limit_ms == 1.0
    assert pictures.cell(row, pictures.MACHINE).limit_ms is None


@pytest.mark.parametrize(
    ("after", "peer", "spread", "word"),
    [
        (1.015, 2.0, "", verdict.SAME),  # within the least noise
        (1.05, 2.0, "", verdict.SLOWER),
        (0.95, 2.0, "", verdict.FASTER),
        (1.05, 2.2, "", verdict.SAME),  # the peer's code is the same, and its time grew by a tenth
        (1.05, 1.8, "", verdict.SAME),
        (1.05, 2.0, "0.08", verdict.SAME),  # the turns of one run differed by more
        (1.2, 2.2, "0.08", verdict.SLOWER),
    ],
)
def test_a_change_counts_beyond_the_noise(after: float, peer: float, spread: str, word: str) -> None:
    old, new = rows({"ours-triton": 1.0, "eager": 2.0}), rows({"ours-triton": after, "eager": peer}, spread)
    assert [change.word for change in verdict.verdicts(old, new)] == [word]


@pytest.mark.parametrize(("after", "status"), [(1.0, 0), (0.5, 0), (1.5, 1)])
def test_the_exit_status_says_that_something_is_slower(
    after: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: list[str] = []
    for name, ms in (("before", 1.0), ("after", after)):
        head = {"machine": "H200", "versions": "torch 2"}
        files.append(str(records.write_csv(tmp_path / name, head, rows({"ours-triton": ms, "eager": 2.0}), COLUMNS)))
    assert verdict.main(files) == status
    counts: Sequence[str] = capsys.readouterr().out.splitlines()[-1].split(", ")
    assert [int(count.split()[0]) for count in counts] == [int(after < 1), int(after > 1), int(after == 1)]
