"""Cases of attn_res."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Number, Size, Vary

KIND = "residual streams"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    count: int = 3,
    partial: bool = True,
    weight: bool = True,
    parameter_dtype: torch.dtype | None = None,
    query: float = 0.1,
    larger: float = 1.0,
    spare: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """With `spare`, blocks are the first of a buffer for more. The second source is `larger` times the others."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    blocks = make.randn(count + 2 * spare, *rows, hidden)[:count]
    if larger != 1.0:
        blocks[min(1, count - 1)] *= larger
    return {
        "blocks": blocks,
        "partial": make.randn(*rows, hidden) if partial else None,
        "query": make.randn(hidden, dtype=parameter_dtype) * query,
        "weight": make.randn(hidden, dtype=parameter_dtype) if weight else None,
        **options,
    }


VARY = Vary(
    sizes={"rows": ROWS, "hidden": Size(), "count": Size(most=20)},
    tensors=("count rows hidden", "rows hidden"),
    values={
        "partial": (True, False),
        "weight": (True, False),
        "parameter_dtype": ANY_DTYPE,
        "query": (0.0, 0.1, 1.0),
        "larger": (1.0, 30.0),
        "spare": (False, True),
        "eps": Number(1e-8, 1.0),
    },
)

CASES = (
    Case("odd", "odd", rows=5, hidden=123),
    Case("batched", "odd", rows=(2, 3), hidden=33, count=1),
    Case("row-of-7168", "odd", rows=1, hidden=7168, count=2),
    Case("dx-of-8200", "odd", mode=CallMode(grads=("blocks",)), rows=1, hidden=8200, count=1, partial=False),
    Case(
        "dpartial-of-8200", "odd", mode=CallMode(grads=("partial", "query")), rows=1, hidden=8200, count=1, weight=False
    ),
    Case("y-of-8200", "odd", mode=CallMode(grads=()), rows=1, hidden=8200, count=1),
    Case("many-sources", "option", rows=3, hidden=24, count=17),
    Case("nine", "option", rows=3, hidden=24, count=9),
    Case("without-partial", "option", rows=3, hidden=40, partial=False),
    Case("one-source", "edge", rows=3, hidden=24, count=1, partial=False),
    Case("vector", "edge", rows=(), hidden=33),
    Case("rows-of-one", "odd", rows=64, hidden=1),
    Case("no-weight", "option", rows=3, hidden=40, weight=False),
    Case("float32-parameters", "option", rows=3, hidden=40, parameter_dtype=torch.float32),
    Case("query-zero", "option", rows=3, hidden=40, query=0.0),
    Case("eps", "option", rows=3, hidden=40, eps=0.5),
    Case("spare", "option", rows=(2, 2), hidden=48, spare=True),
    Case(
        "transposed", "odd", mode=CallMode(layouts={"blocks": "transposed", "partial": "transposed"}), rows=3, hidden=20
    ),
    Case("frozen-parameters", "option", mode=CallMode(grads=("blocks", "partial")), rows=3, hidden=40),
    Case("parameters-alone", "option", mode=CallMode(grads=("query", "weight")), rows=3, hidden=40),
    Case("partial-wanted", "option", mode=CallMode(grads=("partial", "weight")), rows=3, hidden=40),
    Case("one-larger", "extreme", rows=3, hidden=40, larger=1e3),
    Case("uneven-rows", "extreme", rows=6, hidden=97, count=6, by_row=("incoming",)),
    Case("small", "small", rows=2048, hidden=2048, count=4),
    Case("medium", "medium", rows=8192, hidden=4096, count=8),
    Case("large", "large", rows=16384, hidden=7168, count=9),
)

HUGE = Case("huge", "large", rows=32768 + 3, hidden=8192, count=9)

MOVES = Moves({"blocks": 1, "partial": 1, "result": 1}, {"blocks": 2, "partial": 2, "result": 1})


def eager(blocks: Tensor, partial: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    v = torch.cat((blocks, partial[None]))
    scores = F.rms_norm(v, v.shape[-1:], weight, 1e-6) @ query
    return torch.einsum("n...,n...d->...d", torch.softmax(scores.float(), 0).to(v.dtype), v)


def liger(ops: Any, blocks: Tensor, partial: Tensor, query: Tensor, weight: Tensor) -> Any:
    return ops.LigerAttnResFunction.apply(torch.cat((blocks, partial[None])), query, weight, 1e-06)
