"""`tools/build.py` makes files whose descriptions work on an index, and finds those that don't."""

import importlib.util
import subprocess
import zipfile
from email import message_from_bytes
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = "https://invalid.example/liger"  # made up: the repository has no public address yet


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"liger_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = tool("build")
FOLDER = ROOT / "packages/liger-distributed"


@pytest.mark.parametrize(
    ("markdown", "with_base", "without"),
    [
        ("[core](../liger-core)", f"[core]({BASE}/tree/main/packages/liger-core)", "core"),
        (
            "[`f(x[i])`](README.md#a)",
            f"[`f(x[i])`]({BASE}/blob/main/packages/liger-distributed/README.md#a)",
            "`f(x[i])`",
        ),
        ("![p](several-processes.png)", f"![p]({BASE}/raw/main/packages/liger-distributed/several-processes.png)", ""),
        ("[here](#the-head) [there](https://invalid.example/)",) * 3,
        ("```\n[code](../liger-core)\n```",) * 3,
    ],
)
def test_links_of_a_readme(markdown: str, with_base: str, without: str) -> None:
    assert build.published(markdown, FOLDER, BASE) == with_base
    assert build.published(markdown, FOLDER, "") == without


def test_a_link_to_nothing_stops_the_build() -> None:
    with pytest.raises(
        SystemExit, match=r"packages/liger-distributed/README.md links to \.\./nothing, which does not exist"
    ):
        build.published("[gone](../nothing)", FOLDER, BASE)


@pytest.mark.parametrize("base", [BASE, ""])
@pytest.mark.parametrize("package", build.folders())
def test_a_description_works_on_an_index(package: str, base: str, tmp_path: Path) -> None:
    build.build(package, tmp_path, repo_url=base, site_url="")
    (wheel,) = tmp_path.glob("*.whl")
    assert not build.problems(wheel)
    assert list(tmp_path.glob("*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        urls = message_from_bytes(archive.read(name)).get_all("Project-URL") or []
    assert [url.partition(",")[0] for url in urls] == (["Repository", "Issues", "Changelog"] if base else [])


def test_a_plain_build_is_found_out(tmp_path: Path) -> None:
    """`uv build` alone leaves links to files that an index doesn't have."""
    subprocess.run(
        ["uv", "build", "--quiet", "--package", "liger-distributed", "--wheel", "--out-dir", tmp_path],
        cwd=ROOT,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    (problem,) = build.problems(wheel)
    assert "its description links to ../liger-core, several-processes.png, " in problem
