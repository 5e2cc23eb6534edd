"""Cases of sparsemax."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Moves
from liger_conformance.vary import Size, Vary

KIND = "softmax, attention"


def build(
    make: Make,
    *,
    shape: tuple[int, ...],
    scale: float = 1.0,
    mean: float = 0.0,
    step: float | None = None,
    masked: float = 0.0,
    masked_rows: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """`step` rounds the values to its multiples, which makes ties, also with tau.

    `masked` is the probability that an element is −inf; in the first `masked_rows` rows all are.
    """
    x = make.randn(*shape) * scale + mean
    if step is not None:
        x = (x / step).round() * step
    if masked or masked_rows:
        hidden = make.mask(masked, *shape)
        hidden[..., 0] = False
        hidden[:masked_rows] = True
        x = x.masked_fill(hidden, -torch.inf)
    return {"x": x, **options}


VARY = Vary(
    sizes={"shape": Size(most=1 << 20, dims=(1, 4))},
    tensors=("shape",),
    values={"dim": lambda shape: (-1, *range(-len(shape), len(shape)))},
)

CASES = (
    Case("odd", "odd", shape=(5, 123)),
    Case("batched", "odd", shape=(2, 3, 65)),
    Case("many-rows", "odd", shape=(133, 17)),
    Case("long-row", "odd", shape=(2, 5000)),
    Case("rows-of-8192", "option", shape=(2, 8192)),
    Case("row-of-16400", "option", shape=(1, 16400)),
    Case("row-of-32768", "option", shape=(1, 32768)),
    Case("one-element", "edge", shape=(1, 1)),
    Case("one-column", "edge", shape=(7, 1)),
    Case("vector", "edge", shape=(33,)),
    Case("equal-elements", "edge", shape=(4, 64), scale=0.0),
    Case("many-equal-elements", "edge", shape=(2, 3000), scale=0.0, mean=-2.0),
    Case("ties", "edge", shape=(16, 40), step=0.5),
    Case("ties-of-integers", "edge", shape=(16, 40), step=1.0),
    Case("masked", "edge", shape=(6, 70), masked=0.5),
    Case("one-element-left", "edge", shape=(4, 40), masked=1.0),
    Case("all-masked-rows", "edge", shape=(6, 70), masked=0.5, masked_rows=2),
    Case("first-dimension", "option", shape=(19, 5), dim=0),
    Case("middle-dimension", "option", shape=(3, 19, 5), dim=1),
    Case("dimension-from-the-end", "option", shape=(3, 19, 5), dim=-2),
    Case("last-dimension", "option", shape=(3, 5, 19), dim=2),
    Case("whole-support", "extreme", shape=(4, 64), scale=1e-4),
    Case("large-support", "extreme", shape=(4, 1000), scale=1e-2),
    Case("big-values", "extreme", shape=(4, 64), scale=1e4),
    Case("far-from-zero", "extreme", shape=(4, 64), mean=1e4),
    Case("uneven-rows", "extreme", shape=(6, 64), scale=0.1, by_row=("incoming",)),
    Case("small", "small", shape=(2048, 1024)),
    Case("medium", "medium", shape=(4096, 8192)),
    Case("large", "large", shape=(4096, 32768)),
)

DTYPES_APART = True  # cuTile's kernels of rows in parts, and Triton's of packed ones, take bfloat16 alone
FLOAT16_APART = True  # in float16 the smallest results would round to 0, of which backward knows the support

HUGE = Case("huge", "large", shape=((1 << 15) + 3, 65536))

MOVES = Moves({"x": 2}, {"x": 3})


def eager(x: Tensor) -> Tensor:
    wide = x.float()
    descending = wide.sort(-1, descending=True).values
    excess = descending.cumsum(-1) - 1
    support = (descending > excess / torch.arange(1, x.shape[-1] + 1, device=x.device)).sum(-1, keepdim=True)
    return F.relu(wide - excess.gather(-1, support - 1) / support).to(x.dtype)


def liger(ops: Any, x: Tensor) -> Any:
    return ops.LigerSparsemaxFunction.apply(x, -1)
