"""docs/scale.md is what `tools/scale_page.py` computes."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "scale_page", Path(__file__).resolve().parent.parent / "tools" / "scale_page.py"
)
assert _spec is not None
assert _spec.loader is not None
scale_page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scale_page)


def test_the_page_is_current() -> None:
    assert scale_page.PAGE.read_text("utf-8") == scale_page.page(), "run: uv run python tools/scale_page.py"


def test_what_a_ring_sends() -> None:
    """An all-gather of 8 bytes a row, as liger-distributed's tests count it; an all-reduce is two passes."""
    (ours,) = scale_page.losses(scale_page.MODELS[0], 2)[0].collectives
    assert ours == 8 * scale_page.TOKENS
    assert scale_page.reduce(100.0, 2) == 100.0
