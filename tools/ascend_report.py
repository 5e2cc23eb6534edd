#!/usr/bin/env python3
"""Prove the kernels of liger-triton-ascend without an NPU, and write down what was proved: a matrix and a report for each op.

    .venv-ascend/bin/python tools/ascend_report.py                       run the gates, write the reports
    .venv-ascend/bin/python tools/ascend_report.py --runs DIR            the same, and keep the suite's own reports in DIR
    .venv-ascend/bin/python tools/ascend_report.py --runs DIR --render   write the reports of the runs in DIR
    .venv-ascend/bin/python tools/ascend_report.py --op=rope             the same for one op: the others' pages and rows stay

Each gate is a run of the conformance suite in a process of its own. Nothing in the reports is typed: numbers are the suite's,
words are those of the kernels' files.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch fails where torch-npu is installed and CANN is not

from liger_conformance.case import TIMED, Case, cases_of
from liger_conformance.compilers import ascend_execute
from liger_conformance.interpreters.triton_ascend import UNIFIED_BUFFER_BITS
from liger_core.contract import ops

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages/liger-triton-ascend"
SOURCE = PACKAGE / "src/liger_triton_ascend"
TRITON = ROOT / "packages/liger-triton/src/liger_triton"
REPORTS = PACKAGE / "reports"
WRITTEN = sorted(op for op in ops if (SOURCE / "ops" / f"{op}.py").exists())
WITHOUT = sorted(ops.keys() - set(WRITTEN))

COMMAND = ".venv-ascend/bin/python tools/ascend_report.py"
NOTE = f"<!-- Written by tools/ascend_report.py: {COMMAND} -->"
NO_NPU = "not measured: no NPU"
BUFFER = UNIFIED_BUFFER_BITS // 8


class Gate(NamedTuple):
    """A run of the suite. Gates 2 and 3 are one: what is lowered is also measured."""

    number: str
    lane: str
    title: str
    options: tuple[str, ...]
    dtypes: tuple[str, ...]


# With the long cases, and without what needs a device.
EVERY_CASE = ("-m", "slow or not slow", "-k", "not model_sizes and not test_huge and not test_compile_options")
INTERPRETED = Gate("1", "interpreted", "interpreted", EVERY_CASE, ("float32", "bfloat16", "float16", "any"))
LOWERED = Gate("2", "compiled", "lowered", ("--compile=all",), ("float32", "bfloat16"))
EXECUTED = Gate("4", "executed", "executed", ("--compile=all", "--execute"), ("float32", "bfloat16"))
GATES = (INTERPRETED, LOWERED, EXECUTED)

Run = dict[str, Any]


def run(gate: Gate, chosen: list[str], directory: Path) -> None:
    """Run a gate's tests, of chosen ops if there are any, and leave the suite's report in the directory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if gate is INTERPRETED else {}
    command = [sys.executable, "-m", "pytest", "conformance", "--impl=triton-ascend", *gate.options, "-q"]
    command += [f"--op={op}" for op in chosen]
    done = subprocess.run([*command, f"--report={directory}"], cwd=ROOT, env=environment, check=False)
    if done.returncode not in (0, 1):  # 1: tests failed, which the report says
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")


def outcomes(found: Run, op: str, dtype: str) -> Counter[str]:
    """The outcomes of an op in a dtype."""
    cells = (cell for cell in found["cells"] if (cell["op"], cell["dtype"]) == (op, dtype))
    return sum((Counter(cell["outcomes"]) for cell in cells), Counter())


def in_words(counts: Counter[str], lane: str) -> str:
    """A cell: how many passed as the lane passes, and whatever else there was, by name."""
    others = [f"{count} {outcome}" for outcome, count in sorted(counts.items()) if outcome != lane]
    return ", ".join(([str(counts[lane])] if counts[lane] else []) + others) or "-"


class Launch(NamedTuple):
    """A kernel as one case of an op launches it."""

    case: str
    dtype: str
    kernel: str
    constants: str
    uses: dict[str, int]
    over: list[str]
    close: list[str]


def launches(found: Run, op: str) -> list[Launch]:
    """What an op's cases launch, in the order of the kernels."""
    result = []
    for kernel in found["kernels"]:
        constants = kernel["variant"].partition(";")[0]
        for call in kernel["calls"]:
            name, _, rest = call.partition("-")
            case, _, dtype = rest.rpartition("-")
            if name == op:
                what = kernel["kernel"], constants, kernel["uses"], kernel["over"], kernel["close"]
                result.append(Launch(case, dtype, *what))
    return result


def buffer_of(found: Run, op: str, dtype: str) -> str:
    """A cell of gate 3: the most KiB that any launch takes of the Unified Buffer, and those with double buffers."""
    taken = [launch for launch in launches(found, op) if launch.dtype == dtype]
    if not taken:
        return "-"
    most = [max(launch.uses[what] for launch in taken) for what in ("bytes", "bytes with double buffers")]
    return f"{kib(most[0])} / {kib(most[1])} KiB{' OVER' if any(launch.over for launch in taken) else ''}"


def kib(size: int) -> str:
    return f"{size / 1024:.0f}"


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table."""
    heads = list(heads)
    return [row(*heads), "|" + "---|" * len(heads), *(row(*cells) for cells in rows)]


def row(*cells: object) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def matrix(runs: dict[Gate, Run], why_not: dict[Gate, str], names: list[str], before: str, pages: Iterable[str]) -> str:
    """The page of all ops.

    Args:
        runs: of some ops or of all.
        why_not: why a gate wasn't run.
        names: the ops.
        before: the page as it was, whose rows of other ops stay; and so does what it says of their runs.
        pages: those of all ops, which say why tests didn't run.
    """
    heads, columns = ["op"], []
    for gate in runs:
        for dtype in gate.dtypes:
            heads.append(f"{gate.number} {gate.title} {dtype}")
            columns.append(lambda op, gate=gate, dtype=dtype: in_words(outcomes(runs[gate], op, dtype), gate.lane))
        for dtype in gate.dtypes if gate is LOWERED else ():
            heads.append(f"3 Unified Buffer {dtype}")
            columns.append(lambda op, gate=gate, dtype=dtype: buffer_of(runs[gate], op, dtype))
    rows = {op: line for line in before.splitlines() for op in re.findall(r"^\| \[(\w+)\]", line) if op in WRITTEN}
    rows |= {op: row(f"[{op}]({op}.md)", *(column(op) for column in columns)) for op in names}
    headings = [f"- {heading(runs)}"]
    if set(rows) > set(names):
        old = [line for line in before.splitlines() if re.match(r"- .*\bdate \d", line)]
        of = f"- {in_code(names)}: "
        headings = [*(line for line in old if not line.startswith(of)), f"{of}{heading(runs)}"]
    lines = [
        NOTE, "", "# Gates", "",
        f"What the kernels passed on a CPU, by op, gate and dtype. **They never ran on an NPU.** `{COMMAND}` runs the",
        "gates and writes this folder; [porting-to-npu](../../../docs/porting-to-npu.md#the-gates) says what each gate shows.",
        "", *headings,
        *[f"- {gate.title}: not run: {why}" for gate, why in why_not.items()],
        f"- KiB: the most that a launch takes of the Unified Buffer's {kib(BUFFER)}, by the estimate; and with double buffers",
        "- a number alone is of tests that passed as the gate does",
        *[f"- no kernel: {', '.join(WITHOUT)}" for _ in WITHOUT[:1]],
        "", *table(heads, []), *(rows[op] for op in sorted(rows)), "",
    ]  # fmt: skip
    reasons: Counter[tuple[str, str, str]] = Counter()
    for page in pages:
        for title, outcome, n, reason in re.findall(r"^- (\w+), ([\w ]+) \((\d+)\): (.*)$", page, re.MULTILINE):
            reasons[title, outcome, reason] += int(n)
    order = [gate.title for gate in GATES]
    for title, outcome, reason in sorted(reasons, key=lambda key: (order.index(key[0]), *key[1:])):
        lines.append(f"- {title}, {outcome} ({reasons[title, outcome, reason]}): {reason}")
    return "\n".join(lines).rstrip() + "\n"


def heading(runs: dict[Gate, Run]) -> str:
    """What all runs had: the day, the machine, versions."""
    first, *others = (found["heading"] for found in runs.values())
    return ", ".join(f"{name} {value}" for name, value in first.items() if all(o.get(name) == value for o in others))


def report(op: str, runs: dict[Gate, Run], why_not: dict[Gate, str]) -> str:
    """The page of one op."""
    files = sources(op)
    lowered = launches(runs[LOWERED], op)
    cases = [case for case in cases_of(op).cases if case.group in TIMED]
    sections = {
        "Files": table(["file", "lines"], ((link(path), len(read(path).splitlines())) for path in files)),
        "API map": api_map(op, files, {at.kernel for at in lowered}),
        "Optimisations": [line for path in files for line in quoted(path)],
        "Tiling and launches": [*constants(files), *table(
            ["sizes", "dtype", "kernel", "constants", "programs", "KiB", "with double buffers"],
            dict.fromkeys(
                (sizes(case), at.dtype, f"`{at.kernel}`", at.constants or "-", at.uses["programs"], kib(at.uses["bytes"]),
                 kib(at.uses["bytes with double buffers"]))
                for case in cases for at in lowered if at.case == case.id
            ),
        )],
        "Parity, forward and backward": parity(op, runs, why_not),
        "Performance": table(["sizes", "forward", "forward + backward"], ((sizes(c), NO_NPU, NO_NPU) for c in cases)),
        "Risks": risks(files, lowered),
    }  # fmt: skip
    lines = [NOTE, "", f"# {op}"]
    for title, text in sections.items():
        lines += ["", f"## {title}", "", *text]
    return "\n".join(lines).rstrip() + "\n"


def sizes(case: Case) -> str:
    return f"{case.group}: " + ", ".join(f"{name} {value}" for name, value in case.values.items())


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read(path))


def link(path: Path) -> str:
    return f"[{path.relative_to(ROOT)}](../../../{path.relative_to(ROOT)})"


def sources(op: str, package: Path = SOURCE) -> list[Path]:
    """The kernel's file, and the files of its package that it needs, also of other ops."""
    found: dict[Path, None] = {}

    def add(path: Path) -> None:
        if path in found:
            return
        found[path] = None
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package.name}."):
                module = package.joinpath(*node.module.split(".")[1:])
                for file in [module / name.name for name in node.names] if module.is_dir() else [module]:
                    add(file.with_suffix(".py"))

    add(package / "ops" / f"{op}.py")
    return list(found)


def api_map(op: str, files: list[Path], launched: set[str]) -> list[str]:
    """From the contract to kernels, and from the functions of Triton's language there to those here."""
    contract = ops[op]
    rows = [
        (f"`{name}`", "yes" if name in launched else "", (ast.get_docstring(node) or "").replace("\n", " "))
        for path in files
        for node in functions(path)
        for name in [f"{path.stem}.{node.name}"]
    ]
    ours = {name for path in files for name in triton_names(path)}
    theirs = {name for path in sources(op, TRITON) for name in triton_names(path)}
    return [
        f"`{op}{inspect.signature(contract.reference)}`".replace("|", "\\|"), "",
        f"Gradients of: {', '.join(f'`{name}`' for name in contract.differentiable)}.", "",
        *table(["Triton function", "launched", "what it says of itself"], rows), "",
        f"Of Triton's language: {in_code(ours)}.", "",
        f"In liger-triton's files of this op and not here: {in_code(theirs - ours) or 'nothing'}.",
    ]  # fmt: skip


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
            yield node


def triton_names(path: Path) -> set[str]:
    """Functions of the language that a file uses, such as ``tl.exp``."""
    return set(re.findall(r"\b(?:tl|libdevice)(?:\.\w+)+(?=\()", read(path)))


def in_code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def quoted(path: Path) -> list[str]:
    """What a file says of itself."""
    text = ast.get_docstring(parse(path)) or ""
    return [f"{path.stem}:", "", *(f"> {line}".rstrip() for line in text.splitlines()), ""]


def constants(files: list[Path]) -> list[str]:
    """The constants of the files, with the comments and strings that say why."""
    lines = []
    for path in files:
        text = read(path).splitlines()
        body = parse(path).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("()")[0].isupper()):
                continue
            first, last = node.lineno - 1, node.end_lineno
            while text[first - 1].startswith("#"):
                first -= 1
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                last = after.end_lineno
            lines += [f"# {path.name}"] * (f"# {path.name}" not in lines) + text[first:last]
    return ["```python", *lines, "```", ""] if lines else []


def parity(op: str, runs: dict[Gate, Run], why_not: dict[Gate, str]) -> list[str]:
    """Outcomes of each gate, and why tests didn't run."""
    rows = []
    for gate, found in runs.items():
        rows.append([f"{gate.number} {gate.title}"])
        for dtype in INTERPRETED.dtypes:
            counts = outcomes(found, op, dtype)
            rows[-1].append(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())) or "-")
        if gate is LOWERED:
            rows.append(["3 Unified Buffer", *(buffer_of(found, op, dtype) for dtype in INTERPRETED.dtypes)])
    lines = [*table(["gate", *INTERPRETED.dtypes], rows), ""]
    for gate, found in runs.items():
        reasons: Counter[tuple[str, str]] = Counter()
        for cell in found["cells"]:
            for outcome, why in cell["reasons"].items() if cell["op"] == op else ():
                reasons.update({(outcome, reason): count for reason, count in why.items()})
        lines += [f"- {gate.title}, {outcome} ({n}): {reason}" for (outcome, reason), n in sorted(reasons.items())]
    return lines + [f"- {gate.title}: not run: {why}" for gate, why in why_not.items()]


def risks(files: list[Path], lowered: list[Launch]) -> list[str]:
    """What no gate can show, what is near a limit, and what the files themselves say was not measured."""
    lines = ["- Never compiled by CANN, never run on an NPU; [what no gate shows]"
             "(../../../docs/porting-to-npu.md#what-was-never-run)."]  # fmt: skip
    lines += sorted({f"- `{at.kernel}` [{at.constants}]: {what}." for at in lowered for what in [*at.over, *at.close]})
    for path in files:
        for node in parse(path).body:
            if isinstance(node, ast.Expr) and "not measured" in ast.unparse(node):
                lines.append(f"- {path.name}: {ast.literal_eval(node.value)}".replace("\n", " "))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where the suite's own reports go")
    parser.add_argument("--render", action="store_true", help="run nothing: the suite's reports are in --runs")
    parser.add_argument(
        "--op",
        action="append",
        default=[],
        choices=WRITTEN,
        metavar="OP",
        help="this op alone (repeatable): the other pages stay",
    )
    args = parser.parse_args()
    names = sorted(args.op) or WRITTEN
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.runs or Path(temporary)
        obstacle = ascend_execute.obstacle()
        why_not = {EXECUTED: obstacle} if obstacle and not args.render else {}
        for gate in GATES if not args.render else ():
            if gate not in why_not:
                run(gate, args.op, (directory / gate.title).resolve())
        runs = {
            gate: json.loads((directory / gate.title / "conformance.json").read_text(encoding="utf-8"))
            for gate in GATES
            if gate not in why_not
        }
    REPORTS.mkdir(exist_ok=True)
    for op in names:
        (REPORTS / f"{op}.md").write_text(report(op, runs, why_not), encoding="utf-8")
    summary = REPORTS / "README.md"
    before = summary.read_text(encoding="utf-8") if args.op else ""
    pages = [(REPORTS / f"{op}.md").read_text(encoding="utf-8") for op in WRITTEN if (REPORTS / f"{op}.md").exists()]
    summary.write_text(matrix(runs, why_not, names, before, pages), encoding="utf-8")
    failed = sum(cell["outcomes"].get("failed", 0) for found in runs.values() for cell in found["cells"])
    print(f"{REPORTS.relative_to(ROOT)}: {len(names)} ops, {failed} tests failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
