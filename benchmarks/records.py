"""Records of runs: what was measured, on which machine, with which versions, when and at which commit.

A record is a table in a file for programs (CSV) and in one for people (Markdown), both with the same head.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# torch is imported where a run is described: records are also read where no torch is, to draw them.
RECORDS = Path(__file__).parent / "records"

PACKAGES = (
    "torch",
    "triton",
    "triton-ascend",
    "torch-npu",
    "cuda-tile",
    "liger-core",
    "liger-triton",
    "liger-triton-ascend",
    "liger-cutile",
    "liger-distributed",
    "liger-transformers",
    "transformers",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
)

Row = Mapping[str, object]
Head = dict[str, str]


def head_of(device: str) -> Head:
    """Where, with what and when: machine, versions, load, date and commit, in words."""
    return {
        "machine": machine(device),
        "versions": ", ".join(f"{name} {installed}" for name in PACKAGES if (installed := _version(name))),
        "load": f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores in the last minute",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def machine(device: str) -> str:
    """The accelerator, if there is one, the processor and the system. Never the machine's name."""
    import torch

    parts = [] if device == "cpu" else [torch.get_device_module(device).get_device_name()]
    parts += [f"{processor()} ({os.cpu_count()} cores)", platform.system(), f"Python {platform.python_version()}"]
    return ", ".join(parts)


def processor() -> str:
    """The processor's model."""
    info = Path("/proc/cpuinfo")
    if info.exists() and (model := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        return model[1]
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the working tree, with ``+changes`` when it has any; ``unknown`` outside a repository.

    The variable LIGER_COMMIT overrides it, for a copy of the tree that is no repository.
    """
    if override := os.environ.get("LIGER_COMMIT"):
        return override
    try:
        revision = _git("rev-parse", "--short=10", "HEAD")
        return revision + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    # torch's own has its build (+cu130), which the metadata of some builds lacks.
    if package == "torch":
        import torch

        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def path_of(name: str, head: Head, directory: Path = RECORDS) -> Path:
    """Where a record goes, without its suffix: the date, its name and what was measured on."""
    first = re.sub(r"\((R|TM|C)\)|\(\d+ cores\)", "", head["machine"].split(",")[0])
    device = re.sub(r"[^a-z0-9]+", "-", first.lower()).strip("-")
    return directory / f"{head['date']}-{name}-{device}"


def comment(head: Head) -> str:
    """The head, a line for each key, as it stands at the beginning of a CSV."""
    return "".join(f"# {key}: {value}\n" for key, value in head.items())


def write(
    name: str, head: Head, rows: Sequence[Row], columns: Sequence[str], title: str, body: str, directory: Path
) -> None:
    """Write a record as a CSV and as a page, and print where."""
    path = path_of(name, head, directory)
    print("# written:", write_csv(path, head, rows, columns), write_markdown(path, title, head, body), flush=True)


def write_csv(path: Path, head: Head, rows: Sequence[Row], columns: Sequence[str]) -> Path:
    """Write the rows, after a line ``# key: value`` for each entry of the head."""
    path = path.parent / f"{path.name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(comment(head))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_csv(path: Path) -> tuple[Head, list[dict[str, str]]]:
    """Head and rows of a file that `write_csv` wrote; every value is text."""
    lines = path.read_text().splitlines()
    head = dict(line.removeprefix("# ").split(": ", 1) for line in lines if line.startswith("# "))
    return head, list(csv.DictReader(line for line in lines if not line.startswith("# ")))


def check_alike(values: Mapping[str, Collection[str]]) -> None:
    """Check that rows measured apart can become one record: each of these has a single value.

    Raises:
        ValueError: one of them has several.
    """
    for what, distinct in values.items():
        if len(distinct) > 1:
            raise ValueError(f"--render: the files differ in {what}: {'; '.join(sorted(distinct))}")


def write_markdown(path: Path, title: str, head: Head, body: str) -> Path:
    """Write a page: the title, the head as a list, then `body`."""
    path = path.parent / f"{path.name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in head.items()), "", body.strip(), ""]
    path.write_text("\n".join(lines))
    return path


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns padded so that it reads as text too."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
