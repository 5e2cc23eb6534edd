"""Hooks of mkdocs for the documentation's site: pages that are files elsewhere in the repository, and a page per op.

The files keep their links between one another, which work in the repository; on the site they are turned to its pages. A link to
a file that is no page, such as source code, becomes the file's path, or a link to it if mkdocs.yml has a `repo_url`.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "packages/liger-core/src/liger_core"
sys.path.append(str(ROOT / "benchmarks"))

import pictures  # noqa: E402 - benchmarks/ is no package

LANGUAGES = {"Triton": "liger-triton", "cuTile": "liger-cutile", "triton-ascend": "liger-triton-ascend"}

# A file of the repository, and the page that it is. Those under docs/ keep their names.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "conformance/README.md": "packages/liger-conformance.md",
    **{
        f"packages/{path.parent.name}/README.md": f"packages/{path.parent.name}.md"
        for path in ROOT.glob("packages/*/README.md")
    },
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made here into the navigation."""
    nav: Any = config.nav
    for section in nav:
        if "Ops" in section:
            section["Ops"] = ["ops/index.md", *(f"ops/{name}.md" for name in ops()), "ops/losses.md"]
        if "Project" in section:
            decisions = sorted(f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md"))
            section["Project"][-1] = {"Decisions": decisions}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not under docs/."""
    pages = {page: (ROOT / source).read_text("utf-8") for source, page in PAGES.items()}
    pages |= {f"ops/{name}.md": op_page(name) for name in ops()}
    pages |= {"ops/index.md": index_page(), "ops/losses.md": losses_page()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "measured.html", content=measured_page()))
    return files


def measured_page() -> str:
    """The records as one interactive page, which stands beside the others as it is."""
    return pictures.page(pictures.Records.of())


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    origins = {page: source for source, page in PAGES.items()}
    source = origins.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, hash, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        file += "/README.md" if (ROOT / file / "README.md").exists() else ""
        where = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if where is not None and files.get_file_from_path(where) is not None:
            return f"[{text}]({posixpath.relpath(where, posixpath.dirname(page.file.src_uri) or '.')}{hash}{anchor})"
        if source.startswith("docs/ops/") or not (ROOT / file).exists():
            return found[0]  # mkdocs says what is wrong with it
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{file}{hash}{anchor})"
        return text if text.strip("`") in file else f"{text} (`{file}`)"

    parts = FENCE.split(markdown)
    return "".join(part if part.lstrip().startswith("```") else LINK.sub(turned, part) for part in parts)


def ops() -> list[str]:
    """The ops, by name."""
    return sorted(path.stem for path in (CORE / "ops").glob("*.py") if not path.stem.startswith("_"))


def summary(name: str) -> str:
    """The first paragraph of an op's docstring, of which the first line is its formula."""
    tree = ast.parse((CORE / "ops" / f"{name}.py").read_text("utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return (ast.get_docstring(function) or "").partition("\n\n")[0].replace("\n", " ")


def languages(name: str) -> list[str]:
    """The languages that have a kernel of an op."""
    packages = {language: package.replace("-", "_") for language, package in LANGUAGES.items()}
    return [
        language
        for language, package in LANGUAGES.items()
        if (ROOT / "packages" / package / "src" / packages[language] / "ops" / f"{name}.py").exists()
    ]


def op_page(name: str) -> str:
    """An op: its contract, who has kernels of it, and where it was measured."""
    has = languages(name)
    rows = [f"| [{LANGUAGES[language]}](../packages/{LANGUAGES[language]}.md) | {language} |" for language in has]
    table = "\n".join(["| package | language |", "|---|---|", *rows]) if rows else "No language has kernels of it yet."
    picture = f"../pictures/{name}.png"
    measured = (
        f"[![Time and memory over size]({picture})](../measured.md)"
        if (ROOT / "docs/ops" / picture).resolve().exists()
        else "No record has it yet."
    )
    return f"""---
title: {name}
---

::: liger_core.ops.{name}.{name}
    options:
      heading_level: 1
      heading: {name}

## Kernels

The PyTorch reference runs on every device.

{table}

## Measured

{measured}

`liger_core.explain("{name}", ...)` prints which one a call would run, and why. What a kernel owes is in
[adding an op](../adding-an-op.md), and how exact it is in [numerics](../numerics.md).
"""


def index_page() -> str:
    """All ops on a page."""
    rows = [
        f"| [{name}]({name}.md) | {summary(name).replace('|', '&#124;')} | {', '.join(languages(name))} |"
        for name in ops()
    ]
    return "\n".join(
        [
            "# Ops",
            "",
            "Each op is a function of `liger_core`. Losses on log-probabilities are [plain functions](losses.md).",
            "",
            "| op | | kernels |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def losses_page() -> str:
    """The plain functions on log-probabilities."""
    return """# Losses

::: liger_core.losses
    options:
      show_root_heading: false
      members_order: source
"""
