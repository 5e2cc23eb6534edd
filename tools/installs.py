#!/usr/bin/env python3
"""Install the built wheels into clean environments, and see that they work there: tools/installs.py [--only WORD …]

A row of `ROWS` is an environment: Python, torch, extras of liger-core, and the installer. In each one an op must be right and its
dispatch true, `liger doctor --json` must say what is installed, and a conformance op must pass for each language. Nothing of
the checkout is importable there. What is printed is the lines of docs/installs.md.

Needs uv, and the Pythons; a row whose Python is not found is reported as not run. `--only` chooses lines that have a word.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = ("triton", "cutile", "triton-ascend")
SHOWN = ("torch", "triton", "triton-ascend", "cuda-tile", "transformers")


class Row(NamedTuple):
    """An environment. `torch` is a version such as "2.9", or "" for what the installer chooses."""

    python: str
    torch: str
    extras: tuple[str, ...]
    installer: str = "uv"

    def __str__(self) -> str:
        extras = ", ".join(f"`{extra}`" for extra in self.extras)
        return f"| {self.python} | {self.torch} | {extras} | {self.installer} |"


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


def run(words: Sequence[object], folder: Path, step: str) -> str:
    """Output of a command; raises `Failed` if it fails."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # torch-npu is there and CANN isn't.
    environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{step}: " + "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:]))
    return done.stdout


def install(row: Row, wheels: Path, folder: Path) -> Path:
    """Make the environment. Returns its Python."""
    python = folder / "venv/bin/python"
    run(["uv", "venv", "--quiet", "--python", row.python, folder / "venv"], folder, "environment")
    requirements = [f"liger-core[{','.join(row.extras)}]", "liger-conformance"]
    requirements += [f"torch=={row.torch}.*"] * bool(row.torch)
    if row.installer == "pip":
        run(["uv", "pip", "install", "--quiet", "--python", python, "pip"], folder, "pip")
        installer: list[object] = [python, "-m", "pip", "install", "--quiet", "--find-links", wheels]
    else:
        installer = ["uv", "pip", "install", "--quiet", "--python", python, "--find-links", wheels]
    run([*installer, *requirements], folder, "install")
    return python


def check(row: Row, python: Path, folder: Path) -> dict[str, str]:
    """Run every step. Returns the versions that were installed."""
    languages = [language for language in LANGUAGES if language in row.extras]
    run([python, "-c", CALL.format(languages=languages)], folder, "call and dispatch")
    doctor = json.loads(run([python.parent / "liger", "doctor", "--json"], folder, "liger doctor"))
    reported = {entry["language"]: entry["version"] for entry in doctor["languages"]}
    listing = json.loads(run(["uv", "pip", "list", "--quiet", "--python", python, "--format", "json"], folder, "list"))
    versions = {entry["name"]: entry["version"] for entry in listing}
    truth = {language: versions[f"liger-{language}"] for language in languages}
    if (
        reported != truth
        or doctor["torch"].partition("+")[0] != versions["torch"].partition("+")[0]
        or doctor["problems"]
    ):
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


def outcome(row: Row, wheels: Path) -> tuple[str, dict[str, str]]:
    """How a row ended, and the versions that were installed."""
    if "triton-ascend" in row.extras and platform.machine() == "x86_64":
        return "not run: torch-npu needs torch==2.10.0+cpu here, which the default index lacks", {}
    if subprocess.run(["uv", "python", "find", "--no-project", row.python], capture_output=True).returncode:
        return f"not run: no Python {row.python} here", {}
    with tempfile.TemporaryDirectory(prefix="liger-installs-") as folder:
        try:
            return "passed", check(row, install(row, wheels, Path(folder)), Path(folder))
        except Failed as failed:
            return f"failed: {failed}", {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help="only lines that have one of these")
    words = parser.parse_args().only
    failures = 0
    with tempfile.TemporaryDirectory(prefix="liger-wheels-") as wheels:
        run(["uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", wheels], ROOT, "build")
        for row in (row for row in ROWS if any(word in str(row) for word in words)):
            result, versions = outcome(row, Path(wheels))
            print(row, *(f"{versions.get(name, '')} |" for name in SHOWN), result, "|", flush=True)
            failures += result.startswith("failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
