"""Checks of what is made of records: pictures that are not stale, and verdicts that know the noise."""

from __future__ import annotations

import shutil
import subprocess
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
    everything = pictures.Records.of()
    digest = everything.digest
    stale = [name for name in everything.names if pictures.made_of(pictures.PICTURES / f"{name}.png") != digest]
    assert not stale, "run: python benchmarks/pictures.py"
    extra = {path.stem for path in pictures.PICTURES.glob("*.png")} - set(everything.names)
    assert not extra, "no record has these: run python benchmarks/pictures.py"


def test_a_picture_of_other_records_is_stale(tmp_path: Path) -> None:
    path = write(tmp_path, "compare", rows({"ours-triton": 1.0, "eager": 2.0}))
    everything = pictures.Records.of(tmp_path)
    pictures.draw(everything, tmp_path)
    drawn = tmp_path / "rms_norm.png"
    assert pictures.made_of(drawn) == everything.digest
    path.write_text(path.read_text().replace("2.0", "2.5"))
    assert pictures.made_of(drawn) != everything.digest
    assert pictures.made_of(tmp_path / "swiglu.png") is None


def test_the_last_measurement_of_an_op_counts(tmp_path: Path) -> None:
    whole = [row | {"op": op} for op in ("rms_norm", "swiglu") for row in rows({"ours-triton": 1.0, "eager": 2.0})]
    write(tmp_path, "compare-a-second-look", rows({"ours-triton": 0.5, "eager": 2.0}))
    write(tmp_path, "compare", whole)
    ops = pictures.Records.of(tmp_path).ops
    ratios = {op: pictures.ratio(ops[op], "large", "forward") for op in ops}
    assert ratios == {"rms_norm": (4.0, "eager"), "swiglu": (2.0, "eager")}


def test_memory_over_length_is_of_the_newest_record_that_has_it(tmp_path: Path) -> None:
    """And of no record, there is no such picture."""
    columns = ("subject", "mode", "rows", "hidden", "vocabulary", "provider", "peak_mib")
    blank = {"subject": "length", "mode": "dpo", "rows": "2048", "hidden": "8", "vocabulary": "24", "provider": "liger"}
    measured = [
        blank | {"peak_mib": "9"},
        blank | {"rows": "8192", "peak_mib": "36"},
        blank | {"rows": "9", "peak_mib": ""},
    ]
    write(tmp_path, "compare", rows({"ours-triton": 1.0}))
    assert pictures.LENGTHS not in pictures.Records.of(tmp_path).names
    write(tmp_path, "losses", measured, columns)
    write(tmp_path, "losses-of-grpo", [row | {"mode": "grpo"} for row in measured], columns)
    write(tmp_path, "losses-without", [blank | {"subject": "dpo", "peak_mib": "7"}], columns)
    everything = pictures.Records.of(tmp_path)
    assert [(row["mode"], row["rows"]) for row in everything.lengths] == [("grpo", "2048"), ("grpo", "8192")]
    assert pictures.LENGTHS in everything.names
    pictures.draw(everything, tmp_path)
    assert pictures.made_of(tmp_path / f"{pictures.LENGTHS}.png") == everything.digest


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
    assert everything.names == [pictures.END_TO_END]
    pictures.draw(everything, tmp_path)
    assert pictures.made_of(tmp_path / f"{pictures.END_TO_END}.png") == everything.digest


def test_the_limit_is_the_machine_s() -> None:
    row = rows({"ours-triton": 2.0})[0]
    assert pictures._cell(row | {"gbps": "2125"}, "NVIDIA H200").limit_ms == 1.0
    assert pictures._cell(row | {"tflops": "395"}, "NVIDIA H200").limit_ms == 1.0
    assert pictures._cell(row | {"gbps": "2125"}, "another chip").limit_ms is None


@pytest.mark.slow
def test_the_page_draws_itself_without_a_network(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("not run: chromium is not on PATH; Debian has it in chromium")
    page = tmp_path / "measured.html"
    pictures.main(["--page", str(page)])
    quiet = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += ["--virtual-time-budget=8000", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    first = next(iter(pictures.Records.of().ops))
    assert dom.count('class="scatterlayer') == 3, "a panel is missing"
    assert 'class="point"' in dom
    assert f">{first}</text>" in dom


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
