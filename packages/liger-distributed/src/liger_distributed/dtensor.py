"""liger_core's ops on DTensors: from an op's `dimensions`, without a word of the op.

For each dimension of the mesh one independent name is chosen, that along which most bytes lie already. Tensors that have
the name are taken divided, the others whole, their gradient as a sum; the op runs on the local tensors, in any language;
results that have the name are divided, the others are sums. What an op can do beyond that is in `rules`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from liger_core import tensors
from liger_core.calling import MOST_REMEMBERED
from liger_core.contract import Op, compiling
from liger_core.dimensions import independent
from liger_distributed.rules import RULES, Call, Spread
from liger_distributed.vocabulary import landed

log = logging.getLogger("liger_distributed")
_said: set[tuple[Any, ...]] = set()


class Plan(NamedTuple):
    """What metadata decides about a call: how each tensor is taken, and how results are wrapped.

    Attributes:
        mesh: of all its DTensors.
        taken: for each tensor its placements and those of its gradient, None for a tensor without one.
        spread: what is divided, and among whom.
        sizes: of the dimensions, by name, as one process would see them.
        results: the names that results are divided over, for each dimension of the mesh.
        wrapped: placements, shape and stride of results, by what makes them.
    """

    mesh: DeviceMesh
    taken: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...] | None]]
    spread: Spread
    sizes: dict[str, int]
    results: list[str | None]
    wrapped: dict[Any, tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]]


_plans: dict[Any, Plan] = {}


def call(op: Op[..., Any], demand: str | None, arguments: dict[str, Any]) -> Any:
    """Run an op, some of whose arguments are DTensors. They and the results are as one process would see them."""
    key = None if compiling() else _key(op, arguments)
    plan = None if key is None else _plans.get(key)
    if plan is None:
        plan = _plan(op, arguments)
        if key is not None:
            if len(_plans) >= MOST_REMEMBERED:
                _plans.clear()
            _plans[key] = plan
    local = dict(arguments)
    for name, (wanted, gradient) in plan.taken.items():
        local[name] = _local(arguments[name], plan.mesh, wanted, gradient)
    done = Call(op, demand, local, plan.spread, plan.sizes)
    rule = RULES.get(op.name)
    result = rule.run(done) if rule else done.run()
    if not isinstance(result, tuple):
        return _wrap(op, plan, done, 0, result, arguments)
    wrapped = tuple(None if v is None else _wrap(op, plan, done, n, v, arguments) for n, v in enumerate(result))
    return wrapped if op.result is None else cast("Any", op.result)(*wrapped)


def _key(op: Op[..., Any], arguments: dict[str, Any]) -> Any:
    """The metadata of a call; None where an option can't be looked up."""
    options = [arguments[name] for name in op.options]
    found = []
    for name in op.tensors:
        tensor = arguments[name]
        # A mesh by what it is: one of other process groups may equal it.
        placed = (id(tensor.device_mesh), tensor.placements) if isinstance(tensor, DTensor) else None
        found.append(None if tensor is None else (placed, tensor.shape, tensor.dtype, tensor.device))
    key = op.name, tuple(found), tuple(options), tuple(map(type, options))  # 1, 1.0 and True are equal
    try:
        hash(key)
    except TypeError:
        return None
    return None if any(isinstance(option, Tensor | tuple) for option in options) else key


def _plan(op: Op[..., Any], arguments: dict[str, Any]) -> Plan:
    """Check a call, and decide what it divides."""
    layout, rule = op.dimensions, RULES.get(op.name)
    if layout is None:
        raise TypeError(f"{op.name} doesn't say which of its dimensions are independent, so it takes no DTensors")
    given: dict[str, Tensor] = {name: arguments[name] for name in op.tensors if arguments[name] is not None}
    mesh = _mesh_of(op, given)
    op._checks(
        **arguments | ({"memory_budget": None} if "memory_budget" in arguments else {})
    )  # that is of one process

    names = {name: layout.of(name, tensor.dim(), arguments) for name, tensor in given.items()}
    sizes: dict[str, int] = {}
    for name, tensor in given.items():
        for dim, size in zip(names[name], tensor.shape, strict=True):
            sizes[dim] = max(size, sizes.get(dim, 0))
    more = rule.divides if rule else ()
    names |= {name: ("*",) for name in (rule.keeps if rule else ()) if name in names}
    chosen = _choose(mesh, given, names, more)
    if not _may_be_divided(op, arguments, rule is not None):
        chosen = [dim if dim in more else None for dim in chosen]
    taken = {}
    for name, tensor in given.items():
        wanted = _placements(chosen, names[name], tensor.shape, Replicate())
        gradient = _placements(chosen, names[name], tensor.shape, Partial())
        _say(op.name, name, tensor, wanted)
        taken[name] = wanted, gradient if name in op.differentiable else None
    spread = Spread([(dim, mesh.get_group(number)) for number, dim in enumerate(chosen) if dim is not None])
    results = [None if rule and dim in rule.combines else dim for dim in chosen]
    return Plan(mesh, taken, spread, sizes, results, {})


def _wrap(op: Op[..., Any], plan: Plan, done: Call, number: int, value: Tensor, arguments: dict[str, Any]) -> DTensor:
    """A result of this part, as one process would see the whole."""
    layout = op.dimensions
    assert layout is not None
    counted = layout.results[number].counted
    if counted is not None:
        value = value * done.share(counted, layout.tensors[counted][0], value.dtype)
    key = number, value.shape, value.stride()
    known = None if compiling() else plan.wrapped.get(key)
    if known is None:
        dims = layout.of_result(number, value.dim(), arguments) if value.dim() else ()
        shape = [plan.sizes[d] if d.rstrip("'") in plan.results else s for d, s in zip(dims, value.shape, strict=True)]
        known = _placements(plan.results, dims, shape, Partial()), torch.Size(shape), _stride(value, shape)
        if not compiling():
            plan.wrapped[key] = known
    placements, whole, stride = known
    return DTensor.from_local(value, plan.mesh, placements, run_check=False, shape=whole, stride=stride)


def _mesh_of(op: Op[..., Any], given: dict[str, Tensor]) -> DeviceMesh:
    meshes = {name: tensor.device_mesh for name, tensor in given.items() if isinstance(tensor, DTensor)}
    (named, mesh), *others = meshes.items()
    for other, its in others:
        if its != mesh:
            raise ValueError(f"{op.name}: {other} is on {its}; it takes {named}'s mesh, {mesh}")
    if op.names[0] not in meshes:
        raise TypeError(tensors.mixed(op.name, op.names[0], named))
    return mesh


def _may_be_divided(op: Op[..., Any], arguments: dict[str, Any], ruled: bool) -> bool:
    """Whether the parts of the results are what is declared: of a mean of all rows they are no parts, nor addends."""
    return ruled or arguments.get("reduction", "none") in ("none", "sum")


def _choose(
    mesh: DeviceMesh, given: dict[str, Tensor], names: dict[str, tuple[str, ...]], more: tuple[str, ...]
) -> list[str | None]:
    """For each dimension of the mesh the name that it divides, or None.

    What a rule divides comes first, and once: a weight divided along the vocabulary isn't gathered for x's sake.
    """
    chosen: list[str | None] = []
    for number in range(mesh.ndim):
        votes: dict[str, int] = {}
        for name, tensor in given.items():
            if isinstance(tensor, DTensor):
                at = tensor.placements[number]
                if type(at) is Shard and tensor.shape[at.dim] > (0 if names[name][at.dim] in more else 1):
                    dim = names[name][at.dim].rstrip("'")
                    if (independent(dim) or dim in more) and not (dim in more and dim in chosen):
                        votes[dim] = votes.get(dim, 0) + tensor.numel() * tensor.element_size()
        chosen.append(max(votes, key=lambda dim: (dim in more, votes[dim])) if votes else None)
    return chosen


def _placements(
    chosen: Sequence[str | None], dims: tuple[str, ...], shape: Sequence[int], lacking: Placement
) -> tuple[Placement, ...]:
    placed: list[Placement] = []
    bare = [dim.rstrip("'") for dim in dims]
    for dim in chosen:
        if dim is None:
            placed.append(Replicate())
        elif dim in bare and (shape[bare.index(dim)] != 1 or not independent(dim) or dims[bare.index(dim)] != dim):
            placed.append(Shard(bare.index(dim)))
        else:
            placed.append(lacking)
    return tuple(placed)


def _local(
    tensor: Tensor, mesh: DeviceMesh, wanted: tuple[Placement, ...], gradient: tuple[Placement, ...] | None
) -> Tensor:
    """This process's part. A plain tensor is the same everywhere."""
    whole = [Replicate()] * mesh.ndim
    there = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, whole, run_check=False)
    if gradient is None:
        there = cast("DTensor", there.detach())
    if there.placements != wanted:
        there = there.redistribute(mesh, wanted)
    local = there.to_local(grad_placements=gradient)
    return landed(local) if tensors.full_name(type(local)) == tensors.IN_FLIGHT else local


def _stride(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Without gaps, and in the local tensor's order of dimensions."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        stride[dim], step = step, step * max(shape[dim], 1)
    return tuple(stride)


def _say(op: str, name: str, tensor: Tensor, wanted: tuple[Placement, ...]) -> None:
    """Once: what is gathered because the op needs it whole."""
    if not isinstance(tensor, DTensor) or compiling():
        return
    gathered = any(type(a) is Shard and b.is_replicate() for a, b in zip(tensor.placements, wanted, strict=True))
    if gathered and (key := (op, name, tensor.placements, wanted)) not in _said:
        _said.add(key)
        log.warning("%s gathers %s: it is placed %s, and taken %s", op, name, tensor.placements, wanted)
