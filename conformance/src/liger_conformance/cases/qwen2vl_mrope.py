"""Cases of qwen2vl_mrope."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_conformance.case import Case, Make, Moves
from liger_conformance.cases import rope
from liger_conformance.vary import ANY_DTYPE, Size, Vary

KIND = "position"


def build(
    make: Make,
    *,
    batch: int,
    length: int,
    q_heads: int,
    k_heads: int,
    sections: tuple[int, int, int] | list[int],
    tables: int | None = None,
    transposed: bool = True,
    scale: float = 1.0,
    k_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """`tables` is the batch of cos and sin (None: q's). Every column of every plane has its own angle."""
    head = 2 * sum(sections)

    def heads(number: int, dtype: torch.dtype | None) -> Tensor:
        if transposed:
            return (make.randn(batch, length, number, head, dtype=dtype) * scale).transpose(1, 2)
        return make.randn(batch, number, length, head, dtype=dtype) * scale

    angles = make.uniform(3, tables or batch, length, head, dtype=torch.float32) * 2 * math.pi
    table_dtype = table_dtype or make.dtype
    return {
        "q": heads(q_heads, None),
        "k": heads(k_heads, k_dtype),
        "cos": angles.cos().to(table_dtype),
        "sin": angles.sin().to(table_dtype),
        "mrope_section": sections,
    }


def splits(pairs: int) -> tuple[tuple[int, int, int], ...]:
    """Sections of so many columns in all: as in models, and with one or two of them empty."""
    quarter, three, half = pairs // 4, pairs * 3 // 8, pairs // 2
    return (
        (pairs - 2 * three, three, three),
        (pairs - quarter, quarter, 0),
        (half, 0, pairs - half),
        (pairs, 0, 0),
        (0, pairs, 0),
        (0, 0, pairs),
    )


VARY = Vary(
    sizes={
        "batch": Size(most=64),
        "length": Size(most=1 << 16),
        "q_heads": Size(most=128),
        "k_heads": Size(most=128),
        "pairs": Size(most=256),
    },
    tensors=("batch length q_heads pairs", "batch length k_heads pairs"),
    values={
        "sections": splits,
        "tables": lambda batch: (1, batch),
        "transposed": (True, False),
        "k_dtype": ANY_DTYPE,
        "table_dtype": ANY_DTYPE,
    },
)

CASES = (
    Case("odd", "odd", batch=2, length=5, q_heads=3, k_heads=1, sections=(3, 4, 4), tables=1),
    Case("a-table-each", "odd", batch=2, length=7, q_heads=4, k_heads=2, sections=(2, 5, 1)),
    Case("long", "odd", batch=1, length=37, q_heads=2, k_heads=1, sections=(1, 1, 2)),
    Case("as-many-samples-as-planes", "odd", batch=3, length=4, q_heads=2, k_heads=1, sections=(2, 3, 3)),
    Case("one-pair", "edge", batch=1, length=1, q_heads=1, k_heads=1, sections=(1, 0, 0)),
    Case("time-only", "edge", batch=2, length=5, q_heads=2, k_heads=1, sections=(8, 0, 0)),
    Case("height-only", "edge", batch=2, length=5, q_heads=2, k_heads=1, sections=(0, 8, 0)),
    Case("width-only", "edge", batch=2, length=5, q_heads=2, k_heads=1, sections=(0, 0, 8)),
    Case("no-height", "edge", batch=2, length=5, q_heads=2, k_heads=1, sections=(5, 0, 3)),
    Case("more-k-heads", "edge", batch=1, length=5, q_heads=2, k_heads=3, sections=(2, 3, 3)),
    Case("many-heads", "edge", batch=1, length=2, q_heads=33, k_heads=5, sections=(2, 3, 3)),
    Case("list-of-sections", "option", batch=2, tables=1, length=5, q_heads=2, k_heads=1, sections=[2, 3, 3]),
    Case(
        "contiguous", "option", batch=2, tables=1, length=5, q_heads=3, k_heads=1, sections=(2, 3, 3), transposed=False
    ),
    Case(
        "float32-tables",
        "option",
        batch=2,
        tables=1,
        length=5,
        q_heads=3,
        k_heads=1,
        sections=(2, 3, 3),
        table_dtype=torch.float32,
    ),
    Case(
        "float32-k",
        "option",
        batch=2,
        tables=1,
        length=5,
        q_heads=3,
        k_heads=1,
        sections=(2, 3, 3),
        k_dtype=torch.float32,
    ),
    Case(
        "bfloat16-k",
        "option",
        batch=2,
        tables=1,
        length=5,
        q_heads=3,
        k_heads=1,
        sections=(2, 3, 3),
        k_dtype=torch.bfloat16,
    ),
    Case("big-values", "extreme", batch=1, length=5, q_heads=2, k_heads=1, sections=(2, 3, 3), scale=1e4),
    Case(
        "uneven-rows",
        "extreme",
        batch=4,
        length=5,
        q_heads=3,
        k_heads=1,
        sections=(3, 4, 4),
        tables=1,
        by_row=("q", "k", "incoming"),
    ),
    Case("small", "small", batch=1, length=2048, q_heads=32, k_heads=8, sections=(16, 24, 24)),
    Case("medium", "medium", batch=4, length=2048, q_heads=32, k_heads=8, sections=(16, 24, 24)),
    Case("large", "large", batch=2, length=16384, q_heads=32, k_heads=8, sections=(16, 24, 24)),
)

HUGE = Case("huge", "large", batch=(1 << 9) + 3, length=1024, q_heads=32, k_heads=8, sections=(16, 24, 24), tables=1)

MOVES = Moves({"q": 2, "k": 2}, {"q": 2, "k": 2})


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]) -> tuple[Tensor, Tensor]:
    def picked(table: Tensor) -> Tensor:
        return torch.cat([part[i % 3] for i, part in enumerate(torch.split(table, [*mrope_section] * 2, -1))], -1)

    return rope.eager(q, k, picked(cos), picked(sin))


def liger(ops: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]) -> Any:
    return ops.LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, [*mrope_section])
