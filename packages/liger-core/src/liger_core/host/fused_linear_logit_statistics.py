"""Statistics of a linear layer's logits: the host code, to which a language adds its kernels.

Forward makes float32 logits of some rows at a time, unless a language has a kernel that holds none. Backward makes them again,
in one of two ways. With all rows and some columns, products give the weight's gradient, and x's is a sum over columns. With some
rows and all columns, it is the other way round. If all logits fit at once, they are kept instead.

A kernel that holds no logits can leave exponentials, in x's dtype. Where these fit at once, as those of three times as many rows
do, and lse and one picked logit alone are wanted, they are kept: the backward makes the gradient of the logits of them.

If the weight is frozen, and only lse and one picked logit are wanted, forward makes x's gradient but for some factors per row,
and backward makes no product. With c the derivative of softcap and temperature, y the row's target and m = Σ_{v≠y} p_v c_v W_v,
the gradient is g_lse m + (g_lse p_y + g_picked) c_y W_y. Kept apart, the two terms don't cancel when p_y is near 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import torch_state
from liger_core.budget import padded_columns
from liger_core.contract import Needs, Saved, SavedOnce
from liger_core.custom_op import opaque
from liger_core.host.linear import Linear, LinearGrads
from liger_core.host.logit_statistics import (
    StatisticsGrads,
    StatisticsInputs,
    StatisticsKernels,
    StatisticsResults,
    grads_of,
    inputs_of,
    new_results,
    options_of,
    result_of,
    terms_columns,
)
from liger_core.host.rows import Logits
from liger_core.ops.logit_statistics import LogitStatistics

LEAST_TILE = 1024
"""Rows, or columns, of a tile if no memory budget is given."""


class StatisticsPlan(NamedTuple):
    """How a call goes over its logits, the same in forward and in backward.

    Attributes:
        alone: rows of logits that are made at a time, if no gradient lies beside them.
        rows: rows of logits that fit beside their gradient, with all columns.
        columns: columns of logits that fit beside their gradient, with all rows.
        by_columns: whether backward goes by `columns` instead of `rows`.
        held: all logits fit, whatever wants a gradient: no call's results depend on that.
        whole: they are kept for backward.
        frozen: forward makes what backward needs instead of x.
        terms: logits don't fit. What a kernel leaves in their place does, and is kept for backward.
    """

    alone: int
    rows: int
    columns: int
    by_columns: bool
    held: bool
    whole: bool
    frozen: bool
    terms: bool = False


def tile_memory(x: Tensor, weight: Tensor, memory_budget: int | None) -> int:
    """Bytes for logits and their gradient: without a budget, as many as the weight takes."""
    if memory_budget is None:
        return weight.numel() * x.dtype.itemsize
    return memory_budget - 32 * x.shape[0] - 4 * weight.shape[0]


def plan_of(
    needs: Needs,
    x: Tensor,
    weight: Tensor,
    *,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
    picked_alone: bool,
) -> StatisticsPlan:
    """The plan of a call.

    Args:
        needs: which of x, weight and bias want a gradient.
        x, weight: those of the layer.
        accum_dtype, memory_budget: as in `least_statistics_memory`.
        picked_alone: whether there is one target per row, and neither an entropy nor a total.
    """
    (rows, hidden), vocabulary = x.shape, weight.shape[0]
    narrow = x.dtype is not torch.float32
    element = 4 + (x.dtype.itemsize if narrow else 0)  # bytes of a logit, and of its gradient unless that overwrites it
    row, column = padded_columns(vocabulary) * element, rows * element
    frozen = picked_alone and tuple(needs) == (True, False, False)
    adds_up = needs[1] and accum_dtype is not weight.dtype
    tile = tile_memory(x, weight, memory_budget)
    if memory_budget is None:
        alone = max(tile // (4 * padded_columns(vocabulary)), LEAST_TILE)
        tile_rows, tile_columns = max(tile // row, LEAST_TILE), tile // column
        held = tile_rows >= rows
        by_columns = adds_up and tile_columns >= min(LEAST_TILE, vocabulary)
        tile_columns = max(tile_columns, 1)
    else:
        # Without a gradient, logits may take the bias gradient's memory as well.
        alone = max((memory_budget - 32 * rows) // (4 * padded_columns(vocabulary)), 1)
        tile_rows = tile // row
        held = tile_rows >= rows
        if not held and adds_up:
            tile_rows = (tile - vocabulary * hidden * accum_dtype.itemsize) // row
        tile_columns = (tile - (4 * rows * hidden if needs[0] and narrow else 0)) // column
        if frozen:
            kept_beside = (tile - x.numel() * x.dtype.itemsize) // row
            frozen = kept_beside >= 1
            tile_rows = kept_beside if frozen else tile_rows
        by_columns = tile_rows < rows and tile_columns * rows > tile_rows * vocabulary
    whole = held and not frozen
    return StatisticsPlan(
        alone, max(tile_rows, 1), max(tile_columns, 1), by_columns and not (whole or frozen), held, whole, frozen
    )


class StatisticsHead(NamedTuple):
    """A call's linear layer, except x.

    Attributes:
        weight: ``[V, H]``.
        bias: ``[V]``, or None.
        needs: which of x, weight and bias want a gradient.
        accum_dtype: the dtype in which the weight's gradient is summed over chunks of rows.
        plan: how the call goes over its logits.
    """

    weight: Tensor
    bias: Tensor | None
    needs: Sequence[bool]
    accum_dtype: torch.dtype
    plan: StatisticsPlan


class FrozenHead(NamedTuple):
    """Buffers that `_Call.go` fills if forward prepares backward; otherwise both are None.

    Attributes:
        m: ``[N, H]``, contiguous: each row's m but for a factor.
        scales: that factor, float32 ``[N]``. It keeps the exponentials that m is made of from being read and written once more.
    """

    m: Tensor | None
    scales: Tensor | None


class StatisticsPass:
    """A call of the op, in forward or in backward."""

    def __init__(self, host: FusedLinearStatistics, head: StatisticsHead, inputs: StatisticsInputs) -> None:
        self.host, self.kernels, self.linear, self.head, self.labels = host, host.kernels, host.linear, head, inputs
        self.weight, self.bias, self.needs, self.accum_dtype, self.plan = head

    def forward(self, results: StatisticsResults, x: Tensor) -> tuple[Any, ...]:
        """Write all rows' results. Return what is kept for `backward`, or for `of_frozen`."""
        frozen = FrozenHead(None, None)
        if self.plan.frozen:
            scales = torch.ones(x.shape[0], dtype=torch.float32, device=x.device)
            frozen = FrozenHead(torch.empty_like(x, memory_format=torch.contiguous_format), scales)
        # As in a `LinearLossPass`.
        if torch_state.compiling() and (self.plan.frozen or not self.plan.held):
            self.host.go(results, frozen, x, self.head, self.labels)
            held = ()
        else:
            held = self.go(results, frozen, x)
        if frozen.m is None or frozen.scales is None:
            return held
        return frozen.m, torch.cat((self._factors(results), frozen.scales[None]))

    def go(self, results: StatisticsResults, frozen: FrozenHead, x: Tensor) -> tuple[Any, ...]:
        """Write all rows' results, and what backward needs of a frozen weight. Return what else is kept."""
        if frozen.m is not None and frozen.scales is not None:
            self._frozen(results, frozen.m, frozen.scales, x)
            return ()
        size, keeps = x.shape[0], (self.plan.whole or self.plan.terms) and any(self.needs)
        if taken := self._taken(x, results):
            if keeps and taken >= size:
                terms = torch.empty((size, terms_columns(self.weight.shape[0])), dtype=x.dtype, device=x.device)
                beside = self.kernels.product(results, x, self.weight, self.labels, 0, terms)
                return terms, beside, self._factors(results)
            for first, last in self.linear.chunks(size, taken):
                self.kernels.product(results, x[first:last], self.weight, self.labels, first)
            return ()
        logits = None
        for first, last in self.linear.chunks(size, size if self.plan.held else self.plan.alone):
            logits = None  # before the next ones are allocated
            logits = self.linear.logits(x[first:last], self.weight, torch.float32)
            self.kernels.rows(results, logits, self.labels, first)
        return (logits.memory,) if keeps and logits is not None else ()

    def _taken(self, x: Tensor, results: StatisticsResults) -> int:
        """Rows whose results a kernel makes at a time from x itself; 0 if the logits are made first.

        Where all logits fit, they are made and kept if the gradient of more than lse and one picked logit may need them, or
        while Dynamo traces: what may be freed early is no part of a graph.
        """
        more = self.bias is not None or results.entropy is not None or results.total is not None
        if self.plan.held and (more or self.labels.target.shape[1] > 1 or torch_state.compiling()):
            return 0
        return self.kernels.rows_of_product(x, self.weight, self.labels, self.plan.alone)

    def _factors(self, results: StatisticsResults) -> Tensor:
        """Factors ``[2, rows]`` from the gradients of lse and of picked to that of each row's only target logit."""
        z, options = results.picked[:, 0], self.labels.options
        slope = torch.ones_like(z)
        if options.softcap is not None:
            tanh = z * ((options.temperature or 1.0) / options.softcap)
            slope = 1.0 - tanh * tanh
        if options.inverse is not None:
            slope = slope * options.inverse
        absent = ~self.columns_of()[1]
        slope = slope.masked_fill(absent, 0.0)
        p = torch.exp(z - results.lse).masked_fill(absent, 0.0)
        return torch.stack((p * slope, slope))

    def _of_target(self, factors: Tensor, incoming: StatisticsGrads) -> Tensor:
        """The gradient of each row's logit at its only target; 0 if that isn't here."""
        target_grad = torch.zeros_like(factors[0])
        if incoming.lse is not None:
            target_grad.addcmul_(incoming.lse, factors[0])
        if incoming.picked is not None:
            target_grad.addcmul_(incoming.picked[:, 0], factors[1])
        return target_grad

    def _frozen(self, results: StatisticsResults, m: Tensor, scales: Tensor, x: Tensor) -> None:
        """Write the rows' results, and `FrozenHead`'s tensors; `scales` are ones before."""
        assert results.kept is not None
        size = x.shape[0]
        one = torch.ones(size, dtype=torch.float32, device=x.device)
        less = torch.empty_like(results.picked)
        taken = self._taken(x, results)
        # The plan has room for logits beside their gradient. Without logits, twice as many rows take less.
        columns = terms_columns(self.weight.shape[0])
        twice = 2 * self.plan.rows * self.weight.shape[0] // columns
        for first, last in self.linear.chunks(size, min(max(twice, 1), taken) if taken else self.plan.rows):
            chunk = slice(first, last)
            others = logits = None  # freed before the next ones are allocated
            if taken:
                terms = torch.empty((last - first, columns), dtype=x.dtype, device=x.device)
                self.kernels.product(results, x[chunk], self.weight, self.labels, first, terms, scales)
                others = Logits(terms, self.weight.shape[0])
                del terms
            else:
                logits = self.linear.logits(x[chunk], self.weight, torch.float32)
                self.kernels.rows(results, logits, self.labels, first)
                # The target's own term is apart.
                less[chunk, 0] = -torch.exp(results.picked[chunk, 0] - results.lse[chunk])
                incoming = StatisticsGrads(one, less, None, None)
                others = self._dlogits(logits, x.dtype, None, results.kept, incoming, first, 0)
            self.linear.write_product_of(m[chunk], others, self.weight, transposed=False)

    def columns_of(self) -> tuple[Tensor, Tensor]:
        """The column of each row's only target, or 0; and whether the target is a column that counts."""
        target, options = self.labels.target[:, 0], self.labels.options
        column = target - options.first
        here = (target != options.ignore_index) & (column >= 0) & (column < self.weight.shape[0])
        return column.masked_fill(~here, 0), here

    def of_frozen(self, m: Tensor, factors: Tensor, incoming: StatisticsGrads) -> Tensor:
        """The gradient of x, from the results of `forward`."""
        hidden = m.shape[1]
        dx = torch.empty_like(m)
        column, _ = self.columns_of()
        by_m = None if incoming.lse is None else incoming.lse * factors[2]
        # Per column of x, a row takes as much memory here as two columns of the tile.
        most = max(1, self.plan.rows * self.weight.shape[0] // (2 * hidden))
        self.kernels.frozen(dx, m, by_m, self.weight, column, self._of_target(factors, incoming), most)
        return dx

    def backward(
        self, x: Tensor, whole: SavedOnce | None, kept: Tensor, incoming: StatisticsGrads
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias. `whole` is what `forward` kept, to be overwritten and freed; or None."""
        held: tuple[Any, ...] = (None if whole is None else whole.take()) or ()
        at_once = self.plan.whole or bool(held)
        grads = self._memory(x, at_once, self.plan.by_columns and not at_once)
        if torch_state.compiling() and not at_once:
            self.host.go_back(grads, x, self.head, self.labels, kept, incoming)
        else:
            self.go_back(grads, x, held, kept, incoming)
        dx, dweight, dbias = grads
        dx = None if dx is None else dx.to(x.dtype)
        dweight = None if dweight is None else dweight.to(self.weight.dtype)
        return dx, dweight, None if dbias is None or self.bias is None else dbias.to(self.bias.dtype)

    def _memory(self, x: Tensor, at_once: bool, by_columns: bool) -> LinearGrads:
        """Memory for the gradients. A sum over chunks has a wider dtype; the bias's is float32."""
        weight, (needs_x, needs_weight, needs_bias) = self.weight, self.needs
        of_weight = weight.dtype if at_once or by_columns else self.accum_dtype
        return LinearGrads(
            x.new_empty(x.shape, dtype=torch.float32 if by_columns else x.dtype) if needs_x else None,
            weight.new_empty(weight.shape, dtype=of_weight) if needs_weight else None,
            weight.new_empty(weight.shape[0], dtype=torch.float32) if needs_bias else None,
        )

    def go_back(
        self, grads: LinearGrads, x: Tensor, held: tuple[Any, ...], kept: Tensor, incoming: StatisticsGrads
    ) -> None:
        """Write the gradients. `held` is what is left of all logits, or nothing."""
        if grads.dbias is not None:
            grads.dbias.zero_()
        if self.plan.by_columns and not held:
            self._by_columns(grads, x, kept, incoming)
        else:
            self._by_rows(grads, x, held, kept, incoming)

    def _by_rows(
        self, grads: LinearGrads, x: Tensor, held: tuple[Any, ...], kept: Tensor, incoming: StatisticsGrads
    ) -> None:
        dx, dweight, dbias = grads
        at_once = self.plan.whole or bool(held)
        for first, last in self.linear.chunks(x.shape[0], x.shape[0] if at_once else self.plan.rows):
            if len(held) > 1:
                dlogits = self._of_terms(held[0], held[1], held[2], kept, incoming)
            else:
                logits = (
                    Logits(held[0], self.weight.shape[0])
                    if held
                    else self.linear.logits(x[first:last], self.weight, torch.float32)
                )
                held = ()
                dlogits = self._dlogits(logits, x.dtype, dbias, kept, incoming, first, 0)
                del logits  # freed before the products
            if dx is not None:
                self.linear.write_product_of(dx[first:last], dlogits, self.weight, transposed=False)
            if dweight is not None:
                x_chunk = x[first:last]
                self.linear.add_product_of(dweight, dlogits, x_chunk, dweight.dtype, transposed=True, adds=first > 0)
            del dlogits

    def _by_columns(self, grads: LinearGrads, x: Tensor, kept: Tensor, incoming: StatisticsGrads) -> None:
        dx, dweight, dbias = grads
        for first, last in self.linear.chunks_of_columns(self.weight.shape[0], self.plan.columns):
            part = self.weight[first:last]
            logits = self.linear.logits(x, part, torch.float32)
            dlogits = self._dlogits(logits, x.dtype, dbias, kept, incoming, 0, first)
            del logits
            if dx is not None:
                self.linear.add_product_of(dx, dlogits, part, dx.dtype, transposed=False, adds=first > 0)
            if dweight is not None:
                self.linear.write_product_of(dweight[first:last], dlogits, x, transposed=True)
            del dlogits

    def _of_terms(self, terms: Tensor, beside: Any, factors: Tensor, kept: Tensor, incoming: StatisticsGrads) -> Logits:
        """The gradient of all logits, in place of what `forward` kept."""
        dlse = torch.zeros_like(factors[0]) if incoming.lse is None else incoming.lse
        self.kernels.normalise(terms, beside, self.labels, kept, dlse, 0)
        column, here = self.columns_of()
        column, target_grad = column[:, None], self._of_target(factors, incoming)[:, None].to(terms.dtype)
        terms.scatter_(1, column, torch.where(here[:, None], target_grad, terms.gather(1, column)))
        return Logits(terms, self.weight.shape[0])

    def _dlogits(
        self,
        logits: Logits,
        dtype: torch.dtype,
        dbias: Tensor | None,
        kept: Tensor,
        incoming: StatisticsGrads,
        first_row: int,
        first_column: int,
    ) -> Logits:
        """The gradient of logits, rounded to x's dtype. Before that it is added to the bias's. The logits are overwritten."""
        if dbias is not None or dtype is torch.float32:
            self.kernels.gradient(logits, None, self.labels, kept, incoming, first_row, first_column)
            if dbias is not None:
                dbias[first_column : first_column + logits.columns] += logits.tensor().sum(0)
            return logits if dtype is torch.float32 else Logits(logits.memory.to(dtype), logits.columns)
        dlogits = logits.empty_like(dtype)
        self.kernels.gradient(dlogits, logits, self.labels, kept, incoming, first_row, first_column)
        return dlogits


class FusedLinearStatistics:
    """`fused_linear_logit_statistics` by a language's kernels."""

    def __init__(self, kernels: StatisticsKernels, linear: Linear) -> None:
        self.kernels, self.linear = kernels, linear
        module = type(kernels).__module__
        self.go = opaque(writes=("results", "frozen"), within=module)(self._go)
        self.go_back = opaque(writes=("grads",), within=module)(self._go_back)

    def _go(
        self, results: StatisticsResults, frozen: FrozenHead, x: Tensor, head: StatisticsHead, inputs: StatisticsInputs
    ) -> None:
        """`_Call.go`, of logits that aren't kept."""
        StatisticsPass(self, head, inputs).go(results, frozen, x)

    def _go_back(
        self,
        grads: LinearGrads,
        x: Tensor,
        head: StatisticsHead,
        inputs: StatisticsInputs,
        kept: Tensor,
        incoming: StatisticsGrads,
    ) -> None:
        """`_Call.go_back`, of logits that weren't kept."""
        StatisticsPass(self, head, inputs).go_back(grads, x, (), kept, incoming)

    def forward(
        self,
        needs: Needs,
        x: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        class_weight: Tensor | None = None,
        accum_dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
        **options: Any,
    ) -> tuple[LogitStatistics, Saved]:
        """The contract's forward, for a kernel file."""
        inputs = inputs_of(target, class_weight, bias, options_of(**options))
        plan = self._plan(needs, x, linear_weight, inputs, accum_dtype, memory_budget, target.dim() == 1)
        rows = new_results(inputs, any(needs))
        call = StatisticsPass(self, StatisticsHead(linear_weight, bias, needs, accum_dtype, plan), inputs)
        held = call.forward(rows, x)
        result = result_of(rows, target)
        if not any(needs):
            return result, ()
        if plan.frozen:
            m, factors = held
            return result, (m, linear_weight, bias, target, inputs.weight, factors)
        saved = x, linear_weight, bias, target, inputs.weight, rows.kept
        return result, (*saved, SavedOnce(*held)) if held and not torch_state.compiling() else saved

    def backward(
        self,
        needs: Needs,
        saved: Saved,
        dlse: Tensor | None,
        dpicked: Tensor | None,
        dentropy: Tensor | None,
        dtotal: Tensor | None,
        *,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """The contract's backward, for a kernel file."""
        x, linear_weight, bias, target, class_weight, statistics, *logits = saved
        inputs = inputs_of(target, class_weight, bias, options_of(**options))
        plan = self._plan(needs, x, linear_weight, inputs, accum_dtype, memory_budget, target.dim() == 1)
        call = StatisticsPass(self, StatisticsHead(linear_weight, bias, needs, accum_dtype, plan), inputs)
        incoming = grads_of(dlse, dpicked, dentropy, dtotal)
        if plan.frozen:
            return call.of_frozen(x, statistics, incoming), None, None
        return call.backward(x, logits[0] if logits else None, statistics, incoming)

    def _plan(
        self,
        needs: Needs,
        x: Tensor,
        weight: Tensor,
        inputs: StatisticsInputs,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        single: bool,
    ) -> StatisticsPlan:
        picked_alone = single and not inputs.options.return_entropy and not inputs.options.return_total
        plan = plan_of(
            needs, x, weight, accum_dtype=accum_dtype, memory_budget=memory_budget, picked_alone=picked_alone
        )
        if plan.held or plan.frozen or not picked_alone or inputs.bias is not None or torch_state.compiling():
            return plan
        size, memory = x.shape[0], tile_memory(x, weight, memory_budget)
        taken = self.kernels.rows_of_product(x, weight, inputs, plan.alone) >= size
        return plan._replace(terms=taken and self.kernels.rows_of_terms(x, weight, memory) >= size)
