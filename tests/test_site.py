"""What the documentation's site is made of: formulas found in docstrings, facts about ops, and the check of what was built."""

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


site_math, site_links = tool("site_math"), tool("site_links")
site_ops, site_browser = tool("site_ops"), tool("site_browser")
CHROMIUM = next(filter(None, map(shutil.which, site_browser.NAMES)), None)


def formulas(text: str, *names: str) -> list[str]:
    made = site_math.typeset(text, set(names) | site_math.defined(text))
    return [found.replace("&#95;", "_") for found in re.findall(r'alttext="([^"]*)"', made)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "Scale it: y = x · rsqrt(mean(x²) + eps) · (offset + weight).",
            ["y = x · rsqrt(mean(x²) + eps) · (offset + weight)"],
        ),
        ("Rotate: y = x · cos, where x = (x₁, x₂) are halves.", ["y = x · cos", "x = (x₁, x₂)"]),
        ("Two: y = a₀·n(x), n(u) = u · 2.", ["y = a₀·n(x)", "n(u) = u · 2"]),
        ("The weight's gradient sums, in float32, the incoming rows that share an index.", []),
        ("A token whose id is not in [0, V) has loss NaN.", []),
        ("`a + b` is code, and so is ``c = d``.", []),
        ("A row is ignored; it is 0, or a mean of 1.", []),
    ],
)
def test_formulas_are_found_among_words(text: str, found: list[str]) -> None:
    assert formulas(text, "x", "eps", "offset", "cos") == found


def test_a_formula_after_a_colon_has_a_line_and_fractions() -> None:
    made = site_math.typeset("So: y = (a + b) / √(c + 1).", set())
    assert made.startswith('So: <span class="formula"><math display="block"')
    assert (
        "<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mrow><msqrt><mi>c</mi><mo>+</mo><mn>1</mn></msqrt></mrow></mfrac>"
        in made
    )
    assert made.endswith("</math></span>")  # no full stop on a line of its own
    assert "<mfrac>" not in site_math.typeset("With y = a / b there.", set())


def test_markdown_does_not_change_a_formula() -> None:
    made = site_math.typeset("It is w_y + lse_scale · v_y.", {"lse_scale"})
    assert "_" not in made
    assert "<msub><mi>w</mi><mtext>y</mtext></msub>" in made
    assert "lse&#95;scale" in made


@pytest.mark.parametrize("name", site_ops.ops())
def test_an_op_has_its_page(name: str) -> None:
    """Every op has a formula that is typeset, a table of shapes, and somebody who calls it."""
    docstring = site_ops.ast.get_docstring(site_ops.function(name)).partition("\nArgs:")[0]
    assert "<math" in site_math.typeset(docstring, site_ops.variables(name))
    assert site_ops.shapes(name).count("\n") > 2
    assert site_ops.callers(name)


def test_every_op_has_a_kind() -> None:
    """README.md's table of ops by kind is the site's navigation."""
    listed = [name for names in site_ops.kinds().values() for name in names]
    assert sorted(listed) == site_ops.ops()


def test_callers_come_from_the_sources() -> None:
    assert "[`liger_transformers.apply`]" in site_ops.callers("swiglu")
    assert "[TRL's trainers]" in site_ops.callers("logit_statistics")
    assert "`LigerSoftmax`" in site_ops.callers("softmax")
    assert (
        site_ops.package("liger_distributed/new.py")
        == "[`liger_distributed`](../packages/liger-distributed.md), in `new.py`"
    )
    assert site_ops.package("examples/new.py") == "`examples/new.py`"
    assert "your own code" in site_ops.callers("dyt").lower()


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page/index.html").write_text('<h2 id="here"></h2><img src="../nothing.png"><a href="../#there"></a>')
    (tmp_path / "index.html").write_text(
        '<a href="page/#here"></a><a href="page/#gone"></a><a href="https://invalid.example/"></a>'
        '<script src="https://invalid.example/a.js"></script><a href="../up/"></a>'
    )
    found = [problem for problem in site_links.problems(tmp_path) if not problem.startswith("ops/")]
    assert found == [
        "index.html: page/#gone: there is no such place",
        "index.html: a <script> is loaded from https://invalid.example/a.js",
        "index.html: ../up/ leads out of the site",
        "page/index.html: ../nothing.png leads nowhere",
        "page/index.html: ../#there: there is no such place",
        "there is no search index",
    ]


@pytest.mark.skipif(CHROMIUM is None, reason="not run: no Chromium on PATH")
def test_a_page_that_no_phone_can_show_is_found(tmp_path: Path) -> None:
    head = '<!doctype html><link rel="icon" href="data:,"><meta name="viewport" content="width=device-width">'
    (tmp_path / "good.html").write_text(f"{head}<p>short</p>")
    (tmp_path / "wide.html").write_text(f'{head}<p style="width: 600px">wide</p>')
    (tmp_path / "wrong.html").write_text(f"{head}<script>throw new Error('oh')</script>")
    assert list(site_browser.problems(tmp_path, CHROMIUM, searches={})) == [
        "desktop: wrong.html: Uncaught",
        "phone: wide.html is 608 pixels wide, and the screen 390",
        "phone: wrong.html: Uncaught",
    ]


def test_without_a_browser_the_site_is_said_not_to_be_opened(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools/site_browser.py", tmp_path]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("not run: no Chromium on PATH")
