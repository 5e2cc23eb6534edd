#!/usr/bin/env python3
"""Write the tables of pages: each stands between `<!-- tools/pages.py: NAME ... -->` and `<!-- end -->`.

    uv run python tools/pages.py                          write them
    uv run python tools/pages.py --check                  fail if a page is not as it would be written
    uv run python tools/pages.py --modes REPORT ...       write docs/modes.md, of conformance.json files of several machines

`BLOCKS` has the function of each name; words after the name are its arguments. `ELSEWHERE` has who writes the others.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPOSED = runpy.run_path(str(ROOT / "packages/liger-core/src/liger_core/composed.py"))["COMPOSED"]  # imports no torch
BLOCK = re.compile(r"(<!-- tools/pages\.py: ([\w-]+)(.*?) -->\n).*?(<!-- end -->)", re.S)


def filled(text: str, blocks: Mapping[str, Callable[..., str]]) -> str:
    """A page with these blocks written anew; blocks of other names stay."""

    def written(block: re.Match[str]) -> str:
        start, name, words, end = block.groups()
        return f"{start}{blocks[name](*words.split())}{end}" if name in blocks else block[0]

    return BLOCK.sub(written, text)


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    first, *others = (f"| {' | '.join(map(str, cells))} |\n" for cells in (heads, *rows))
    return "".join([first, "|" + "---|" * len(heads) + "\n", *others])


def has_kernel(package: str, op: str, root: Path = ROOT) -> bool:
    """Whether a package of kernels has a file for an op, or the files that core makes the op of."""
    folder = root / "packages" / package / "src" / package.replace("-", "_") / "ops"
    files = COMPOSED[op].files if op in COMPOSED else [op]
    return (folder / f"{op}.py").exists() or all((folder / f"{file}.py").exists() for file in files)


def languages(root: Path = ROOT) -> str:
    """A row per language: its ops, or those that it lacks. Languages are the entry points of the packages."""
    import tomllib

    from liger_core.contract import ops

    rows = [("torch (the reference)", f"all {len(ops)}")]
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        points = tomllib.loads(project.read_text("utf-8"))["project"].get("entry-points", {})
        for language in points.get("liger.backends", {}):
            missing = [f"`{op}`" for op in sorted(ops) if not has_kernel(project.parent.name, op, root)]
            number = f"{len(ops) - len(missing)} of {len(ops)}, not {', '.join(missing)}"
            rows.append((language, number if missing else f"all {len(ops)}"))
    return table(("language", "ops"), rows)


def counted(op: Any) -> set[str]:
    """The dimensions that a mean over labels has lost: a process sends its count over them."""
    return {op.dimensions.tensors[result.counted][0] for result in op.dimensions.results if result.counted}


def sharding() -> str:
    """Dimensions that each op divides: by its declaration, and by liger-distributed's rules."""
    from liger_core.contract import ops
    from liger_core.dimensions import independent
    from liger_distributed.rules import RULES

    rows = []
    for name, op in sorted(ops.items()):
        assert op.dimensions is not None, f"{name} declares no dimensions"
        declared = dict.fromkeys(dim for dims in op.dimensions.tensors.values() for dim in dims)
        free = [dim for dim in declared if independent(dim) and not dim.endswith("'")]
        count = counted(op)
        ways = ([dim for dim in free if dim not in count], sorted(count), RULES[name].divides if name in RULES else ())
        rows.append((f"`{name}`", *(" ".join(f"`{dim}`" for dim in dims) for dims in ways)))
    return table(("op", "sends nothing forward", "sends one count", "by a rule"), rows)


def record(names: str, group: str, ours: str, *others: str) -> str:
    """Times of one group of cases in a record of `benchmarks/compare.py`.

    Args:
        names: the record, or several joined by `+`, of which the last that has an op counts.
        group: of the cases.
        ours: the provider whose times are shown.
        others: providers whose times are shown as multiples of these.
    """
    sys.path.append(str(ROOT / "benchmarks"))
    import records
    import report

    rows: list[dict[str, str]] = []
    for name in names.split("+"):
        _, newer = records.read_csv(records.RECORDS / f"{name}.csv")
        measured_again = {row["op"] for row in newer}
        rows = [row for row in rows if row["op"] not in measured_again] + newer
    rows = [row for row in sorted(rows, key=itemgetter("op")) if row["case"] == group]
    return f"{report.beside(rows, ours, others)}\n\n"


def counts() -> str:
    """Rows of op and size in which liger is better and worse than its peers, in the records that the pictures are of."""
    sys.path.append(str(ROOT / "benchmarks"))
    import pictures

    heads = ("on one " + pictures.MACHINE, "liger is better", "within 2 %", "liger is worse")
    return table(heads, pictures.counts(pictures.Records.of().ops))


LANGUAGES_TESTED = ("triton", "cutile")
"""Languages whose kernels ran on a device."""


def tested() -> str:
    """A row per op: the newest record of the conformance suite on a device of each kind of tests, by language."""
    from liger_core.contract import ops

    folder = ROOT / "benchmarks/records"
    found: dict[tuple[str, str], dict[str, str]] = {}
    for path in sorted(folder.glob("*-conformance-*.md")):
        text = path.read_text("utf-8")
        chip = re.search(r"device cuda: NVIDIA (\w+)", text)
        if chip and not re.search(r"-(random|modes)", path.stem):
            kind = "slow tests" if "slow" in path.stem else "quick tests"
            heads, _, *rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|")
            for op, *cells in rows:
                for language in LANGUAGES_TESTED:
                    own = [cell for head, cell in zip(heads[1:], cells, strict=True) if head.startswith(f"{language}/")]
                    failed = sum(int(number) for cell in own for number in re.findall(r"(\d+) failed", cell))
                    if any("passed" in cell for cell in own):
                        words = f"[{chip[1]}, {kind}](../{path.relative_to(ROOT).as_posix()})"
                        found.setdefault((op, language), {})[kind] = words + f": {failed} failed" * bool(failed)
    cells = {op: ["; ".join(found.get((op, name), {}).values()) for name in LANGUAGES_TESTED] for op in sorted(ops)}
    return table(("op", *LANGUAGES_TESTED), ((f"`{op}`", *places) for op, places in cells.items()))


def modes(reports: Sequence[dict[str, Any]]) -> str:
    """A row per mode of PyTorch: what a language does in it, and each language's outcomes in the suite's reports."""
    from liger_conformance.report import OUTCOMES
    from liger_conformance.suite.test_modes import MODES

    outcomes: dict[tuple[str, str], set[tuple[int, str]]] = {}
    for cell in (cell for report in reports for cell in report["modes"]):
        place = outcomes.setdefault((cell["mode"], cell["language"]), set())
        if cell["outcome"] != "not run":  # in one report; it may have run in another
            place.add((OUTCOMES.index(cell["outcome"]), f"{cell['outcome']} on {cell['device']}"))
    languages = sorted({language for _, language in outcomes}, key=lambda language: (language != "torch", language))
    rows = []
    for mode in MODES:
        cells = [sorted(outcomes.get((mode.name, language), ())) for language in languages]
        rows.append((mode.name, mode.promise, *(", ".join(text for _, text in cell) or "not run" for cell in cells)))
    return table(("mode", "what a kernel's language does", *languages), rows)


def kinds() -> str:
    """A row per kind, which the ops' case files say: its ops. The order of kinds is README's; a new one comes last."""
    from liger_conformance.case import cases_of
    from liger_core.contract import ops

    rows = re.findall(r"^\| ([^|]+) \| `", (ROOT / "README.md").read_text("utf-8"), re.M)
    by_kind: dict[str, list[str]] = {kind: [] for kind in rows}
    for op in sorted(ops):
        by_kind.setdefault(cases_of(op).kind, []).append(f"`{op}`")
    return table(("kind", "ops"), ((kind, " ".join(names)) for kind, names in by_kind.items() if names))


def mutants() -> str:
    """A row per record of mutants: how many there are, and their verdicts."""
    rows = []
    for path in sorted(ROOT.glob("conformance/mutants/*.jsonl")):
        found = Counter(json.loads(line)["verdict"] for line in path.read_text("utf-8").splitlines())
        judged = (found["killed"], found["survived"], found["never reached"])
        rows.append((f"[{path.stem}](../{path.relative_to(ROOT).as_posix()})", sum(found.values()), *judged))
    return table(("record", "mutants", "killed", "survived, known", "never reached"), rows)


BLOCKS: dict[str, Callable[..., str]] = {
    "ops": kinds,
    "languages": languages,
    "sharding": sharding,
    "record": record,
    "counts": counts,
    "tested": tested,
    "mutants": mutants,
}
ELSEWHERE = {
    "modes": "tools/pages.py --modes",
    **dict.fromkeys(("model-counts", "model-types", "models-not-run"), "tools/models.py"),
    "trl": "tools/models.py --trl",
}


def pages() -> list[Path]:
    """The pages that have a block."""
    paths = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
    return [path for path in paths if BLOCK.search(path.read_text("utf-8"))]


def write(blocks: Mapping[str, Callable[..., str]] = BLOCKS, *, check: bool = False) -> list[str]:
    """Write these blocks into all pages, or none with `check`. Returns the pages that are not as they would be written."""
    stale = []
    for path in pages():
        before = path.read_text("utf-8")
        after = filled(before, blocks)
        if after != before:
            stale.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(after, "utf-8")
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--modes", type=Path, nargs="+", metavar="REPORT")
    options = parser.parse_args()
    blocks = BLOCKS
    if options.modes:
        reports = [json.loads(path.read_text("utf-8")) for path in options.modes]
        blocks = {"modes": lambda: modes(reports)}
    stale = write(blocks, check=options.check)
    print(*(f"{'stale' if options.check else 'written'}: {page}" for page in stale), sep="\n")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
