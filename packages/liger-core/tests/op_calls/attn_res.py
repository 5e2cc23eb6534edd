"""Calls that attn_res refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    inputs = {
        "blocks": randn(2, 3, 8),
        "partial": randn(3, 8),
        "query": randn(8),
        "weight": randn(8),
    }
    return {**inputs, **changed}


BAD = (
    BadCall("integer-blocks", TypeError, ("blocks", "int64"), lambda: _bad(blocks=integers(0, 9, 2, 3, 8))),
    BadCall("list-of-blocks", TypeError, ("blocks", "list"), lambda: _bad(blocks=[randn(3, 8)])),
    BadCall(
        "partial-of-another-dtype",
        TypeError,
        ("partial", "bfloat16", "float32"),
        lambda: _bad(partial=randn(3, 8, dtype=torch.bfloat16)),
    ),
    BadCall("one-block", ValueError, ("blocks", "1 dimension"), lambda: _bad(blocks=randn(8), partial=None)),
    BadCall(
        "nothing",
        ValueError,
        ("blocks", "(0, 3, 8)"),
        lambda: _bad(blocks=randn(0, 3, 8), partial=None),
    ),
    BadCall("short-partial", ValueError, ("partial", "(2, 8)", "(3, 8)"), lambda: _bad(partial=randn(2, 8))),
    BadCall("short-query", ValueError, ("query", "(7,)", "(8,)"), lambda: _bad(query=randn(7))),
    BadCall("short-weight", ValueError, ("weight", "(7,)", "(8,)"), lambda: _bad(weight=randn(7))),
    BadCall("eps-not-a-number", TypeError, ("eps", "'1'"), lambda: _bad(eps="1")),
)
