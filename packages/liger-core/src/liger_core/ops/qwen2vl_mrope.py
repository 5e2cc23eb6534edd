"""Multimodal rotary position embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import Recompute, op
from liger_core.ops.rope import rope


@op(
    differentiable=("q", "k"),
    dimensions="q: b h s D, k: b h' s D, cos: P b s D, sin: P b s D -> b h s D, b h' s D",
    recompute=Recompute("cos", "sin"),
)
def qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Rotate the two halves of each head, as `rope` does, by angles of a token's time, height and width.

    Half a head's columns are divided into three sections. Section i takes its cos and sin from plane i: column j of
    the first half from column j of the plane, column j of the second half from column D/2 + j. Computed in float32
    and rounded once.

    Args:
        q: ``[B, Hq, S, D]``, D even; float32, bfloat16 or float16. A transposed view of ``[B, S, Hq, D]`` is the
            usual case.
        k: ``[B, Hk, S, D]``; it may have another dtype than q.
        cos: ``[3, B, S, D]`` or ``[3, 1, S, D]``: a plane each for time, height and width; of any floating dtype. No
            gradient.
        sin: of cos's shape and dtype. No gradient.
        mrope_section: the columns of half a head that belong to time, height and width: three ints that add up to
            D/2.

    Returns:
        The rotated ``(q, k)``, each in its own dtype. They lie in memory as those of `rope`.

    Raises:
        TypeError: a dtype or type that is not accepted, or a `sin` of another dtype than cos's.
        ValueError: shapes or sections that don't fit together, or tensors on different devices.

    Source:
        Wang et al., Qwen2-VL, arXiv 2409.12191.

    >>> x = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)
    >>> cos, sin = torch.ones(3, 1, 1, 2), torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1, 1).expand(3, 1, 1, 2)
    >>> qwen2vl_mrope(x, x, cos, sin, (0, 1, 0))[0].flatten()
    tensor([-1.,  3.])
    """
    return rope.reference(q, k, _merge_planes(cos, mrope_section), _merge_planes(sin, mrope_section))


def _merge_planes(table: Tensor, mrope_section: Sequence[int]) -> Tensor:
    sections = torch.split(table, [*mrope_section, *mrope_section], dim=-1)
    return torch.cat([section[i % 3] for i, section in enumerate(sections)], -1)


@qwen2vl_mrope.checks
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]) -> None:
    checks.floating("qwen2vl_mrope", q=q, k=k, cos=cos, sin=sin)
    checks.same_dtype("qwen2vl_mrope", cos=cos, sin=sin)
    checks.ndim("qwen2vl_mrope", 4, 4, q=q, k=k)
    batch, _, length, head = q.shape
    if head % 2 or head == 0:
        raise ValueError(f"qwen2vl_mrope: q has head size {head}; it takes an even one")
    checks.shape("qwen2vl_mrope", "k", k, (batch, k.shape[1], length, head), "q's batch, sequence and head size")
    checks.ndim("qwen2vl_mrope", 4, 4, cos=cos)
    tables = 1 if cos.shape[1] == 1 else batch
    checks.shape("qwen2vl_mrope", "cos", cos, (3, tables, length, head), "q's batch (or 1), sequence and head size")
    checks.shape("qwen2vl_mrope", "sin", sin, cos.shape, "cos's shape")
    if not isinstance(mrope_section, (list, tuple)):
        raise TypeError(f"qwen2vl_mrope: mrope_section is {mrope_section!r}; it takes a list or tuple of three ints")
    for size in mrope_section:
        checks.integer("qwen2vl_mrope", least=0, mrope_section=size)
    if len(mrope_section) != 3 or sum(mrope_section) != head // 2:
        raise ValueError(
            f"qwen2vl_mrope: mrope_section is {mrope_section!r}; it takes three ints that add up to {head // 2}, half "
            "of q's head size"
        )
