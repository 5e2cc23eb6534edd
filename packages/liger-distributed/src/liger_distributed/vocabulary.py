"""A vocabulary that is divided among processes: who has which columns, and how statistics of columns become a row's.

Each process has the statistics of its own columns. One all-gather makes those of the row. lse is the log-sum-exp of all lse.
picked and total are sums. With share_r = e^(lse_r − lse), the entropy is Σ share_r · (entropy_r + lse − lse_r).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from liger_core import checks, torch_state
from liger_core.autograd import without_second_derivatives
from liger_core.contract import upcast
from liger_core.dispatch import reads_values
from liger_core.ops.logit_statistics import LogitStatistics

T = TypeVar("T")

LARGEST_VOCABULARY = 1 << 24
"""The largest vocabulary for which predicted tokens can be requested: their ids are sent in float32."""


class VocabularyShard(NamedTuple):
    """This process's columns of a vocabulary: `columns` of them, from the global id `first` on."""

    group: ProcessGroup
    vocabulary: int
    first: int
    columns: int


def shard_of(op: str, group: ProcessGroup, columns: int, vocabulary: int | None) -> VocabularyShard:
    """The columns that this process has, as torch.chunk divides a vocabulary. None: all processes have equally many.

    Raises:
        TypeError: `group` is no process group, or `vocabulary` no int.
        ValueError: the process is not in the group, or has another number of columns.
    """
    check_member(op, group)
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
    return VocabularyShard(group, whole, first, columns)


def check_member(op: str, group: object) -> None:
    """Raise TypeError if `group` is no process group, and ValueError if this process is not in it."""
    if isinstance(group, ProcessGroup):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: this process is not in `group`; only the processes of a group call with it")
    raise TypeError(
        f"{op}: group is {group!r}; it takes a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD, "
        "which is None before init_process_group"
    )


def combined(local: LogitStatistics, target: Tensor, shard: VocabularyShard, ignore_index: int) -> LogitStatistics:
    """The statistics of the whole vocabulary, from those of this process's columns. The same bits on every process."""
    targets, dtype = target if target.dim() == 2 else target[:, None], local.lse.dtype
    counted = (targets != ignore_index).any(-1)
    sent = [local.lse[:, None], local.picked.view(targets.shape)]
    sent += [value[:, None] for value in (local.total, local.entropy) if value is not None]
    if local.best is not None and local.best_index is not None:
        if shard.vocabulary > LARGEST_VOCABULARY:
            raise ValueError(
                f"predicted tokens take a vocabulary of at most {LARGEST_VOCABULARY}; it has {shard.vocabulary}"
            )
        sent += [local.best[:, None].to(dtype), local.best_index[:, None].to(dtype)]
    received = gather(torch.cat(sent, -1), shard)
    column = 1 + targets.shape[1]

    lse_by_process = received[..., 0]
    lse = lse_by_process.logsumexp(0)
    total = entropy = best = best_index = None
    if local.total is not None:
        total, column = received[..., column].sum(0), column + 1
    if local.entropy is not None:
        share = torch.exp(lse_by_process - lse)
        difference = (lse - lse_by_process).masked_fill(share == 0, 0.0)
        entropy, column = (share * (received[..., column] + difference)).sum(0).masked_fill(~counted, 0.0), column + 1
    if local.best is not None:
        values, indices = received[..., column].detach(), received[..., column + 1].detach()
        best = values.amax(0)
        best_index = indices.masked_fill(values != best, shard.vocabulary).amin(0).to(torch.int64)
    picked = received[..., 1 : 1 + targets.shape[1]].sum(0).view(target.shape)
    return LogitStatistics(lse.masked_fill(~counted, 0.0), picked, entropy, total, None, best, best_index)


def empty_statistics(
    logits: Tensor, target: Tensor, shard: VocabularyShard, options: dict[str, Any]
) -> LogitStatistics:
    """The statistics of logits without columns, ``[N, 0]``, on which they depend, so that backward's collectives meet."""
    zero = upcast(logits).sum(-1)
    picked = zero if target.dim() == 1 else zero[:, None].expand(target.shape)
    return_best = options.get("return_best")
    return LogitStatistics(
        zero - torch.inf,
        picked,
        zero if options.get("return_entropy") else None,
        zero if options.get("return_total") else None,
        None,
        zero.detach() - torch.inf if return_best else None,
        torch.full_like(target if target.dim() == 1 else target[:, 0], shard.vocabulary) if return_best else None,
    )


def gather(tensor: Tensor, shard: VocabularyShard) -> Tensor:
    """All processes' tensors, ``[processes, *shape]``. Only this process's own part has a gradient.

    Every process makes the same loss from the gathered tensors. So its own part's gradient is complete, and nothing is added up
    in backward. PyTorch's differentiable all-gather would count it once per process.

    Each process sends the size of its vocabulary as well. If they differ, the result is NaN on all: an accelerator would have to
    wait for an error.
    """
    rank, size = shard.group.rank(), shard.group.size()
    sent = torch.cat((tensor.detach().reshape(-1), tensor.new_full((1,), shard.vocabulary)))[None]
    received = wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(sent, size, shard.group.group_name))
    parts, vocabularies = received[:, :-1].reshape(size, *tensor.shape), received[:, -1]
    local: Tensor = tensor
    # torch.compile makes no second derivative.
    if torch.is_grad_enabled() and tensor.requires_grad and not torch_state.compiling():
        local = cast("Any", _LocalPart).apply(tensor)
    valid = torch.where((vocabularies == shard.vocabulary).all(), 1.0, torch.nan)
    return torch.cat((parts[:rank], local[None], parts[rank + 1 :])) * valid


def in_step(
    op: str, group: ProcessGroup, rows: Tensor, prepare: Callable[[], tuple[VocabularyShard, T]]
) -> tuple[VocabularyShard, T]:
    """The result of `prepare`, which checks and makes all that a process needs before it sends statistics.

    An error of one process is an error of all, as is another number of rows or another vocabulary: the others would wait for
    the process, or add up what doesn't belong together. For that the processes exchange three numbers, on the CPU and under
    LIGER_KERNEL_CHECK=1: an accelerator would have to wait for them.
    """
    check_member(op, group)
    if torch_state.compiling() or torch_state.without_values([rows]) or not reads_values(rows.device.type):
        return prepare()
    error = prepared = None
    try:
        prepared = prepare()
    except (TypeError, ValueError, IndexError) as raised:
        error = raised
    told = [rows.shape[:1].numel(), 0 if prepared is None else prepared[0].vocabulary, error is not None]
    sent = torch.tensor([told], device=rows.device)
    received = torch.ops._c10d_functional.all_gather_into_tensor(sent, group.size(), group.group_name)
    numbers, vocabularies, failed = cast("Any", wait_tensor(received)).t().tolist()
    if error is not None:
        raise error
    if any(failed):
        raise ValueError(f"{op}: process {failed.index(1)} of {group.size()} raised an error, which says what it takes")
    if len(set(numbers)) > 1:
        raise ValueError(f"{op}: the processes have {_listed(numbers)} rows; it takes the same rows on every process")
    if len(set(vocabularies)) > 1:
        raise ValueError(
            f"{op}: the processes take the vocabulary to have {_listed(vocabularies)} tokens; if they have different numbers "
            "of columns, it takes `vocabulary`, the same on every process"
        )
    assert prepared is not None
    return prepared


def _listed(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


NO_DOUBLE = "a loss of a vocabulary that is divided among processes has no second derivative"


class _LocalPart(torch.autograd.Function):
    """A process's own part of a gathered tensor. Its gradient depends on the other parts, by which nobody differentiates."""

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
            summed = wait_tensor(
                torch.ops._c10d_functional.all_reduce(gradient.contiguous(), "sum", ctx.group.group_name)
            )
        if torch_state.compiling() or not torch.is_grad_enabled():
            return summed, None
        return without_second_derivatives(NO_DOUBLE, (summed,), (gradient,))[0], None


def sum_gradient(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """A tensor that is the same on all processes, for each to use on its own columns: its gradient is the sum of theirs."""
    summing: Tensor = tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        summing = cast("Any", _SumGradient).apply(tensor, group)
    return summing


def wait_tensor(tensor: Tensor) -> Tensor:
    """The result of a collective that is in flight. Autograd doesn't record it."""
    return torch.ops._c10d_functional.wait_tensor(tensor)
