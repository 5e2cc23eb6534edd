"""The notebook runs from top to bottom, and prints what it shows, but for the numbers.

`python examples/test_notebook.py` runs it, and writes what it prints into it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent / "own_kernel.ipynb"


def outputs(notebook: dict[str, Any]) -> list[str]:
    """The text that each cell of code prints, in one namespace."""
    names: dict[str, object] = {}
    printed: list[str] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
            printed.append(out.getvalue())
    return printed


def shown(cell: dict[str, Any]) -> str:
    """The text below a cell."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def test_the_notebook_prints_what_it_shows() -> None:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    printed = outputs(notebook)
    shown_words, words = (
        [re.sub(r"\d+", "1", text) for text in texts]
        for texts in ([shown(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"], printed)
    )
    assert words == shown_words, "run: python examples/test_notebook.py"
    right, wrong_factor, rounded, mended = filter(None, printed)
    assert " 0 failed" in right
    assert " 0 failed" not in wrong_factor + rounded, "the suite didn't catch a bug"
    assert mended == right


def write() -> None:
    """Write what the notebook prints into it."""
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, outputs(notebook), strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = number, [stream] if text else []
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(write())
