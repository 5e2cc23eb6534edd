"""The migration page names functions that exist, and the table of models is what this transformers gives."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import liger_core
import liger_core.losses
import liger_transformers

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/migrating-from-liger-kernel.md"


def test_migration_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, module in (
        ("liger", liger_core),
        ("losses", liger_core.losses),
        ("liger_transformers", liger_transformers),
    ):
        used = set(re.findall(rf"\b{name}\.(\w+)", text))
        missing = sorted(found for found in used if not hasattr(module, found))
        assert used, name
        assert not missing, f"{PAGE.name} names what {name} doesn't have: {missing}"
    flags = inspect.signature(liger_transformers.apply).parameters
    assert {"rope", "rms_norm", "layer_norm", "glu", "loss"} <= {*flags}


@pytest.mark.slow
def test_models_page() -> None:
    """All types are equal, and a change of transformers or of a swap shows as a difference."""
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    if f"of transformers {transformers.__version__}\n" not in text:
        pytest.skip(f"docs/models.md is of another transformers than {transformers.__version__}")
    done = subprocess.run([sys.executable, ROOT / "tools/models_table.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_trl_page() -> None:
    """TRL's own head is right and wrong where the page says, and ours is right for all types."""
    text = (ROOT / "docs/trl.md").read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}: " not in text:
        pytest.skip(f"docs/trl.md is of another transformers than {transformers.__version__}")
    done = subprocess.run([sys.executable, ROOT / "tools/trl_table.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
