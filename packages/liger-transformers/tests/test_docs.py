"""The migration page names functions that exist, and the table of models is what this transformers gives."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

import liger_core
import liger_core.losses
import liger_transformers

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/migrating-from-liger-kernel.md"
MODELS = ROOT / "docs/models.md"


def test_migration_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, module in (
        ("liger", liger_core),
        ("losses", liger_core.losses),
        ("liger_transformers", liger_transformers),
    ):
        used = set(re.findall(rf"\b{name}\.(\w+)", text))
        missing = sorted(attribute for attribute in used if not hasattr(module, attribute))
        assert used, name
        assert not missing, f"{PAGE.name} names what {name} doesn't have: {missing}"
    flags = inspect.signature(liger_transformers.apply).parameters
    assert {"rope", "rms_norm", "layer_norm", "glu", "loss"} <= {*flags}


def table() -> Any:
    """tools/models.py as a module."""
    spec = importlib.util.spec_from_file_location("models", ROOT / "tools/models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE_IS_OLD = "docs/models.md is not what this transformers gives: run tools/models.py and look at the difference"


def test_models_page_has_this_transformers() -> None:
    """It counts every type, and of the newest transformers it names every type."""
    tool, text = table(), MODELS.read_text(encoding="utf-8")
    every = {*tool.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *tool.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    lines = {match[1]: match[0] for match in tool.COUNTS.finditer(text)}
    version = transformers.__version__
    assert lines.get(version, "").startswith(f"| {version} | {len(every)} | "), PAGE_IS_OLD
    if version == max(lines, key=Version):
        named = {
            name for row in re.findall(r"^(?:\| ([\w.-]+) \||- not [^:]*: \w+: (.*)$)", text, re.M) for name in row
        }
        named = {name for names in named for name in names.split(", ")}
        assert every <= named, f"{PAGE_IS_OLD}: it lacks {sorted(every - named)}"


@pytest.mark.parametrize("name", ["gemma2", "glm", "gpt_oss", "nemotron", "qwen3_5_text"])
def test_models_page_is_current(name: str) -> None:
    """Rows of a few types, of every kind of swap, are what these types give now."""
    tool, text = table(), MODELS.read_text(encoding="utf-8")
    if f"The rest of this page is about {transformers.__version__}." not in text:
        pytest.skip(f"the rows of docs/models.md are of another transformers than {transformers.__version__}")
    assert tool.line(tool.compare(name)) in text.splitlines(), PAGE_IS_OLD


@pytest.mark.slow
def test_models_page() -> None:
    """All types are equal, and a change of transformers or of a swap shows as a difference."""
    text = MODELS.read_text(encoding="utf-8")
    if f"| {transformers.__version__} | " not in text:
        pytest.skip(f"docs/models.md is of another transformers than {transformers.__version__}")
    done = subprocess.run([sys.executable, ROOT / "tools/models.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_trl_page() -> None:
    """TRL's own head is right and wrong where the page says, and ours is right for all types."""
    text = (ROOT / "docs/trl.md").read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}: " not in text:
        pytest.skip(f"docs/trl.md is of another transformers than {transformers.__version__}")
    done = subprocess.run(
        [sys.executable, ROOT / "tools/models.py", "--trl", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
