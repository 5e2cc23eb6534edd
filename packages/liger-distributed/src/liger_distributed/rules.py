"""Ops that do more on a part than run on it: rows of an embedding, columns of losses, means of cross-entropies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from liger_core import checks, modes
from liger_core.contract import Op, upcast
from liger_core.ops.cross_entropy import CrossEntropyOutput
from liger_core.ops.grpo_loss import GRPOOutput
from liger_distributed.divergence import divergence_of_linear
from liger_distributed.losses import loss_of, statistics_of_linear, statistics_of_logits
from liger_distributed.policy import loss_of_columns
from liger_distributed.vocabulary import Part, landed, part_of


class Spread:
    """What is divided: for each dimension of the mesh that divides a name, that name and the processes that share it."""

    def __init__(self, divided: list[tuple[str, ProcessGroup]]) -> None:
        self.divided = divided

    def groups(self, name: str) -> list[ProcessGroup]:
        """The groups that a name is divided among, the outermost first."""
        return [group for dim, group in self.divided if dim == name]

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """The sum over all parts of a name, without a gradient."""
        tensor = tensor.detach()
        for group in self.groups(name):
            tensor = landed(torch.ops._c10d_functional.all_reduce(tensor, "sum", group.group_name))
        return tensor


class Call(NamedTuple):
    """An op's call on this process's part: local arguments, and the sizes of all dimensions by name."""

    op: Op[..., Any]
    demand: str | None
    arguments: dict[str, Any]
    spread: Spread
    sizes: dict[str, int]

    def run(self, **changed: Any) -> Any:
        """The op on the local arguments."""
        return self.op.call(self.demand, (), self.arguments | changed)

    def share(self, labels: str, dim: str, dtype: torch.dtype) -> Tensor | float:
        """The weight of this part's mean over the labels in the mean over all labels."""
        if not self.spread.groups(dim):
            return 1.0
        target = self.arguments[labels]
        if target is None:
            first = self.op.names[0]
            count = torch.tensor(self.arguments[first].shape[0], dtype=dtype, device=self.arguments[first].device)
        else:
            count = (target != self.arguments["ignore_index"]).sum().to(dtype)
        return count / self.spread.sum(count, dim).clamp(min=1)


class Rule(NamedTuple):
    """How an op runs on parts.

    Attributes:
        run: makes the results of this part.
        divides: the names that it divides besides the independent ones.
        combines: those of them whose parts it combines: results are then the same on all processes, and not addends.
        keeps: the tensors that it takes whole.
        means: whether it makes the mean of divided rows. If not, it runs only if one of `divides` is divided, or `fills` has to.
        fills: an independent name of which the op takes no empty part.
        gathers: what forward sends for a name that it combines.
    """

    run: Callable[[Call], Any]
    divides: tuple[str, ...]
    combines: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    means: bool = False
    fills: str | None = None
    gathers: str = "an all-gather"


def _embedding(call: Call) -> Tensor:
    """Rows of other processes give 0. The sum over the parts is the result."""
    (group,) = call.spread.groups("V")
    indices, weight, padding = (call.arguments[name] for name in ("indices", "weight", "padding_idx"))
    part = part_of("embedding", group, weight.shape[0], call.sizes["V"])
    if indices.device.type == "cpu" and not modes.compiling() and not modes.without_values([indices]):
        checks.indices_below("embedding", "indices", indices, part.vocabulary)
    here = (indices >= part.first) & (indices < part.first + part.columns)
    if part.columns == 0:  # depends on the weight, so that backward's collectives meet
        found = weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    else:
        if padding is not None:
            padding = padding % part.vocabulary - part.first
            padding = padding if 0 <= padding < part.columns else None
        found = call.run(indices=torch.where(here, indices - part.first, 0), padding_idx=padding)
        found = torch.where(here[..., None], found, 0.0)
    return found


def _moe(call: Call) -> Tensor:
    """A process that has none of a token's experts gets one that is no expert, and adds 0."""
    indices, weights = call.arguments["expert_indices"], call.arguments["expert_weights"]
    if indices.shape[1]:
        return call.run()
    rows = indices.shape[0]
    hanging = weights.new_zeros((rows, 1)) + weights.sum()  # depends on the weights, so that they get a gradient
    return call.run(expert_indices=indices.new_full((rows, 1), -1), expert_weights=hanging)


def _cross_entropy(call: Call) -> Any:
    """A divided vocabulary takes one all-gather. A mean over divided rows takes the count of all labels."""
    given, name = call.arguments, call.op.name
    fused = "linear_weight" in given
    weight = given["class_weight" if fused else "weight"]
    target, ignore_index, vocabulary = given["target"], given["ignore_index"], call.sizes["V"]
    reduction, rows_apart = given["reduction"], bool(call.spread.groups("n"))
    inner = "none" if rows_apart else reduction
    if groups := call.spread.groups("V"):
        columns = given["linear_weight"].shape[0] if fused else given["logits"].shape[1]
        found = _of_columns(call, part_of(name, groups[0], columns, vocabulary), weight, inner)
    else:
        found = call.run(reduction=inner)
    if inner == reduction:
        return found
    several = isinstance(found, tuple)
    parts: tuple[Any, ...] = cast("tuple[Any, ...]", found) if several else (found, None, None, None)
    loss, z_loss, accuracy, predicted = parts
    counted = (target != ignore_index) & (target >= 0) & (target < vocabulary)
    labels = call.spread.sum((target != ignore_index).sum(), "n")
    rows = divisor = labels.clamp(min=1)
    if reduction == "mean" and weight is not None:
        if given["lse_square_scale"]:
            raise ValueError(
                f"{name}: a mean over divided rows has one divisor, and class weights beside lse_square_scale make two; "
                "it takes reduction='sum'"
            )
        of_labels = upcast(weight)[target.clamp(0, vocabulary - 1)].masked_fill(~counted, 0.0).sum()
        divisor = torch.where(labels > 0, call.spread.sum(of_labels, "n"), 1.0)
    mean = reduction == "mean"
    loss = loss.sum() / divisor if mean else loss.sum()
    if not several:
        return loss
    z_loss = None if z_loss is None else z_loss.sum() / rows if mean else z_loss.sum()
    return CrossEntropyOutput(loss, z_loss, None if accuracy is None else accuracy.sum() / rows, predicted)


def _of_columns(call: Call, part: Part, weight: Tensor | None, reduction: str) -> Any:
    given = call.arguments
    fused = "linear_weight" in given
    mine = None if weight is None else weight[part.first : part.first + part.columns]
    options = {
        "softcap": given["softcap"],
        "return_total": bool(given["label_smoothing"]),
        "return_best": given["return_token_accuracy"] or given["return_predicted_tokens"],
    }
    target, ignore_index = given["target"], given["ignore_index"]
    if fused:
        options |= {name: given[name] for name in ("accum_dtype", "memory_budget")} | {"class_weight": mine}
        x, linear_weight, bias = given["x"], given["linear_weight"], given["bias"]
        statistics = statistics_of_linear(x, linear_weight, target, bias, part, ignore_index, options)
    else:
        statistics = statistics_of_logits(given["logits"], target, part, ignore_index, options | {"weight": mine})
    names = ("softcap", "ignore_index", "label_smoothing", "lse_square_scale")
    names += ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
    passed = {name: given[name] for name in names}
    scaling = fused and given["token_scaling"]
    return loss_of(call.op.name, statistics, target, weight, part, token_scaling=scaling, reduction=reduction, **passed)


def _jsd(call: Call) -> Tensor:
    """Divided columns take an all-gather of the rows' normalisers, and one of their divergences."""
    (group,) = call.spread.groups("V")
    given = dict(call.arguments)
    weights = given["student_weight"], given["teacher_weight"]
    part = part_of(call.op.name, group, weights[0].shape[0], call.sizes["V"])
    labels = given["labels"]
    loss = divergence_of_linear(**given, part=part)
    rows = given["student_x"].shape[0]
    counted = torch.full((), rows, device=loss.device) if labels is None else (labels != given["ignore_index"]).sum()
    return loss / counted.clamp(min=1)


def _grpo(call: Call) -> GRPOOutput:
    """Divided columns take one all-gather of the rows' statistics."""
    (group,) = call.spread.groups("V")
    part = part_of(call.op.name, group, call.arguments["logits"].shape[-1], call.sizes["V"])
    return loss_of_columns(**call.arguments, part=part)


RULES: dict[str, Rule] = {
    "embedding": Rule(_embedding, ("V",)),
    "cross_entropy": Rule(_cross_entropy, ("V",), ("V",), ("weight",), True),
    "fused_linear_cross_entropy": Rule(_cross_entropy, ("V",), ("V",), ("class_weight",), True),
    "fused_moe": Rule(_moe, (), fills="k"),
    "fused_linear_jsd": Rule(_jsd, ("V",), ("V",), gathers="two all-gathers"),
    "grpo_loss": Rule(_grpo, ("V",), ("V",)),
}
