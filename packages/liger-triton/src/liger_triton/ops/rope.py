"""Rotary embedding."""

from torch import Tensor

from liger_core import rope
from liger_core.contract import Needs, Saved, implements
from liger_triton.ops._heads import rotate


def _rotate(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool
) -> tuple[Tensor | None, Tensor | None]:
    strides = cos.stride()
    if strides[-1] != 1 or strides != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = cos.stride()
    batch = 0 if cos.dim() == 2 or cos.shape[0] == 1 else strides[0]
    return rotate(q, k, cos, sin, (0, batch, strides[-2]), backward)


@implements(rope)
def forward(needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    return _rotate(q, k, cos, sin, False), (cos, sin) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    return (None, None) if dq is None and dk is None else _rotate(dq, dk, *saved, True)
