"""Cases of mhc_pre."""

from typing import Any

import torch

from liger_conformance.case import BadCall, CallMode, Case, Make
from liger_conformance.vary import ANY_DTYPE, ROWS, Number, Size, Vary


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    streams: int,
    width: int,
    head: bool = False,
    parameters: torch.dtype | None = None,
    scale: float = 1.0,
    spread: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """`spread` is how far the logits lie apart; with 0 they are equal. `parameters` is the dtype of weight, bias, alpha."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    count = streams if head else streams * streams + 2 * streams
    columns = streams * width
    # The product of a row has values near 1.
    weight = make.randn(count, columns, dtype=torch.float32) * columns**-0.5
    return {
        "x": make.randn(*rows, streams, width) * scale,
        "weight": weight.to(parameters or make.dtype),
        "bias": make.randn(count, dtype=parameters) * spread,
        "alpha": (make.uniform(1 if head else 3, dtype=parameters) + 0.5) * spread,
        **options,
    }


VARY = Vary(
    sizes={"rows": ROWS, "streams": Size(most=8), "width": Size(most=1 << 14)},
    tensors=("rows streams width", "streams streams streams width", "rows streams streams"),
    values={
        "head": (False, True),
        "parameters": ANY_DTYPE,
        "spread": (0.0, Number(0.0, 50.0)),
        "iterations": (1, 2, 5, 20),
        "norm_eps": Number(1e-8, 1.0),
        "sinkhorn_eps": Number(1e-8, 0.1),
        "pre_eps": (0.0, Number(0.0, 0.1)),
        "post_multiplier": (2.0, Number(-3.0, 3.0)),
    },
)

CASES = (
    Case("odd", "odd", rows=5, streams=3, width=31, iterations=3),
    Case("batched", "odd", rows=(2, 3), streams=2, width=33, iterations=2),
    Case("many-rows", "odd", rows=133, streams=2, width=7, iterations=2),
    Case("four-streams", "odd", rows=3, streams=4, width=24),
    Case("eight-streams", "odd", rows=2, streams=8, width=9, iterations=2),
    Case("five-streams", "odd", rows=2, streams=5, width=13, iterations=2),
    Case("long-row", "odd", rows=2, streams=4, width=1100, iterations=2),
    Case("one-element", "edge", rows=1, streams=1, width=1),
    Case(
        "streams-of-one-element",
        "odd",
        mode=CallMode(layouts={"x": "outermost_last", "weight": "sliced", "bias": "sliced", "alpha": "sliced"}),
        rows=(4, 4),
        streams=1,
        width=1,
        head=True,
        parameters=torch.float32,
    ),
    Case("one-stream", "edge", rows=3, streams=1, width=40, iterations=2),
    Case("vector", "edge", rows=(), streams=2, width=17, iterations=2),
    Case("one-iteration", "option", rows=4, streams=4, width=48, iterations=1),
    Case("float32-parameters", "option", rows=4, streams=4, width=48, iterations=2, parameters=torch.float32),
    Case("head", "option", rows=3, streams=4, width=24, head=True),
    Case("head-float32-parameters", "option", rows=5, streams=3, width=31, head=True, parameters=torch.float32),
    Case("norm-eps", "option", rows=4, streams=2, width=24, iterations=2, norm_eps=0.5, scale=0.1),
    Case("sinkhorn-eps", "option", rows=4, streams=3, width=24, iterations=3, sinkhorn_eps=0.05),
    Case("pre-eps", "option", rows=4, streams=2, width=24, iterations=1, pre_eps=0.25),
    Case("post-multiplier", "option", rows=4, streams=2, width=24, iterations=1, post_multiplier=-1.5),
    Case("equal-logits", "extreme", rows=3, streams=4, width=24, spread=0.0, iterations=2),
    Case("logits-of-50", "extreme", rows=3, streams=4, width=24, spread=50.0, iterations=3),
    Case("big-values", "extreme", rows=4, streams=2, width=24, scale=1e3, iterations=2),
    Case("uneven-rows", "extreme", rows=6, streams=2, width=24, iterations=2, by_row=("x",)),
    Case("small", "small", rows=2048, streams=4, width=2048, parameters=torch.float32),
    Case("medium", "medium", rows=8192, streams=4, width=4096, parameters=torch.float32),
    Case("large", "large", rows=16384, streams=4, width=7168, parameters=torch.float32),
)

HUGE = Case("huge", "large", rows=(1 << 17) + 3, streams=4, width=4096, iterations=2)


def _bad(make: Make, **changed: Any) -> dict[str, Any]:
    """Two streams of three columns."""
    good = {"x": make.randn(4, 2, 3), "weight": make.randn(8, 6), "bias": make.randn(8), "alpha": make.randn(3)}
    return {**good, **changed}


def _head(make: Make, **changed: Any) -> dict[str, Any]:
    good = {"x": make.randn(4, 2, 3), "weight": make.randn(2, 6), "bias": make.randn(2), "alpha": make.randn(1)}
    return {**good, **changed}


BAD = (
    BadCall("integer-x", TypeError, ("x", "int64"), lambda make: _bad(make, x=make.integers(0, 9, 4, 2, 3))),
    BadCall(
        "integer-weight", TypeError, ("weight", "int64"), lambda make: _bad(make, weight=make.integers(0, 9, 8, 6))
    ),
    BadCall("integer-bias", TypeError, ("bias", "int64"), lambda make: _bad(make, bias=make.integers(0, 9, 8))),
    BadCall("integer-alpha", TypeError, ("alpha", "int64"), lambda make: _bad(make, alpha=make.integers(0, 9, 3))),
    BadCall("no-bias", TypeError, ("bias", "NoneType"), lambda make: _bad(make, bias=None)),
    BadCall("one-stream-alone", ValueError, ("x", "1 dimensions"), lambda make: _bad(make, x=make.randn(6))),
    BadCall("no-streams", ValueError, ("x", "(4, 0, 3)"), lambda make: _bad(make, x=make.randn(4, 0, 3))),
    BadCall("no-columns", ValueError, ("x", "(4, 2, 0)"), lambda make: _bad(make, x=make.randn(4, 2, 0))),
    BadCall("flat-weight", ValueError, ("weight", "1 dimensions"), lambda make: _bad(make, weight=make.randn(48))),
    BadCall(
        "weight-of-other-rows",
        ValueError,
        ("weight", "7 rows", "8 of them for 2 streams", "2 for the head"),
        lambda make: _bad(make, weight=make.randn(7, 6), bias=make.randn(7)),
    ),
    BadCall(
        "weight-of-other-columns",
        ValueError,
        ("weight", "(8, 3)", "(8, 6)"),
        lambda make: _bad(make, weight=make.randn(8, 3)),
    ),
    BadCall("short-bias", ValueError, ("bias", "(7,)", "(8,)"), lambda make: _bad(make, bias=make.randn(7))),
    BadCall("alpha-of-the-head", ValueError, ("alpha", "(1,)", "(3,)"), lambda make: _bad(make, alpha=make.randn(1))),
    BadCall(
        "alpha-not-of-the-head", ValueError, ("alpha", "(3,)", "(1,)"), lambda make: _head(make, alpha=make.randn(3))
    ),
    BadCall("no-iterations", ValueError, ("iterations", "0", "1"), lambda make: _bad(make, iterations=0)),
    BadCall("iterations-not-an-int", TypeError, ("iterations", "2.0"), lambda make: _bad(make, iterations=2.0)),
    BadCall("negative-norm-eps", ValueError, ("norm_eps", "-1"), lambda make: _bad(make, norm_eps=-1)),
    BadCall("sinkhorn-eps-not-a-number", TypeError, ("sinkhorn_eps", "'1'"), lambda make: _bad(make, sinkhorn_eps="1")),
    BadCall("pre-eps-not-a-number", TypeError, ("pre_eps", "None"), lambda make: _bad(make, pre_eps=None)),
    BadCall(
        "multiplier-not-a-number", TypeError, ("post_multiplier", "True"), lambda make: _bad(make, post_multiplier=True)
    ),
)
