"""Losses of a linear layer's logits: matrix products, chunks and sums, which PyTorch does for every language.

If one chunk holds all rows, its logits are kept for backward, as an unfused model does. Otherwise the gradient of a chunk's
logits overwrites them, and becomes the gradients of the arguments at once. Backward then only scales those.

That is impossible if the loss's own gradient differs from row to row: backward then computes the logits again. It does so as
well if a memory budget has no room for an accumulator of the weight's gradient: it then takes all rows of x, and some rows of
the weight after others.

A language has one `Linear`. An op has a `LinearLoss`, which writes rows' results and the gradient of their logits.
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


class Made(NamedTuple):
    """The gradients of x, weight and bias, or memory for them; None for those that aren't needed."""

    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None

    def any(self) -> bool:
        """Whether one is needed."""
        return any(each is not None for each in self)


class Gradients:
    """The gradients of x, weight and bias of a linear layer, added up from the gradient of the logits.

    That gradient comes in chunks of rows (`add_rows`) or of columns (`add_columns`). With rows, the weight's gradient is a sum
    over chunks. With columns, one product makes it, and it is rounded once.

    Args:
        linear: the language's.
        layer: the layer.
        made: memory, which is written to. The dtype of the weight's gradient is that in which it is summed over chunks of rows.
            The bias's is summed in float32.
    """

    def __init__(self, linear: Linear, layer: Layer, made: Made) -> None:
        self.linear, self.x, self.weight, self.made = linear, layer.x, layer.weight, made
        self.begun = False
        self.wide = made.dbias is not None and is_wide(layer.bias, layer.x)
        if self.wide and made.dbias is not None:
            made.dbias.zero_()

    def add_rows(self, first: int, last: int, dlogits: Logits) -> None:
        """Add the gradient of some rows of logits, with all columns."""
        dx, dweight, dbias = self.made
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
        _, dweight, dbias = self.made
        if dweight is not None:
            self.linear.write_product_of(dweight[first:last], dlogits, self.x, transposed=True)
        if dbias is not None and not self.wide:
            dbias[first:last] = dlogits.tensor().sum(0, dtype=torch.float32)

    def add_wide_bias(self, first: int, last: int, dlogits: Tensor) -> None:
        """Add the float32 gradient of some columns of logits, with any rows, to the gradient of a `wide` bias."""
        if self.made.dbias is not None:
            self.made.dbias[first:last] += dlogits.sum(0, dtype=torch.float32)


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
    if at_once and memory_budget is not None and torch_state.compiling():
        # Gradients that are kept for backward take memory beside those that it returns.
        room = temporary_memory(chunk, x, weight, accum_dtype=accum_dtype, weight_grad=made[1], teacher_x=teacher_x)
        kept = x.numel() * x.dtype.itemsize if made[0] else 0
        kept += weight.numel() * accum_dtype.itemsize if made[1] else 0
        kept += 4 * weight.shape[0] if made[2] else 0
        at_once = kept <= room
    return Plan(chunk, columns, whole, at_once, made)


class Layer(NamedTuple):
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
    plan: Plan


class LinearLoss:
    """A call of a loss of a linear layer's logits. An op's subclass has `write`, `incoming`, `gradient` and `as_one`.

    Attributes:
        rows: rows of logits at a time. Their gradient overwrites them.
        columns: if `plan` has columns, columns of logits at a time, with all rows.
        divisor: the divisor of a mean, as in `Linear.scale`; None for a sum.
    """

    divisor: Tensor | None = None

    def __init__(self, linear: Linear, layer: Layer) -> None:
        self.linear, self.layer = linear, layer
        self.x, self.weight, self.bias, needs, self.accum_dtype, self.plan = layer
        plan, x = self.plan, self.x
        self.rows, self.columns = x.shape[0] if plan.whole else plan.chunk, plan.columns
        # A plan has room for logits beside their gradient. Here the gradient overwrites the logits, except for a wide bias.
        wide = is_wide(self.bias, x)
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
            logits = self.linear.logits(x, self.weight, x.dtype)
            kept = self.visit(first, logits, results, gradients, incoming)
            if gradients is not None:
                kept = None
                gradients.add_rows(first, last, logits)
        return kept

    def as_one(self, made: Made, results: bool, dloss: Tensor | None, by_columns: bool) -> None:
        """`go`, as one custom op.

        In a trace, each chunk's products and launches would be steps of the graph. That takes long to compile, and a graph of so
        many chunks is for sizes that have as many. Inductor would also make the products of all chunks at the end, each of a
        gradient of logits in its own memory.
        """
        raise NotImplementedError

    def go(self, made: Made, results: bool, dloss: Tensor | None, by_columns: bool) -> tuple[Logits, ...] | None:
        """Go over all logits once: over chunks of rows, as `run` does, or of columns, for gradients alone.

        Args:
            made: where gradients are written.
            results, dloss: as in `run`.
            by_columns: whether chunks are columns.

        Returns:
            What `run` returns.
        """
        gradients = Gradients(self.linear, self.layer, made) if made.any() else None
        if gradients is None or not by_columns:
            return self.run(results, gradients, dloss)
        self._by_columns(gradients, dloss)
        return None

    def _pass(
        self, made: Made, *, results: bool = False, dloss: Tensor | None = None, by_columns: bool = False
    ) -> tuple[Logits, ...] | None:
        if torch_state.compiling() and not self.plan.whole:
            self.as_one(made, results, dloss, by_columns)
            return None
        return self.go(made, results, dloss, by_columns)

    def forward(self) -> Saved:
        """Write all rows' results.

        Returns:
            What `backward` takes, beside what the op itself saves: logits, gradients, or nothing.
        """
        made = self._memory(self.accum_dtype) if self.plan.at_once else Made(None, None, None)
        kept = self._pass(made, results=True)
        if self.plan.at_once:
            return made if torch_state.compiling() else (SavedOnce(*made),)
        return tuple(logits.memory for logits in kept) if self.plan.whole and kept is not None else ()

    def backward(self, kept: Saved, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias; `kept` is what `forward` returned."""
        if kept and not self.plan.whole:
            dx, dweight, dbias = self._scaled(kept, dloss)
        else:
            made = self._memory(self.weight.dtype if self.plan.whole else self.accum_dtype)
            if self.plan.whole:
                columns = self.weight.shape[0]
                self._add_whole(made, tuple(Logits(memory, columns) for memory in kept), dloss)
            elif made.any():
                self._pass(made, dloss=dloss)
            dx, dweight, dbias = self._rounded(made)
        if self.columns is not None:
            made = self._memory_by_columns()
            self._pass(made, dloss=dloss, by_columns=True)
            _, dweight, dbias = self._rounded(made)
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

    def _memory(self, dtype: torch.dtype) -> Made:
        """Memory for the gradients that chunks of rows make, of the weight's in `dtype`."""
        x, weight, (needs_x, needs_weight, needs_bias) = self.x, self.weight, self.plan.needs
        return Made(
            torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None,
            weight.new_empty(weight.shape, dtype=dtype) if needs_weight else None,
            weight.new_empty(weight.shape[0], dtype=torch.float32) if needs_bias else None,
        )

    def _memory_by_columns(self) -> Made:
        """Memory for the gradients that chunks of columns make."""
        weight, (_, needs_weight, needs_bias) = self.weight, self.layer.needs
        dbias = None
        if needs_bias and self.bias is not None:
            dtype = torch.float32 if is_wide(self.bias, self.x) else self.bias.dtype
            dbias = weight.new_empty(weight.shape[0], dtype=dtype)
        return Made(None, weight.new_empty(weight.shape) if needs_weight else None, dbias)

    def _add_whole(self, made: Made, kept: tuple[Logits, ...], dloss: Tensor) -> None:
        gradients = Gradients(self.linear, self.layer, made)
        incoming = self.incoming(dloss)
        self.add_wide_bias(gradients, kept, incoming)
        dlogits = kept[0].empty_like(kept[0].memory.dtype)
        self.gradient(dlogits, kept, incoming)
        gradients.add_rows(0, self.x.shape[0], dlogits)

    def _by_columns(self, gradients: Gradients, dloss: Tensor | None) -> None:
        """The gradients of weight and bias, `columns` of the logits at a time. One matmul makes each sum."""
        assert self.columns is not None
        incoming = self.incoming(dloss)
        for first, last in self.linear.chunks_of_columns(self.weight.shape[0], self.columns):
            logits = self.linear.logits(self.x, self.weight[first:last], self.x.dtype)
            self.add_wide_bias(gradients, (logits,), incoming, first_column=first)
            self.gradient(logits, (None,), incoming, first_column=first)
            gradients.add_columns(first, last, logits)
            del logits

    def _scaled(self, kept: Saved, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        own = isinstance(kept[0], SavedOnce)
        if own:
            taken: Saved | None = kept[0].take()
            if taken is None:  # an earlier backward has taken them
                taken = made = self._memory(self.accum_dtype)
                self._pass(made)
            kept = taken
        dx, dweight, dbias = kept
        scaled, divisor = self.linear.scaled, self.divisor
        dx = scaled(dx, self.x.dtype, dloss, divisor, own)
        dweight = scaled(dweight, self.weight.dtype, dloss, divisor, own)
        return dx, dweight, None if self.bias is None else scaled(dbias, self.bias.dtype, dloss, divisor, own)

    def _rounded(self, made: Made) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx, dweight, dbias = made
        dweight = None if dweight is None else dweight.to(self.weight.dtype)
        return dx, dweight, None if dbias is None or self.bias is None else dbias.to(self.bias.dtype)


class Teacher(NamedTuple):
    """The other linear layer of a `TeacherLoss`.

    Attributes:
        x: ``[N, H']``.
        weight: ``[V, H']``.
        budgeted: whether the call has a memory budget.
    """

    x: Tensor
    weight: Tensor
    budgeted: bool


class TeacherLoss(LinearLoss):
    """A `LinearLoss` of a student that also depends on the logits of its teacher, another linear layer without gradients.

    The teacher's logits are only read, so they are computed for some rows of a chunk at a time. In the same memory there are
    then fewer chunks, each of which reads and writes the accumulator of the weight's gradient.
    """

    def __init__(self, linear: Linear, layer: Layer, teacher: Teacher) -> None:
        super().__init__(linear, layer)
        plan = layer.plan
        self.teacher = teacher
        self.teacher_rows = self.rows
        if not plan.whole:
            self.rows = plan.chunk
            if teacher.budgeted and not (layer.needs[2] and is_wide(layer.bias, layer.x)):
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
            x = self.teacher.x[first + start : first + end]
            teacher = self.linear.logits(x, self.teacher.weight, x.dtype)
            student = logits.rows(start, end)
            if results:
                self.write(first + start, student, teacher)
            if gradients is not None:
                self.add_wide_bias(gradients, (student, teacher), incoming, first + start)
                self.gradient(student, (None, teacher), incoming, first + start)
        return logits, teacher
