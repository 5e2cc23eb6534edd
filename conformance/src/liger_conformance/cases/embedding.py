"""Cases of embedding."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import Size, Vary

KIND = "activation, embedding"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    hidden: int,
    vocabulary: int,
    used: int | None = None,
    index_dtype: torch.dtype = torch.int64,
    **options: Any,
) -> dict[str, Any]:
    rows = rows if isinstance(rows, tuple) else (rows,)
    return {
        "indices": make.integers(0, used or vocabulary, *rows, dtype=index_dtype),
        "weight": make.randn(vocabulary, hidden),
        **options,
    }


VARY = Vary(
    sizes={"rows": Size(most=1 << 18, dims=(0, 3)), "hidden": Size(most=1 << 14), "vocabulary": Size()},
    tensors=("rows hidden", "vocabulary hidden"),
    values={
        "index_dtype": (torch.int64, torch.int32),
        "used": lambda vocabulary: (None, 1, vocabulary),
        "padding_idx": lambda vocabulary: (None, 0, -1, vocabulary // 2, -vocabulary),
    },
)

CASES = (
    Case("odd", "odd", rows=11, hidden=123, vocabulary=37),
    Case("batched", "odd", rows=(2, 3, 5), hidden=65, vocabulary=17),
    Case("many-rows", "odd", rows=129, hidden=17, vocabulary=300),
    Case("long-row", "odd", rows=3, hidden=5000, vocabulary=2),
    Case("thousands-of-indices", "odd", rows=2100, hidden=5, vocabulary=70),
    Case("one-element", "edge", rows=1, hidden=1, vocabulary=1),
    Case("scalar-index", "edge", rows=(), hidden=33, vocabulary=5),
    Case("one-index-many-times", "edge", rows=300, hidden=9, vocabulary=4, used=1),
    Case("few-indices-many-times", "edge", rows=300, hidden=9, vocabulary=50, used=3),
    Case("int32", "option", rows=11, hidden=96, vocabulary=37, index_dtype=torch.int32),
    Case("padding", "option", rows=20, hidden=24, vocabulary=4, padding_idx=2),
    Case("padding-first", "option", rows=20, hidden=24, vocabulary=4, padding_idx=0),
    Case("padding-from-the-end", "option", rows=20, hidden=24, vocabulary=4, padding_idx=-1),
    Case("padding-only", "option", rows=20, hidden=24, vocabulary=4, used=1, padding_idx=-4),
    Case("uneven-rows", "extreme", rows=6, hidden=33, vocabulary=9, by_row=("weight", "incoming")),
    Case("small", "small", rows=2048, hidden=2048, vocabulary=32000),
    Case("medium", "medium", rows=16384, hidden=4096, vocabulary=128256),
    Case("large", "large", rows=65536, hidden=4096, vocabulary=128256),
)

HUGE = Case("huge", "large", rows=(1 << 18) + 5, hidden=8192, vocabulary=(1 << 18) + 3)

OUT_OF_RANGE = (
    Case("index-too-large", "edge", rows=3, hidden=8, vocabulary=5, holds={"indices": 5}),
    Case("negative-index", "edge", rows=3, hidden=8, vocabulary=5, holds={"indices": -1}),
    Case("negative-padding-index", "edge", rows=3, hidden=8, vocabulary=5, padding_idx=-2, holds={"indices": -2}),
)

MOVES = Moves({"result": 2}, {"result": 1, "weight": 1})


def eager(indices: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(indices, weight)


def liger(ops: Any, indices: Tensor, weight: Tensor) -> Any:
    return ops.LigerEmbeddingFunction.apply(weight, indices)
