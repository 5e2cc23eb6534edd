#!/usr/bin/env python3
"""Build packages as they are published: tools/build.py --out-dir DIST [PACKAGE ...]

A package index shows a README alone, so its links to other files of the repository can't stay as they are. With a `repo_url` in
mkdocs.yml they become links to that repository, and the metadata gets `[project.urls]`; `site_url` adds the documentation.
Without one, as long as the repository has no public address, a link becomes its text, and a picture is left out.

Without a PACKAGE, all are built. The sources are copied first: nothing in the working tree changes.

    --repo-url URL, --site-url URL    in place of those of mkdocs.yml
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The text of a link may be code with brackets in it, such as `x[i]`.
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:`[^`]*`|[^\[\]])*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.M | re.S)


def folders() -> dict[str, Path]:
    """Every package, with its folder."""
    files = [*sorted(ROOT.glob("packages/*/pyproject.toml")), ROOT / "conformance/pyproject.toml"]
    found = {file.parent: re.search(r'(?m)^name = "(.+)"$', file.read_text("utf-8")) for file in files}
    return {name[1]: folder for folder, name in found.items() if name is not None}


def address(name: str) -> str:
    """A setting of mkdocs.yml, or nothing."""
    found = re.search(rf"(?m)^{name}: *(\S+)", (ROOT / "mkdocs.yml").read_text("utf-8"))
    return found[1].rstrip("/") if found else ""


def relative(target: str) -> bool:
    """Whether a link's target is a file beside the page."""
    return not re.match(r"[a-z][a-z+.-]*:|#|//", target)


def published(markdown: str, folder: Path, repo_url: str) -> str:
    """A README of `folder` as an index can show it."""

    def turned(found: re.Match[str]) -> str:
        text, target = found["text"], found["target"]
        if not relative(target):
            return found[0]
        if not repo_url:
            return "" if found["picture"] else text
        path, hash, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(folder.relative_to(ROOT).as_posix(), path))
        if not (ROOT / file).exists():
            raise SystemExit(f"{folder.relative_to(ROOT)}/README.md links to {target}, which does not exist")
        kind = "raw" if found["picture"] else "tree" if (ROOT / file).is_dir() else "blob"
        return f"{found['picture']}[{text}]({repo_url}/{kind}/main/{file}{hash}{anchor})"

    parts = FENCE.split(markdown)
    return "".join(part if part.lstrip().startswith("```") else LINK.sub(turned, part) for part in parts)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", choices=[[], *folders()], metavar="PACKAGE")
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--repo-url")
    parser.add_argument("--site-url")
    args = parser.parse_args()
    for package in args.packages or folders():
        build(package, args.out_dir, args.repo_url, args.site_url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
