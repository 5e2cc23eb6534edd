"""A vocabulary that is divided among processes: who has which columns, and how statistics of columns become a row's.

Each process has the statistics of its own columns. One all-gather makes those of the row. lse is the log-sum-exp of all lse.
picked and total are sums. With share_r = e^(lse_r − lse), the entropy is Σ share_r · (entropy_r + lse − lse_r).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from liger_core import checks, modes
from liger_core.autograd import without_second_derivatives
from liger_core.contract import upcast
from liger_core.ops.logit_statistics import LogitStatistics

LARGEST = 1 << 24
"""The largest vocabulary for which predicted tokens can be requested: their ids are sent in float32."""


class Part(NamedTuple):
    """This process's columns of a vocabulary: `columns` of them, from the global id `first` on."""

    group: ProcessGroup
    vocabulary: int
    first: int
    columns: int


def part_of(op: str, group: ProcessGroup, columns: int, vocabulary: int | None) -> Part:
    """The columns that this process has, as torch.chunk divides a vocabulary. None: all processes have equally many.

    Raises:
        TypeError: `group` is no process group, or `vocabulary` no int.
        ValueError: the process is not in the group, or has another number of columns.
    """
    member(op, group)
    if vocabulary is not None and not isinstance(cast("object", vocabulary), torch.SymInt):
        checks.integer(op, vocabulary=vocabulary)
    size, rank = group.size(), group.rank()
    whole = columns * size if vocabulary is None else vocabulary
    each = -(-whole // size)
    first = min(each * rank, whole)
    if columns != min(each, whole - first):
        raise ValueError(
            f"{op}: process {rank} of {size} has {columns} columns of a vocabulary of {whole}; it takes "
            f"{min(each, whole - first)}, as torch.chunk divides them"
        )
    return Part(group, whole, first, columns)


def member(op: str, group: object) -> None:
    """Raise TypeError if that is no process group, and ValueError if this process is not in it."""
    if isinstance(group, ProcessGroup):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: this process is not in `group`; only the processes of a group call with it")
    raise TypeError(
        f"{op}: group is {group!r}; it takes a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD, "
        "which is None before init_process_group"
    )


def joined(mine: LogitStatistics, target: Tensor, part: Part, ignore_index: int) -> LogitStatistics:
    """The statistics of the whole vocabulary, from those of this process's columns. The same bits on every process."""
    wide, dtype = target if target.dim() == 2 else target[:, None], mine.lse.dtype
    row = (wide != ignore_index).any(-1)
    sent = [mine.lse[:, None], mine.picked.view(wide.shape)]
    sent += [value[:, None] for value in (mine.total, mine.entropy) if value is not None]
    if mine.best is not None and mine.best_index is not None:
        if part.vocabulary > LARGEST:
            raise ValueError(f"predicted tokens take a vocabulary of at most {LARGEST}; it has {part.vocabulary}")
        sent += [mine.best[:, None].to(dtype), mine.best_index[:, None].to(dtype)]
    received = gather(torch.cat(sent, -1), part.group)
    at = 1 + wide.shape[1]

    lse_of = received[..., 0]
    lse = lse_of.logsumexp(0)
    total = entropy = best = best_index = None
    if mine.total is not None:
        total, at = received[..., at].sum(0), at + 1
    if mine.entropy is not None:
        share = torch.exp(lse_of - lse)
        ahead = (lse - lse_of).masked_fill(share == 0, 0.0)
        entropy, at = (share * (received[..., at] + ahead)).sum(0).masked_fill(~row, 0.0), at + 1
    if mine.best is not None:
        values, indices = received[..., at].detach(), received[..., at + 1].detach()
        best = values.amax(0)
        best_index = indices.masked_fill(values != best, part.vocabulary).amin(0).to(torch.int64)
    picked = received[..., 1 : 1 + wide.shape[1]].sum(0).view(target.shape)
    return LogitStatistics(lse.masked_fill(~row, 0.0), picked, entropy, total, None, best, best_index)


def of_nothing(hanging: Tensor, target: Tensor, part: Part, options: dict[str, Any]) -> LogitStatistics:
    """The statistics of no columns. They depend on `hanging`, float ``[N, 0]``, so that backward's collectives meet."""
    zero = upcast(hanging).sum(-1)
    picked = zero if target.dim() == 1 else zero[:, None].expand(target.shape)
    best = options.get("return_best")
    return LogitStatistics(
        zero - torch.inf,
        picked,
        zero if options.get("return_entropy") else None,
        zero if options.get("return_total") else None,
        None,
        zero.detach() - torch.inf if best else None,
        torch.full_like(target if target.dim() == 1 else target[:, 0], part.vocabulary) if best else None,
    )


def gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """``[processes, *shape]``. Only this process's own part has a gradient.

    Every process makes the same loss from what it gathers. So its own part's gradient is complete, and nothing is added up in
    backward. PyTorch's differentiable all-gather would count it once per process.
    """
    rank, size = group.rank(), group.size()
    sent = tensor.detach()[None].contiguous()
    parts = landed(torch.ops._c10d_functional.all_gather_into_tensor(sent, size, group.group_name))
    own: Tensor = tensor
    # What torch.compile makes has no second derivative.
    if torch.is_grad_enabled() and tensor.requires_grad and not modes.compiling():
        own = cast("Any", _Own).apply(tensor)
    return torch.cat((parts[:rank], own[None], parts[rank + 1 :]))


NO_DOUBLE = "a loss of a vocabulary that is divided among processes has no second derivative"


class _Own(torch.autograd.Function):
    """A process's own part of what is gathered. Its gradient depends on the other parts, by which nobody differentiates."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not torch.is_grad_enabled():
            return gradient
        return without_second_derivatives(NO_DOUBLE, (gradient,), (*ctx.saved_tensors, gradient))[0]


class _SumGradient(torch.autograd.Function):
    """A tensor that all processes have, and that each uses for its own columns: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            summed = landed(torch.ops._c10d_functional.all_reduce(gradient.contiguous(), "sum", ctx.group.group_name))
        if modes.compiling() or not torch.is_grad_enabled():
            return summed, None
        return without_second_derivatives(NO_DOUBLE, (summed,), (gradient,))[0], None


def shared(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """A tensor that is the same on all processes, for each to use on its own columns: its gradient is the sum of theirs."""
    alone: Tensor = tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        alone = cast("Any", _SumGradient).apply(tensor, group)
    return alone


def landed(tensor: Tensor) -> Tensor:
    """The result of a collective of ours that is in flight. Autograd doesn't record it."""
    return torch.ops._c10d_functional.wait_tensor(tensor)
