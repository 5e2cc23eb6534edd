#!/usr/bin/env python3
"""Install the built wheels into clean environments, and see that they work there: tools/installs.py [--only WORD …] [--table]

A row of `ROWS` is an environment: Python, torch, extras of liger-core, and the installer. In each one an op must be right and its
dispatch true, `liger doctor --json` must say what is installed, and a conformance op must pass for each language. Nothing of
the checkout is importable there.

Needs uv, and the Pythons; a row whose Python is not found is reported as not run. `--table` writes the results into
docs/installs.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "installs.md"
START, END = "<!-- tools/installs.py -->\n", "<!-- end -->\n"
LANGUAGES = ("triton", "cutile", "triton-ascend")

NOT_RUN, PASSED = "not run", "passed"
SHOWN = ("torch", "triton", "triton-ascend", "cuda-tile", "transformers")


class Row(NamedTuple):
    """One environment. `torch` is a version such as "2.9", or "" for what the installer chooses."""

    python: str
    torch: str
    extras: tuple[str, ...]
    installer: str = "uv"

    def __str__(self) -> str:
        return f"python {self.python}, torch {self.torch or 'any'}, [{','.join(self.extras)}], {self.installer}"


ROWS = (
    Row("3.10", "2.9", ("triton", "cutile", "distributed")),
    Row("3.11", "2.10", ("triton", "cutile")),
    Row("3.11", "2.11", ("triton", "cutile")),
    Row("3.12", "2.12", ("triton", "cutile")),
    Row("3.11", "2.13", ("triton", "cutile", "transformers", "distributed")),
    Row("3.13", "2.14", ("triton", "cutile")),
    Row("3.12", "2.15", ("triton", "cutile", "transformers", "distributed")),
    Row("3.13", "2.15", ("triton",)),
    Row("3.13", "2.13", ("cutile",)),
    Row("3.14", "2.15", ("triton", "cutile")),
    Row("3.11", "2.13", ("triton",), "pip"),
    Row("3.11", "2.13", ("cutile", "transformers"), "pip"),
    Row("3.11", "2.13", ("distributed",), "pip"),
    Row("3.10", "", ("triton-ascend",)),
    Row("3.11", "", ("triton-ascend",)),
    Row("3.11", "", ("triton-ascend",), "pip"),
)

CALL = """
import torch, liger_core as liger
x = torch.randn(4, 64, requires_grad=True)
weight = torch.ones(64)
y = liger.rms_norm(x, weight)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))
y.sum().backward()
assert x.grad is not None
assert "-> torch: chosen" in str(liger.explain("rms_norm", x, weight)), liger.explain("rms_norm", x, weight)
for language in {languages!r}:
    try:
        with liger.use(language):
            liger.rms_norm(x, weight)
    except liger.Unsupported as error:
        assert language in str(error) and "cpu" in str(error), error
    else:
        raise AssertionError(f"{{language}} has no kernels for a CPU, and a demand of it ran")
"""

SHARDED = """
import torch, torch.distributed as dist, liger_core as liger
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x, weight = torch.randn(4, 64), torch.ones(64)
shard = lambda tensor, dim: distribute_tensor(tensor, mesh, [Shard(dim)])
y = liger.swiglu(shard(x, 0), shard(x, 0))
torch.testing.assert_close(y.full_tensor(), liger.swiglu(x, x))
dist.destroy_process_group()
"""

MODEL = """
import torch, liger_transformers
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model, ids = LlamaForCausalLM(config), torch.arange(16)[None]
plain = model(ids, labels=ids).loss
report = liger_transformers.apply(model)
torch.testing.assert_close(model(ids, labels=ids).loss, plain)
"""


class Failed(Exception):
    """A step of a row, and the end of what it printed."""


def run(words: Sequence[object], folder: Path, what: str) -> str:
    """What a command prints; raises `Failed` if it fails."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # torch-npu is there and CANN isn't.
    environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{what}: " + "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:]))
    return done.stdout


def install(row: Row, wheels: Path, folder: Path) -> Path:
    """Make the environment. Returns its Python."""
    python = folder / "venv/bin/python"
    run(["uv", "venv", "--quiet", "--python", row.python, folder / "venv"], folder, "environment")
    wanted = [f"liger-core[{','.join(row.extras)}]", "liger-conformance"]
    wanted += [f"torch=={row.torch}.*"] * bool(row.torch)
    if row.installer == "pip":
        run(["uv", "pip", "install", "--quiet", "--python", python, "pip"], folder, "pip")
        installer: list[object] = [python, "-m", "pip", "install", "--quiet", "--find-links", wheels]
    else:
        installer = ["uv", "pip", "install", "--quiet", "--python", python, "--find-links", wheels]
    run([*installer, *wanted], folder, "install")
    return python


def check(row: Row, python: Path, folder: Path) -> dict[str, str]:
    """Run every step. Returns the versions that were installed."""
    languages = [language for language in LANGUAGES if language in row.extras]
    run([python, "-c", CALL.format(languages=languages)], folder, "call and dispatch")
    doctor = json.loads(run([python.parent / "liger", "doctor", "--json"], folder, "liger doctor"))
    told = {found["language"]: found["version"] for found in doctor["languages"]}
    listing = json.loads(run(["uv", "pip", "list", "--quiet", "--python", python, "--format", "json"], folder, "list"))
    versions = {found["name"]: found["version"] for found in listing}
    truth = {language: versions[f"liger-{language}"] for language in languages}
    if told != truth or doctor["torch"].partition("+")[0] != versions["torch"].partition("+")[0] or doctor["problems"]:
        raise Failed(f"liger doctor says {doctor}, and {truth} is installed")
    for language in languages or ["torch"]:
        command = [python, "-m", "pytest", "--pyargs", "liger_conformance", f"--impl={language}", "--op=rms_norm", "-q"]
        run([*command, "-p", "no:cacheprovider", "--basetemp", folder / "tmp"], folder, f"conformance of {language}")
    if "distributed" in row.extras:
        run([python, "-c", SHARDED], folder, "a DTensor")
    if "transformers" in row.extras:
        run([python, "-c", MODEL], folder, "a model")
        run([python.parent / "liger-transformers", "llama"], folder, "liger-transformers")
    return versions


def try_row(row: Row, wheels: Path) -> tuple[str, dict[str, str]]:
    """The outcome of a row and what was installed."""
    if "triton-ascend" in row.extras and platform.machine() == "x86_64":
        return f"{NOT_RUN}: torch-npu needs torch==2.10.0+cpu here, which the default index lacks", {}
    if subprocess.run(["uv", "python", "find", "--no-project", row.python], capture_output=True).returncode:
        return f"{NOT_RUN}: no Python {row.python} here", {}
    folder = Path(tempfile.mkdtemp(prefix="liger-installs-"))
    try:
        return PASSED, check(row, install(row, wheels, folder), folder)
    except Failed as failed:
        return f"failed: {failed}", {}
    finally:
        shutil.rmtree(folder)


def cells_of(row: Row, outcome: str, versions: dict[str, str]) -> list[str]:
    """The line of a row in the table."""
    cells = [row.python, row.torch, ", ".join(f"`{extra}`" for extra in row.extras), row.installer]
    return [*cells, *(versions.get(name, "") for name in SHOWN), outcome.splitlines()[0]]


def table_of(lines: Sequence[Sequence[str]]) -> str:
    """The results, a line each."""
    heads = ["Python", "torch wanted", "extras", "installer", *SHOWN, ""]
    table = [heads, ["---"] * len(heads), *lines]
    where = f"On {platform.system()}, {platform.machine()}, no accelerator, {date.today()}:"
    return "\n".join([where, "", *(f"| {' | '.join(cells)} |" for cells in table), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only rows whose description has one of these")
    parser.add_argument("--table", action="store_true", help="write docs/installs.md")
    options = parser.parse_args()
    wheels = Path(tempfile.mkdtemp(prefix="liger-wheels-"))
    run(["uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", wheels], ROOT, "build")
    found = []
    for row in ROWS:
        if not options.only or any(word in str(row) for word in options.only):
            outcome, versions = try_row(row, wheels)
            print(f"{row}: {outcome}", flush=True)
            found.append((row, outcome, versions))
    shutil.rmtree(wheels)
    if options.table:
        text = PAGE.read_text(encoding="utf-8")
        start, end = text.index(START) + len(START), text.index(END)
        # What was not tried this time keeps its line.
        lines = {
            tuple(cells[:4]): cells
            for line in text[start:end].splitlines()
            if (cells := [cell.strip() for cell in line.strip().strip("|").split("|")])
        }
        lines |= {tuple(cells[:4]): cells for cells in (cells_of(*result) for result in found)}
        keys = [tuple(cells_of(row, PASSED, {})[:4]) for row in ROWS]
        PAGE.write_text(text[:start] + table_of([lines[key] for key in keys if key in lines]) + text[end:], "utf-8")
    return int(any(outcome.startswith("failed") for _, outcome, _ in found))


if __name__ == "__main__":
    sys.exit(main())
