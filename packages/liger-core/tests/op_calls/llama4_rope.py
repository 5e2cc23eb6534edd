"""Calls that llama4_rope refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    return {
        "q": randn(2, 3, 4, 8),
        "k": randn(2, 3, 1, 8),
        "freqs_cis": randn(3, 4, 2),
        **changed,
    }


BAD = (
    BadCall("integer-q", TypeError, ("q", "int64"), lambda: _bad(q=integers(0, 9, 2, 3, 4, 8))),
    BadCall("integer-k", TypeError, ("k", "int64"), lambda: _bad(k=integers(0, 9, 2, 3, 1, 8))),
    BadCall(
        "integer-freqs",
        TypeError,
        ("freqs_cis", "int64", "complex64"),
        lambda: _bad(freqs_cis=integers(0, 9, 3, 4, 2)),
    ),
    BadCall(
        "complex128-freqs",
        TypeError,
        ("freqs_cis", "complex128", "complex64"),
        lambda: _bad(freqs_cis=torch.zeros(3, 4, dtype=torch.complex128)),
    ),
    BadCall("flat-q", ValueError, ("q", "3 dimensions"), lambda: _bad(q=randn(2, 3, 32))),
    BadCall("flat-k", ValueError, ("k", "3 dimensions"), lambda: _bad(k=randn(2, 3, 8))),
    BadCall("odd-head-size", ValueError, ("q", "head size 7", "even"), lambda: _bad(q=randn(2, 3, 4, 7))),
    BadCall("empty-heads", ValueError, ("q", "head size 0", "even"), lambda: _bad(q=randn(2, 3, 4, 0))),
    BadCall("k-of-another-batch", ValueError, ("k", "(1, 3, 1, 8)"), lambda: _bad(k=randn(1, 3, 1, 8))),
    BadCall("k-of-another-length", ValueError, ("k", "(2, 5, 1, 8)"), lambda: _bad(k=randn(2, 5, 1, 8))),
    BadCall("k-of-another-head-size", ValueError, ("k", "(2, 3, 1, 4)"), lambda: _bad(k=randn(2, 3, 1, 4))),
    BadCall(
        "freqs-of-another-length",
        ValueError,
        ("freqs_cis", "(5, 4, 2)", "(3, 4, 2)"),
        lambda: _bad(freqs_cis=randn(5, 4, 2)),
    ),
    BadCall(
        "freqs-of-a-whole-head",
        ValueError,
        ("freqs_cis", "(3, 8, 2)", "(3, 4, 2)"),
        lambda: _bad(freqs_cis=randn(3, 8, 2)),
    ),
    BadCall(
        "real-freqs-of-complex-shape",
        ValueError,
        ("freqs_cis", "(3, 4)", "(3, 4, 2)"),
        lambda: _bad(freqs_cis=randn(3, 4)),
    ),
    BadCall(
        "complex-freqs-with-batch",
        ValueError,
        ("freqs_cis", "(1, 3, 4)", "(3, 4)"),
        lambda: _bad(freqs_cis=torch.zeros(1, 3, 4, dtype=torch.complex64)),
    ),
)


def small() -> dict[str, Any]:
    return {"q": randn(2, 5, 3, 8), "k": randn(2, 5, 1, 8), "freqs_cis": randn(5, 4, 2)}
