"""Losses of a linear layer's logits: matrix products, chunks and sums, which PyTorch does for every language.

If one chunk holds all rows, its logits are kept for backward, as an unfused model does. Otherwise the gradient of a chunk's
logits overwrites them, and becomes the gradients of the arguments at once. Backward then only scales those.

That is impossible if the loss's own gradient differs from row to row: backward then computes the logits again. It does so as
well if a memory budget has no room for an accumulator of the weight's gradient: it then takes all rows of x, and some rows of
the weight after others.

A language has one `Linear`. An op has a `LinearLoss`, which writes rows' results and the gradient of their logits; a call has a
`LinearLossPass`, which goes over the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import torch_state
from liger_core.budget import chunk_columns, chunk_rows, padded_columns, temporary_memory
from liger_core.contract import Needs, Saved, SavedOnce
from liger_core.custom_op import opaque
from liger_core.host.rows import Logits

# Whether there are matmuls of half-precision operands with a float32 result. ROCm has the plain one since pytorch#162600. The
# one that adds to a float32 tensor exists since pytorch#167931.
_FLOAT32_MM = torch.version.hip is None or torch.__version__ >= "2.10"
_FLOAT32_ADDMM = torch.__version__ >= "2.10"

EVEN = 8
"""Columns of logits, and the stride of their rows, are multiples of this for tensor cores: 16 bytes of bfloat16.

Otherwise cuBLAS takes several times as long: benchmarks/records has a compare of odd vocabularies.
"""


def chunks(size: int, most: int, aligned: int) -> list[tuple[int, int]]:
    """The ends of chunks of rows or columns, all of about one size. A dynamic size stays dynamic in a trace.

    Args:
        size: the size of all chunks together.
        most: the largest size of a chunk.
        aligned: chunks are multiples of this, unless `most` is less.
    """
    if size <= most:
        return [(0, size)]
    step = aligned if most >= aligned else 1
    most = most // step * step
    count = 1
    while count * most < size:
        count += 1
    each = ((size + count - 1) // count + step - 1) // step * step  # at most `most`, so that no chunk is empty
    return [(i * each, min(i * each + each, size)) for i in range(count)]


def is_wide(bias: Tensor | None, x: Tensor) -> bool:
    """Whether logits of half-precision x, and their gradient, are float32, because the bias has another dtype."""
    return bias is not None and bias.dtype is not x.dtype and x.dtype is not torch.float32


def _factors(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, torch.dtype | None]:
    """The arguments of `_mm` for a b in `dtype`: both factors, and the product's dtype if it differs from theirs."""
    if dtype is not torch.float32 or a.dtype is torch.float32:
        return a, b, None
    return (a, b, dtype) if a.is_cuda and _FLOAT32_MM else (a.float(), b.float(), None)


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.mm(a, b) if dtype is None else torch.mm(a, b, out_dtype=dtype)


def _write(y: Tensor, a: Tensor, b: Tensor) -> None:
    a, b, dtype = _factors(a, b, y.dtype)
    if dtype is not None:
        torch.mm(a, b, out_dtype=dtype, out=y)
    elif a.dtype is y.dtype:
        torch.mm(a, b, out=y)
    else:
        y.copy_(torch.mm(a, b))


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    a, b, dtype = _factors(a, b, total.dtype)
    if dtype is not None and _FLOAT32_ADDMM:
        torch.addmm(total, a, b, out_dtype=dtype, out=total)
    elif a.dtype is total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(_mm(a, b, dtype))


def _parts(columns: int, width: int) -> list[slice]:
    """Columns of logits, or of their gradient, in parts that products take at full speed: most of them, and then the rest.

    Args:
        columns: how many there are.
        width: columns of their memory.
    """
    even = columns if columns == width else columns // EVEN * EVEN
    return [slice(0, columns)] if even in (0, columns) else [slice(0, even), slice(even, columns)]


@opaque(writes=("y",))
def _product_of(y: Tensor, logits: Tensor, columns: int, b: Tensor, transposed: bool, adds: bool) -> None:
    """y = a b, or y += a b. a is the first columns of `logits`, or their transpose."""
    parts = _parts(columns, logits.shape[1])
    if transposed:
        for part in parts:
            (_add if adds else _write)(y[part], logits[:, part].t(), b)
    else:
        # The rest first: what is rounded twice is then a sum of few terms.
        for part in reversed(parts):
            a = logits[:, part]
            if a.device.type == "cpu":
                # oneDNN reads on behind the columns, where there may be NaN (bfloat16 with AMX, torch 2.13).
                a = a.contiguous()
            (_add if adds else _write)(y, a, b[part])
            adds = True


def _sum_of(
    total: Tensor | None, logits: Logits, b: Tensor, dtype: torch.dtype, *, transposed: bool, adds: bool
) -> Tensor:
    """total + logitsᵀ b, or total + logits b if not `transposed`; written to `total`, or to a new one in `dtype`."""
    memory, columns = logits
    if total is None:
        adds = False
        total = torch.empty((columns if transposed else memory.shape[0], b.shape[1]), dtype=dtype, device=b.device)
    _product_of(total, memory, columns, b, transposed, adds)
    return total


@opaque(writes=("logits",))
def _write_logits(logits: Tensor, x: Tensor, weight: Tensor) -> None:
    """The first columns of `logits` = x weightᵀ."""
    for part in _parts(weight.shape[0], logits.shape[1]):
        _write(logits[:, part], x, weight[part].t())


class Linear:
    """A language's part of linear layers: a kernel that scales gradients, and matrix products that suit its devices.

    The products here are those for GPUs.
    """

    aligned = 128
    """Rows and columns of chunks are multiples of this. Matmuls of odd sizes can be several times slower: 32768 rows of
    4096 and 128256 columns took an H200 683 ms with columns in chunks of 8551, and 221 in chunks of 8576."""

    pads = True
    """Whether logits have `padded_columns` in memory, for products of the columns that EVEN divides and of the rest."""

    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        """Write x · dloss / divisor to `y`, which may be `x`.

        Args:
            y: contiguous, as `x` is, and of its shape.
            x: of any float dtype.
            dloss: a float32 scalar.
            divisor: float32; its first element is the divisor. Or None.
        """
        raise NotImplementedError

    def takes_memory(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether `add_product` in `dtype`, of tensors with x's dtype, needs about as much memory as its `a`."""
        return False

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype, adds: bool = True) -> Tensor:
        """total + aᵀ b, in `dtype`; written to `total` if there is one. If not `adds`, `total` is memory alone."""
        return _sum_of(total, Logits.of(a), b, dtype, transposed=True, adds=adds)

    def add_product_of(
        self,
        total: Tensor | None,
        logits: Logits,
        b: Tensor,
        dtype: torch.dtype,
        *,
        transposed: bool,
        adds: bool = True,
    ) -> Tensor:
        """`add_product` of logits or their gradient: total + logitsᵀ b, or total + logits b if not `transposed`."""
        if logits.padded():
            return _sum_of(total, logits, b, dtype, transposed=transposed, adds=adds)
        return self.add_product(total, logits.memory if transposed else logits.memory.t(), b, dtype, adds)

    def write_product_of(self, y: Tensor, logits: Logits, b: Tensor, *, transposed: bool) -> None:
        """Write logits b, or logitsᵀ b if `transposed`, to `y`, in their dtype."""
        _product_of(y, logits.memory, logits.columns, b, transposed, False)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a · b in float32, not rounded to their dtype."""
        return _mm(*_factors(a, b, torch.float32))

    def logits(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Logits:
        """x · weightᵀ in `dtype`, which is x's or float32.

        Args:
            x: ``[N, H]``.
            weight: ``[V, H]``.
            dtype: the dtype of the logits.
        """
        columns = weight.shape[0]
        width = padded_columns(columns) if self.pads else columns
        if width == columns:
            return Logits(x @ weight.t() if dtype is x.dtype else self.product(x, weight.t()), columns)
        memory = torch.empty((x.shape[0], width), dtype=dtype, device=x.device)
        _write_logits(memory, x, weight)
        return Logits(memory, columns)

    def chunks(self, size: int, most: int) -> list[tuple[int, int]]:
        """`chunks` that suit the device's matrix products."""
        return chunks(size, most, self.aligned)

    def chunks_of_columns(self, size: int, most: int) -> list[tuple[int, int]]:
        """`chunks` of columns of logits that take the memory of `most` columns."""
        return self.chunks(size, min(most, size - 1) if padded_columns(size) > most else most)

    def scaled(
        self, x: Tensor | None, dtype: torch.dtype, dloss: Tensor, divisor: Tensor | None, own: bool
    ) -> Tensor | None:
        """x · dloss / divisor, in `dtype`. If x is `own`, it is written there."""
        if x is None:
            return None
        y = x if own and x.dtype is dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
        self.scale(y, x, dloss, divisor)
        return y


class LinearGrads(NamedTuple):
    """The gradients of x, weight and bias, or memory for them; None for those that aren't needed."""

    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None

    def any(self) -> bool:
        """Whether one is needed."""
        return any(grad is not None for grad in self)


class LinearPlan(NamedTuple):
    """How a call goes over its rows.

    Attributes:
        chunk: rows whose logits fit beside their gradient.
        columns: columns whose logits fit beside their gradient, with all rows, if the weight's gradient is made by columns;
            otherwise None.
        whole: one chunk holds all rows, and its logits are kept.
        at_once: gradients are made in forward.
        needs: which gradients of x, weight and bias the chunks of rows make.
    """

    chunk: int
    columns: int | None
    whole: bool
    at_once: bool
    needs: Sequence[bool]


def plan_of(
    needs: Needs,
    x: Tensor,
    weight: Tensor,
    *,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
    reduced: bool = True,
    teacher_x: Tensor | None = None,
) -> LinearPlan:
    """The plan of a call, the same in forward and in backward.

    Args:
        needs: which of x, weight and bias want a gradient.
        x, weight: those of the layer.
        accum_dtype, memory_budget, teacher_x: as in `temporary_memory`.
        reduced: whether the loss is a sum or a mean over rows, so that its own gradient is one number.
    """
    columns = None
    if teacher_x is None:
        columns = chunk_columns(memory_budget, x, weight, accum_dtype=accum_dtype, weight_grad=needs[1])
    by_rows = needs if columns is None else (needs[0], False, False)
    chunk = chunk_rows(memory_budget, x, weight, accum_dtype=accum_dtype, weight_grad=by_rows[1], teacher_x=teacher_x)
    whole = chunk >= x.shape[0] and columns is None
    at_once = any(by_rows) and not whole and reduced
    if at_once and memory_budget is not None and torch_state.compiling():
        # Gradients that are kept for backward take memory beside those that it returns.
        room = temporary_memory(chunk, x, weight, accum_dtype=accum_dtype, weight_grad=by_rows[1], teacher_x=teacher_x)
        saved_bytes = x.numel() * x.dtype.itemsize if by_rows[0] else 0
        saved_bytes += weight.numel() * accum_dtype.itemsize if by_rows[1] else 0
        saved_bytes += 4 * weight.shape[0] if by_rows[2] else 0
        at_once = saved_bytes <= room
    return LinearPlan(chunk, columns, whole, at_once, by_rows)


class LinearLayer(NamedTuple):
    """A call's linear layer.

    Attributes:
        x: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]``, or None.
        needs: which of these want a gradient.
        accum_dtype: the dtype in which the weight's gradient is summed over chunks of rows.
        plan: how the call goes over its rows.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    needs: Sequence[bool]
    accum_dtype: torch.dtype
    plan: LinearPlan


def layer_of(
    needs: Needs,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
    *,
    reduced: bool = True,
    teacher_x: Tensor | None = None,
) -> LinearLayer:
    """A call's linear layer, with its plan: the arguments are those of `plan_of`."""
    plan = plan_of(
        needs, x, weight, accum_dtype=accum_dtype, memory_budget=memory_budget, reduced=reduced, teacher_x=teacher_x
    )
    return LinearLayer(x, weight, bias, needs, accum_dtype, plan)


class TeacherLayer(NamedTuple):
    """The other linear layer of a loss that also depends on a teacher's logits. It gets no gradients.

    Attributes:
        x: ``[N, H']``.
        weight: ``[V, H']``.
        budgeted: whether the call has a memory budget.
    """

    x: Tensor
    weight: Tensor
    budgeted: bool


class GradAccumulator:
    """The gradients of x, weight and bias of a linear layer, added up from the gradient of the logits.

    The logits' gradient comes in chunks of rows (`add_rows`) or of columns (`add_columns`). With rows, the weight's gradient is a
    sum over chunks. With columns, one product makes it, and it is rounded once.

    Args:
        linear: the language's.
        layer: the layer.
        grads: memory, which is written to. The dtype of the weight's gradient is that in which it is summed over chunks of
            rows. The bias's is summed in float32.
    """

    def __init__(self, linear: Linear, layer: LinearLayer, grads: LinearGrads) -> None:
        self.linear, self.x, self.weight, self.grads = linear, layer.x, layer.weight, grads
        self.begun = False
        self.wide = grads.dbias is not None and is_wide(layer.bias, layer.x)
        if self.wide and grads.dbias is not None:
            grads.dbias.zero_()

    def add_rows(self, first: int, last: int, dlogits: Logits) -> None:
        """Add the gradient of some rows of logits, with all columns."""
        dx, dweight, dbias = self.grads
        if dx is not None:
            self.linear.write_product_of(dx[first:last], dlogits, self.weight, transposed=False)
        if dweight is not None:
            x = self.x[first:last]
            self.linear.add_product_of(dweight, dlogits, x, dweight.dtype, transposed=True, adds=self.begun)
        if dbias is not None and not self.wide:
            (dbias.add_ if self.begun else dbias.copy_)(dlogits.tensor().sum(0, dtype=torch.float32))
        self.begun = True

    def add_columns(self, first: int, last: int, dlogits: Logits) -> None:
        """Take the gradient of some columns of logits, with all rows: that gives these rows of weight's and bias's gradients."""
        _, dweight, dbias = self.grads
        if dweight is not None:
            self.linear.write_product_of(dweight[first:last], dlogits, self.x, transposed=True)
        if dbias is not None and not self.wide:
            dbias[first:last] = dlogits.tensor().sum(0, dtype=torch.float32)

    def add_wide_bias(self, first: int, last: int, dlogits: Tensor) -> None:
        """Add the float32 gradient of some columns of logits, with any rows, to the gradient of a `wide` bias."""
        if self.grads.dbias is not None:
            self.grads.dbias[first:last] += dlogits.sum(0, dtype=torch.float32)


class LinearLoss:
    """A loss of a linear layer's logits, by a language's kernels. An op's subclass says what they make of a chunk of logits.

    Attributes:
        inputs: the NamedTuple of what `write` and `gradient` take beside logits.
        results: the NamedTuple of what `write` writes. Its `statistics` are what `gradient` needs.
    """

    inputs: type[tuple[Any, ...]]
    results: type[tuple[Any, ...]]

    def __init__(self, kernels: Any, linear: Linear) -> None:
        self.kernels, self.linear = kernels, linear

        def run(
            grads: LinearGrads,
            results: Any,
            layer: LinearLayer,
            teacher: TeacherLayer | None,
            inputs: Any,
            statistics: Tensor | None,
            divisor: Tensor | None,
            dloss: Tensor | None,
            by_columns: bool,
        ) -> None:
            call = LinearLossPass(self, layer, inputs, results, statistics=statistics, divisor=divisor, teacher=teacher)
            call.run(grads, dloss, by_columns)

        run.__annotations__ |= {"results": self.results | None, "inputs": self.inputs}  # `opaque` reads them
        run.__qualname__ = f"{type(self).__name__}.run"  # in the custom op's name: kernels may serve several ops
        self.run = opaque(writes=("grads", "results"), within=type(kernels).__module__)(run)

    def write(self, inputs: Any, results: Any, first: int, *logits: Logits) -> None:
        """Write results of the rows from `first` on, from their logits; with a teacher, from the teacher's as well."""
        raise NotImplementedError

    def incoming(self, inputs: Any, dloss: Tensor | None, divisor: Tensor | None, device: torch.device) -> Any:
        """The factors of `gradient`, from the gradient of the loss; None if the loss's gradient isn't known yet.

        `gradient` then gives the gradient of the sum; or that of the mean times the rows that count, because the mean's own
        gradient would underflow in float16. `scaled` divides by these rows.
        """
        raise NotImplementedError

    def gradient(
        self,
        inputs: Any,
        dlogits: Logits,
        logits: tuple[Logits | None, ...],
        statistics: Any,
        incoming: Any,
        first: int,
        first_column: int,
    ) -> None:
        """Write the gradient of the logits of the rows from `first` on, and of the columns from `first_column` on.

        Args:
            inputs: as `write` got them.
            dlogits: to be written; `memory` is contiguous.
            logits: the logits, or None if `dlogits` holds them; and the teacher's, if there is one.
            statistics: what `write` wrote for it.
            incoming: what `incoming` returned.
            first: the first row.
            first_column: the first column.
        """
        raise NotImplementedError


class LinearLossPass:
    """The forward or the backward of a call of a `LinearLoss`.

    Args:
        loss: the op in a language.
        layer: the linear layer.
        inputs: what the kernels take beside logits.
        results: memory for all rows' results, in forward.
        statistics: what forward wrote for the gradient, in backward.
        divisor: the divisor of a mean, as in `Linear.scale`; None for a sum.
        teacher: the teacher's linear layer, if there is one.

    Attributes:
        rows: rows of logits at a time. Their gradient overwrites them.
        columns: if the plan has columns, columns of logits at a time, with all rows.
        teacher_rows: rows of the teacher's logits at a time. They are only read. In the same memory there are then fewer chunks,
            each of which reads and writes the accumulator of the weight's gradient.
    """

    def __init__(
        self,
        loss: LinearLoss,
        layer: LinearLayer,
        inputs: Any,
        results: Any = None,
        *,
        statistics: Tensor | None = None,
        divisor: Tensor | None = None,
        teacher: TeacherLayer | None = None,
    ) -> None:
        self.loss, self.linear, self.layer, self.inputs, self.teacher = loss, loss.linear, layer, inputs, teacher
        self.results, self.statistics = results, statistics if results is None else results.statistics
        self.divisor = divisor
        self.x, self.weight, self.bias, needs, self.accum_dtype, self.plan = layer
        plan, x = self.plan, self.x
        self.rows, self.columns = x.shape[0] if plan.whole else plan.chunk, plan.columns
        # A plan has room for logits beside their gradient. Here the gradient overwrites the logits, except for a wide bias.
        wide = is_wide(self.bias, x)
        if plan.columns is not None and not (needs[2] and wide):
            self.columns = 2 * plan.columns
        self.teacher_rows = self.rows
        if plan.whole:
            return
        if teacher is None:
            if not (self.takes_memory or (plan.needs[2] and wide)):
                self.rows *= 2
            return
        if teacher.budgeted and not (needs[2] and wide):
            # The plan has room for three: the student's logits, their gradient, which here overwrites them, and the teacher's
            # logits, half of whose room `add_product` may take.
            self.rows += plan.chunk // 2 if self.takes_memory else plan.chunk
        # Products and losses of fewer rows take longer. On an H100, the large case of fused_linear_distillation takes 22.8 ms
        # forward and 37.2 with the backward. With 256 rows at a time it took 25.0 and 40.7.
        self.teacher_rows = min(plan.chunk, max(1024, plan.chunk // 4))

    @property
    def takes_memory(self) -> bool:
        """Whether adding up the weight's gradient takes about as much memory as the logits."""
        return self.plan.needs[1] and self.linear.takes_memory(self.x, self.accum_dtype)

    def forward(self) -> Saved:
        """Write all rows' results.

        Returns:
            What `backward` takes, beside what the op itself saves: logits, gradients, or nothing.
        """
        grads = self._memory(self.accum_dtype) if self.plan.at_once else LinearGrads(None, None, None)
        logits = self._run_as_one(grads)
        if self.plan.at_once:
            return grads if torch_state.compiling() else (SavedOnce(*grads),)
        return tuple(each.memory for each in logits) if self.plan.whole and logits is not None else ()

    def backward(self, logits_or_grads: Saved, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias; `logits_or_grads` is what `forward` returned."""
        if logits_or_grads and not self.plan.whole:
            dx, dweight, dbias = self._scaled(logits_or_grads, dloss)
        else:
            grads = self._memory(self.weight.dtype if self.plan.whole else self.accum_dtype)
            if self.plan.whole:
                columns = self.weight.shape[0]
                self._whole(grads, tuple(Logits(memory, columns) for memory in logits_or_grads), dloss)
            elif grads.any():
                self._run_as_one(grads, dloss)
            dx, dweight, dbias = self._rounded(grads)
        if self.columns is not None:
            grads = self._memory_by_columns()
            self._run_as_one(grads, dloss, by_columns=True)
            _, dweight, dbias = self._rounded(grads)
        return dx, dweight, dbias

    def run(self, grads: LinearGrads, dloss: Tensor | None, by_columns: bool) -> tuple[Logits, ...] | None:
        """Go over all logits once.

        Args:
            grads: where gradients are written.
            dloss: the gradient of the loss, or None, as in `LinearLoss.incoming`.
            by_columns: whether chunks are columns, with all rows, for gradients alone; otherwise they are rows.

        Returns:
            The logits of the last chunk, and those of its last teacher's, if no gradient overwrote them.
        """
        accumulator = GradAccumulator(self.linear, self.layer, grads) if grads.any() else None
        if by_columns and accumulator is not None:
            self._by_columns(accumulator, dloss)
            return None
        return self._by_rows(accumulator, dloss)

    def _run_as_one(
        self, grads: LinearGrads, dloss: Tensor | None = None, by_columns: bool = False
    ) -> tuple[Logits, ...] | None:
        """`run`, which is one custom op in a trace, unless one chunk holds all rows.

        In a trace, each chunk's products and launches would be steps of the graph. That takes long to compile, and a graph of so
        many chunks is for sizes that have as many. Inductor would also make the products of all chunks at the end, each of a
        gradient of logits in its own memory.
        """
        if self.plan.whole or not torch_state.compiling():
            return self.run(grads, dloss, by_columns)
        statistics = self.statistics if self.results is None else None  # they are among the results
        call = self.layer, self.teacher, self.inputs
        self.loss.run(grads, self.results, *call, statistics, self.divisor, dloss, by_columns)
        return None

    def _by_rows(self, accumulator: GradAccumulator | None, dloss: Tensor | None) -> tuple[Logits, ...] | None:
        """Write all rows' results, if this is forward, and add to gradients, if they are wanted."""
        incoming = None if accumulator is None else self._incoming(dloss)
        chunk_logits = logits = None
        for first, last in self.linear.chunks(self.x.shape[0], self.rows):
            chunk_logits = logits = None  # freed before the next chunk's are allocated
            x = self.x[first:last]
            logits = self.linear.logits(x, self.weight, x.dtype)
            chunk_logits = self._visit(first, logits, accumulator, incoming)
            if accumulator is not None:
                chunk_logits = None
                accumulator.add_rows(first, last, logits)
        return chunk_logits

    def _visit(
        self, first: int, logits: Logits, accumulator: GradAccumulator | None, incoming: Any
    ) -> tuple[Logits, ...]:
        """Write results of the rows from `first` on. With an `accumulator`, overwrite `logits` with their gradient then.

        Returns:
            The logits, and the last ones of the teacher.
        """
        rows, teacher = logits.memory.shape[0], ()
        for start, end in [(0, rows)] if self.teacher is None else self.linear.chunks(rows, self.teacher_rows):
            student = logits
            if self.teacher is not None:
                teacher = ()  # freed before the next ones are allocated
                x = self.teacher.x[first + start : first + end]
                teacher = (self.linear.logits(x, self.teacher.weight, x.dtype),)
                student = logits.rows(start, end)
            if self.results is not None:
                self.loss.write(self.inputs, self.results, first + start, student, *teacher)
            if accumulator is not None:
                self._add_wide_bias(accumulator, (student, *teacher), incoming, first + start)
                self._gradient(student, (None, *teacher), incoming, first + start)
        return logits, *teacher

    def _by_columns(self, accumulator: GradAccumulator, dloss: Tensor | None) -> None:
        """The gradients of weight and bias, `columns` of the logits at a time. One matmul makes each sum."""
        assert self.columns is not None
        incoming = self._incoming(dloss)
        for first, last in self.linear.chunks_of_columns(self.weight.shape[0], self.columns):
            logits = self.linear.logits(self.x, self.weight[first:last], self.x.dtype)
            self._add_wide_bias(accumulator, (logits,), incoming, first_column=first)
            self._gradient(logits, (None,), incoming, first_column=first)
            accumulator.add_columns(first, last, logits)
            del logits

    def _whole(self, grads: LinearGrads, logits: tuple[Logits, ...], dloss: Tensor) -> None:
        """The gradients, from the logits of all rows."""
        accumulator = GradAccumulator(self.linear, self.layer, grads)
        incoming = self._incoming(dloss)
        self._add_wide_bias(accumulator, logits, incoming)
        dlogits = logits[0].empty_like(logits[0].memory.dtype)
        self._gradient(dlogits, logits, incoming)
        accumulator.add_rows(0, self.x.shape[0], dlogits)

    def _incoming(self, dloss: Tensor | None) -> Any:
        return self.loss.incoming(self.inputs, dloss, self.divisor, self.x.device)

    def _gradient(
        self, dlogits: Logits, logits: tuple[Logits | None, ...], incoming: Any, first: int = 0, first_column: int = 0
    ) -> None:
        self.loss.gradient(self.inputs, dlogits, logits, self.statistics, incoming, first, first_column)

    def _add_wide_bias(
        self,
        accumulator: GradAccumulator,
        logits: tuple[Logits, ...],
        incoming: Any,
        first: int = 0,
        first_column: int = 0,
    ) -> None:
        """Add a `wide` bias's gradient, from the unrounded gradient of the logits, in half of the logits' memory at a time."""
        if not accumulator.wide:
            return
        rows, columns = logits[0].memory.shape[0], logits[0].columns
        # Parts begin at multiples of 16 columns: kernels may read up to the next multiple.
        most = max(1, columns // 2)
        for start, end in chunks(columns, most, self.linear.aligned if most >= self.linear.aligned else 16):
            dpart = torch.empty((rows, end - start), dtype=torch.float32, device=self.x.device)
            parts = tuple(each.part(start, end) for each in logits)
            self._gradient(Logits.of(dpart), parts, incoming, first, first_column + start)
            accumulator.add_wide_bias(first_column + start, first_column + end, dpart)
            del dpart

    def _memory(self, dtype: torch.dtype) -> LinearGrads:
        """Memory for the gradients that chunks of rows make, of the weight's in `dtype`."""
        x, weight, (needs_x, needs_weight, needs_bias) = self.x, self.weight, self.plan.needs
        return LinearGrads(
            torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None,
            weight.new_empty(weight.shape, dtype=dtype) if needs_weight else None,
            weight.new_empty(weight.shape[0], dtype=torch.float32) if needs_bias else None,
        )

    def _memory_by_columns(self) -> LinearGrads:
        """Memory for the gradients that chunks of columns make."""
        weight, (_, needs_weight, needs_bias) = self.weight, self.layer.needs
        dbias = None
        if needs_bias and self.bias is not None:
            dtype = torch.float32 if is_wide(self.bias, self.x) else self.bias.dtype
            dbias = weight.new_empty(weight.shape[0], dtype=dtype)
        return LinearGrads(None, weight.new_empty(weight.shape) if needs_weight else None, dbias)

    def _scaled(self, saved: Saved, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients that forward made at once, or that are made again, times the gradient of the loss."""
        own = isinstance(saved[0], SavedOnce)
        if own:
            grads: Saved | None = saved[0].take()
            if grads is None:  # an earlier backward has taken them
                grads = again = self._memory(self.accum_dtype)
                self._run_as_one(again)
            saved = grads
        dx, dweight, dbias = saved
        scaled, divisor = self.linear.scaled, self.divisor
        dx = scaled(dx, self.x.dtype, dloss, divisor, own)
        dweight = scaled(dweight, self.weight.dtype, dloss, divisor, own)
        return dx, dweight, None if self.bias is None else scaled(dbias, self.bias.dtype, dloss, divisor, own)

    def _rounded(self, grads: LinearGrads) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx, dweight, dbias = grads
        dweight = None if dweight is None else dweight.to(self.weight.dtype)
        return dx, dweight, None if dbias is None or self.bias is None else dbias.to(self.bias.dtype)
