"""For the documentation's site: formulas of docstrings typeset, and doctests as examples without a heading."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.append(str(Path(__file__).resolve().parent))

import site_math
import site_ops

SECTION = re.compile(r"^(?:Args|Returns|Raises|Source):$|^>>> ", re.M)


class Examples(griffe.Extension):
    """Indents the doctests that end a docstring under ``Examples:``, as mkdocstrings wants them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one docstring."""
        if obj.docstring is None or "\n>>> " not in (text := obj.docstring.value):
            return
        before, _, doctests = text.partition("\n>>> ")
        indented = re.sub("^", "    ", ">>> " + doctests, flags=re.M)
        obj.docstring.value = f"{before}\nExamples:\n{indented}"


class Formulas(griffe.Extension):
    """Typesets the formulas in what an op's docstring has before its arguments."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Change one docstring."""
        if func.docstring is None or func.module.path != f"liger_core.ops.{func.name}":
            return
        text = func.docstring.value
        end = found.start() if (found := SECTION.search(text)) else len(text)
        func.docstring.value = site_math.typeset(text[:end], site_ops.variables(func.name)) + text[end:]
