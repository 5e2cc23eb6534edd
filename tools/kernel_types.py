"""Compare each kernel's signature with its contract's, as `@implements` ties them: what the type checker says of those lines.

    uv run python tools/kernel_types.py [FOLDER ...]    # without folders, all packages of this checkout

The rest of those files is no Python to a type checker: a kernel is in a language of its own, and host code knows what it
saved. A name, a default or a kind of parameter that differs from the contract's is an error of pyright's at the decorator.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(ROOT.glob("packages/*/src"))


def decorators(folders: Sequence[Path]) -> set[tuple[str, int]]:
    """The file and the line, counted from 0, of each `@implements` below the folders."""
    return {
        (str(file), number)
        for folder in folders
        for file in folder.rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines())
        if re.match(r"@implements\(", line)
    }


def mismatches(folders: Sequence[Path]) -> tuple[int, list[str]]:
    """How many signatures were compared, and what pyright says of those that differ."""
    lines = decorators(folders)
    if not lines:  # without files, pyright would read all of the checkout
        return 0, []
    command = [sys.executable, "-m", "pyright", "--outputjson", *sorted({file for file, _ in lines})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    errors = [
        f"{diagnostic['file']}:{diagnostic['range']['start']['line'] + 1}: {diagnostic['message']}"
        for diagnostic in json.loads(done.stdout)["generalDiagnostics"]
        if diagnostic["severity"] == "error" and (diagnostic["file"], diagnostic["range"]["start"]["line"]) in lines
    ]
    return len(lines), errors


def main(words: Sequence[str]) -> int:
    """Print what differs; 1 if anything does, or if there is nothing to compare."""
    count, errors = mismatches([Path(word).resolve() for word in words] or PACKAGES)
    print("\n".join([*errors, f"{count} signatures compared, {len(errors)} differ"]))
    return 1 if errors or not count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
