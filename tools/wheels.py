#!/usr/bin/env python3
"""Check built wheels before they are published: tools/wheels.py dist

Each holds one top-level package with its py.typed, its license and nothing of its tests; its metadata names no file or
address of the machine that built it, and other liger packages with both ends of a range. The description has no link to a file
beside it, which an index doesn't have. Its classifiers are there, and its URLs, if mkdocs.yml has a `repo_url`. Every package of
the workspace is there.
"""

import importlib.util
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from email.policy import default
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("liger_build", ROOT / "tools/build.py")
assert _spec is not None
assert _spec.loader is not None
builder = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(builder)


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
        text = archive.read(f"{info}/METADATA")
    metadata: Message = message_from_bytes(text, policy=default)
    module = str(metadata["Name"]).replace("-", "_")
    found = []
    if strangers := sorted({name.split("/")[0] for name in names} - {module, info}):
        found.append(f"holds {', '.join(strangers)} beside {module}")
    if strangers := [name for name in names if "/tests/" in name or name.endswith(".pyc")]:
        found.append(f"holds {', '.join(strangers)}")
    for required in (f"{module}/__init__.py", f"{module}/py.typed", f"{info}/licenses/LICENSE"):
        if required not in names:
            found.append(f"lacks {required}")
    for field in ("Summary", "License-Expression", "Requires-Python", "Description-Content-Type"):
        if not metadata[field]:
            found.append(f"metadata lacks {field}")
    for requirement in metadata.get_all("Requires-Dist") or []:
        if " @ " in requirement or "://" in requirement:
            found.append(f"requires a file or an address: {requirement}")
        if requirement.startswith("liger") and not {"<", ">"} <= set(requirement.partition(";")[0]):
            found.append(f"requires a liger package without a range: {requirement}")
    described = str(metadata.get_payload())
    prose = "".join(part for part in builder.FENCE.split(described) if not part.lstrip().startswith("```"))
    if beside := [link["target"] for link in builder.LINK.finditer(prose) if builder.relative(link["target"])]:
        found.append(
            f"its description links to {', '.join(beside)}, which an index does not have: build it by tools/build.py"
        )
    classifiers = metadata.get_all("Classifier") or []
    found += [
        f"metadata lacks a classifier {kind!r}"
        for kind in (
            "Development Status ::",
            "Intended Audience ::",
            "Programming Language :: Python :: 3.",
            "Topic ::",
        )
        if not any(classifier.startswith(kind) for classifier in classifiers)
    ]
    if builder.address("repo_url") and not metadata.get_all("Project-URL"):
        found.append("metadata lacks Project-URL, and mkdocs.yml has a repo_url: build it by tools/build.py")
    if str(ROOT).encode() in text:
        found.append(f"metadata names {ROOT}")
    return [f"{wheel.name}: {problem}" for problem in found]


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    projects = [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "conformance/pyproject.toml"]
    found = [problem for wheel in wheels for problem in problems(wheel)]
    if len(wheels) != len(projects):
        found.append(f"{len(wheels)} wheels of {len(projects)} packages: tools/build.py --out-dir {sys.argv[1]}")
    print("\n".join(found) or f"{len(wheels)} wheels are clean")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
