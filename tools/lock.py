#!/usr/bin/env python3
"""Keep uv.lock free of the addresses of package indexes.

uv writes into uv.lock where it got every file. The committed lock keeps the versions, the forks and the markers;
`uv sync` completes its copy in the working tree from the index that this machine has configured.

    tools/lock.py            strip uv.lock in place; run it before committing uv.lock
    tools/lock.py --check    fail when the committed or staged uv.lock holds an address, or is older than the pyprojects
    tools/lock.py --filter   stdin to stdout, for git: git config filter.uvlock.clean 'python3 tools/lock.py --filter'
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "uv.lock"

FILES = re.compile(r"^sdist = \{.*\}\n|^wheels = \[\n(?:    \{.*\},\n)*\]\n", re.M)
REGISTRY = re.compile(r'source = \{ registry = "[^"]*" \}')
METADATA = re.compile(r"^\[package\.metadata.*\]\n(?:.+\n)*\n?", re.M)
MEMBERS = re.compile(r"^members = \[\n(?:    .*\n)*\]\n", re.M)
MARKER = re.compile(r', marker = "[^"]*"')


def strip(lock: str) -> str:
    """Drop what says where the packages come from.

    A list of members that is not the workspace's makes uv resolve again; it then prefers the versions and forks that
    the lock records, whatever index they came from.
    """
    lock = FILES.sub("", lock)
    lock = REGISTRY.sub('source = { registry = "index" }', lock)
    lock = METADATA.sub("", lock)
    return MEMBERS.sub('members = ["resolve-again"]\n', lock)


def strip_in_place() -> None:
    """Strip the uv.lock of the working tree."""
    LOCK.write_text(strip(LOCK.read_text(encoding="utf-8")), encoding="utf-8")


def problems() -> list[str]:
    """Problems of the uv.lock in git's index."""
    show = subprocess.run(["git", "show", ":uv.lock"], cwd=LOCK.parent, capture_output=True, text=True)
    if show.returncode:
        return ["uv.lock is not in git: git add uv.lock"]
    staged = show.stdout
    if addresses := [f"uv.lock:{n}: {line.strip()}" for n, line in enumerate(staged.splitlines(), 1) if "://" in line]:
        return [*addresses[:5], "uv.lock holds addresses: tools/lock.py; git add uv.lock"]
    if staged != strip(staged):
        return ["uv.lock is not stripped: tools/lock.py; git add uv.lock"]
    # uv writes one marker in several forms, and its releases differ in which: 0.13.9 factors out what others repeat.
    if MARKER.sub("", staged) != MARKER.sub("", strip(LOCK.read_text(encoding="utf-8"))):
        return ["uv.lock in git is not the one in use: uv lock; tools/lock.py; git diff uv.lock; git add uv.lock"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--filter", action="store_true")
    args = parser.parse_args()
    if args.filter:
        sys.stdout.write(strip(sys.stdin.read()))
    elif args.check:
        faults = problems()
        print("\n".join(faults) or "uv.lock: no addresses, and in step with the pyprojects")
        return bool(faults)
    else:
        strip_in_place()
    return 0


if __name__ == "__main__":
    sys.exit(main())
