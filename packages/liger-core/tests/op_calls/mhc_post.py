"""Calls that mhc_post refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    """Two streams of three columns."""
    good = {"f": randn(4, 3), "x": randn(4, 2, 3), "post": randn(4, 2), "res": randn(4, 2, 2)}
    return {**good, **changed}


BAD = (
    BadCall("integer-f", TypeError, ("f", "int64"), lambda: _bad(f=integers(0, 9, 4, 3))),
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 4, 2, 3))),
    BadCall("integer-post", TypeError, ("post", "int64"), lambda: _bad(post=integers(0, 9, 4, 2))),
    BadCall("integer-res", TypeError, ("res", "int64"), lambda: _bad(res=integers(0, 9, 4, 2, 2))),
    BadCall("no-res", TypeError, ("res", "NoneType"), lambda: _bad(res=None)),
    BadCall(
        "f-of-another-dtype",
        TypeError,
        ("f", "float64", "float32"),
        lambda: _bad(x=randn(4, 2, 3, dtype=torch.float32), f=randn(4, 3, dtype=torch.float64)),
    ),
    BadCall("one-stream-alone", ValueError, ("x", "1 dimensions"), lambda: _bad(x=randn(3))),
    BadCall(
        "no-streams",
        ValueError,
        ("x", "(4, 0, 3)"),
        lambda: _bad(x=randn(4, 0, 3), post=randn(4, 0), res=randn(4, 0, 0)),
    ),
    BadCall("short-f", ValueError, ("f", "(4, 2)", "(4, 3)"), lambda: _bad(f=randn(4, 2))),
    BadCall("post-of-other-rows", ValueError, ("post", "(3, 2)", "(4, 2)"), lambda: _bad(post=randn(3, 2))),
    BadCall("flat-res", ValueError, ("res", "(4, 4)", "(4, 2, 2)"), lambda: _bad(res=randn(4, 4))),
)


def small() -> dict[str, Any]:
    return {"f": randn(3, 5), "x": randn(3, 2, 5), "post": randn(3, 2), "res": randn(3, 2, 2)}
