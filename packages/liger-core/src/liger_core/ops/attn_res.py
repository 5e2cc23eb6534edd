"""Attention residuals: a sub-layer reads a weighted mean of all blocks before it, instead of their sum."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.contract import op, upcast


@op(
    differentiable=("blocks", "partial", "query", "weight"),
    dimensions="blocks: N ... D, partial: ... D, query: D, weight: D -> ... D",
)
def attn_res(blocks: Tensor, partial: Tensor | None, query: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Average the blocks and the partial sum by a softmax over them: y = Σ softmax(s)ᵢ·vᵢ, sᵢ = query · rms_norm(vᵢ, weight).

    Finished blocks are stacked once, when one is added. The current block's sum changes at every sub-layer. So it is given apart,
    as `partial`, and nothing is copied for it. Computed in float32 and rounded once. The blocks, and two float32 numbers for each
    of their rows, are saved for backward.

    Args:
        blocks: ``[N, ..., D]``, any number of blocks; float32, bfloat16 or float16.
        partial: ``[..., D]``, one more block, in blocks' dtype; or None.
        query: ``[D]``. It may be float32 beside half-precision blocks.
        weight: ``[D]``, the norm's weight; its dtype is as query's. None for no scaling.
        eps: added to the mean square.

    Returns:
        ``[..., D]``, in blocks' dtype.

    Raises:
        TypeError: a dtype or type that is not accepted, or a `partial` of another dtype than blocks'.
        ValueError: fewer than two dimensions of `blocks`, no block and no `partial`, shapes that don't fit together, or
            tensors on different devices.

    Source:
        Kimi Team, Attention Residuals, arXiv 2603.15031.

    >>> blocks, partial = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.tensor([[5.0, 9.0]])
    >>> attn_res(blocks, partial, torch.zeros(2), None)
    tensor([[3., 5.]])
    """
    v = upcast(blocks if partial is None else torch.cat((blocks, partial[None])))
    w = upcast(query) if weight is None else upcast(query) * upcast(weight)
    scores = (v * w).sum(-1, keepdim=True) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return (torch.softmax(scores, 0) * v).sum(0).to(blocks.dtype)


@attn_res.checks
def _(blocks: Tensor, partial: Tensor | None, query: Tensor, weight: Tensor | None, eps: float) -> None:
    checks.floating("attn_res", blocks=blocks, partial=partial, query=query, weight=weight)
    checks.same_dtype("attn_res", blocks=blocks, partial=partial)
    checks.ndim("attn_res", 2, blocks=blocks)
    if blocks.shape[0] == 0 and partial is None:
        raise ValueError(
            f"attn_res: blocks has shape {tuple(blocks.shape)}; without partial it takes one block or more"
        )
    checks.shape("attn_res", "partial", partial, blocks.shape[1:], "that of a block")
    checks.shape("attn_res", "query", query, blocks.shape[-1:], "blocks' last dimension")
    checks.shape("attn_res", "weight", weight, blocks.shape[-1:], "blocks' last dimension")
    checks.number("attn_res", eps=eps)
