"""Hooks of mkdocs for the documentation's site: pages that are files elsewhere in the repository, and a page per op.

The files keep their links between one another, which work in the repository; on the site they are turned to its pages. A link to
a file that is no page, such as source code, becomes the file's path, or a link to it if mkdocs.yml has a `repo_url`.

An op's page is read from its source, not imported: the site's environment has no torch.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "packages/liger-core/src/liger_core"
sys.path.append(str(ROOT / "tools"))

import build  # noqa: E402 - tools/ is no package
import pages  # noqa: E402

LANGUAGES = {"Triton": "liger-triton", "cuTile": "liger-cutile", "triton-ascend": "liger-triton-ascend"}
CALLING = {
    "liger-transformers": (
        "packages/liger-transformers/src",
        "[`liger_transformers`](../packages/liger-transformers.md)",
    ),
    "liger-distributed": ("packages/liger-distributed/src", "[`liger_distributed`](../packages/liger-distributed.md)"),
    "losses": ("packages/liger-core/src/liger_core/losses", "[`liger_core.losses`](losses.md)"),
    "examples": ("examples", "`examples`"),
}
"""Folders whose code calls ops, with what a reader knows them as."""
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/README.md"))
# A file of the repository, and the page that it is. Those under docs/ keep their names.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "conformance/README.md": "packages/liger-conformance.md",
    **{f"packages/{package}/README.md": f"packages/{package}.md" for package in PACKAGES},
    "examples/README.md": "examples.md",
    **{f"packages/{package}/CHANGELOG.md": f"changelogs/{package}.md" for package in PACKAGES},
    "conformance/CHANGELOG.md": "changelogs/liger-conformance.md",
    **{f"benchmarks/records/{path.name}": f"records/{path.name}" for path in ROOT.glob("benchmarks/records/*.md")},
    "benchmarks/records": "records/index.md",
    "docs/decisions": "decisions/index.md",
}
PICTURES = {
    path.relative_to(ROOT).as_posix(): f"pictures/{path.name}"
    for path in [*ROOT.glob("packages/*/*.png"), *ROOT.glob("examples/*.svg")]
}
# Whoever types an error message wants the first page; the second has every number.
BOOSTS = {"troubleshooting.md": 10, "npu-gates.md": 0.2}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made here into the navigation."""
    nav: Any = config.nav
    for section in nav:
        if "Ops" in section:
            by_kind = ({kind: [f"ops/{name}.md" for name in names]} for kind, names in kinds().items())
            section["Ops"] = ["ops/index.md", *by_kind, "ops/losses.md"]
        if "Project" in section:
            decisions = sorted(f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md"))
            section["Project"][-1] = {"Decisions": ["decisions/index.md", *decisions]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not under docs/."""
    texts = {page: (ROOT / source).read_text("utf-8") for source, page in PAGES.items() if (ROOT / source).is_file()}
    texts |= {page: list_page(ROOT / source) for source, page in PAGES.items() if (ROOT / source).is_dir()}
    texts |= {f"ops/{name}.md": op_page(name) for name in ops()}
    texts["ops/index.md"] = index_page()
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    for source, name in PICTURES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository, and their pictures, into those between pages."""
    if page.file.src_uri.startswith(("records/", "changelogs/")):
        page.meta["search"] = {"exclude": True}
    if boost := 5 if page.file.src_uri.startswith("api/") else BOOSTS.get(page.file.src_uri):
        page.meta["search"] = {"boost": boost}
    # "attention" is to find fused_neighborhood_attention.
    if page.file.src_uri.startswith("ops/") and "_" in page.file.name:
        page.meta["tags"] = page.file.name.split("_")
    origins = {page: source for source, page in PAGES.items()}
    source = origins.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turn(link: re.Match[str], file: str, anchor: str) -> str:
        picture, text, _ = link.groups()
        file += "/README.md" if (ROOT / file / "README.md").exists() else ""
        in_docs = file.removeprefix("docs/") if file.startswith("docs/") else ""
        where = PAGES.get(file) or PICTURES.get(file) or in_docs
        if files.get_file_from_path(where):
            path = posixpath.relpath(where, posixpath.dirname(page.file.src_uri) or ".")
            return f"{picture}[{text}]({path}{anchor})"
        if picture or source.startswith("docs/ops/") or not (ROOT / file).exists():
            return link[0]  # mkdocs says what is wrong with it
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{file}{anchor})"
        return text if text.strip("`") in file else f"{text} (`{file}`)"

    return build.turned(markdown, posixpath.dirname(source), turn)


def list_page(folder: Path) -> str:
    """A page that lists the pages of a folder, the newest record first."""
    files = sorted(folder.glob("*.md"), reverse=folder.name == "records")
    titles = (path.read_text("utf-8").partition("\n")[0].lstrip("# ") for path in files)
    lines = [f"- [{path.stem}]({path.name}): {title}" for path, title in zip(files, titles, strict=True)]
    return "\n".join([f"# {folder.name.capitalize()}", "", *lines, ""])


def op_page(name: str) -> str:
    """An op: its contract, who has kernels of it, and where it was measured."""
    packages = {language: LANGUAGES[language] for language in languages(name)}
    rows = [(f"[{package}](../packages/{package}.md)", language) for language, package in packages.items()]
    table = pages.table(("package", "language"), rows) if rows else "No language has kernels of it yet."
    picture = f"../pictures/{name}.svg"
    drawn = (ROOT / "docs/ops" / picture).resolve().exists()
    measured = f"[![Time and memory over size]({picture})](../measured.md)" if drawn else "No record has it yet."
    return f"""---
title: {name}
---

::: liger_core.ops.{name}.{name}
    options:
      heading_level: 1

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
        "# Ops\n",
        "Each op is a function of `liger_core`. Losses on log-probabilities are [plain functions](losses.md). The PyTorch",
        f"reference has all {len(ops())}. {', '.join(LANGUAGES)} have kernels of those that name no exception.",
    ]
    for kind, names in kinds().items():
        rows = []
        for name in names:
            lacking = ", ".join(language for language in LANGUAGES if language not in languages(name))
            formula = summary(name).replace("|", "&#124;")
            rows.append((f"[{name}]({name}.md)", formula + f" No kernel in {lacking}." * bool(lacking)))
        lines += ["", f"## {kind}", "", pages.table(("op", ""), rows)]
    return "\n".join(lines)


def ops() -> list[str]:
    """The ops, by name."""
    return sorted(path.stem for path in (CORE / "ops").glob("*.py") if not path.stem.startswith("_"))


@cache
def module(name: str) -> ast.Module:
    """The source of an op."""
    return ast.parse((CORE / "ops" / f"{name}.py").read_text("utf-8"))


def function(name: str) -> ast.FunctionDef:
    """The op itself: its signature, docstring and declaration."""
    return next(node for node in module(name).body if isinstance(node, ast.FunctionDef) and node.name == name)


def summary(name: str) -> str:
    """The first paragraph of an op's docstring, which has its formula."""
    return (ast.get_docstring(function(name)) or "").partition("\n\n")[0].replace("\n", " ")


def kinds() -> dict[str, list[str]]:
    """The ops by kind, as the README's table has them."""
    table = (ROOT / "README.md").read_text("utf-8").partition("\n## Ops\n")[2].partition("\n\nThe reference")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if "`" in line]
    by_kind = {kind[0].upper() + kind[1:]: re.findall(r"`(\w+)`", listed) for kind, listed in cells}
    if missing := set(ops()) ^ {name for listed in by_kind.values() for name in listed}:
        raise ValueError(f"README.md's table of ops by kind and liger_core differ in {', '.join(sorted(missing))}")
    return by_kind


def declaration(name: str) -> dict[str, ast.expr]:
    """Arguments of an op's declaration."""
    call = next(node for node in function(name).decorator_list if isinstance(node, ast.Call))
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def shapes(name: str) -> str:
    """A table of the op's tensors and results, from its declaration."""
    declared = declaration(name)
    if "dimensions" not in declared:
        return "Its dimensions are not declared."
    arguments, _, results = ast.literal_eval(declared["dimensions"]).partition(" -> ")
    differentiable = ast.literal_eval(declared["differentiable"])
    fields = result_fields(name, len(results.split(",")))
    rows = [
        (f"`{argument}`", shape(dims), "yes" if argument in differentiable else "no")
        for argument, _, dims in (tensor.partition(":") for tensor in arguments.split(", "))
    ]
    rows += [(field, shape(dims), "") for field, dims in zip(fields, results.split(","), strict=True)]
    return pages.table(("tensor", "shape", "gets a gradient"), rows)


def result_fields(name: str, count: int) -> list[str]:
    """The names of an op's results."""
    kind = declaration(name).get("result")
    for node in module(name).body:
        if isinstance(kind, ast.Name) and isinstance(node, ast.ClassDef) and node.name == kind.id:
            fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            return [f"result `{field}`" for field in fields][:count] + ["result"] * (count - len(fields))
    return ["result"] if count == 1 else [f"result {number + 1}" for number in range(count)]


def shape(dims: str) -> str:
    """``... H`` as ``[..., H]``."""
    names = []
    for word in dims.split():
        word, at, option = word.partition("@")
        names.append(f"{word} (dimension `{option}`)" if at else "any" if word == "*" else word)
    if names and names[-1].startswith("/"):
        return f"a number: the sum of all rows, divided by the number of {names[-1][1:]}"
    return f"`[{', '.join(names)}]`" if names and "(" not in "".join(names) else ", ".join(names) or "a number"


def callers(name: str) -> str:
    """Who calls an op: packages of this repository, and code for liger-kernel by the names of the migration page."""
    lines = [title for key, (_, title) in CALLING.items() if name in called()[key]]
    names = []
    for line in (ROOT / "docs/migrating-from-liger-kernel.md").read_text("utf-8").splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == 2 and re.search(rf"`liger\.{name}\b", cells[1]) and "`" in cells[0]:
            names.append(cells[0])
    if not lines:
        lines = ["Your own code: no package here calls it. The source above names its paper or its model"]
    if names:
        lines.append(f"Code for [liger-kernel](../migrating-from-liger-kernel.md), as {'; '.join(names)}")
    return "\n".join(f"- {line}" for line in lines)


@cache
def called() -> dict[str, set[str]]:
    """The names that the code of each folder of `CALLING` takes from liger_core."""
    names: dict[str, set[str]] = {}
    for key, (folder, _) in CALLING.items():
        code = "\n".join(file.read_text("utf-8") for file in (ROOT / folder).rglob("*.py"))
        imports = re.findall(r"from liger_core[\w.]* import (\([^)]*\)|.*)", code)
        names[key] = {*re.findall(r"\bliger\w*\.(\w+)", code), *re.findall(r"\w+", " ".join(imports))}
    return names


def languages(name: str) -> list[str]:
    """The languages that have a kernel of an op."""
    return [language for language, package in LANGUAGES.items() if pages.has_kernel(package, name)]


class Examples(griffe.Extension):
    """Indents the doctests that end a docstring under ``Examples:``, as mkdocstrings wants them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one docstring."""
        if obj.docstring is None or "\n>>> " not in (text := obj.docstring.value):
            return
        before, _, doctests = text.partition("\n>>> ")
        indented = re.sub("^", "    ", ">>> " + doctests, flags=re.M)
        obj.docstring.value = f"{before}\nExamples:\n{indented}"
