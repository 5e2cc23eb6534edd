"""Calls that rope refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {
        "q": randn(2, 4, 3, 8),
        "k": randn(2, 1, 3, 8),
        "cos": randn(2, 3, 8),
        "sin": randn(2, 3, 8),
        **changed,
    }


def _bad_tables(*shape: int) -> dict[str, Any]:
    return _bad(cos=randn(*shape), sin=randn(*shape))


BAD = (
    BadCall("integer-q", TypeError, ("q", "int64"), lambda: _bad(q=integers(0, 9, 2, 4, 3, 8))),
    BadCall("integer-k", TypeError, ("k", "int64"), lambda: _bad(k=integers(0, 9, 2, 1, 3, 8))),
    BadCall("integer-cos", TypeError, ("cos", "int64"), lambda: _bad(cos=integers(0, 9, 2, 3, 8))),
    BadCall("integer-sin", TypeError, ("sin", "int64"), lambda: _bad(sin=integers(0, 9, 2, 3, 8))),
    BadCall(
        "sin-of-another-dtype",
        TypeError,
        ("sin", "bfloat16", "float32"),
        lambda: _bad(sin=randn(2, 3, 8, dtype=torch.bfloat16)),
    ),
    BadCall("flat-q", ValueError, ("q", "3 dimensions"), lambda: _bad(q=randn(2, 3, 32))),
    BadCall("flat-k", ValueError, ("k", "3 dimensions"), lambda: _bad(k=randn(2, 3, 8))),
    BadCall("k-of-another-batch", ValueError, ("k", "(1, 1, 3, 8)"), lambda: _bad(k=randn(1, 1, 3, 8))),
    BadCall("k-of-another-length", ValueError, ("k", "(2, 1, 5, 8)"), lambda: _bad(k=randn(2, 1, 5, 8))),
    BadCall("k-of-another-head-size", ValueError, ("k", "(2, 1, 3, 4)"), lambda: _bad(k=randn(2, 1, 3, 4))),
    BadCall("tables-with-heads", ValueError, ("cos", "4 dimensions", "2 to 3"), lambda: _bad_tables(2, 1, 3, 8)),
    BadCall("tables-of-another-batch", ValueError, ("cos", "(3, 3, 8)"), lambda: _bad_tables(3, 3, 8)),
    BadCall("tables-of-another-length", ValueError, ("cos", "(4, 8)", "(3, 8)"), lambda: _bad_tables(4, 8)),
    BadCall("smaller-sin", ValueError, ("sin", "(3, 8)", "(2, 3, 8)"), lambda: _bad(sin=randn(3, 8))),
    BadCall("odd-columns", ValueError, ("cos", "7 columns", "even"), lambda: _bad_tables(3, 7)),
    BadCall("no-columns", ValueError, ("cos", "0 columns"), lambda: _bad_tables(3, 0)),
    BadCall("too-many-columns", ValueError, ("cos", "10 columns", "8"), lambda: _bad_tables(3, 10)),
)


def small() -> dict[str, Any]:
    return {"q": randn(2, 3, 5, 8), "k": randn(2, 1, 5, 8), "cos": randn(2, 5, 4), "sin": randn(2, 5, 4)}
