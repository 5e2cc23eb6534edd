"""The host code of fused_moe, by kernels in PyTorch that take what a language's take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from liger_core.autograd import differentiable
from liger_core.host import fused_moe as host
from liger_core.host.fused_moe import FusedMoE, MoEActivation, MoEKernels, Routing, plan_of, route
from liger_core.ops.fused_moe import fused_moe, temporary_memory

NAMES = ("x", "gate_up_weight", "down_weight", "expert_weights")


class Kernels(MoEKernels):
    """The formulas, over the blocks of the tables. What must not be read is NaN."""

    def rows(self, slots: int, experts: int, x: Tensor) -> int:
        return 2

    def blocks(self, routing: Routing) -> Any:
        ends = routing.starts[1:]
        for expert, first in zip(routing.tile_experts.tolist(), routing.tile_starts.tolist(), strict=True):
            if expert < len(ends):
                rows = torch.arange(first, min(first + routing.rows, int(ends[expert])))
                yield expert, rows, routing.order[rows]

    def up(
        self,
        factors: Tensor | None,
        activated: Tensor | None,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        routing: Routing,
        activation: MoEActivation,
        exact: bool,
    ) -> None:
        for made in (factors, activated):
            if made is not None:
                made.fill_(torch.nan)
        for expert, rows, slots in self.blocks(routing):
            tokens = x[slots // routing.per_token()]
            gates, ups = tokens @ gate[expert].T, tokens @ up[expert].T
            if factors is not None:
                factors[rows] = torch.cat((gates, ups), 1)
            if activated is not None:
                activated[rows] = F.silu(gates) * ups

    def product(self, total: Tensor | None, left: Tensor, weight: Tensor, routing: Routing, last: bool) -> Tensor:
        result = torch.full((routing.slots(), weight.shape[1]), torch.nan) if total is None else total
        for expert, rows, slots in self.blocks(routing):
            part = (left[rows] @ weight[expert].T).float()
            result[slots] = part if total is None else result[slots] + part
        return result

    def gradient(
        self,
        dfactors: Tensor | None,
        weighted: Tensor | None,
        sums: Tensor | None,
        dy: Tensor,
        down: Tensor,
        factors: Tensor,
        expert_weights: Tensor,
        routing: Routing,
        activation: MoEActivation,
    ) -> None:
        for expert, rows, slots in self.blocks(routing):
            gates, ups = factors[rows].chunk(2, 1)
            d, share = dy[slots // routing.per_token()] @ down[expert], expert_weights[slots, None]
            products = F.silu(gates) * ups
            if weighted is not None:
                weighted[rows] = share * products
            if sums is not None:
                sums[slots] = (d * products).float().view(len(rows), sums.shape[1], -1).sum(2)
            if dfactors is not None:
                dgates = torch.ops.aten.silu_backward(d * share * ups, gates)
                dfactors[rows] = torch.cat((dgates, d * share * F.silu(gates)), 1)

    def parts(self, columns: int, x: Tensor) -> int:
        return 1

    def weight_gradient(
        self, result: Tensor | None, left: Tensor, right: Tensor, routing: Routing, gathers: str
    ) -> Tensor:
        result = (
            left.new_zeros(len(routing.by_size), left.shape[1], right.shape[1]) if result is None else result.zero_()
        )
        for expert, rows, slots in self.blocks(routing):
            token = slots // routing.per_token()
            of_left, of_right = (token, rows) if gathers == "left" else (rows, token)
            result[expert] += left[of_left].T @ right[of_right]
        return result

    def sum_slots(self, result: Tensor, slots: Tensor, scale: Tensor | None, routing: Routing, marks: bool) -> None:
        experts = routing.by_size.shape[0]
        slots = slots if scale is None else slots * scale[:, None]
        by_token = slots.view(*routing.keys.shape, -1).masked_fill((routing.keys >= experts)[..., None], 0.0)
        if marks:
            by_token = by_token.masked_fill((routing.keys > experts)[..., None], torch.nan)
        result.copy_(by_token.sum(1))


def arguments() -> dict[str, Any]:
    torch.manual_seed(0)
    indices = torch.tensor([[0, 3], [3, 3], [-1, 1], [0, 0], [-1, -1], [1, 3], [0, 5]])
    return {
        "x": torch.randn(7, 6),
        "gate_up_weight": torch.randn(6, 40, 6),
        "down_weight": torch.randn(6, 6, 20),
        "expert_indices": indices,
        "expert_weights": torch.rand(7, 2),
    }


def gradients(given: dict[str, Any], needs: tuple[bool, ...], budget: int | None, dy: Tensor) -> list[Tensor | None]:
    """Gradients of the host code, if `needs` says so. Its result must be the reference's."""
    moe = FusedMoE(Kernels())
    options: dict[str, Any] = {"activation": "silu", "limit": None, "memory_budget": budget}
    y, saved = moe.forward(needs, **given, **options)
    torch.testing.assert_close(y, fused_moe.reference(**given))
    return list(moe.backward(needs, saved, dy, **options))


def budget_of(given: dict[str, Any], columns: int) -> int:
    return temporary_memory(7, columns, given["x"], given["gate_up_weight"], given["expert_indices"], x_grad=True)


@pytest.mark.parametrize("columns", [None, 20, 19, 7, 1])
def test_budgets_change_no_value(columns: int | None) -> None:
    """With less than all, columns are taken in spans, forward goes by tokens, and the factors are made again."""
    inputs = arguments()
    leaves = {name: inputs[name].requires_grad_() for name in NAMES}
    dy = torch.randn(7, 6)
    expected = torch.autograd.grad(fused_moe.reference(**inputs), list(leaves.values()), dy)
    inputs = {name: value.detach() for name, value in inputs.items()}
    grads = gradients(inputs, (True,) * 4, None if columns is None else budget_of(inputs, columns), dy)
    torch.testing.assert_close(grads, list(expected), rtol=1e-5, atol=1e-4)  # of gradients up to 100


@pytest.mark.parametrize("wanted", range(1, 16))
def test_only_what_is_wanted_is_made(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights take no product and no memory of theirs; frozen tokens no row to be summed."""
    inputs, needs = arguments(), tuple(bool(wanted >> i & 1) for i in range(4))
    calls: list[str] = []
    for name in ("product", "weight_gradient"):
        kernel = getattr(Kernels, name)
        monkeypatch.setattr(Kernels, name, lambda *a, of=kernel, name=name, **k: (calls.append(name), of(*a, **k))[1])
    grads = gradients(inputs, needs, None, torch.randn(7, 6))
    assert [gradient is not None for gradient in grads] == list(needs)
    assert calls.count("product") == 1 + needs[0]
    assert calls.count("weight_gradient") == needs[1] + needs[2]


def test_the_plan_fits_its_budget() -> None:
    """The most tokens and columns that there is room for; columns in vectors where there are many."""
    inputs = arguments()
    x, weight, indices = inputs["x"], inputs["gate_up_weight"], inputs["expert_indices"]
    every = (True,) * 4
    assert plan_of(every, x, weight, indices, None) == (7, 20, True)
    assert plan_of(every, x, weight, indices, budget_of(inputs, 20)) == (7, 20, True)
    assert plan_of(every, x, weight, indices, budget_of(inputs, 20) - 1) == (6, 16, False)
    assert plan_of(every, x, weight, indices, budget_of(inputs, 1)) == (1, 1, False)
    assert plan_of((False,) * 4, x, weight, indices, budget_of(inputs, 1)) == (1, 20, False)


def test_slots_are_sorted_and_divided() -> None:
    """Slots of one expert are in order, slots without an expert last. A token with a wrong index has no expert."""
    indices = torch.tensor([[2, 0], [2, 2], [-1, 0], [3, 1], [0, 2]])
    routing = route(indices, 3, 2)
    assert routing.keys.tolist() == [[2, 0], [2, 2], [3, 0], [4, 4], [0, 2]]
    assert routing.order.tolist() == [1, 5, 8, 0, 2, 3, 9, 4, 6, 7]
    assert routing.places.tolist() == [3, 0, 4, 5, 7, 1, 8, 9, 2, 6]
    assert routing.starts.tolist() == [0, 3, 3, 7]
    assert routing.by_size.tolist() == [2, 0, 1]
    assert routing.tile_experts.tolist() == [0, 0, 2, 2, 3, 3, 3, 3]
    assert routing.tile_starts.tolist()[:4] == [0, 2, 3, 5]


def test_spans_cover_a_size_once() -> None:
    assert host.spans(5, 7) == [(0, 5)]
    assert host.spans(5, 2) == [(0, 2), (2, 4), (4, 5)]


def test_one_graph_is_for_any_number_of_chunks() -> None:
    """With a budget the loops are custom ops: these kernels, which read the tables, can't be traced."""
    moe = FusedMoE(Kernels())
    run = differentiable(fused_moe, SimpleNamespace(forward=moe.forward, backward=moe.backward), "toy")
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(given: dict[str, Any]) -> Tensor:
        given = fused_moe.bind((), given)
        return run(given, (True,) * 4, {option: given[option] for option in fused_moe.options})

    torch.compiler.reset()
    compiled = torch.compile(call, backend=keep, fullgraph=True, dynamic=True)
    call_inputs = arguments()
    budget = budget_of(call_inputs, 7)
    for times in (1, 2, 5):
        more = {name: torch.cat([call_inputs[name]] * times) for name in ("x", "expert_indices", "expert_weights")}
        leaves = {name: (call_inputs | more)[name].detach().requires_grad_() for name in NAMES}
        each = call_inputs | more | leaves
        expected, actual = fused_moe.reference(**each), compiled(each | {"memory_budget": budget * times})
        torch.testing.assert_close(actual, expected)
        gradients = [torch.autograd.grad(y.sum(), list(leaves.values())) for y in (expected, actual)]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-4)
    assert len(graphs) == 1
