"""Rules for ops that do more on a part than run on it: rows of an embedding, columns of losses, means of cross-entropies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from liger_core import checks, torch_state
from liger_core.contract import Op, upcast
from liger_core.ops.cross_entropy import CrossEntropyOutput, loss_of_statistics
from liger_core.ops.grpo_loss import GRPOOutput
from liger_distributed.divergence import divergence_of_linear
from liger_distributed.losses import check_tokens, local_statistics_of_linear, local_statistics_of_logits
from liger_distributed.policy import grpo_loss_of_shard
from liger_distributed.vocabulary import VocabularyShard, combined, shard_of, wait_tensor


class Sharding:
    """The divided names: for each dimension of the mesh that divides a name, that name and the processes that share it."""

    def __init__(self, divided: list[tuple[str, ProcessGroup]]) -> None:
        self.divided = divided

    def groups(self, name: str) -> list[ProcessGroup]:
        """The groups that a name is divided among, the outermost first."""
        return [group for dim, group in self.divided if dim == name]

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """The sum over all parts of a name, without a gradient."""
        tensor = tensor.detach()
        for group in self.groups(name):
            tensor = wait_tensor(torch.ops._c10d_functional.all_reduce(tensor, "sum", group.group_name))
        return tensor


class LocalCall(NamedTuple):
    """An op's call on this process's part: local arguments, and the sizes of all dimensions by name."""

    op: Op[..., Any]
    demand: str | None
    arguments: dict[str, Any]
    sharding: Sharding
    sizes: dict[str, int]

    def run(self, **replaced: Any) -> Any:
        """The op on the local arguments, some of which may be replaced."""
        return self.op.call(self.demand, (), self.arguments | replaced)

    def share(self, labels: str, dim: str, dtype: torch.dtype) -> Tensor | float:
        """The weight of this part's mean over the labels in the mean over all labels."""
        if not self.sharding.groups(dim):
            return 1.0
        target = self.arguments[labels]
        if target is None:
            first = self.op.names[0]
            count = torch.tensor(self.arguments[first].shape[0], dtype=dtype, device=self.arguments[first].device)
        else:
            count = (target != self.arguments["ignore_index"]).sum().to(dtype)
        return count / self.sharding.sum(count, dim).clamp(min=1)


class Rule(NamedTuple):
    """An op's own way to run on parts.

    Attributes:
        run: makes the results of this part.
        divides: the names that it divides besides the independent ones.
        combines: those of them whose parts it combines: results are then the same on all processes, and not addends.
        keeps: the tensors that it takes whole.
        means: whether it makes the mean of divided rows. If not, it runs only if one of `divides` is divided, or `fills` has to.
        fills: an independent name of which the op takes no empty part.
        gathers: what forward sends for a name that it combines.
    """

    run: Callable[[LocalCall], Any]
    divides: tuple[str, ...]
    combines: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    means: bool = False
    fills: str | None = None
    gathers: str = "an all-gather"


def _embedding(call: LocalCall) -> Tensor:
    """Rows of other processes give 0. The sum over the parts is the result."""
    (group,) = call.sharding.groups("V")
    indices, weight, padding = (call.arguments[name] for name in ("indices", "weight", "padding_idx"))
    shard = shard_of("embedding", group, weight.shape[0], call.sizes["V"])
    if indices.device.type == "cpu" and not torch_state.compiling() and not torch_state.without_values([indices]):
        checks.indices_below("embedding", "indices", indices, shard.vocabulary)
    is_local = (indices >= shard.first) & (indices < shard.first + shard.columns)
    if shard.columns == 0:  # depends on the weight, so that backward's collectives meet
        rows = weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    else:
        if padding is not None:
            padding = padding % shard.vocabulary - shard.first
            padding = padding if 0 <= padding < shard.columns else None
        rows = call.run(indices=torch.where(is_local, indices - shard.first, 0), padding_idx=padding)
        rows = torch.where(is_local[..., None], rows, 0.0)
    return rows


def _moe(call: LocalCall) -> Tensor:
    """A process that has none of a token's experts gets one that is no expert, and adds 0."""
    indices, weights = call.arguments["expert_indices"], call.arguments["expert_weights"]
    if indices.shape[1]:
        return call.run()
    rows = indices.shape[0]
    zeros = weights.new_zeros((rows, 1)) + weights.sum()  # depends on the weights, so that they get a gradient
    return call.run(expert_indices=indices.new_full((rows, 1), -1), expert_weights=zeros)


def _cross_entropy(call: LocalCall) -> Any:
    """A divided vocabulary takes one all-gather. A mean over divided rows takes the count of all labels."""
    arguments, name = call.arguments, call.op.name
    fused = "linear_weight" in arguments
    weight = arguments["class_weight" if fused else "weight"]
    target, ignore_index, vocabulary = arguments["target"], arguments["ignore_index"], call.sizes["V"]
    reduction, rows_divided = arguments["reduction"], bool(call.sharding.groups("n"))
    inner = "none" if rows_divided else reduction
    if groups := call.sharding.groups("V"):
        columns = arguments["linear_weight"].shape[0] if fused else arguments["logits"].shape[1]
        result = _loss_of_columns(call, shard_of(name, groups[0], columns, vocabulary), weight, inner)
    else:
        result = call.run(reduction=inner)
    if inner == reduction:
        return result
    several = isinstance(result, tuple)
    results: tuple[Any, ...] = cast("tuple[Any, ...]", result) if several else (result, None, None, None)
    loss, z_loss, accuracy, predicted = results
    counted = (target != ignore_index) & (target >= 0) & (target < vocabulary)
    labels = call.sharding.sum((target != ignore_index).sum(), "n")
    rows = divisor = labels.clamp(min=1)
    if reduction == "mean" and weight is not None:
        if arguments["lse_square_scale"]:
            raise ValueError(
                f"{name}: a mean over divided rows has one divisor, and class weights beside lse_square_scale make two; "
                "it takes reduction='sum'"
            )
        label_weights = upcast(weight)[target.clamp(0, vocabulary - 1)].masked_fill(~counted, 0.0).sum()
        divisor = torch.where(labels > 0, call.sharding.sum(label_weights, "n"), 1.0)
    mean = reduction == "mean"
    loss = loss.sum() / divisor if mean else loss.sum()
    if not several:
        return loss
    z_loss = None if z_loss is None else z_loss.sum() / rows if mean else z_loss.sum()
    return CrossEntropyOutput(loss, z_loss, None if accuracy is None else accuracy.sum() / rows, predicted)


def _loss_of_columns(call: LocalCall, shard: VocabularyShard, weight: Tensor | None, reduction: str) -> Any:
    arguments = call.arguments
    fused = "linear_weight" in arguments
    local_weight = None if weight is None else weight[shard.first : shard.first + shard.columns]
    options = {
        "softcap": arguments["softcap"],
        "return_total": bool(arguments["label_smoothing"]),
        "return_best": arguments["return_token_accuracy"] or arguments["return_predicted_tokens"],
    }
    target, ignore_index = arguments["target"], arguments["ignore_index"]
    if fused:
        options |= {name: arguments[name] for name in ("accum_dtype", "memory_budget")} | {"class_weight": local_weight}
        x, linear_weight, bias = arguments["x"], arguments["linear_weight"], arguments["bias"]
        local = local_statistics_of_linear(x, linear_weight, target, bias, shard, ignore_index, options)
    else:
        options |= {"weight": local_weight}
        local = local_statistics_of_logits(arguments["logits"], target, shard, ignore_index, options)
    check_tokens(call.op.name, target, shard, ignore_index)
    names = ("ignore_index", "label_smoothing", "lse_square_scale")
    names += ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
    return loss_of_statistics(
        combined(local, target, shard, ignore_index),
        target,
        weight,
        vocabulary=shard.vocabulary,
        token_scaling=fused and arguments["token_scaling"],
        reduction=reduction,
        **{name: arguments[name] for name in names},
    )


def _jsd(call: LocalCall) -> Tensor:
    """Divided columns take an all-gather of the rows' normalisers, and one of their divergences."""
    (group,) = call.sharding.groups("V")
    arguments = call.arguments
    weights = arguments["student_weight"], arguments["teacher_weight"]
    shard = shard_of(call.op.name, group, weights[0].shape[0], call.sizes["V"])
    labels = arguments["labels"]
    loss = divergence_of_linear(**arguments, shard=shard)
    rows = arguments["student_x"].shape[0]
    counted = (
        torch.full((), rows, device=loss.device) if labels is None else (labels != arguments["ignore_index"]).sum()
    )
    return loss / counted.clamp(min=1)


def _grpo(call: LocalCall) -> GRPOOutput:
    """Divided columns take one all-gather of the rows' statistics."""
    (group,) = call.sharding.groups("V")
    shard = shard_of(call.op.name, group, call.arguments["logits"].shape[-1], call.sizes["V"])
    return grpo_loss_of_shard(**call.arguments, shard=shard)


RULES: dict[str, Rule] = {
    "embedding": Rule(_embedding, ("V",)),
    "cross_entropy": Rule(_cross_entropy, ("V",), ("V",), ("weight",), True),
    "fused_linear_cross_entropy": Rule(_cross_entropy, ("V",), ("V",), ("class_weight",), True),
    "fused_moe": Rule(_moe, (), fills="k"),
    "fused_linear_jsd": Rule(_jsd, ("V",), ("V",), gathers="two all-gathers"),
    "grpo_loss": Rule(_grpo, ("V",), ("V",)),
}
