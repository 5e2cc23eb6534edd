"""Cases of mhc_pre."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import CallMode, Case, Make, Moves
from liger_conformance.vary import ANY_DTYPE, ROWS, Number, Size, Vary

KIND = "residual streams"


def build(
    make: Make,
    *,
    rows: int | tuple[int, ...],
    streams: int,
    width: int,
    head: bool = False,
    parameters: torch.dtype | None = None,
    scale: float = 1.0,
    spread: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """`spread` is how far the logits lie apart; with 0 they are equal. `parameters` is the dtype of weight, bias, alpha."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    count = streams if head else streams * streams + 2 * streams
    columns = streams * width
    # The product of a row has values near 1.
    weight = make.randn(count, columns, dtype=torch.float32) * columns**-0.5
    return {
        "x": make.randn(*rows, streams, width) * scale,
        "weight": weight.to(parameters or make.dtype),
        "bias": make.randn(count, dtype=parameters) * spread,
        "alpha": (make.uniform(1 if head else 3, dtype=parameters) + 0.5) * spread,
        **options,
    }


VARY = Vary(
    sizes={"rows": ROWS, "streams": Size(most=8), "width": Size(most=1 << 14)},
    tensors=("rows streams width", "streams streams streams width", "rows streams streams"),
    values={
        "head": (False, True),
        "parameters": ANY_DTYPE,
        "spread": (0.0, Number(0.0, 50.0)),
        "iterations": (1, 2, 5, 20),
        "norm_eps": Number(1e-8, 1.0),
        "sinkhorn_eps": Number(1e-8, 0.1),
        "pre_eps": (0.0, Number(0.0, 0.1)),
        "post_multiplier": (2.0, Number(-3.0, 3.0)),
    },
)

CASES = (
    Case("odd", "odd", rows=5, streams=3, width=31, iterations=3),
    Case("batched", "odd", rows=(2, 3), streams=2, width=33, iterations=2),
    Case("many-rows", "odd", rows=133, streams=2, width=7, iterations=2),
    Case("four-streams", "odd", rows=3, streams=4, width=24),
    Case("eight-streams", "odd", rows=2, streams=8, width=9, iterations=2),
    Case("five-streams", "odd", rows=2, streams=5, width=13, iterations=2),
    Case("long-row", "odd", rows=2, streams=4, width=1100, iterations=2),
    Case("one-element", "edge", rows=1, streams=1, width=1),
    Case(
        "streams-of-one-element",
        "odd",
        mode=CallMode(layouts={"x": "outermost_last", "weight": "sliced", "bias": "sliced", "alpha": "sliced"}),
        rows=(4, 4),
        streams=1,
        width=1,
        head=True,
        parameters=torch.float32,
    ),
    Case("one-stream", "edge", rows=3, streams=1, width=40, iterations=2),
    Case("vector", "edge", rows=(), streams=2, width=17, iterations=2),
    Case("one-iteration", "option", rows=4, streams=4, width=48, iterations=1),
    Case("float32-parameters", "option", rows=4, streams=4, width=48, iterations=2, parameters=torch.float32),
    Case("head", "option", rows=3, streams=4, width=24, head=True),
    Case("head-float32-parameters", "option", rows=5, streams=3, width=31, head=True, parameters=torch.float32),
    Case("norm-eps", "option", rows=4, streams=2, width=24, iterations=2, norm_eps=0.5, scale=0.1),
    Case("sinkhorn-eps", "option", rows=4, streams=3, width=24, iterations=3, sinkhorn_eps=0.05),
    Case("pre-eps", "option", rows=4, streams=2, width=24, iterations=1, pre_eps=0.25),
    Case("post-multiplier", "option", rows=4, streams=2, width=24, iterations=1, post_multiplier=-1.5),
    Case("equal-logits", "extreme", rows=3, streams=4, width=24, spread=0.0, iterations=2),
    Case("logits-of-50", "extreme", rows=3, streams=4, width=24, spread=50.0, iterations=3),
    Case("big-values", "extreme", rows=4, streams=2, width=24, scale=1e3, iterations=2),
    Case("uneven-rows", "extreme", rows=6, streams=2, width=24, iterations=2, by_row=("x",)),
    Case("small", "small", rows=2048, streams=4, width=2048, parameters=torch.float32),
    Case("medium", "medium", rows=8192, streams=4, width=4096, parameters=torch.float32),
    Case("large", "large", rows=16384, streams=4, width=7168, parameters=torch.float32),
)

HUGE = Case("huge", "large", rows=(1 << 17) + 3, streams=4, width=4096, iterations=2)

MOVES = Moves({"x": 1, "result": 1}, {"x": 2, "result": 1})


def eager(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, v = x.shape[-2], x.flatten(-2).float()
    m = F.linear(F.rms_norm(v, v.shape[-1:], None, 1e-6), weight.float())
    pre, post, res = torch.split(m, [n, n, n * n], -1)
    pre = torch.sigmoid(alpha[0] * pre + bias[:n])
    post = 2 * torch.sigmoid(alpha[1] * post + bias[n : 2 * n])
    res = torch.softmax((alpha[2] * res + bias[2 * n :]).view(*res.shape[:-1], n, n), -1) + 1e-6
    for step in range(39):
        res = res / (res.sum(-1 if step % 2 else -2, keepdim=True) + 1e-6)
    return torch.einsum("...n,...nc->...c", pre, x.float()).to(x.dtype), pre, post, res


def liger(ops: Any, x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
    options = x.dtype is torch.float32, 20, 1e-6, 0.0, 1e-6, 2.0
    coefficients = ops.LigerMHCCoeffsFunction.apply(x, weight.T, bias, *alpha.unbind(), *options)
    return ops.LigerMHCPreFunction.apply(x, coefficients[0]), *coefficients
