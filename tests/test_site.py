"""The checks of the documentation's site find what is wrong. The site itself is built by CI's phase `docs`."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


site_browser = tool("site_browser")
CHROMIUM = next(filter(None, map(shutil.which, site_browser.NAMES)), None)


def test_the_workflow_runs_the_commands_of_ci() -> None:
    workflow, ci = ((ROOT / name).read_text("utf-8") for name in (".github/workflows/docs.yml", ".ci/run"))
    commands = re.findall(r"- run: (?:uv run|python) (.*(?:mkdocs|tools/site).*)", workflow)
    assert len(commands) == 2
    assert [command for command in commands if command not in ci] == []


TAG = re.compile(r"<\w+\b[^<>]* (?:href|src)=")


def test_links_are_markdown() -> None:
    """mkdocs checks the links of Markdown alone, under --strict."""
    assert TAG.search('<img width="3" src="a.png">')
    names = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(names) > 80, "the pages are not where this test looks for them"
    assert [name for name in names if TAG.search((ROOT / name).read_text("utf-8"))] == []


@pytest.mark.skipif(CHROMIUM is None, reason="not run: no Chromium on PATH")
def test_a_page_that_no_phone_can_show_is_found(tmp_path: Path) -> None:
    head = '<!doctype html><link rel="icon" href="data:,"><meta name="viewport" content="width=device-width">'
    (tmp_path / "good.html").write_text(f"{head}<p>short</p>")
    (tmp_path / "wide.html").write_text(f'{head}<p style="width: 600px">wide</p>')
    (tmp_path / "far.html").write_text(f'{head}<script src="https://invalid.example/a.js"></script>')
    (tmp_path / "wrong.html").write_text(f"{head}<script>throw new Error('oh')</script>")
    far = "far.html: Failed to load resource: net::ERR_NAME_NOT_RESOLVED https://invalid.example/a.js"
    assert list(site_browser.problems(tmp_path, CHROMIUM, searches={})) == [
        f"desktop: {far}",
        "desktop: wrong.html: Uncaught oh",
        f"phone: {far}",
        "phone: wide.html is 608 pixels wide, and the screen 390",
        "phone: wrong.html: Uncaught oh",
    ]


def test_without_a_browser_the_site_is_said_not_to_be_opened(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools/site_browser.py", tmp_path]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("not run: no Chromium on PATH")
