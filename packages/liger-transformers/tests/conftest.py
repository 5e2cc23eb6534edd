"""The tests' own modules, and a count of the ops that a model calls."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from liger_core.contract import Op

sys.path.insert(0, str(Path(__file__).parent / "helpers"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of liger_core's ops, by name."""
    counts: Counter[str] = Counter()
    call = Op.__call__

    def counted(op: Op[..., Any], *args: Any, **kwargs: Any) -> Any:
        counts[op.name] += 1
        return call(op, *args, **kwargs)

    monkeypatch.setattr(Op, "__call__", counted)
    return counts
