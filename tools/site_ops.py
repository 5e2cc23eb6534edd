"""For the documentation's site: facts about an op, read from its source, its callers' sources and the pages with tables."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "packages/liger-core/src/liger_core"
sys.path.append(str(ROOT / "tools"))

import site_math  # noqa: E402 - tools/ is no package

LANGUAGES = {"Triton": "liger-triton", "cuTile": "liger-cutile", "triton-ascend": "liger-triton-ascend"}

# Who calls ops, by file: what a reader knows it as. A file that is not here is known by its package.
CALLERS = {
    "liger_transformers/norms.py": "[`liger_transformers.apply`](../packages/liger-transformers.md): norms",
    "liger_transformers/activations.py": "[`liger_transformers.apply`](../packages/liger-transformers.md): activations",
    "liger_transformers/rotary.py": "[`liger_transformers.apply`](../packages/liger-transformers.md): rotary functions",
    "liger_transformers/experts.py": "[`liger_transformers.apply(model, experts=True)`](../packages/liger-transformers.md)",
    "liger_transformers/logits.py": "[`liger_transformers.apply`](../packages/liger-transformers.md): the loss",
    "liger_transformers/logprobs.py": "[TRL's trainers](../trl.md), by `apply(model, lazy=True)`",
    "liger_transformers/trl.py": "[TRL's trainers](../trl.md), by `apply(model, trl=True)`",
    "liger_distributed/head.py": "[`liger_distributed.LossHead`](../packages/liger-distributed.md#the-head)",
    "liger_distributed/losses.py": "[`liger_distributed`'s losses of a divided vocabulary](../packages/liger-distributed.md)",
    "losses/logprobs.py": "[`liger_core.losses`](losses.md), which give log-probabilities to preference and policy losses",
    "examples/parallel.py": "`examples/parallel.py`",
}
CALLING = (
    "packages/liger-transformers/src",
    "packages/liger-distributed/src",
    "packages/liger-core/src/liger_core/losses",
)
ROPES = ("rope", "llama4_rope", "qwen2vl_mrope")


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


def variables(name: str) -> set[str]:
    """The words of an op's docstring that are variables: its arguments, the fields of its result, and what it defines."""
    arguments = function(name).args
    fields = [
        node.target.id
        for kind in module(name).body
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    named = {argument.arg for argument in arguments.args + arguments.kwonlyargs}
    return named | set(fields) | site_math.defined(ast.get_docstring(function(name)) or "")


def summary(name: str) -> str:
    """The first paragraph of an op's docstring, which has its formula."""
    return (ast.get_docstring(function(name)) or "").partition("\n\n")[0].replace("\n", " ")


def kinds() -> dict[str, list[str]]:
    """The ops by kind, as the README's table has them."""
    table = (ROOT / "README.md").read_text("utf-8").partition("\n## Ops\n")[2].partition("\n\nThe reference")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if "`" in line]
    found = {kind[0].upper() + kind[1:]: re.findall(r"`(\w+)`", listed) for kind, listed in cells}
    if missing := set(ops()) ^ {name for listed in found.values() for name in listed}:
        raise ValueError(f"README.md's table of ops by kind and liger_core differ in {', '.join(sorted(missing))}")
    return found


def declaration(name: str) -> dict[str, ast.expr]:
    """What an op is declared with."""
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
        f"| `{argument}` | {shape(dims)} | {'yes' if argument in differentiable else 'no'} |"
        for argument, _, dims in (tensor.partition(":") for tensor in arguments.split(", "))
    ]
    rows += [f"| {field} | {shape(dims)} | |" for field, dims in zip(fields, results.split(","), strict=True)]
    return "\n".join(["| tensor | shape | gets a gradient |", "|---|---|---|", *rows])


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
    """Who calls an op, from the sources of the packages, the pages of models and trainers, and liger-kernel's names."""
    found = {CALLERS.get(caller) or package(caller) for caller in calling().get(name, ())}
    found |= model_types(name)
    names = liger_kernel_names(name)
    lines = sorted(found) + (
        [f"Code for [liger-kernel](../migrating-from-liger-kernel.md), as {names}"] if names else []
    )
    if not found:
        lines.insert(
            0, "Your own code: no package here calls it. The source above names the paper or the model that it is from"
        )
    return "\n".join(f"- {line}" for line in lines)


def package(caller: str) -> str:
    """The package that a file is in, or the example that it is."""
    folder, _, file = caller.partition("/")
    known = {"liger_transformers": "liger-transformers", "liger_distributed": "liger-distributed"}
    return f"[`{folder}`](../packages/{known[folder]}.md), in `{file}`" if folder in known else f"`{caller}`"


@cache
def calling() -> dict[str, set[str]]:
    """The files that call each op, by the name that `CALLERS` has."""
    known = set(ops())
    found: dict[str, set[str]] = {}
    for path in [
        *(file for folder in CALLING for file in (ROOT / folder).rglob("*.py")),
        *(ROOT / "examples").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            used: list[str] = []
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id.startswith("liger")
            ):
                used = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("liger_core"):
                used = [alias.name for alias in node.names]
            for op in known.intersection(used):
                found.setdefault(op, set()).add("/".join(path.parts[-2:]))
    return found


def model_types(name: str) -> set[str]:
    """The Hugging Face model types that call an op, of the table in docs/models.md."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/models.md").read_text("utf-8").splitlines()
        if line.startswith("| ")
    ]
    kinds = [row for row in rows if len(row) == 7 and row[0] != "model type"]
    calls = {
        "rms_norm": ("", [row for row in kinds if "rms " in row[1]]),
        "layer_norm": ("", [row for row in kinds if "layer_norm" in row[1]]),
        "fused_linear_cross_entropy": ("", [row for row in kinds if row[5] == "fused"]),
        **dict.fromkeys(ROPES, (" one of the three rotary ops", [row for row in kinds if row[3]])),
    }
    if name not in calls:
        return set()
    which, types = calls[name]
    listed = ", ".join(f"<code>{row[0]}</code>" for row in types)
    return {
        f"{len(types)} of the {len(kinds)} [model types of transformers](../models.md) that were tried call{which or ' it'}"
        f"<details><summary>their names</summary>{listed}</details>"
    }


def liger_kernel_names(name: str) -> str:
    """What liger-kernel calls an op, by the page on migrating from it."""
    found = []
    for line in (ROOT / "docs/migrating-from-liger-kernel.md").read_text("utf-8").splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == 2 and re.search(rf"`liger\.{name}\b", cells[1]) and "`" in cells[0]:
            found.append(cells[0])
    return "; ".join(found)


def languages(name: str) -> list[str]:
    """The languages that have a kernel of an op."""
    packages = {language: package.replace("-", "_") for language, package in LANGUAGES.items()}
    return [
        language
        for language, package in LANGUAGES.items()
        if (ROOT / "packages" / package / "src" / packages[language] / "ops" / f"{name}.py").exists()
    ]
