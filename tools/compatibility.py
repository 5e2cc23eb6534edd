#!/usr/bin/env python3
"""Run the conformance suite over packages of different ages: tools/compatibility.py [pytest options]

Each kernel package is released on its own, so users mix versions. For each language this runs
- liger-core and the suite of this checkout with the kernel package of its last tag, and
- the kernel package of this checkout with liger-core and the suite of their last tags.

A package without a tag was never released: that run is printed as not run. So is a language that this environment lacks, as the
main one lacks triton-ascend. Before a run, what Python imports is compared with the sources that are meant. Options go to pytest,
such as --op=rms_norm.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = {"triton": "liger-triton", "cutile": "liger-cutile", "triton-ascend": "liger-triton-ascend"}
FOLDERS = {"liger-conformance": "conformance"}


def last_tag(package: str) -> str | None:
    """The tag of a package's newest release."""
    tags = subprocess.run(
        ["git", "tag", "--list", f"{package}-v*", "--sort=-version:refname"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return tags[0] if tags else None


def sources(package: str, tag: str | None, place: Path) -> Path:
    """A package's sources: of this checkout, or of a tag, unpacked under `place`."""
    folder = FOLDERS.get(package, f"packages/{package}")
    if tag is None:
        return ROOT / folder / "src"
    target = place / tag
    if not target.exists():
        target.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", tag, folder], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive, check=True)
    return target / folder / "src"


def module(package: str) -> str:
    """The name by which a package is imported."""
    return package.replace("-", "_")


def imported(packages: list[str], environment: dict[str, str], place: Path) -> dict[str, Path]:
    """Where Python finds each package, without importing it."""
    code = (
        "import importlib.util, json, sys;"
        "print(json.dumps([importlib.util.find_spec(name).origin for name in sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, *map(module, packages)]
    printed = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=True).stdout
    return dict(zip(packages, map(Path, json.loads(printed)), strict=True))


def run(language: str, paths: dict[str, Path], options: list[str], place: Path) -> bool:
    """Run the suite with these sources before the installed ones; whether it passed."""
    path = os.pathsep.join([*map(str, paths.values()), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    for package, origin in imported(list(paths), environment, place).items():
        if not origin.is_relative_to(paths[package]):
            raise SystemExit(f"{package} is imported from {origin}, not from {paths[package]}")
    command = [sys.executable, "-m", "pytest", "--pyargs", "liger_conformance", f"--impl={language}", "-q", *options]
    return subprocess.run(command, cwd=place, env=environment).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, options = parser.parse_known_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for language, package in LANGUAGES.items():
            if importlib.util.find_spec(module(package)) is None:
                print(f"=== {language}: not run: {package} is not in this environment", flush=True)
                continue
            for old in ([package], ["liger-core", "liger-conformance"]):
                tags = {name: last_tag(name) for name in old}
                olds = ", ".join(tag or name for name, tag in tags.items())
                mixture = f"{language}: {olds} with the rest of this checkout"
                if missing := [name for name, tag in tags.items() if tag is None]:
                    print(f"=== {mixture}: not run: {' and '.join(missing)} has no release", flush=True)
                    continue
                print(f"=== {mixture}", flush=True)
                names = ("liger-core", "liger-conformance", package)
                paths = {name: sources(name, tags.get(name), place) for name in names}
                if not run(language, paths, options, place):
                    failed.append(mixture)
    print("\n".join(f"FAILED: {mixture}" for mixture in failed) or "no failure")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
