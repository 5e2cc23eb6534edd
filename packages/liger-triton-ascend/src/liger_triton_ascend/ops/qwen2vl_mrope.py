"""Multimodal rotary embedding: rope's kernel, which takes each column's angles from its plane."""

from collections.abc import Sequence

from torch import Tensor

from liger_core import qwen2vl_mrope
from liger_core.contract import Needs, Saved, implements
from liger_triton_ascend.ops.rope import launch


@implements(qwen2vl_mrope)
def forward(
    needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[tuple[Tensor, Tensor], Saved]:
    return launch(q, k, cos, sin, False, mrope_section), (cos, sin) if True in needs else ()


def backward(
    needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None, *, mrope_section: Sequence[int]
) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else launch(dq, dk, *saved, True, mrope_section)
