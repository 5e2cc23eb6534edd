"""For the documentation's site: doctests of a docstring are its examples, without a heading of that name."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Indents the doctests that end a docstring under ``Examples:``, as mkdocstrings wants them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one docstring."""
        if obj.docstring is None or "\n>>> " not in (text := obj.docstring.value):
            return
        before, _, doctests = text.partition("\n>>> ")
        indented = re.sub("^", "    ", ">>> " + doctests, flags=re.M)
        obj.docstring.value = f"{before}\nExamples:\n{indented}"
