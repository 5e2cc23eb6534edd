"""Calls that mhc_pre refuses."""

from typing import Any

from op_calls import BadCall, integers, randn


def _bad(**changed: Any) -> dict[str, Any]:
    """Two streams of three columns."""
    good = {"x": randn(4, 2, 3), "weight": randn(8, 6), "bias": randn(8), "alpha": randn(3)}
    return {**good, **changed}


def _head(**changed: Any) -> dict[str, Any]:
    good = {"x": randn(4, 2, 3), "weight": randn(2, 6), "bias": randn(2), "alpha": randn(1)}
    return {**good, **changed}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda: _bad(x=integers(0, 9, 4, 2, 3))),
    BadCall("integer-weight", TypeError, ("weight", "int64"), lambda: _bad(weight=integers(0, 9, 8, 6))),
    BadCall("integer-bias", TypeError, ("bias", "int64"), lambda: _bad(bias=integers(0, 9, 8))),
    BadCall("integer-alpha", TypeError, ("alpha", "int64"), lambda: _bad(alpha=integers(0, 9, 3))),
    BadCall("no-bias", TypeError, ("bias", "NoneType"), lambda: _bad(bias=None)),
    BadCall("one-stream-alone", ValueError, ("x", "1 dimensions"), lambda: _bad(x=randn(6))),
    BadCall("no-streams", ValueError, ("x", "(4, 0, 3)"), lambda: _bad(x=randn(4, 0, 3))),
    BadCall("no-columns", ValueError, ("x", "(4, 2, 0)"), lambda: _bad(x=randn(4, 2, 0))),
    BadCall("flat-weight", ValueError, ("weight", "1 dimensions"), lambda: _bad(weight=randn(48))),
    BadCall(
        "weight-of-other-rows",
        ValueError,
        ("weight", "7 rows", "8 of them for 2 streams", "2 for the head"),
        lambda: _bad(weight=randn(7, 6), bias=randn(7)),
    ),
    BadCall(
        "weight-of-other-columns",
        ValueError,
        ("weight", "(8, 3)", "(8, 6)"),
        lambda: _bad(weight=randn(8, 3)),
    ),
    BadCall("short-bias", ValueError, ("bias", "(7,)", "(8,)"), lambda: _bad(bias=randn(7))),
    BadCall("alpha-of-the-head", ValueError, ("alpha", "(1,)", "(3,)"), lambda: _bad(alpha=randn(1))),
    BadCall("alpha-not-of-the-head", ValueError, ("alpha", "(3,)", "(1,)"), lambda: _head(alpha=randn(3))),
    BadCall("no-iterations", ValueError, ("iterations", "0", "1"), lambda: _bad(iterations=0)),
    BadCall("iterations-not-an-int", TypeError, ("iterations", "2.0"), lambda: _bad(iterations=2.0)),
    BadCall("negative-norm-eps", ValueError, ("norm_eps", "-1"), lambda: _bad(norm_eps=-1)),
    BadCall("sinkhorn-eps-zero", ValueError, ("sinkhorn_eps", "0", "at least 1.17"), lambda: _bad(sinkhorn_eps=0)),
    BadCall("sinkhorn-eps-tiny", ValueError, ("sinkhorn_eps", "1e-60"), lambda: _bad(sinkhorn_eps=1e-60)),
    BadCall("sinkhorn-eps-not-a-number", TypeError, ("sinkhorn_eps", "'1'"), lambda: _bad(sinkhorn_eps="1")),
    BadCall("pre-eps-not-a-number", TypeError, ("pre_eps", "None"), lambda: _bad(pre_eps=None)),
    BadCall("multiplier-not-a-number", TypeError, ("post_multiplier", "True"), lambda: _bad(post_multiplier=True)),
)


def small() -> dict[str, Any]:
    return {
        "x": randn(4, 2, 5),
        "weight": randn(8, 10),
        "bias": randn(8),
        "alpha": randn(3),
        "iterations": 2,
    }
