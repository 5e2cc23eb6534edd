"""Mixture of experts: the host code, to which a language adds its kernels.

A slot is one of a token's experts. The slots are sorted by expert, and kernels multiply blocks of sorted rows with the weights
of their expert: their loads gather the rows. Then the slots' results are summed over each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_core.contract import Needs, Saved
from liger_core.custom_op import opaque
from liger_core.ops.fused_moe import temporary_memory


class Routing(NamedTuple):
    """Which slots each expert has, and which rows each block of a kernel takes. All but `keys` is int64.

    Attributes:
        keys: ``[T, K]``, each slot's expert, of any integer dtype. E is no expert. E + 1 marks all slots of a token that has an
            index out of range.
        order: ``[T·K]``, the slots sorted by their key; slots of one key are in order.
        places: ``[T·K]``, each slot's place among the sorted ones.
        starts: ``[E + 1]``, where each expert's slots start among the sorted ones, and where the last ones end.
        by_size: ``[E]``, the experts, those with most slots first, so that the longest work starts first.
        tile_experts: ``[⌈T·K / rows⌉ + E]``, the expert of each block of at most `rows` sorted slots. Blocks that are left over
            have E.
        tile_starts: of the same length, the first sorted slot of each block.
        rows: rows of a block.
    """

    keys: Tensor
    order: Tensor
    places: Tensor
    starts: Tensor
    by_size: Tensor
    tile_experts: Tensor
    tile_starts: Tensor
    rows: int

    def slots(self) -> int:
        return self.order.shape[0]

    def per_token(self) -> int:
        return self.keys.shape[1]

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tables by which a kernel finds an expert's slots and a block's expert."""
        return self.starts, self.tile_experts, self.tile_starts

    def gathered(self, x: Tensor) -> Tensor:
        """The row of each sorted slot's token, ``[T·K, ...]``."""
        return x.index_select(0, self.order // self.per_token())


def route(indices: Tensor, experts: int, rows: int) -> Routing:
    """Sort the slots by expert and divide each expert's slots into blocks, without waiting for the device."""
    outside = (indices < -1) | (indices >= experts)
    keys = torch.where(indices < 0, experts, indices).long()
    keys = keys.masked_fill(outside.any(1, keepdim=True), experts + 1)
    # On a GPU a stable sort of integers is a radix sort: keys of few bits take few passes.
    sorted_keys, order = torch.sort(
        keys.view(-1).to(torch.int16 if experts < (1 << 15) - 1 else torch.int32), stable=True
    )
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=indices.device)
    each = torch.arange(experts + 1, device=indices.device, dtype=sorted_keys.dtype)
    starts = torch.searchsorted(sorted_keys, each)
    counts = starts[1:] - starts[:-1]
    tiles = (counts + rows - 1) // rows
    ends = tiles.cumsum(0)
    tile = torch.arange((indices.numel() + rows - 1) // rows + experts, device=indices.device)
    tile_experts = torch.searchsorted(ends, tile, right=True)
    inside = tile_experts.clamp(max=experts - 1)
    tile_starts = starts[inside] + (tile - (ends - tiles)[inside]) * rows
    by_size = torch.sort(counts, descending=True, stable=True).indices
    return Routing(keys, order, places, starts, by_size, tile_experts, tile_starts, rows)


class MoEActivation(NamedTuple):
    """The activation of a gate and the other factor. `limit` is None if there is none."""

    gelu: bool
    limit: float | None


class MoEKernels:
    """A language's kernels of a mixture of experts.

    Rows of a sorted tensor, ``[T·K, ...]``, are sorted slots. The rows of slots without an expert are neither written nor read.
    Weights and the op's arguments may have any strides. Everything else is contiguous.
    """

    def rows(self, slots: int, experts: int, x: Tensor) -> int:
        """How many sorted slots a block has."""
        raise NotImplementedError

    def route(self, indices: Tensor, experts: int, rows: int) -> Routing:
        """The same as the function `route`."""
        return route(indices, experts, rows)

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
        """Write both factors of each slot, and act(gate)·up.

        Args:
            factors: sorted ``[T·K, 2·C]``, the gates and then the others, or None. A factor beyond the limit is infinite, so that
                backward sees that, however it is rounded.
            activated: sorted ``[T·K, C]``, or None.
            x: ``[T, H]``.
            gate: ``[E, C, H]``.
            up: ``[E, C, H]``, with gate's strides.
            routing: of the slots.
            activation: the activation.
            exact: whether the other factor in `factors` makes up for the gate's rounding, so that their product is rounded only
                once. The product is a term of the gradient of slots' weights that are wider than x.
        """
        raise NotImplementedError

    def product(self, total: Tensor | None, left: Tensor, weight: Tensor, routing: Routing, last: bool) -> Tensor:
        """left · weightᵀ of each slot, for `sum_slots` alone: ``[T·K, N]``, in the order that it reads.

        Args:
            total: an earlier result, to add to; or None.
            left: sorted ``[T·K, C]``; rows may lie apart.
            weight: ``[E, N, C]``.
            routing: of the slots.
            last: whether nothing more will be added to it. Only then may it have another dtype than float32.
        """
        raise NotImplementedError

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
        """Write what follows from d = dy · down of each slot. Outputs that are None are not wanted.

        Args:
            dfactors: sorted ``[T·K, 2·C]``, the gradients of `factors`.
            weighted: sorted ``[T·K, C]``, the activated products times the slot's weight. They don't need d.
            sums: float32 ``[T·K, B]``, in the order of the slots: parts of Σ d·act(gate)·up over all columns. B is
                `parts` of C.
            dy: ``[T, H]``.
            down: ``[E, H, C]``.
            factors: as `up` wrote them.
            expert_weights: ``[T·K]``, contiguous.
            routing: of the slots.
            activation: the activation.
        """
        raise NotImplementedError

    def parts(self, columns: int, x: Tensor) -> int:
        """How many sums `gradient` writes for each slot: at most one per 16 columns, and one more."""
        raise NotImplementedError

    def weight_gradient(
        self, result: Tensor | None, left: Tensor, right: Tensor, routing: Routing, gathers: str
    ) -> Tensor:
        """leftᵀ · right over each expert's slots, ``[E, M, N]``; 0 for an expert without slots.

        Args:
            result: where to write it, with any strides; None allocates it.
            left: ``[..., M]``.
            right: ``[..., N]``.
            routing: of the slots.
            gathers: ``"left"`` or ``"right"``: the one whose rows are tokens. The other one's rows are sorted slots.
        """
        raise NotImplementedError

    def sum_slots(self, result: Tensor, slots: Tensor, scale: Tensor | None, routing: Routing, marks: bool) -> None:
        """Write, for each token, the sum over its slots, in float32 and rounded once.

        Args:
            result: ``[T, N]``, contiguous.
            slots: what `product` returned.
            scale: factors of the rows, ``[T·K]``, contiguous, in the order of the slots; or None.
            routing: of the slots.
            marks: whether a token with an index out of range gets NaN; otherwise it gets 0.
        """
        raise NotImplementedError


class MoEPlan(NamedTuple):
    """Chunk sizes that a memory budget allows, and whether factors are kept.

    Attributes:
        tokens: tokens that forward takes at a time.
        columns: columns that backward takes at a time.
        keeps: whether forward keeps both factors of all tokens.
    """

    tokens: int
    columns: int
    keeps: bool


def plan_of(needs: Needs, x: Tensor, gate_up_weight: Tensor, indices: Tensor, memory_budget: int | None) -> MoEPlan:
    """The plan for a budget that is at least `least_memory`."""
    tokens, columns = x.shape[0], gate_up_weight.shape[1] // 2
    if memory_budget is None:
        return MoEPlan(tokens, columns, True)

    def room(tokens: int, columns: int, x_grad: bool) -> int:
        return temporary_memory(tokens, columns, x, gate_up_weight, indices, x_grad=x_grad)

    if room(tokens, columns, True) <= memory_budget:
        return MoEPlan(tokens, columns, True)
    none = room(0, columns, True)
    few = min(tokens, (memory_budget - none) // (room(1, columns, True) - none))
    if True not in needs:
        return MoEPlan(few, columns, False)
    none = room(tokens, 0, needs[0])
    narrow = min(columns, (memory_budget - none) // (room(tokens, 1, needs[0]) - none))
    return MoEPlan(few, narrow // 16 * 16 if narrow > 16 else narrow, False)


class MoEGradients(NamedTuple):
    """Memory for the gradients; None for those that aren't wanted. expert_weights' is float32 ``[T·K]``."""

    x: Tensor | None
    gate_up_weight: Tensor | None
    down_weight: Tensor | None
    expert_weights: Tensor | None


class MoECall(NamedTuple):
    """Inputs of backward, except the factors.

    Attributes:
        needs: which gradients are wanted.
        weights: expert_weights as ``[T·K]``, contiguous.
        exact: whether expert_weights want a gradient, and have more digits than x.
    """

    needs: Sequence[bool]
    x: Tensor
    gate_up_weight: Tensor
    down_weight: Tensor
    weights: Tensor
    routing: Routing
    dy: Tensor
    activation: MoEActivation
    exact: bool


class FusedMoE:
    """`fused_moe` by a language's kernels."""

    def __init__(self, kernels: MoEKernels) -> None:
        self.kernels = kernels
        module = type(kernels).__module__
        self.go = opaque(writes=("y",), within=module)(self._go)
        self.go_back = opaque(writes=("grads",), within=module)(self._go_back)

    def forward(
        self,
        needs: Needs,
        x: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        expert_indices: Tensor,
        expert_weights: Tensor,
        *,
        activation: str = "silu",
        limit: float | None = None,
        memory_budget: int | None = None,
    ) -> tuple[Tensor, Saved]:
        """The contract's forward, for a kernel file."""
        plan = plan_of(needs, x, gate_up_weight, expert_indices, memory_budget)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        experts = gate_up_weight, down_weight
        act, weights = activation_of(activation, limit), expert_weights.contiguous()
        routing = factors = None
        if plan.tokens < x.shape[0]:
            self.go(y, x, *experts, expert_indices, weights, act, plan.tokens)
        else:
            keeps = plan.keeps and True in needs
            exact = keeps and _sums_wider(needs, x, expert_weights)
            routing, factors = self._tokens(y, x, *experts, expert_indices, weights, act, keeps, exact)
        if True not in needs:
            return y, ()
        tables = (None,) * 7 if routing is None else routing[:-1]
        return y, (x, *experts, expert_indices, expert_weights, factors, *tables)

    def _go(
        self,
        y: Tensor,
        x: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        indices: Tensor,
        weights: Tensor,
        activation: MoEActivation,
        most: int,
    ) -> None:
        """Write y, of at most so many tokens at a time. It is one custom op in a trace, as a `LinearLossPass` is."""
        for first, last in spans(x.shape[0], most):
            tokens = slice(first, last)
            experts = gate_up_weight, down_weight
            self._tokens(y[tokens], x[tokens], *experts, indices[tokens], weights[tokens], activation, False, False)

    def _tokens(
        self,
        y: Tensor,
        x: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        indices: Tensor,
        weights: Tensor,
        activation: MoEActivation,
        keeps: bool,
        exact: bool,
    ) -> tuple[Routing, Tensor | None]:
        """Write y of some tokens. Return their routing, and their factors if backward `keeps` those."""
        kernels = self.kernels
        gate, up = gate_up_weight.chunk(2, 1)
        routing = self._route(indices, gate, x)
        factors = x.new_empty(routing.slots(), 2 * gate.shape[1]) if keeps else None
        activated = x.new_empty(routing.slots(), gate.shape[1])
        kernels.up(factors, activated, x, gate, up, routing, activation, exact)
        slots = kernels.product(None, activated, down_weight, routing, last=True)
        del activated
        kernels.sum_slots(y, slots, weights.view(-1), routing, marks=True)
        return routing, factors

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dy: Tensor,
        *,
        activation: str,
        limit: float | None,
        memory_budget: int | None,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward, for a kernel file."""
        x, gate_up_weight, down_weight, expert_indices, expert_weights, factors, *tables = saved
        plan = plan_of(needs, x, gate_up_weight, expert_indices, memory_budget)
        columns = gate_up_weight.shape[1] // 2
        if tables[0] is None:
            routing = self._route(expert_indices, gate_up_weight, x)
        else:
            rows = self.kernels.rows(expert_indices.numel(), gate_up_weight.shape[0], x)
            routing = Routing._make((*tables, rows))
        weights, exact = expert_weights.contiguous().view(-1), _sums_wider(needs, x, expert_weights)
        act = activation_of(activation, limit)
        call = MoECall(needs, x, gate_up_weight, down_weight, weights, routing, dy, act, exact)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        if plan.columns < columns:
            grads = MoEGradients(
                dx,
                torch.empty_like(gate_up_weight) if needs[1] else None,
                torch.empty_like(down_weight) if needs[2] else None,
                weights.new_empty(weights.shape, dtype=torch.float32) if needs[3] else None,
            )
            self.go_back(grads, call, plan.columns)
        else:
            grads = MoEGradients(dx, None, None, None)
            grads, dslots = self._columns(grads, call, factors if plan.keeps else None, 0, columns, None)
            self._sum(dx, dslots, routing)
        dweights = grads.expert_weights
        if dweights is not None:
            dweights = dweights.view(expert_weights.shape).to(expert_weights.dtype)
        return dx, grads.gate_up_weight, grads.down_weight, dweights

    def _go_back(self, grads: MoEGradients, call: MoECall, most: int) -> None:
        """Write the gradients, of at most so many columns at a time. As `_go`."""
        dslots = None
        for first, last in spans(call.gate_up_weight.shape[1] // 2, most):
            added, dslots = self._columns(grads, call, None, first, last, dslots)
            if grads.expert_weights is not None and added.expert_weights is not None:
                (grads.expert_weights.add_ if first else grads.expert_weights.copy_)(added.expert_weights)
        self._sum(grads.x, dslots, call.routing)

    def _sum(self, dx: Tensor | None, dslots: Tensor | None, routing: Routing) -> None:
        if dx is not None and dslots is not None:
            self.kernels.sum_slots(dx, dslots, None, routing, marks=False)

    def _columns(
        self, grads: MoEGradients, call: MoECall, factors: Tensor | None, first: int, last: int, dslots: Tensor | None
    ) -> tuple[MoEGradients, Tensor | None]:
        """Gradients from some columns.

        Args:
            grads: weights' gradients are written there; None allocates them, for all columns.
            call: the call.
            factors: as forward kept them, or None.
            first, last: the columns.
            dslots: the slots' gradients of x from the columns before; None if there are none.

        Returns:
            Gradients of the weights and of expert_weights; and dslots, with these columns' added.
        """
        kernels = self.kernels
        needs, x, gate_up_weight, down_weight, weights, routing, dy, act, exact = call
        wants_x, wants_first, wants_second, wants_weights = needs
        gate, up = gate_up_weight.chunk(2, 1)
        columns, slots, wide = gate.shape[1], routing.slots(), last - first
        _, dfirst, dsecond, dweights = grads
        gate_rows, up_rows, down_columns = gate[:, first:last], up[:, first:last], down_weight[:, :, first:last]
        if factors is None:
            factors = x.new_empty(slots, 2 * wide)
            kernels.up(factors, None, x, gate_rows, up_rows, routing, act, exact)
        dfactors = x.new_empty(slots, 2 * wide) if wants_x or wants_first else None
        weighted = x.new_empty(slots, wide) if wants_second else None
        sums = None
        if wants_weights:  # zeros: no kernel writes the sums of slots without an expert
            sums = torch.zeros(slots, kernels.parts(wide, x), dtype=torch.float32, device=x.device)
        kernels.gradient(dfactors, weighted, sums, dy, down_columns, factors, weights, routing, act)
        if sums is not None:
            dweights = sums.sum(1)
        if weighted is not None:
            part = None if dsecond is None else dsecond[:, :, first:last]
            part = kernels.weight_gradient(part, dy, weighted, routing, "left")
            dsecond = part if dsecond is None else dsecond
        del weighted
        if dfactors is not None:
            for half, (weight, from_row) in enumerate(((gate_rows, first), (up_rows, columns + first))):
                both = dfactors[:, half * wide : (half + 1) * wide]
                if wide == columns:  # both halves at once
                    if half:
                        break
                    both, weight = dfactors, gate_up_weight
                if wants_first:
                    part = None if dfirst is None else dfirst[:, from_row : from_row + wide]
                    part = kernels.weight_gradient(part, both, x, routing, "right")
                    dfirst = part if dfirst is None else dfirst
                if wants_x:
                    dslots = kernels.product(dslots, both, weight.transpose(1, 2), routing, last=wide == columns)
        return MoEGradients(None, dfirst, dsecond, dweights), dslots

    def _route(self, indices: Tensor, weight: Tensor, x: Tensor) -> Routing:
        experts = weight.shape[0]
        return self.kernels.route(indices, experts, self.kernels.rows(indices.numel(), experts, x))


def _sums_wider(needs: Needs, x: Tensor, expert_weights: Tensor) -> bool:
    """Whether the slots' weights want a gradient, and have more digits than x."""
    return needs[3] and expert_weights.element_size() > x.element_size()


def activation_of(activation: str, limit: float | None) -> MoEActivation:
    """The activation, as kernels take it."""
    return MoEActivation(activation == "gelu_tanh", None if limit is None else float(limit))


def spans(size: int, most: int) -> list[tuple[int, int]]:
    """The spans, of at most `most` elements each, that make up a size."""
    if most >= size:  # a case of its own keeps a dynamic size dynamic while torch.compile traces
        return [(0, size)]
    return [(first, min(size, first + most)) for first in range(0, size, most)]
