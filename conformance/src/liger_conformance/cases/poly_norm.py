"""Cases of poly_norm."""

from typing import Any

import torch

from liger_conformance.case import Bad, Case, Make


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    scale: float = 1.0,
    weight_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    rows = rows if isinstance(rows, tuple) else (rows,)
    return {
        "x": make.randn(*rows, hidden) * scale,
        "weight": make.randn(3, dtype=weight_dtype),
        "bias": make.randn(1, dtype=weight_dtype),
        **options,
    }


CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("batched", "odd", rows=(2, 3), hidden=65),
    Case("many-rows", "odd", rows=133, hidden=17),
    Case("long-row", "odd", rows=2, hidden=5000),
    Case("one-element", "edge", rows=1, hidden=1, eps=0.5),
    Case("vector", "edge", rows=(), hidden=33),
    Case("zeros", "edge", rows=4, hidden=32, scale=0.0),
    Case("eps", "option", rows=4, hidden=96, eps=0.5),
    Case("float32-weight", "option", rows=4, hidden=96, weight_dtype=torch.float32),
    Case("tiny-values", "extreme", rows=4, hidden=64, scale=1e-4),
    Case("big-values", "extreme", rows=4, hidden=64, scale=1e4),
    Case("small", "small", rows=2048, hidden=2048),
    Case("medium", "medium", rows=8192, hidden=4096),
    Case("large", "large", rows=16384, hidden=8192),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 3, hidden=8192)


def _bad(make: Make, **changed: Any) -> dict[str, Any]:
    return {"x": make.randn(2, 8), "weight": make.randn(3), "bias": make.randn(1), **changed}


BAD = (
    Bad("integer-x", TypeError, ("x", "int64"), lambda make: _bad(make, x=make.integers(0, 9, 2, 8))),
    Bad("integer-weight", TypeError, ("weight", "int64"), lambda make: _bad(make, weight=make.integers(0, 9, 3))),
    Bad("integer-bias", TypeError, ("bias", "int64"), lambda make: _bad(make, bias=make.integers(0, 9, 1))),
    Bad("no-bias", TypeError, ("bias", "NoneType"), lambda make: _bad(make, bias=None)),
    Bad("scalar-x", ValueError, ("x", "0 dimensions"), lambda make: _bad(make, x=make.randn())),
    Bad("long-weight", ValueError, ("weight", "(8,)", "(3,)"), lambda make: _bad(make, weight=make.randn(8))),
    Bad("scalar-bias", ValueError, ("bias", "()", "(1,)"), lambda make: _bad(make, bias=make.randn())),
    Bad("eps-not-a-number", TypeError, ("eps", "'1'"), lambda make: _bad(make, eps="1")),
)
