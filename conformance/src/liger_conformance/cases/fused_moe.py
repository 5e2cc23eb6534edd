"""Cases of fused_moe."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_conformance.case import Case, Make, Product
from liger_conformance.vary import ANY_DTYPE, Number, Size, Vary
from liger_core.budget import least_chunk
from liger_core.ops.fused_moe import ACTIVATIONS

KIND = "experts"


def build(
    make: Make,
    *,
    tokens: int,
    per_token: int,
    experts: int,
    hidden: int,
    intermediate: int,
    used: int | None = None,
    repeat: bool = False,
    dropped: float = 0.0,
    scale: float = 1.0,
    transposed: bool = False,
    index_dtype: torch.dtype = torch.int64,
    router_dtype: torch.dtype | None = None,
    at_limit: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A token's experts are other ones each, unless there are too few, or they may `repeat`.

    `used` is how many experts get tokens. `dropped` is the share of slots without an expert. With `transposed` the weights
    are views of ``[E, H, 2·I]`` and ``[E, I, H]``. With `at_limit` all gates are 2⁻²⁶ beyond the limit, and the other terms of
    their products cancel, in another order each.
    """
    among = experts if used is None else min(used, experts)
    if repeat or per_token > among:
        indices = make.integers(0, among, tokens, per_token)
    else:
        indices = make.uniform(tokens, among, dtype=torch.float32).topk(per_token).indices
    first, second = (2 * intermediate, hidden), (hidden, intermediate)
    gate_up_weight, down_weight = (
        (make.randn(experts, *shape[::-1]).transpose(1, 2) if transposed else make.randn(experts, *shape))
        * shape[1] ** -0.5
        for shape in (first, second)
    )
    x = make.randn(tokens, hidden) * scale
    if at_limit and hidden > 3 and options.get("limit") is not None:
        x, pairs = torch.ones_like(x), make.randn(experts, intermediate, hidden // 2 - 1)
        ends = (torch.full_like(pairs[..., :1], end) for end in (options["limit"], 2.0**-26))
        order = make.uniform(experts, intermediate, hidden // 2 * 2, dtype=torch.float32).argsort(-1)
        gate_weight = torch.cat((pairs, -pairs, *ends), -1).gather(-1, order)
        gate_weight = F.pad(gate_weight, (0, hidden % 2))
        gate_up_weight = torch.cat((gate_weight, gate_up_weight[:, intermediate:]), 1)
    return {
        "x": x,
        "gate_up_weight": gate_up_weight,
        "down_weight": down_weight,
        "expert_indices": indices.masked_fill(make.mask(dropped, tokens, per_token), -1).to(index_dtype),
        "expert_weights": make.uniform(tokens, per_token, dtype=router_dtype) + 0.25,
        **options,
    }


def with_one_large_term(device: str) -> tuple[dict[str, Any], dict[str, Tensor], tuple[float, float]]:
    """A gradient of down_weight that one running sum of its terms would lose, for a test of how a kernel adds up.

    Returns:
        The arguments; the incoming gradients, by result; and between which numbers that gradient is, if sums of some slots each
        are added up. Each slot has silu(64) / 64, which is 1, and one running sum would lose every 1 that follows the first
        slot's 2²⁵.
    """
    incoming = torch.zeros(1024, 1, device=device)
    incoming[::32] = 1.0
    incoming[0] = 2.0**25
    arguments = {
        "x": torch.ones(1024, 1, device=device),
        "gate_up_weight": torch.tensor([64.0, 1 / 64], device=device).view(1, 2, 1),
        "down_weight": torch.ones(1, 1, 1, device=device),
        "expert_indices": torch.zeros(1024, 1, dtype=torch.int64, device=device),
        "expert_weights": torch.ones(1024, 1, device=device),
    }
    return arguments, {"result": incoming}, (2.0**25 + 24, 2.0**25 + 32)


def budgets(tokens: int, per_token: int, experts: int, hidden: int, intermediate: int) -> tuple[int | None, ...]:
    """None, room for all, and for some columns, in a dtype of 2 or of 4 bytes; and what is enough in any."""

    def room(columns: int, itemsize: int) -> int:
        row = 5 * columns * itemsize + intermediate // 4 + 4 + (4 + itemsize) * hidden + 64
        return tokens * per_token * row + 64 * (experts + 1)

    least = least_chunk(intermediate)
    few = [room(columns, size) for columns in (least, 3 * least, intermediate // 2 + 1) for size in (2, 4)]
    return (None, None, *few, room(intermediate, 4))


VARY = Vary(
    sizes={
        "tokens": Size(most=1 << 14),
        "per_token": Size(most=16),
        "experts": Size(most=256),
        "hidden": Size(most=1 << 13),
        "intermediate": Size(most=1 << 13),
    },
    tensors=(
        "tokens hidden",
        "tokens per_token hidden",
        "tokens per_token intermediate",
        "experts hidden intermediate",
        "experts tokens hidden",
        "experts tokens intermediate",
    ),
    values={
        "used": lambda experts: (None, 1, experts),
        "repeat": (False, True),
        "dropped": (0.0, Number(0.0, 1.0)),
        "transposed": (False, True),
        "index_dtype": (torch.int64, torch.int32),
        "router_dtype": ANY_DTYPE,
        "activation": ACTIVATIONS,
        "limit": (None, Number(0.1, 10.0)),
        "memory_budget": budgets,
    },
)

SMALL: dict[str, Any] = {"tokens": 6, "per_token": 2, "experts": 4, "hidden": 16, "intermediate": 8}

CASES = (
    Case("odd", "odd", tokens=5, per_token=2, experts=3, hidden=37, intermediate=11),
    Case("wide", "odd", tokens=3, per_token=2, experts=2, hidden=97, intermediate=47),
    Case(
        "many-tokens", "odd", tokens=75, per_token=2, experts=3, hidden=19, intermediate=5, router_dtype=torch.float32
    ),
    Case("long-expert", "odd", tokens=140, per_token=1, experts=2, used=1, hidden=9, intermediate=8),
    Case("many-experts", "odd", tokens=7, per_token=2, experts=37, hidden=8, intermediate=8),
    Case("one-token", "edge", tokens=1, per_token=2, experts=4, hidden=16, intermediate=8),
    Case("one-element", "edge", tokens=1, per_token=1, experts=1, hidden=1, intermediate=1),
    Case("one-expert-each", "edge", **dict(SMALL, per_token=1)),
    Case("all-experts", "edge", **dict(SMALL, per_token=4)),
    Case("one-expert-has-all", "edge", **dict(SMALL, per_token=1, used=1)),
    Case("experts-without-tokens", "edge", **dict(SMALL, used=2)),
    Case("same-expert-twice", "edge", **dict(SMALL, per_token=3), repeat=True),
    Case("dropped", "edge", **SMALL, dropped=0.4),
    Case("all-dropped", "edge", **SMALL, dropped=1.0),
    # Found by random calls in float32: one running sum over so many slots is off by more than PyTorch's product.
    Case("hundreds-of-slots", "edge", tokens=41, per_token=14, experts=1, hidden=7, intermediate=214),
    Case("hundreds-of-one-expert", "edge", tokens=39, per_token=10, experts=5, hidden=104, intermediate=57, used=1),
    Case("thousands-of-slots", "edge", tokens=910, per_token=3, experts=1, hidden=2, intermediate=8),
    Case("thousands-of-slots-wide", "edge", tokens=899, per_token=7, experts=1, hidden=24, intermediate=16),
    Case("random-21-58", "edge", tokens=257, per_token=16, experts=1, hidden=7, intermediate=8),
    Case("random-21-139", "edge", tokens=2800, per_token=3, experts=1, hidden=25, intermediate=8, dropped=0.281),
    Case("float32-router", "option", **SMALL, router_dtype=torch.float32, index_dtype=torch.int32),
    Case("gelu", "option", **SMALL, activation="gelu_tanh"),
    Case("limit", "option", **SMALL, limit=0.5, scale=2.0),
    Case("limit-gelu", "option", **SMALL, limit=0.75, activation="gelu_tanh", dropped=0.2),
    Case("transposed", "option", **SMALL, transposed=True),
    # Room for the order and rows of 16, and in two bytes 7 columns at a time, in four 2.
    Case("few-columns", "option", **SMALL, memory_budget=3176),
    Case("few-columns-limit", "option", **SMALL, memory_budget=3176, limit=0.5, dropped=0.3),
    # A product of so many terms.
    Case("random-31-84", "edge", tokens=1, per_token=1, experts=1, hidden=1, intermediate=5570),
    # Gradients of weights go beyond float16. Rounding decides of some whether they do.
    Case(
        "random-21-33",
        "extreme",
        tokens=15,
        per_token=8,
        experts=1,
        hidden=188,
        intermediate=138,
        repeat=True,
        scale=60.0,
    ),
    # In float16 some gates have few digits. What makes up for that in their product is no part of the other factor's gradient.
    Case(
        "gates-near-zero",
        "extreme",
        tokens=24,
        per_token=1,
        experts=2,
        hidden=6,
        intermediate=128,
        scale=1e-3,
        router_dtype=torch.float32,
    ),
    Case(
        "random-31-115",
        "extreme",
        tokens=28,
        per_token=1,
        experts=2,
        hidden=8,
        intermediate=64,
        scale=1e-3,
        router_dtype=torch.float32,
        activation="gelu_tanh",
    ),
    # Rounding decides which gates are clamped.
    Case("at-the-limit", "extreme", **SMALL, limit=0.5, at_limit=True),
    Case("uneven-rows", "extreme", **SMALL, by_row=("x", "incoming")),
    Case("big-values", "extreme", **SMALL, scale=30.0),
    Case("tiny-values", "extreme", **SMALL, scale=1e-3),
    Case("small", "small", tokens=2048, per_token=8, experts=64, hidden=2048, intermediate=1024),
    Case("medium", "medium", tokens=8192, per_token=8, experts=128, hidden=2048, intermediate=768),
    Case("large", "large", tokens=8192, per_token=8, experts=32, hidden=7168, intermediate=2048),
)

HUGE = Case("huge", "large", tokens=40, per_token=2, experts=130, hidden=4096, intermediate=2048)

OUT_OF_RANGE = (
    Case(
        "index-too-high",
        "edge",
        tokens=3,
        per_token=2,
        experts=5,
        hidden=4,
        intermediate=2,
        holds={"expert_indices": 5},
    ),
    Case(
        "index-too-low",
        "edge",
        tokens=3,
        per_token=2,
        experts=5,
        hidden=4,
        intermediate=2,
        holds={"expert_indices": -2},
    ),
)

PRODUCTS = (
    Product("expert_indices", "gate_up_weight", 1, 2, grouped=True),
    Product("expert_indices", "down_weight", 1, 2, grouped=True),
)


def eager(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, expert_indices: Tensor, expert_weights: Tensor
) -> Tensor:
    y = torch.zeros_like(x)
    for expert in range(gate_up_weight.shape[0]):
        token, slot = torch.where(expert_indices == expert)
        gate, up = (x[token] @ gate_up_weight[expert].T).chunk(2, -1)
        z = (F.silu(gate) * up) @ down_weight[expert].T
        y.index_add_(0, token, (z * expert_weights[token, slot, None]).to(y.dtype))
    return y


def liger(
    ops: Any, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, expert_indices: Tensor, expert_weights: Tensor
) -> Any:
    return ops.LigerFusedMoEFunction.apply(x, gate_up_weight, down_weight, expert_indices.int(), expert_weights)
