"""`tools/release.py` changes what a release has to change, and what it builds can be installed from a folder."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
assert _spec is not None
assert _spec.loader is not None
release = importlib.util.module_from_spec(_spec)
sys.modules["release"] = release  # its dataclass looks itself up there
_spec.loader.exec_module(release)

KERNELS = ("liger-triton", "liger-cutile", "liger-triton-ascend")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the packages' pyproject.toml files and changelogs: a plan reads no more."""
    for folder in [*(ROOT / "packages").iterdir(), ROOT / "conformance"]:
        if (folder / "pyproject.toml").exists():
            copy = tmp_path / folder.relative_to(ROOT)
            copy.mkdir(parents=True)
            version = re.sub(r'(?m)^version = ".*"$', 'version = "0.1.3"', (folder / "pyproject.toml").read_text())
            (copy / "pyproject.toml").write_text(version)
            (copy / "CHANGELOG.md").write_text(
                "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- An op.\n\n## [0.1.3] - 2026-01-01\n"
            )
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release.builder, "ROOT", tmp_path)
    return tmp_path


def planned(package: str, part: str) -> dict[str, str]:
    """The files that a release changes, with their text."""
    return {
        path.relative_to(release.ROOT).as_posix(): text
        for path, text in release.plan(package, part, "2026-02-03").edits.items()
    }


def test_a_patch_touches_one_package(workspace: Path) -> None:
    edits = planned("liger-cutile", "patch")
    assert set(edits) == {"packages/liger-cutile/pyproject.toml", "packages/liger-cutile/CHANGELOG.md"}
    assert '\nversion = "0.1.4"\n' in edits["packages/liger-cutile/pyproject.toml"]
    assert (
        "## [Unreleased]\n\n## [0.1.4] - 2026-02-03\n\n### Added\n\n- An op.\n\n## [0.1.3]"
        in edits["packages/liger-cutile/CHANGELOG.md"]
    )
    assert release.plan("liger-cutile", "patch", "2026-02-03").tags == ["liger-cutile-v0.1.4"]


def test_the_first_release_keeps_its_version(workspace: Path) -> None:
    assert set(planned("liger-core", "first")) == {"packages/liger-core/CHANGELOG.md"}
    assert release.plan("liger-core", "first", "2026-02-03").tags == ["liger-core-v0.1.3"]


@pytest.mark.parametrize("package", KERNELS)
def test_cores_extra_takes_a_kernel_packages_new_series(workspace: Path, package: str) -> None:
    edits = planned(package, "minor")
    assert set(edits) == {
        f"packages/{package}/pyproject.toml",
        f"packages/{package}/CHANGELOG.md",
        "packages/liger-core/pyproject.toml",
    }
    ranges = re.findall(r'"(liger-[a-z-]+)(?:\[npu\])?(>=.*?)"', edits["packages/liger-core/pyproject.toml"])
    assert dict(ranges)[package] == ">=0.1,<0.3"
    assert {range for name, range in ranges if name != package} == {">=0.1,<0.2"}


@pytest.mark.parametrize(("part", "version", "range"), [("minor", "0.2.0", ">=0.2,<0.3"), ("major", "1.0.0", ">=1,<2")])
def test_a_new_series_of_core_moves_every_package(workspace: Path, part: str, version: str, range: str) -> None:
    plan = release.plan("liger-core", part, "2026-02-03")
    assert set(plan.releases.values()) == {version}
    assert set(plan.releases) == set(release.builder.folders())
    assert list(plan.releases)[-1] == "liger-core"  # until it is out, nobody gets the others by accident
    for path, text in plan.edits.items():
        if path.name == "pyproject.toml":
            assert set(re.findall(r'"liger-[a-z-]+(?:\[npu\])?(>=.*?)"', text)) == {range}, path


def test_refusals_say_why(workspace: Path) -> None:
    with pytest.raises(release.Refused, match="there is no package liger-metal; there are liger-core, liger-cutile"):
        release.plan("liger-metal", "patch", "2026-02-03")
    changelog = workspace / "packages" / "liger-cutile" / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## [Unreleased]\n\n## [0.1.3] - 2026-01-01\n")
    with pytest.raises(release.Refused, match="CHANGELOG.md says of nothing that is new"):
        release.plan("liger-cutile", "patch", "2026-02-03")
    changelog.write_text("# Changelog\n")
    with pytest.raises(release.Refused, match="has no line"):
        release.plan("liger-cutile", "patch", "2026-02-03")


def test_a_package_without_a_tag_is_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its version was probably never released, and `patch` would leave it out."""
    for tags, noted in (("", True), ("liger-core-v0.1.0", True), ("liger-cutile-v0.0.1", False)):
        monkeypatch.setattr(release, "run", lambda *_, tags=tags: tags)
        assert release.main(["liger-cutile", "patch", "--dry-run"]) == 0
        assert ("liger-cutile has no tag here; `first` releases" in capsys.readouterr().err) == noted
    monkeypatch.setattr(release, "run", lambda *_: "")
    assert release.main(["liger-cutile", "first", "--dry-run"]) == 0
    assert not capsys.readouterr().err


def test_a_dry_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """On the checkout itself: each package could be released, and no file is written."""
    before = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    for package in release.builder.folders():
        assert release.main([package, "patch", "--dry-run"]) == 0
        printed = capsys.readouterr().out
        assert re.search(rf"^would tag {package}-v\d+\.\d+\.\d+$", printed, re.M)
        assert re.search(r'^\+version = "', printed, re.M)
    after = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert after.stdout == before.stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two files. Its releases run git, and of the other tools nothing."""
    real = release.run
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "run", lambda *command: real(*command) if command[0] == "git" else "")
    monkeypatch.setattr(release.lock, "LOCK", tmp_path / "uv.lock")
    monkeypatch.setattr(release, "build", lambda planned, dist: (dist / "new.whl").write_text("new"))
    for name in ("uv.lock", "pyproject.toml"):
        (tmp_path / name).write_text("old")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "old.whl").write_text("old")
    (tmp_path / ".gitignore").write_text("dist")
    for command in (["init"], ["config", "user.name", "nobody"], ["config", "user.email", "nobody@invalid.example"]):
        real("git", *command)
    real("git", "add", "--all")
    real("git", "commit", "--message", "before")
    return tmp_path


def state(checkout: Path) -> list[str]:
    """The commits, tags, changes and files of a checkout."""
    built = sorted(file.name for file in (checkout / "dist").iterdir())
    git = [release.run("git", *command) for command in (["log", "--format=%s"], ["tag"], ["status", "--porcelain"])]
    return [*git, *built, *((checkout / name).read_text() for name in ("uv.lock", "pyproject.toml"))]


def a_release(checkout: Path) -> object:
    return release.Plan({checkout / "pyproject.toml": "new"}, {"liger-triton": "0.2.0", "liger-core": "0.2.0"})


def test_tags_are_annotated(checkout: Path) -> None:
    """git push --follow-tags leaves others behind, and what isn't pushed starts no workflow."""
    release.carry_out(a_release(checkout), checkout / "dist", ci=False)
    for tag in ("liger-triton-v0.2.0", "liger-core-v0.2.0"):
        assert release.run("git", "cat-file", "-t", tag) == "tag\n"
    assert state(checkout) == [
        "liger-triton 0.2.0, liger-core 0.2.0\nbefore\n", "liger-core-v0.2.0\nliger-triton-v0.2.0\n", "",
        "new.whl", "old.whl", "old", "new",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fails", ["uv lock", ".ci/run", "git add", "git commit", "git tag --annotate --message liger-core"]
)
def test_a_release_that_fails_half_way_leaves_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    before, real = state(checkout), release.run

    def run(*command: str) -> str:
        if " ".join(command).startswith(fails):
            raise release.Refused(fails)
        return real(*command)

    monkeypatch.setattr(release, "run", run)
    with pytest.raises(release.Refused, match=fails):
        release.carry_out(a_release(checkout), checkout / "dist", ci=True)
    assert state(checkout) == before


def test_each_tag_is_pushed_by_itself() -> None:
    """The forge starts no workflow for more than three tags that one push brings."""
    assert release.pushes(["liger-triton-v0.2.0", "liger-core-v0.2.0"]) == [
        "git push --atomic origin HEAD:main liger-triton-v0.2.0",
        "git push origin liger-core-v0.2.0",
    ]


def test_actions_of_workflows_are_pinned() -> None:
    """By the hash of a commit, which nobody can move, and the version that it is."""
    used = [
        (file.name, line.strip())
        for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for line in file.read_text().splitlines()
        if re.match(r"\s*(- )?uses: (?!\./)", line)
    ]
    assert used
    for file, line in used:
        assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), f"{file}: {line}"


def test_only_a_commit_of_main_that_passes_ci_is_published() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "  ci:\n    uses: ./.github/workflows/ci.yml\n" in workflow
    assert "    needs: [ci, build]\n" in workflow
    assert "git merge-base --is-ancestor HEAD origin/main\n" in workflow
    assert "\n  workflow_call:" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


PROBE = """
import liger_core, torch
assert liger_core.list_overridden_ops("cuda"), "no kernel package is installed"
print(liger_core.rms_norm(torch.ones(2, 4), torch.full((4,), 2.0), eps=0.0).tolist())
"""


@pytest.mark.slow
def test_releases_install_from_a_folder(tmp_path: Path) -> None:
    """Every package is released into a folder. `liger-core[cutile]` is installed from it alone, and works; then the others are.

    tools/compatibility.py then compares the tags that this made, so it is tried before there is a release.
    """
    checkout, dist = tmp_path / "checkout", tmp_path / "dist"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)

    def run(*command: str, cwd: Path = checkout) -> str:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    run("python3", "tools/lock.py")  # the copied lock may hold addresses
    run("git", "init", "--quiet")
    run("git", "config", "user.name", "nobody")
    run("git", "config", "user.email", "nobody@invalid.example")
    run("git", "add", "--all")
    run("git", "commit", "--quiet", "-m", "everything")
    for package in release.builder.folders():
        printed = run(sys.executable, "tools/release.py", package, "patch", "--skip-ci", f"--dist={dist}")
        assert re.search(rf"^tagged {package}-v\d+\.\d+\.\d+$", printed, re.M)
        assert re.search(rf"^git push --atomic origin HEAD:main {package}-v\d+\.\d+\.\d+$", printed, re.M)
        assert "uv publish" not in printed
    tags = {tag.rpartition("-v")[0]: tag for tag in run("git", "tag").split()}
    assert set(tags) == set(release.builder.folders())
    assert not run("git", "status", "--porcelain")
    assert "://" not in (checkout / "uv.lock").read_text()

    python = tmp_path / "environment" / "bin" / "python"
    run("uv", "venv", "--quiet", str(tmp_path / "environment"), cwd=tmp_path)
    install = ("uv", "pip", "install", "--quiet", f"--find-links={dist}")
    run(*install, f"--python={python}", "liger-core[cutile]", cwd=tmp_path)

    def check(*packages: str) -> None:
        installed = run("uv", "pip", "list", f"--python={python}", cwd=tmp_path)
        for package in packages:
            version = re.search(rf"^{package} +(\S+)$", installed, re.M)
            assert version is not None, installed
            assert (dist / f"{package.replace('-', '_')}-{version[1]}-py3-none-any.whl").exists()

    check("liger-core", "liger-cutile")
    assert run(str(python), "-c", PROBE, cwd=tmp_path).strip() == "[[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]"
    assert "cutile" in run(str(python.with_name("liger")), "matrix", cwd=tmp_path)

    everything = "liger-core[triton,cutile,transformers,distributed]"
    run(*install, f"--python={python}", everything, "liger-conformance", cwd=tmp_path)
    check(*(set(release.builder.folders()) - {"liger-triton-ascend"}))
    # triton-ascend itself excludes triton, so its kernels are installed alone.
    run(*install, f"--target={tmp_path / 'ascend'}", "--no-deps", "liger-triton-ascend", cwd=tmp_path)
    assert (tmp_path / "ascend/liger_triton_ascend/ops/rms_norm.py").exists()

    # Only the tags are this checkout's: its tool runs the suite with the packages that are installed for these tests.
    printed = run(sys.executable, "tools/compatibility.py", "--op=rms_norm", "-k", "test_values and odd", "-n", "0")
    for language in ("triton", "cutile"):
        for old in (tags[f"liger-{language}"], f"{tags['liger-core']}, {tags['liger-conformance']}"):
            assert f"=== {language}: {old} with the rest of this checkout\n" in printed
    assert printed.rstrip().endswith("no failure")
