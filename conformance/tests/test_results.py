"""Results of compiling that a file keeps: what is new is compiled, what is compared agrees, and what nobody uses leaves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from liger_conformance.compilers.results import Differs, Results

CHIP, KERNEL = "sm_90", "softmax._row"


class Compiler:
    """Counts what it compiles."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        return self.result


def fail() -> Any:
    raise RuntimeError("no such type")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Results of three launches, of two chips."""
    results = Results(tmp_path / "results" / "toy.txt")
    for chip, launch in ((CHIP, "first"), (CHIP, "second"), ("sm_120", "first")):
        results.of(chip, KERNEL, launch, Compiler([50, ["a load, with spaces"]]))
    results.write(())
    return results.path


def test_only_a_launch_that_the_file_lacks_is_compiled(file: Path) -> None:
    results, compiler = Results(file), Compiler([64, []])
    assert results.of(CHIP, KERNEL, "first", compiler) == [50, ["a load, with spaces"]]
    assert compiler.count == 0
    for _ in range(2):  # and once in a run
        assert results.of(CHIP, KERNEL, "third", compiler) == [64, []]
    assert compiler.count == 1


def test_a_launch_that_fails_to_compile_is_not_kept(file: Path) -> None:
    before, results = file.read_text(), Results(file)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such type"):
            results.of(CHIP, KERNEL, "third", fail)
    results.write(())
    assert file.read_text() == before


def test_a_false_line_fails_where_it_is_compared(file: Path) -> None:
    file.write_text(file.read_text().replace("[50,", "[49,"))
    compiler = Compiler([50, ["a load, with spaces"]])
    assert Results(file).of(CHIP, KERNEL, "first", compiler)[0] == 49
    with pytest.raises(Differs, match=r"toy\.txt has \[49.* for sm_90 softmax\._row .*; it compiles to \[50"):
        Results(file, share=1.0).of(CHIP, KERNEL, "first", compiler)


def test_a_share_is_compared_another_one_for_each_seed(tmp_path: Path) -> None:
    whole = Results(tmp_path / "toy.txt")
    launches = [str(number) for number in range(1000)]
    for launch in launches:
        whole.of(CHIP, KERNEL, launch, Compiler(0))
    whole.write(())

    def compared(seed: int) -> set[str]:
        results = Results(whole.path, 0.1, seed)
        compilers = {launch: Compiler(0) for launch in launches}
        for launch, compiler in compilers.items():
            results.of(CHIP, KERNEL, launch, compiler)
        return {launch for launch, compiler in compilers.items() if compiler.count}

    first, second = compared(1), compared(2)
    assert first == compared(1)
    assert 60 < len(first) < 140
    assert len(first & second) < 40


def test_a_result_that_is_not_current_is_compiled(file: Path) -> None:
    compiler = Compiler([51, []])
    assert Results(file).of(CHIP, KERNEL, "first", compiler, lambda result: result[0] == 51) == [51, []]
    assert compiler.count == 1


def test_lines_that_no_launch_used_leave_complete_chips(file: Path) -> None:
    results = Results(file)
    results.of(CHIP, KERNEL, "third", Compiler(1))
    results.write(())
    assert len(file.read_text().splitlines()) == 4
    results.write({CHIP})
    lines = file.read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["sm_120", KERNEL], [CHIP, KERNEL]]
    assert lines == sorted(lines)


def test_a_run_that_writes_replaces_a_false_line(file: Path) -> None:
    right = file.read_text()
    file.write_text(right.replace("[50,", "[49,"))
    results = Results(file, share=1.0, writes=True)
    for chip, launch in ((CHIP, "first"), (CHIP, "second"), ("sm_120", "first")):
        results.of(chip, KERNEL, launch, Compiler([50, ["a load, with spaces"]]))
    results.write(())
    assert file.read_text() == right
