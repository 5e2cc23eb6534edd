"""Hooks of mkdocs for the documentation's site: pages that are files elsewhere in the repository, and a page per op.

The files keep their links between one another, which work in the repository; on the site they are turned to its pages. A link to
a file that is no page, such as source code, becomes the file's path, or a link to it if mkdocs.yml has a `repo_url`.

tools/site_ops.py knows the ops, tools/site_math.py typesets their formulas, and tools/site_links.py checks what was built.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import pictures  # noqa: E402 - benchmarks/ and tools/ are no packages
from site_ops import LANGUAGES, callers, kinds, languages, ops, shapes, summary  # noqa: E402

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
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made here into the navigation."""
    nav: Any = config.nav
    for section in nav:
        if "Ops" in section:
            section["Ops"] = [
                "ops/index.md",
                *({kind: [f"ops/{name}.md" for name in names]} for kind, names in kinds().items()),
                "ops/losses.md",
            ]
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
    for path in ROOT.glob("packages/*/*.png"):
        files.append(File.generated(config, f"pictures/{path.name}", content=path.read_bytes()))
    files.append(File.generated(config, "measured.html", content=measured_page()))
    return files


def measured_page() -> str:
    """The records as one interactive page, which stands beside the others as it is."""
    head = '<head><meta name="viewport" content="width=980"><link rel="icon" href="data:,">'  # its plots stand side by side
    return pictures.page(pictures.Records.of()).replace("<head>", head, 1)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository, and their pictures, into those between pages."""
    if page.file.src_uri == "troubleshooting.md":  # whoever types an error message wants this page
        page.meta["search"] = {"boost": 3}
    if (
        page.file.src_uri.startswith("ops/") and "_" in page.file.name
    ):  # "attention" is to find fused_neighborhood_attention
        page.meta["tags"] = page.file.name.split("_")
    origins = {page: source for source, page in PAGES.items()}
    source = origins.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        path, hash, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if picture:
            where = file.removeprefix("docs/") if file.startswith("docs/") else f"pictures/{posixpath.basename(file)}"
            if source.startswith("docs/ops/") or files.get_file_from_path(where) is None:
                return found[0]
            return f"![{text}]({posixpath.relpath(where, posixpath.dirname(page.file.src_uri) or '.')})"
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

## Shapes

{shapes(name)}

Dimensions in lower case, and those of `...`, are independent: a call [can be divided
there](../packages/liger-distributed.md) among processes. A dimension in capitals is needed whole.

## Who calls it

{callers(name)}

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
    lines = [
        "# Ops",
        "",
        "Each op is a function of `liger_core`. Losses on log-probabilities are [plain functions](losses.md). The PyTorch",
        f"reference has all {len(ops())}. {', '.join(LANGUAGES)} have kernels of those that name no exception.",
    ]
    for kind, names in kinds().items():
        lines += ["", f"## {kind}", "", "| op | |", "|---|---|"]
        for name in names:
            lacking = ", ".join(language for language in LANGUAGES if language not in languages(name))
            exception = f" No kernel in {lacking}." if lacking else ""
            lines.append(f"| [{name}]({name}.md) | {summary(name).replace('|', '&#124;')}{exception} |")
    return "\n".join([*lines, ""])


def losses_page() -> str:
    """The plain functions on log-probabilities."""
    return """# Losses

::: liger_core.losses
    options:
      show_root_heading: false
      members_order: source
"""
