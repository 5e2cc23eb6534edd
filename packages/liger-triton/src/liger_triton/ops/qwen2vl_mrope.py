"""Multimodal rotary embedding: each column takes its angle from one of three planes."""

from collections.abc import Sequence

from torch import Tensor

from liger_core import qwen2vl_mrope
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._heads import rotate


@implements(qwen2vl_mrope)
def forward(
    needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[tuple[Tensor, Tensor], Saved]:
    return rotate(q, k, cos, sin, False, *mrope_section[:2]), (cos, sin) if True in needs else ()


def backward(
    needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None, *, mrope_section: Sequence[int]
) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else rotate(dq, dk, *saved, True, *mrope_section[:2])
