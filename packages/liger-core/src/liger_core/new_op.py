"""The files of a new op: `liger new-op NAME` writes a small op that works, for its author to replace."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from liger_core.calling import ops

LANGUAGES = ("triton", "cutile", "triton-ascend")

EXPORTS = Path("packages/liger-core/src/liger_core/__init__.py")

TEMPLATES = files("liger_core") / "templates"

BY_HAND = """\
Written. What you have now is y = x · weight, which passes its cases. To do, by hand:
  1. the formula, the signature and the checks: {op}
  2. the cases: {cases}
{kernels}  {next}. benchmarks/traffic.py, benchmarks/peers.py, README.md (table of ops, and the number below it) and SMALL in
     packages/liger-core/tests/test_references_basic.py: an entry in each
Then: uv run python tools/pages.py
      uv run pytest conformance --impl=torch --op={name}
docs/adding-an-op.md explains each step and ends with a checklist."""


def new_op(name: str, languages: Iterable[str], root: Path) -> str:
    """Write an op's files into a checkout. Nothing is written if anything stands in the way.

    Args:
        name: of the op, a Python name in lower case.
        languages: those that get a kernel file.
        root: of the checkout.

    Returns:
        What was written, and what is left to do by hand.

    Raises:
        ValueError: no such name, an op of that name, or no checkout.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"new-op: {name!r} is no name for an op; it takes lower case letters, digits and _")
    if not (root / EXPORTS).is_file():
        raise ValueError(f"new-op: {root.resolve()} is no checkout of liger: there is no {EXPORTS}; --root names it")
    op = Path(f"packages/liger-core/src/liger_core/ops/{name}.py")
    cases = Path(f"conformance/src/liger_conformance/cases/{name}.py")
    kernels = {
        language: Path(f"packages/liger-{language}/src/liger_{language.replace('-', '_')}/ops/{name}.py")
        for language in languages
    }
    written = {op: "op", cases: "cases", **{path: language.replace("-", "_") for language, path in kernels.items()}}
    exports = (root / EXPORTS).read_text(encoding="utf-8")
    if name in ops or re.search(rf'^    "{name}",$', exports, re.MULTILINE):
        raise ValueError(f"new-op: liger_core has the name {name!r}")
    if standing := [path.as_posix() for path in written if (root / path).exists()]:
        raise ValueError(f"new-op: there is {', '.join(standing)}")
    for path, template in written.items():
        text = (TEMPLATES / f"{template}.py.txt").read_text(encoding="utf-8")
        (root / path).write_text(text.replace("OPNAME", name), encoding="utf-8")
    (root / EXPORTS).write_text(_exporting(exports, name), encoding="utf-8")
    lines = "".join(f"  {number}. the kernel: {path.as_posix()}\n" for number, path in enumerate(kernels.values(), 3))
    return BY_HAND.format(op=op.as_posix(), cases=cases.as_posix(), kernels=lines, next=3 + len(kernels), name=name)


def _exporting(text: str, name: str) -> str:
    """`liger_core/__init__.py` with the op imported and in `__all__`, each in the order of the alphabet."""
    imports = [line for line in text.splitlines() if line.startswith("from liger_core.ops.")]
    line = f"from liger_core.ops.{name} import {name}"
    text = text.replace("\n".join(imports), "\n".join(sorted([*imports, line], key=lambda i: i.split()[1])))
    head, _, names = text.partition("__all__ = [\n")
    names, _, tail = names.partition("]\n")
    entries = sorted(
        [*names.splitlines(), f'    "{name}",'], key=lambda entry: (entry.strip('", ')[0].islower(), entry)
    )
    return head + "__all__ = [\n" + "\n".join(entries) + "\n]\n" + tail
