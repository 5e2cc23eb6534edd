"""Multimodal rotary embedding: each column takes its angle from one of three planes."""

from collections.abc import Sequence

from torch import Tensor

from liger_core import qwen2vl_mrope
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._heads import rotate


def _rotate(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], backward: bool
) -> tuple[Tensor | None, Tensor | None]:
    strides = cos.stride()
    if strides[-1] != 1 or strides != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = cos.stride()
    plane, batch, token, _ = strides
    batch = 0 if cos.shape[1] == 1 else batch
    time, height, _ = mrope_section
    return rotate(q, k, cos, sin, (plane, batch, token), backward, time, height)


@implements(qwen2vl_mrope)
def forward(
    needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[tuple[Tensor, Tensor], Saved]:
    return _rotate(q, k, cos, sin, mrope_section, False), (cos, sin) if True in needs else ()


def backward(
    needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None, *, mrope_section: Sequence[int]
) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else _rotate(dq, dk, *saved, mrope_section, True)
