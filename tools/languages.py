"""Write which ops each language has into README.md, from the files of the kernel packages:

uv run python tools/languages.py
"""

from __future__ import annotations

from pathlib import Path

import tomllib

from liger_core.contract import ops

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
START, END = "<!-- tools/languages.py -->\n", "<!-- end -->\n"


def languages(root: Path) -> dict[str, Path]:
    """The folder of each language's kernels, by the entry points of the packages in this repository."""
    found = {}
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        points = tomllib.loads(project.read_text("utf-8"))["project"].get("entry-points", {})
        for language, target in points.get("liger.backends", {}).items():
            found[language] = project.parent / "src" / target.partition(":")[0] / "ops"
    return found


def table(root: Path) -> str:
    """A row per language: its ops, or those that it lacks."""
    lines = ["| language | ops |", "|---|---|", f"| torch (the reference) | all {len(ops)} |"]
    for language, folder in languages(root).items():
        missing = [f"`{op}`" for op in sorted(ops) if not (folder / f"{op}.py").exists()]
        has = f"{len(ops) - len(missing)} of {len(ops)}, not {', '.join(missing)}" if missing else f"all {len(ops)}"
        lines.append(f"| {language} | {has} |")
    return "\n".join(lines) + "\n"


def written(text: str, root: Path) -> str:
    """The page with the table of now."""
    return text[: text.index(START) + len(START)] + table(root) + text[text.index(END, text.index(START)) :]


if __name__ == "__main__":
    README.write_text(written(README.read_text("utf-8"), ROOT), "utf-8")
