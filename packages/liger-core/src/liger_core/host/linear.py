"""Losses of a linear layer's logits: matrix products, chunks and sums, which PyTorch does for every language.

If one chunk holds all rows, its logits are kept for backward, as an unfused model does. Otherwise the gradient of a chunk's
logits overwrites them, and becomes the gradients of the arguments at once. Backward then only scales those.

That is impossible if the loss's own gradient differs from row to row: backward then computes the logits again. It does so as
well if a memory budget has no room for an accumulator of the weight's gradient: it then takes all rows of x, and some rows of
the weight after others.

A language has one `Linear`. An op has a `LinearLoss`, which writes rows' results and the gradient of their logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import modes
from liger_core.contract import Needs, Once, Saved
from liger_core.host.rows import Logits
from liger_core.opaque import opaque
from liger_core.ops.fused_linear_cross_entropy import chunk_columns, chunk_rows, padded_columns, temporary_memory

# Whether there are matmuls of half-precision operands with a float32 result. ROCm has the plain one since pytorch#162600. The
# one that adds to a float32 tensor exists since pytorch#167931.
_FLOAT32_MM = torch.version.hip is None or torch.__version__ >= "2.10"
_FLOAT32_ADDMM = torch.__version__ >= "2.10"

EVEN = 8
"""What the columns of logits, and the distance of their rows, have to be multiples of for tensor cores: 16 bytes of bfloat16.

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
    """y = a b, or y += a b. a is the first columns of `logits`, or their transpose.

    It isn't traced: Inductor would make the products of all chunks at the end, each of a gradient of logits in its own memory.
    """
    parts = _parts(columns, logits.shape[1])
    if transposed:
        for part in parts:
            (_add if adds else _write)(y[part], logits[:, part].t(), b)
    else:
        # The rest first: what is rounded twice is then a sum of few terms.
        for part in reversed(parts):
            (_add if adds else _write)(y, logits[:, part], b[part])
            adds = True


def _sum_of(total: Tensor | None, logits: Logits, b: Tensor, dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """total + logitsᵀ b, or total + logits b if not `transposed`; written to `total`, or to a new one in `dtype`."""
    memory, columns = logits
    adds = total is not None
    if total is None:
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
    """What rows and columns of a chunk are a multiple of. Matmuls of odd sizes can be several times slower: 32768 rows of
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

    def add_product(self, total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """total + aᵀ b, in `dtype`; written to `total` if there is one."""
        return _sum_of(total, Logits.of(a), b, dtype, transposed=True)

    def add_product_of(
        self, total: Tensor | None, logits: Logits, b: Tensor, dtype: torch.dtype, *, transposed: bool
    ) -> Tensor:
        """`add_product` of logits or their gradient: total + logitsᵀ b, or total + logits b if not `transposed`."""
        if logits.padded():
            return _sum_of(total, logits, b, dtype, transposed=transposed)
        return self.add_product(total, logits.memory if transposed else logits.memory.t(), b, dtype)

    def write_product_of(self, y: Tensor, logits: Logits, b: Tensor, *, transposed: bool) -> None:
        """Write logits b, or logitsᵀ b if `transposed`, to `y`, in their dtype."""
        _product_of(y, logits.memory, logits.columns, b, transposed, False)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a · b in float32, not rounded to their dtype."""
        return _mm(*_factors(a, b, torch.float32))

    def logits(self, x: Tensor, weight: Tensor, dtype: torch.dtype, again: bool = False) -> Logits:
        """x · weightᵀ in `dtype`, which is x's or float32.

        Args:
            x: ``[N, H]``.
            weight: ``[V, H]``.
            dtype: the dtype of the logits.
            again: for backward. The product isn't traced then: torch.compile would find the same one in forward, and keep that
                for backward, and so in the end all logits.
        """
        columns = weight.shape[0]
        width = padded_columns(columns) if self.pads else columns
        if width == columns and not again:
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


class Gradients:
    """The gradients of x, weight and bias of a linear layer, added up from the gradient of the logits.

    That gradient comes in chunks of rows (`add_rows`) or of columns (`add_columns`). With rows, the weight's gradient is a sum
    over chunks. With columns, one product makes it, and it is rounded once.

    Args:
        linear: the language's.
        needs: which of x, weight and bias want a gradient.
        x: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]``, or None.
        dtype: the dtype in which the weight's gradient is summed over chunks of rows. The bias's is summed in float32.

    Attributes:
        made: the gradients of x, weight and bias; None for those that aren't needed.
    """

    def __init__(
        self, linear: Linear, needs: Needs, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.linear, self.needs, self.x, self.weight, self.bias = linear, needs, x, weight, bias
        self.dtype = dtype
        self.dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None
        self.wide = needs[2] and is_wide(bias, x)

    @property
    def made(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.dx, self.dweight, self.dbias

    def add_rows(self, first: int, last: int, dlogits: Logits) -> None:
        """Add the gradient of some rows of logits, with all columns."""
        if self.dx is not None:
            self.linear.write_product_of(self.dx[first:last], dlogits, self.weight, transposed=False)
        if self.needs[1]:
            x = self.x[first:last]
            self.dweight = self.linear.add_product_of(self.dweight, dlogits, x, self.dtype, transposed=True)
        if self.needs[2] and not self.wide:
            dbias = dlogits.tensor().sum(0, dtype=torch.float32)
            self.dbias = dbias if self.dbias is None else self.dbias.add_(dbias)

    def add_columns(self, first: int, last: int, dlogits: Logits) -> None:
        """Take the gradient of some columns of logits, with all rows: that gives these rows of weight's and bias's gradients."""
        if self.needs[1]:
            if self.dweight is None:
                self.dweight = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
            self.linear.write_product_of(self.dweight[first:last], dlogits, self.x, transposed=True)
        if self.needs[2] and self.bias is not None and not self.wide:
            if self.dbias is None:
                self.dbias = torch.empty_like(self.bias, memory_format=torch.contiguous_format)
            self.dbias[first:last] = dlogits.tensor().sum(0, dtype=torch.float32)

    def add_wide_bias(self, first: int, last: int, dlogits: Tensor) -> None:
        """Add the float32 gradient of some columns of logits, with any rows, to the gradient of a `wide` bias."""
        if self.dbias is None:
            self.dbias = torch.zeros(self.weight.shape[0], dtype=torch.float32, device=self.x.device)
        self.dbias[first:last] += dlogits.sum(0, dtype=torch.float32)


class Plan(NamedTuple):
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
    needs: Needs


def plan_of(
    needs: Needs,
    x: Tensor,
    weight: Tensor,
    *,
    accum_dtype: torch.dtype,
    memory_budget: int | None,
    reduced: bool = True,
    teacher_x: Tensor | None = None,
) -> Plan:
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
    made = needs if columns is None else (needs[0], False, False)
    chunk = chunk_rows(memory_budget, x, weight, accum_dtype=accum_dtype, weight_grad=made[1], teacher_x=teacher_x)
    whole = chunk >= x.shape[0] and columns is None
    at_once = any(made) and not whole and reduced
    if at_once and memory_budget is not None and modes.compiling():
        # Gradients that are kept for backward take memory beside those that it returns.
        room = temporary_memory(chunk, x, weight, accum_dtype=accum_dtype, weight_grad=made[1], teacher_x=teacher_x)
        kept = x.numel() * x.dtype.itemsize if made[0] else 0
        kept += weight.numel() * accum_dtype.itemsize if made[1] else 0
        kept += 4 * weight.shape[0] if made[2] else 0
        at_once = kept <= room
    return Plan(chunk, columns, whole, at_once, made)


class LinearLoss:
    """A call of a loss of a linear layer's logits. An op's subclass has `write`, `incoming` and `gradient`.

    Attributes:
        rows: rows of logits at a time. Their gradient overwrites them.
        columns: if `plan` has columns, columns of logits at a time, with all rows.
        divisor: the divisor of a mean, as in `Linear.scale`; None for a sum.
    """

    divisor: Tensor | None = None

    def __init__(
        self,
        linear: Linear,
        needs: Needs,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        accum_dtype: torch.dtype,
    ) -> None:
        self.linear, self.needs, self.x, self.weight, self.bias = linear, needs, x, weight, bias
        self.plan, self.accum_dtype = plan, accum_dtype
        self.rows, self.columns = x.shape[0] if plan.whole else plan.chunk, plan.columns
        # A plan has room for logits beside their gradient. Here the gradient overwrites the logits, except for a wide bias.
        wide = is_wide(bias, x)
        if not (plan.whole or self.takes_memory or (plan.needs[2] and wide)):
            self.rows *= 2
        if plan.columns is not None and not (needs[2] and wide):
            self.columns = 2 * plan.columns

    @property
    def takes_memory(self) -> bool:
        """Whether adding up the weight's gradient takes about as much memory as the logits."""
        return self.plan.needs[1] and self.linear.takes_memory(self.x, self.accum_dtype)

    def visit(
        self, first: int, logits: Logits, results: bool, gradients: Gradients | None, incoming: Any
    ) -> tuple[Logits, ...]:
        """Write results of the rows from `first` on. With `gradients`, overwrite `logits` with their gradient then.

        Returns:
            What `gradient` reads: `logits`, and others beside it.
        """
        if results:
            self.write(first, logits)
        if gradients is not None:
            self.add_wide_bias(gradients, (logits,), incoming, first)
            self.gradient(logits, (None,), incoming, first)
        return (logits,)

    def write(self, first: int, *logits: Logits) -> None:
        """Write results of the rows from `first` on, from their logits; in a `TeacherLoss`, from the teacher's as well."""
        raise NotImplementedError

    def incoming(self, dloss: Tensor | None) -> Any:
        """The factors of `gradient`, from the gradient of the loss; None if the loss's gradient isn't known yet.

        `gradient` then gives the gradient of the sum; or that of the mean times the rows that count, because the mean's own
        gradient would underflow in float16. `scaled` divides by these rows.
        """
        raise NotImplementedError

    def gradient(
        self, dlogits: Logits, kept: tuple[Logits | None, ...], incoming: Any, first: int = 0, first_column: int = 0
    ) -> None:
        """Write the gradient of the logits of the rows from `first` on, and of the columns from `first_column` on.

        Args:
            dlogits: to be written; `memory` is contiguous.
            kept: what `visit` returned; None in place of logits that `dlogits` holds.
            incoming: what `incoming` returned.
            first: the first row.
            first_column: the first column.
        """
        raise NotImplementedError

    def run(self, results: bool, gradients: Gradients | None, dloss: Tensor | None) -> tuple[Logits, ...] | None:
        """Go over all rows, one chunk after another.

        Args:
            results: whether to write the rows' results.
            gradients: to add to, or None.
            dloss: the gradient of the loss, or None, as in `incoming`.

        Returns:
            What the last `visit` returned, if there are no `gradients`.
        """
        incoming = None if gradients is None else self.incoming(dloss)
        kept = logits = None
        for first, last in self.linear.chunks(self.x.shape[0], self.rows):
            kept = logits = None  # freed before the next chunk's are allocated
            x = self.x[first:last]
            logits = self.linear.logits(x, self.weight, x.dtype, again=not results)
            kept = self.visit(first, logits, results, gradients, incoming)
            if gradients is not None:
                kept = None
                gradients.add_rows(first, last, logits)
        return kept

    def forward(self) -> Saved:
        """Write all rows' results.

        Returns:
            What `backward` takes, beside what the op itself saves: logits, gradients, or nothing.
        """
        gradients = self._gradients(self.accum_dtype) if self.plan.at_once else None
        kept = self.run(True, gradients, None)
        if gradients is not None:
            return gradients.made if modes.compiling() else (Once(*gradients.made),)
        return tuple(logits.memory for logits in kept) if self.plan.whole and kept is not None else ()

    def backward(self, kept: Saved, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias; `kept` is what `forward` returned."""
        if kept and not self.plan.whole:
            dx, dweight, dbias = self._scaled(kept, dloss)
        else:
            gradients = self._gradients(self.weight.dtype if self.plan.whole else self.accum_dtype)
            if self.plan.whole:
                columns = self.weight.shape[0]
                self._add_whole(gradients, tuple(Logits(memory, columns) for memory in kept), dloss)
            elif any(gradients.needs):
                self.run(False, gradients, dloss)
            dx, dweight, dbias = self._rounded(gradients)
        if self.columns is not None:
            gradients = self._by_columns(self.columns, dloss)
            _, dweight, dbias = self._rounded(gradients)
        return dx, dweight, dbias

    def add_wide_bias(
        self,
        gradients: Gradients,
        kept: tuple[Logits, ...],
        incoming: Any,
        first: int = 0,
        first_column: int = 0,
    ) -> None:
        """Add a `wide` bias's gradient, from the unrounded gradient of the logits, in half of the logits' memory at a time."""
        if not gradients.wide:
            return
        rows, columns = kept[0].memory.shape[0], kept[0].columns
        # Parts begin at multiples of 16 columns: kernels may read up to the next multiple.
        most = max(1, columns // 2)
        for start, end in chunks(columns, most, self.linear.aligned if most >= self.linear.aligned else 16):
            part = torch.empty((rows, end - start), dtype=torch.float32, device=self.x.device)
            some = tuple(logits.part(start, end) for logits in kept)
            self.gradient(Logits.of(part), some, incoming, first, first_column + start)
            gradients.add_wide_bias(first_column + start, first_column + end, part)
            del part

    def _gradients(self, dtype: torch.dtype) -> Gradients:
        return Gradients(self.linear, self.plan.needs, self.x, self.weight, self.bias, dtype)

    def _add_whole(self, gradients: Gradients, kept: tuple[Logits, ...], dloss: Tensor) -> None:
        incoming = self.incoming(dloss)
        self.add_wide_bias(gradients, kept, incoming)
        dlogits = kept[0].empty_like(kept[0].memory.dtype)
        self.gradient(dlogits, kept, incoming)
        gradients.add_rows(0, self.x.shape[0], dlogits)

    def _by_columns(self, columns: int, dloss: Tensor) -> Gradients:
        """The gradients of weight and bias, `columns` of the logits at a time. One matmul makes each sum."""
        needs = (False, *self.needs[1:])
        gradients = Gradients(self.linear, needs, self.x, self.weight, self.bias, self.weight.dtype)
        incoming = self.incoming(dloss)
        for first, last in self.linear.chunks_of_columns(self.weight.shape[0], columns):
            logits = self.linear.logits(self.x, self.weight[first:last], self.x.dtype, again=True)
            self.add_wide_bias(gradients, (logits,), incoming, first_column=first)
            self.gradient(logits, (None,), incoming, first_column=first)
            gradients.add_columns(first, last, logits)
            del logits
        return gradients

    def _scaled(self, kept: Saved, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        own = isinstance(kept[0], Once)
        if own:
            taken: Saved | None = kept[0].take()
            if taken is None:  # an earlier backward has taken them
                gradients = self._gradients(self.accum_dtype)
                self.run(False, gradients, None)
                taken = gradients.made
            kept = taken
        dx, dweight, dbias = kept
        scaled, divisor = self.linear.scaled, self.divisor
        dx = scaled(dx, self.x.dtype, dloss, divisor, own)
        dweight = scaled(dweight, self.weight.dtype, dloss, divisor, own)
        return dx, dweight, None if self.bias is None else scaled(dbias, self.bias.dtype, dloss, divisor, own)

    def _rounded(self, gradients: Gradients) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx, dweight, dbias = gradients.made
        dweight = None if dweight is None else dweight.to(self.weight.dtype)
        return dx, dweight, None if dbias is None or self.bias is None else dbias.to(self.bias.dtype)


class TeacherLoss(LinearLoss):
    """A `LinearLoss` of a student that also depends on the logits of its teacher, another linear layer without gradients.

    The teacher's logits are only read, so they are computed for some rows of a chunk at a time. In the same memory there are
    then fewer chunks, each of which reads and writes the accumulator of the weight's gradient.
    """

    def __init__(
        self,
        linear: Linear,
        needs: Needs,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        *,
        accum_dtype: torch.dtype,
        memory_budget: int | None,
        reduced: bool = True,
    ) -> None:
        plan = plan_of(
            needs,
            x,
            weight,
            accum_dtype=accum_dtype,
            memory_budget=memory_budget,
            reduced=reduced,
            teacher_x=teacher_x,
        )
        super().__init__(linear, needs, x, weight, bias, plan, accum_dtype)
        self.teacher_x, self.teacher_weight = teacher_x, teacher_weight
        self.teacher_rows = self.rows
        if not plan.whole:
            self.rows = plan.chunk
            if memory_budget is not None and not (needs[2] and is_wide(bias, x)):
                # The plan has room for three: the student's logits, their gradient, which here overwrites them, and the
                # teacher's logits, half of whose room `add_product` may take.
                self.rows += plan.chunk // 2 if self.takes_memory else plan.chunk
            # Products and losses of fewer rows take longer. On an H100, the large case of fused_linear_distillation takes 22.8 ms
            # forward and 37.2 with the backward. With 256 rows at a time it took 25.0 and 40.7.
            self.teacher_rows = min(plan.chunk, max(1024, plan.chunk // 4))

    def visit(
        self, first: int, logits: Logits, results: bool, gradients: Gradients | None, incoming: Any
    ) -> tuple[Logits, ...]:
        teacher: Any = None
        for start, end in self.linear.chunks(logits.memory.shape[0], self.teacher_rows):
            teacher = None
            x = self.teacher_x[first + start : first + end]
            teacher = self.linear.logits(x, self.teacher_weight, x.dtype, again=not results)
            student = logits.rows(start, end)
            if results:
                self.write(first + start, student, teacher)
            if gradients is not None:
                self.add_wide_bias(gradients, (student, teacher), incoming, first + start)
                self.gradient(student, (None, teacher), incoming, first + start)
        return logits, teacher
