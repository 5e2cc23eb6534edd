#!/usr/bin/env python3
"""Release one package: tools/release.py liger-cutile patch

It sets the version, dates the changelog, widens the ranges that have to take the new version, writes uv.lock, runs .ci/run,
builds the package, checks what was built, commits and tags. It publishes nothing: it prints the push that starts the workflow
which does. If a step fails, everything is as it was before: files, commits, tags and what was built.

    tools/release.py PACKAGE {first,patch,minor,major}
        first       release the version that stands in pyproject.toml, which has no tag yet
        --dry-run   print the changes, and make none
        --skip-ci   don't run .ci/run; for a commit that has passed it
        --dist DIR  where the files go (default: dist)

A minor or major release of liger-core releases every package that needs it, with the same version: see docs/releasing.md.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))

import build as builder  # noqa: E402 - tools/ is no package
import lock  # noqa: E402

CORE = "liger-core"
UNRELEASED = "## [Unreleased]\n"
# A requirement of one of our packages, as pyproject.toml has it: "liger-triton-ascend[npu]>=0.1,<0.2".
REQUIREMENT = re.compile(r'"(?P<name>liger-[a-z-]+)(?P<extra>\[[a-z,]+\])?>=(?P<least>[\d.]+),<(?P<below>[\d.]+)"')


class Refused(Exception):
    """Why nothing can be released as things stand."""


@dataclass
class Plan:
    """Changes of a release: the text of files, and the packages with their versions in the order in which they go out."""

    edits: dict[Path, str] = field(default_factory=dict)
    releases: dict[str, str] = field(default_factory=dict)

    def text(self, path: Path) -> str:
        """A file as it will be."""
        return self.edits.get(path) or path.read_text(encoding="utf-8")

    def diff(self) -> str:
        """All changes, as a unified diff."""
        lines: list[str] = []
        for path, text in self.edits.items():
            name = path.relative_to(ROOT).as_posix()
            old = path.read_text(encoding="utf-8")
            lines += difflib.unified_diff(old.splitlines(True), text.splitlines(True), f"a/{name}", f"b/{name}")
        return "".join(lines)

    @property
    def tags(self) -> list[str]:
        return [f"{name}-v{version}" for name, version in self.releases.items()]


def bumped(version: str, part: str) -> str:
    """The next version."""
    major, minor, patch = map(int, version.split("."))
    after = {
        "first": (major, minor, patch),
        "patch": (major, minor, patch + 1),
        "minor": (major, minor + 1, 0),
        "major": (major + 1, 0, 0),
    }
    return ".".join(map(str, after[part]))


def series(version: str) -> tuple[str, str]:
    """Where the versions that are compatible with this one begin, and where they end: 0.2.1 is in 0.2 to 0.3, 1.4.2 in 1 to 2."""
    major, minor, _ = map(int, version.split("."))
    return (f"{major}", f"{major + 1}") if major else (f"0.{minor}", f"0.{minor + 1}")


def holds(least: str, below: str, version: str) -> bool:
    """Whether a range has a version."""
    numbers = [tuple(map(int, text.split("."))) for text in (least, version, below)]
    return numbers[0] <= numbers[1] < numbers[2]


def plan(package: str, part: str, date: str) -> Plan:
    """Changes that release `package`."""
    folders = builder.folders()
    if package not in folders:
        raise Refused(f"there is no package {package}; there are {', '.join(folders)}")
    planned = Plan()
    stands = tomllib.loads((folders[package] / "pyproject.toml").read_text())["project"]["version"]
    version = bumped(stands, part)
    # All packages need core's series, so a new one needs all of them; core goes last, when the others can be installed.
    together = package == CORE and part in ("minor", "major")
    for name in [*(name for name in folders if name != package), package] if together else [package]:
        _date_changelog(planned, folders[name] / "CHANGELOG.md", version, date, empty=name != package)
        file = folders[name] / "pyproject.toml"
        planned.edits[file] = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', planned.text(file), count=1)
        planned.releases[name] = version
    for folder in folders.values():
        _widen(planned, folder / "pyproject.toml", together)
    planned.edits = {path: text for path, text in planned.edits.items() if text != path.read_text(encoding="utf-8")}
    return planned


def _date_changelog(planned: Plan, path: Path, version: str, date: str, empty: bool) -> None:
    """Give what is unreleased the version and the date."""
    before, head, after = planned.text(path).partition(UNRELEASED)
    name = path.relative_to(ROOT)
    if not head:
        raise Refused(f"{name} has no line {UNRELEASED.strip()!r}")
    if not after.partition("\n## [")[0].strip():
        if not empty:
            raise Refused(
                f"{name} says of nothing that is new: write under {UNRELEASED.strip()!r} what this release changes"
            )
        after = f"\n### Changed\n\n- For liger-core {version}.\n{after}"
    planned.edits[path] = f"{before}{head}\n## [{version}] - {date}\n{after}"


def _widen(planned: Plan, file: Path, together: bool) -> None:
    """Make the ranges in a pyproject.toml take the new versions: wider, or, if all packages move at once, the new series."""

    def ranged(requirement: re.Match[str]) -> str:
        version = planned.releases.get(requirement["name"])
        if version is None or holds(requirement["least"], requirement["below"], version):
            return requirement[0]
        least, below = series(version)
        return f'"{requirement["name"]}{requirement["extra"] or ""}>={least if together else requirement["least"]},<{below}"'

    planned.edits[file] = REQUIREMENT.sub(ranged, planned.text(file))


def run(*command: str) -> str:
    """Output of a command; it runs at the top of the repository."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def build(planned: Plan, dist: Path) -> None:
    """Build a wheel and an sdist of each package, and check them."""
    for name, version in planned.releases.items():
        run(sys.executable, "tools/build.py", name, "--out-dir", str(dist))
        built = sorted(dist.glob(f"{name.replace('-', '_')}-{version}*"))
        if faults := [problem for file in built if file.suffix == ".whl" for problem in builder.problems(file)]:
            raise Refused("\n".join(faults))


def pushes(tags: list[str]) -> list[str]:
    """Commands that push the commit with the first tag, and then each other tag: a forge may start nothing for many at once."""
    return [f"git push --atomic origin HEAD:main {tags[0]}", *(f"git push origin {tag}" for tag in tags[1:])]


def carry_out(planned: Plan, dist: Path, ci: bool) -> None:
    """Make the release, from a clean working tree: files, lock, checks, build, commit and tags. Undo it if a step fails."""
    changed = [path.relative_to(ROOT).as_posix() for path in planned.edits]
    before, had = run("git", "rev-parse", "HEAD").strip(), set(dist.glob("*"))
    tagged: list[str] = []
    try:
        for path, text in planned.edits.items():
            path.write_text(text, encoding="utf-8")
        run("uv", "lock", "--quiet")
        lock.strip_in_place()
        if ci:
            run(".ci/run")
        build(planned, dist)
        if changed:
            run("git", "add", "uv.lock", *changed)
            subject = ", ".join(f"{name} {version}" for name, version in planned.releases.items())
            run("git", "commit", "--quiet", "-m", subject)
        for tag in planned.tags:
            run("git", "tag", "--annotate", "--message", tag, tag)
            tagged.append(tag)
    except BaseException:
        if tagged:
            run("git", "tag", "--delete", *tagged)
        run("git", "reset", "--quiet", "--hard", before)
        for file in set(dist.glob("*")) - had:
            file.unlink()
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("part", choices=("first", "patch", "minor", "major"))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--skip-ci", action="store_true")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    args = parser.parse_args(arguments)
    try:
        planned = plan(args.package, args.part, datetime.date.today().isoformat())
        known = run("git", "tag").split()
        if again := [tag for tag in planned.tags if tag in known]:
            raise Refused(f"{', '.join(again)} is tagged already")
        if args.part != "first" and not any(tag.startswith(f"{args.package}-v") for tag in known):
            print(f"note: {args.package} has no tag here; `first` releases the version that stands", file=sys.stderr)
        if args.dry_run:
            print(planned.diff(), end="")
            print(f"would tag {', '.join(planned.tags)}")
            return 0
        if changes := run("git", "status", "--porcelain"):
            raise Refused(f"the working tree has changes; commit them first:\n{changes}".rstrip())
        carry_out(planned, args.dist, ci=not args.skip_ci)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1
    print(f"tagged {', '.join(planned.tags)}")
    print("\n".join(pushes(planned.tags)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
