#!/usr/bin/env python3
"""Build packages as they are published, and check what was built.

    tools/build.py --out-dir DIST [PACKAGE ...]    build these packages, or all
    tools/build.py --check DIST                    fail if a wheel there is not fit to be published, or a package has none

A package index shows a README alone, so its links to other files of the repository can't stay as they are. With a `repo_url` in
mkdocs.yml they become links to that repository, and the metadata gets `[project.urls]`; `site_url` adds the documentation.
Without one, as long as the repository has no public address, a link becomes its text, and a picture is left out.

The sources are copied first: nothing in the working tree changes.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from email.message import Message
from email.policy import default
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
# The text of a link may be code with brackets in it, such as `x[i]`.
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:`[^`]*`|[^\[\]])*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.M | re.S)


def folders() -> dict[str, Path]:
    """Every package, with its folder."""
    files = [*sorted(ROOT.glob("packages/*/pyproject.toml")), ROOT / "conformance/pyproject.toml"]
    return {tomllib.loads(file.read_text("utf-8"))["project"]["name"]: file.parent for file in files}


def address(name: str) -> str:
    """A setting of mkdocs.yml, or nothing."""
    match = re.search(rf"(?m)^{name}: *(\S+)", (ROOT / "mkdocs.yml").read_text("utf-8"))
    return match[1].rstrip("/") if match else ""


def turned(markdown: str, folder: str, turn: Callable[[re.Match[str], str, str], str]) -> str:
    """A page of `folder` whose links to files are turned; those in blocks of code stay.

    `turn` gets a match of `LINK`, the path of the file from the top of the repository, and the anchor with its ``#``.
    """

    def one(link: re.Match[str]) -> str:
        path, hash, anchor = link["target"].partition("#")
        file = posixpath.normpath(posixpath.join(folder, path))
        return turn(link, file, hash + anchor) if relative(link["target"]) else link[0]

    parts = FENCE.split(markdown)
    return "".join(part if part.lstrip().startswith("```") else LINK.sub(one, part) for part in parts)


def relative(target: str) -> bool:
    """Whether a link's target is a file beside the page."""
    return not re.match(r"[a-z][a-z+.-]*:|#|//", target)


def published(markdown: str, folder: Path, repo_url: str) -> str:
    """A README of `folder` as an index can show it."""
    place = folder.relative_to(ROOT).as_posix()

    def turn(link: re.Match[str], file: str, anchor: str) -> str:
        if not repo_url:
            return "" if link["picture"] else link["text"]
        if not (ROOT / file).exists():
            raise SystemExit(f"{place}/README.md links to {link['target']}, which does not exist")
        kind = "raw" if link["picture"] else "tree" if (ROOT / file).is_dir() else "blob"
        return f"{link['picture']}[{link['text']}]({repo_url}/{kind}/main/{file}{anchor})"

    return turned(markdown, place, turn)


def urls(folder: Path, repo_url: str, site_url: str) -> str:
    """The `[project.urls]` of a package, or nothing."""
    place = folder.relative_to(ROOT).as_posix()
    lines = []
    if repo_url:
        lines += [f'Repository = "{repo_url}"', f'Issues = "{repo_url}/issues"']
        lines += [f'Changelog = "{repo_url}/blob/main/{place}/CHANGELOG.md"']
    if site_url:
        lines += [f'Documentation = "{site_url}"']
    return "\n".join(["", "[project.urls]", *lines, ""]) if lines else ""


def build(package: str, out_dir: Path, repo_url: str | None = None, site_url: str | None = None) -> None:
    """Build a wheel and an sdist of a package."""
    folder = folders()[package]
    repo_url = address("repo_url") if repo_url is None else repo_url.rstrip("/")
    site_url = address("site_url") if site_url is None else site_url.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="liger-build-") as place:
        copy = Path(place) / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        readme, project = copy / "README.md", copy / "pyproject.toml"
        readme.write_text(published(readme.read_text("utf-8"), folder, repo_url), "utf-8")
        project.write_text(project.read_text("utf-8") + urls(folder, repo_url, site_url), "utf-8")
        subprocess.run(["uv", "build", "--quiet", "--out-dir", str(out_dir.resolve()), str(copy)], check=True)


def problems(wheel: Path) -> list[str]:
    """Problems of a wheel.

    It holds one top-level package with its py.typed, its license and nothing of its tests. Its metadata names no file or
    address of the machine that built it, and other liger packages with both ends of a range. Its description has no link to a
    file beside it, which an index doesn't have. Its classifiers are there, and its URLs, if mkdocs.yml has a `repo_url`.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
        text = archive.read(f"{info}/METADATA")
    metadata: Message = message_from_bytes(text, policy=default)
    module = str(metadata["Name"]).replace("-", "_")
    faults = []
    if strangers := sorted({name.split("/")[0] for name in names} - {module, info}):
        faults.append(f"holds {', '.join(strangers)} beside {module}")
    if strangers := [name for name in names if "/tests/" in name or name.endswith(".pyc")]:
        faults.append(f"holds {', '.join(strangers)}")
    for required in (f"{module}/__init__.py", f"{module}/py.typed", f"{info}/licenses/LICENSE"):
        if required not in names:
            faults.append(f"lacks {required}")
    for field in ("Summary", "License-Expression", "Requires-Python", "Description-Content-Type"):
        if not metadata[field]:
            faults.append(f"metadata lacks {field}")
    for requirement in metadata.get_all("Requires-Dist") or []:
        if " @ " in requirement or "://" in requirement:
            faults.append(f"requires a file or an address: {requirement}")
        if requirement.startswith("liger") and not {"<", ">"} <= set(requirement.partition(";")[0]):
            faults.append(f"requires a liger package without a range: {requirement}")
    described = str(metadata.get_payload())
    prose = "".join(part for part in FENCE.split(described) if not part.lstrip().startswith("```"))
    if beside := [link["target"] for link in LINK.finditer(prose) if relative(link["target"])]:
        faults.append(
            f"its description links to {', '.join(beside)}, which an index does not have: build it by tools/build.py"
        )
    classifiers = str(metadata.get_all("Classifier"))
    for kind in ("Development Status", "Intended Audience", "Programming Language :: Python :: 3.", "Topic"):
        if kind not in classifiers:
            faults.append(f"metadata lacks a classifier {kind!r}")
    if address("repo_url") and not metadata.get_all("Project-URL"):
        faults.append("metadata lacks Project-URL, and mkdocs.yml has a repo_url: build it by tools/build.py")
    if str(ROOT).encode() in text:
        faults.append(f"metadata names {ROOT}")
    return [f"{wheel.name}: {problem}" for problem in faults]


def check(directory: Path) -> list[str]:
    """Problems of the wheels in a folder that has to have one of each package."""
    wheels = sorted(directory.glob("*.whl"))
    faults = [problem for wheel in wheels for problem in problems(wheel)]
    if len(wheels) != len(folders()):
        faults.append(f"{len(wheels)} wheels of {len(folders())} packages: tools/build.py --out-dir {directory}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", choices=[[], *folders()], metavar="PACKAGE")
    parser.add_argument("--out-dir", type=Path)
    parser.add_argument("--check", type=Path, metavar="DIST")
    args = parser.parse_args()
    if (args.out_dir is None) == (args.check is None):
        parser.error("name one of --out-dir and --check")
    if args.check:
        faults = check(args.check)
        print("\n".join(faults) or f"{args.check}: all wheels are clean")
        return bool(faults)
    for package in args.packages or folders():
        build(package, args.out_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
