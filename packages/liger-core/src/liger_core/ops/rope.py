"""Rotary position embedding that pairs the two halves of a head."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import Recompute, op, upcast


@op(
    differentiable=("q", "k"),
    dimensions="q: b h s D, k: b h' s D, cos: b s R, sin: b s R -> b h s D, b h' s D",
    recompute=Recompute("cos", "sin"),
)
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R columns of each head: y = x · cos + (−x₂, x₁) · sin, where x = (x₁, x₂) are their halves.

    So y₁ = x₁·cos₁ − x₂·sin₁ and y₂ = x₂·cos₂ + x₁·sin₂: every column has its own entry of cos and sin, as in the
    models, even though theirs hold the same angles in both halves. Columns R to D pass through unchanged. Computed in
    float32 and rounded once.

    Args:
        q: ``[B, Hq, S, D]``; float32, bfloat16 or float16. A transposed view of ``[B, S, Hq, D]`` is the usual case.
        k: ``[B, Hk, S, D]``; it may have another dtype than q.
        cos: ``[B, S, R]``, ``[1, S, R]`` or ``[S, R]``, of any floating dtype; R is even and at most D. No gradient.
        sin: of cos's shape and dtype. No gradient.

    Returns:
        The rotated ``(q, k)``, each in its own dtype. They have no gaps in memory, and are contiguous unless a token's heads
        lie together in q, or k, with adjacent columns: then they do in its result.

    Raises:
        TypeError: a dtype or type that is not accepted, or a `sin` of another dtype than cos's.
        ValueError: shapes that don't fit together, or tensors on different devices.

    Source:
        Su et al., RoFormer, arXiv 2104.09864, with the pairing of columns of the GPT-NeoX and Llama models.

    >>> x = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)
    >>> rope(x, x, torch.zeros(1, 2), torch.ones(1, 2))[0].flatten()
    tensor([-2.,  1.])
    """
    cos, sin = (upcast(t.detach()) if t.dim() == 2 else upcast(t.detach()).unsqueeze(1) for t in (cos, sin))
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, passed = x.tensor_split([cos.shape[-1]], dim=-1)
    x1, x2 = upcast(rotated).chunk(2, dim=-1)
    y = torch.cat((x1, x2), -1) * cos + torch.cat((-x2, x1), -1) * sin
    y = torch.cat((y.to(x.dtype), passed), -1)
    tokens_first = x.stride(3) == 1 and x.stride(1) < x.stride(2)
    return y.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else y


@rope.checks
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    checks.floating("rope", q=q, k=k, cos=cos, sin=sin)
    checks.same_dtype("rope", cos=cos, sin=sin)
    checks.ndim("rope", 4, 4, q=q, k=k)
    checks.ndim("rope", 2, 3, cos=cos)
    batch, _, length, head = q.shape
    checks.shape("rope", "k", k, (batch, k.shape[1], length, head), "q's batch, sequence and head size")
    leading = () if cos.dim() == 2 else (1,) if cos.shape[0] == 1 else (batch,)
    checks.shape("rope", "cos", cos, (*leading, length, cos.shape[-1]), "q's batch (or 1) and sequence")
    checks.shape("rope", "sin", sin, cos.shape, "cos's shape")
    columns = cos.shape[-1]
    if columns % 2 or not 2 <= columns <= head:
        raise ValueError(f"rope: cos has {columns} columns; it takes an even number from 2 to q's head size, {head}")
