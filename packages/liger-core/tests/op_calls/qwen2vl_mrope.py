"""Calls that qwen2vl_mrope refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {
        "q": randn(2, 4, 5, 8),
        "k": randn(2, 1, 5, 8),
        "cos": randn(3, 2, 5, 8),
        "sin": randn(3, 2, 5, 8),
        "mrope_section": (1, 2, 1),
        **changed,
    }


def _bad_tables(*shape: int) -> dict[str, Any]:
    return _bad(cos=randn(*shape), sin=randn(*shape))


BAD = (
    BadCall("integer-q", TypeError, ("q", "int64"), lambda: _bad(q=integers(0, 9, 2, 4, 5, 8))),
    BadCall("integer-k", TypeError, ("k", "int64"), lambda: _bad(k=integers(0, 9, 2, 1, 5, 8))),
    BadCall("integer-cos", TypeError, ("cos", "int64"), lambda: _bad(cos=integers(0, 9, 3, 2, 5, 8))),
    BadCall("integer-sin", TypeError, ("sin", "int64"), lambda: _bad(sin=integers(0, 9, 3, 2, 5, 8))),
    BadCall(
        "sin-of-another-dtype",
        TypeError,
        ("sin", "bfloat16", "float32"),
        lambda: _bad(sin=randn(3, 2, 5, 8, dtype=torch.bfloat16)),
    ),
    BadCall("flat-q", ValueError, ("q", "3 dimensions"), lambda: _bad(q=randn(2, 5, 32))),
    BadCall("flat-k", ValueError, ("k", "3 dimensions"), lambda: _bad(k=randn(2, 5, 8))),
    BadCall("odd-head-size", ValueError, ("q", "head size 7", "even"), lambda: _bad(q=randn(2, 4, 5, 7))),
    BadCall("empty-heads", ValueError, ("q", "head size 0", "even"), lambda: _bad(q=randn(2, 4, 5, 0))),
    BadCall("k-of-another-batch", ValueError, ("k", "(1, 1, 5, 8)"), lambda: _bad(k=randn(1, 1, 5, 8))),
    BadCall("k-of-another-length", ValueError, ("k", "(2, 1, 3, 8)"), lambda: _bad(k=randn(2, 1, 3, 8))),
    BadCall("k-of-another-head-size", ValueError, ("k", "(2, 1, 5, 4)"), lambda: _bad(k=randn(2, 1, 5, 4))),
    BadCall("tables-of-one-plane", ValueError, ("cos", "3 dimensions"), lambda: _bad_tables(2, 5, 8)),
    BadCall("tables-of-two-planes", ValueError, ("cos", "(2, 2, 5, 8)"), lambda: _bad_tables(2, 2, 5, 8)),
    BadCall("tables-of-another-batch", ValueError, ("cos", "(3, 4, 5, 8)"), lambda: _bad_tables(3, 4, 5, 8)),
    BadCall("tables-of-half-a-head", ValueError, ("cos", "(3, 2, 5, 4)"), lambda: _bad_tables(3, 2, 5, 4)),
    BadCall("smaller-sin", ValueError, ("sin", "(3, 1, 5, 8)"), lambda: _bad(sin=randn(3, 1, 5, 8))),
    BadCall("section-not-a-list", TypeError, ("mrope_section", "4"), lambda: _bad(mrope_section=4)),
    BadCall("section-of-a-float", TypeError, ("mrope_section", "2.0"), lambda: _bad(mrope_section=(1, 2.0, 1))),
    BadCall("negative-section", ValueError, ("mrope_section", "-1"), lambda: _bad(mrope_section=(3, -1, 2))),
    BadCall("two-sections", ValueError, ("mrope_section", "(2, 2)"), lambda: _bad(mrope_section=(2, 2))),
    BadCall("wrong-sum", ValueError, ("mrope_section", "(2, 3, 3)"), lambda: _bad(mrope_section=(2, 3, 3))),
)


def small() -> dict[str, Any]:
    return {
        "q": randn(2, 3, 5, 8),
        "k": randn(2, 1, 5, 8),
        "cos": randn(3, 1, 5, 8),
        "sin": randn(3, 1, 5, 8),
        "mrope_section": (1, 2, 1),
    }
