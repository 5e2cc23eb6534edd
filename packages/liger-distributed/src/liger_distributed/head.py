"""A model's head whose forward is the loss, and the mean over the labels of all processes.

FSDP2 gathers a module's weights for its forward, so a loss that reads the head's weight belongs in it. Each process divides its
sum of losses by the mean number of labels per process. DDP and FSDP2 average gradients over the processes. The average is then
the sum over all labels divided by their number.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from liger_core import fused_linear_cross_entropy, subclasses
from liger_distributed.vocabulary import check_member, wait_tensor


class LossHead(nn.Linear):
    """A linear head. Called with labels it returns their mean cross-entropy, without logits; without labels, the logits.

    It is an `nn.Linear`: its weight is ``[vocabulary, hidden]``, it may be tied to an embedding, and a plan of
    `parallelize_module` may divide it along the vocabulary. `fully_shard` takes it as a unit of its own.

    Args:
        hidden: H, the width of its input.
        vocabulary: V, the number of tokens.
        bias: whether there is one.
        group: the processes whose labels a mean counts: all those over which data parallelism averages gradients. Some of
            them may have the same labels. None: all processes, or this one if torch.distributed isn't initialised. Under
            pipeline parallelism, pass the processes of the last stage.
        averaged: whether data parallelism averages gradients over the group, as DDP and FSDP2 do by themselves. False: it
            adds them up.
        ignore_index, label_smoothing, lse_square_scale, softcap: as in `liger_core.cross_entropy`.
        accum_dtype, memory_budget: as in `liger_core.fused_linear_cross_entropy`.
        device, dtype: those of the weight, as in `nn.Linear`.
    """

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        bias: bool = False,
        *,
        group: ProcessGroup | None = None,
        averaged: bool = True,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        accum_dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        linear: Any = super()
        linear.__init__(hidden, vocabulary, bias, device, dtype)
        if group is not None:
            check_member("LossHead", group)
        # The group's name and size, because a module that holds a group can't be copied.
        self._group = None if group is None else (group.group_name, group.size())
        self.averaged, self.ignore_index, self.softcap = averaged, ignore_index, softcap
        self.options: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "lse_square_scale": lse_square_scale,
            "accum_dtype": accum_dtype,
            "memory_budget": memory_budget,
        }

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: an input is x throughout liger_core
        self, x: Tensor, target: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """The loss of this process's labels, as data parallelism takes it, or the logits.

        Args:
            x: ``[..., H]``.
            target: int64 ``[...]``, the labels of x's rows; None for logits.
            labels: int64 ``[]``, from `count`, for a step of several calls: how many labels the mean is over. None: the labels of
                this call, which are counted while the loss is computed.

        Returns:
            A number, in the dtype of `fused_linear_cross_entropy`. The processes' average (their sum, if not `averaged`) is the
            mean over all labels, and so are its gradients. It is 0 if no process has a label. Without a target, ``[..., V]``.
        """
        if target is None:
            logits = super().forward(x)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        if labels is not None and not isinstance(cast("object", labels), Tensor):
            raise TypeError(f"LossHead: labels is {labels!r}; it takes the tensor that `count` returns")
        count = self._count(target)
        pending = self._summed(count) if labels is None else None  # in flight while the loss is computed
        loss: Tensor = cast("Any", fused_linear_cross_entropy)(
            x.flatten(0, -2),
            self.weight,
            target.flatten(),
            self.bias,
            ignore_index=self.ignore_index,
            softcap=self.softcap,
            **self.options,
        )
        total = labels if pending is None else wait_tensor(pending)
        assert total is not None
        # The sum of losses isn't divided at the end: in float16 the weight's gradient of a sum would overflow.
        share = (count * (self._size() if self.averaged else 1)).to(loss.dtype) / total.clamp(min=1)
        if subclasses.full_name(type(loss)) == subclasses.DTENSOR:
            share = _replicated(share, cast("Any", loss).device_mesh)
        return loss * share

    def count(self, *targets: Tensor) -> Tensor:
        """How many labels all processes have in the targets of one optimizer step. Pass it as `labels` to each of its calls.

        It takes one all-reduce of 8 bytes. The number stays on the device.

        Args:
            *targets: int64, of any shape, one for each call.

        Returns:
            int64 ``[]``, the same on all processes.
        """
        if not targets:
            raise TypeError("LossHead.count: there is no target; it takes the target of each call of this step")
        return wait_tensor(self._summed(torch.stack([self._count(target) for target in targets]).sum()))

    def extra_repr(self) -> str:
        """The sizes, and some of the options."""
        return f"{super().extra_repr()}, ignore_index={self.ignore_index}, averaged={self.averaged}"

    def _count(self, target: Tensor) -> Tensor:
        """The number of labels of a target; of all its parts, if it is a DTensor."""
        count = (target != self.ignore_index).sum()
        return cast("Any", count).full_tensor() if subclasses.full_name(type(count)) == subclasses.DTENSOR else count

    def _summed(self, count: Tensor) -> Tensor:
        """The sum over the group, in flight."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._group is None and world is None:
            return count
        name = self._group[0] if self._group else cast("ProcessGroup", world).group_name
        return torch.ops._c10d_functional.all_reduce(count, "sum", name)

    def _size(self) -> int:
        if self._group is not None:
            return self._group[1]
        return dist.get_world_size() if dist.is_initialized() else 1


def _replicated(number: Tensor, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate  # 2 s to import, already paid if there is a mesh

    return DTensor.from_local(number, mesh, [Replicate()] * mesh.ndim, run_check=False)
