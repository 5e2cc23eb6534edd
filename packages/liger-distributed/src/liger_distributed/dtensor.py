"""liger_core's ops on DTensors: an op's `dimensions` are enough, and no op is named here.

Each dimension of the mesh divides one independent name, the one along which most bytes are divided already. Tensors that have
the name are taken divided. The others are taken whole, and their gradient is a sum. The op runs on the local tensors, in any
language. Results that have the name are divided, the others are sums. What an op can do beyond that is in `rules`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

from liger_core import tensors
from liger_core.calling import MOST_REMEMBERED
from liger_core.contract import Needs, Op, compiling
from liger_core.dimensions import independent
from liger_distributed.rules import RULES, Call, Rule, Spread

log = logging.getLogger("liger_distributed")
_said: set[tuple[Any, ...]] = set()


class Plan(NamedTuple):
    """What metadata decides about a call: how each tensor is taken, and how results are wrapped.

    Attributes:
        mesh: the mesh of all its DTensors.
        taken: for each tensor its placements and those of its gradient; None for a tensor without a gradient.
        spread: what is divided, and among which processes.
        sizes: the sizes of the dimensions, by name, as one process would see them.
        divided: the name that each dimension of the mesh divides.
        results: the names that results are divided over, for each dimension of the mesh.
        rule: what makes the results of a part, if that isn't the op alone.
        divides_alone: there is no rule, and no result is a mean, which would send a count.
        needs: which differentiable tensors require a gradient.
        moved: the tensors that aren't taken as they are placed.
        wrapped: placements, shape and stride of results, by what makes them.
        made: how DTensors are made from a kernel's results and gradients, by their metadata.
    """

    mesh: DeviceMesh
    taken: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...] | None]]
    spread: Spread
    sizes: dict[str, int]
    divided: list[str | None]
    results: list[str | None]
    rule: Rule | None
    divides_alone: bool
    needs: Needs
    moved: tuple[str, ...]
    wrapped: dict[Any, tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]]
    made: dict[Any, Made]


class Made(NamedTuple):
    """Makes a DTensor from a local tensor, with the metadata of one that was made before.

    `DTensor.from_local` does the same in several times the time: it is an autograd function, and makes the metadata again.

    Attributes:
        spec: a DTensor's metadata. It doesn't change, so DTensors may share it, as torch's own operators let them.
        shape, stride: those that one process would see.
        placements: where it is.
        incoming: the placements of its gradient, which is whole for addends.
    """

    spec: Any
    shape: torch.Size
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]
    incoming: tuple[Placement, ...]

    def of(self, local: Tensor) -> Tensor:
        """The DTensor. Autograd doesn't record it."""
        # `__init__` does nothing, and would take as long as all the rest.
        return cast("Any", DTensor).__new__(DTensor, local, self.spec, requires_grad=False)

    def recorded(self, local: Tensor, mesh: DeviceMesh) -> DTensor:
        """The DTensor, as autograd records it."""
        return DTensor.from_local(local, mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)


class Parts:
    """A call whose kernel runs on local tensors while autograd records it for the DTensors: see `liger_core.autograd.Parts`."""

    __slots__ = ("arguments", "given", "known", "locals", "made", "needs", "op", "plan")

    def __init__(self, op: Op[..., Any], plan: Plan, arguments: dict[str, Any], given: tuple[Any, ...]) -> None:
        self.op, self.plan, self.arguments, self.given = op, plan, arguments, given
        self.needs, self.known = plan.needs, plan.spread  # `spread`, because no other plan has it
        self.made: list[Made | None] = []
        self.locals: list[Tensor] = []

    def whole(self, result: Any) -> Any:
        """Results as DTensors."""
        if not isinstance(result, tuple):
            return self._whole(0, result)
        return tuple([self._whole(number, value) for number, value in enumerate(cast("tuple[Any, ...]", result))])

    def _whole(self, number: int, value: Tensor | None) -> Tensor | None:
        if value is None:
            self.made.append(None)
            return None
        key = number, value.shape, value.stride(), value.dtype
        made = self.plan.made.get(key)
        if made is None:
            placements, shape, stride = _as_one(self.op, self.plan, number, value, self.arguments)
            made = self.plan.made[key] = _made(value, self.plan.mesh, placements, shape, stride)
        self.made.append(made)
        return made.of(value)

    def flowing(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Incoming gradients, divided as the results are; whole for results that are addends."""
        found: list[Tensor | None] = []
        for gradient, made in zip(gradients, self.made, strict=True):
            if gradient is None or made is None:
                found.append(None)
                continue
            here = _redistributed(gradient, self.plan.mesh, made.incoming)
            found.append(_arrived(here.to_local() if torch.is_grad_enabled() else here._local_tensor))
        self.locals = [local for local in found if local is not None]
        return tuple(found)

    def gradients(self, found: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients as DTensors; addends for a tensor that all parts need whole."""
        wrapped: list[Tensor | None] = []
        held = set(map(id, self.locals))
        for name, value in zip(self.op.differentiable, found, strict=True):
            if value is None:
                wrapped.append(None)
                continue
            if id(value) in held:
                value = value.clone()  # autograd may add into a gradient in place, and knows of one owner only
            held.add(id(value))
            key = name, value.shape, value.stride(), value.dtype
            made = self.plan.made.get(key)
            if made is None:
                placements = self.plan.taken[name][1]
                assert placements is not None
                shape = self.arguments[name].shape
                made = self.plan.made[key] = _made(value, self.plan.mesh, placements, shape, _stride(value, shape))
            if torch.is_grad_enabled():  # keeps the node that says that there is no second derivative
                wrapped.append(made.recorded(value, self.plan.mesh))
            else:
                wrapped.append(made.of(value))
        return wrapped


_plans: dict[Any, Plan] = {}


def call(op: Op[..., Any], demand: str | None, arguments: dict[str, Any]) -> Any:
    """Run an op, some of whose arguments are DTensors. They and the results are as one process would see them."""
    key = None if compiling() else _key(op, demand, arguments)
    try:
        plan = None if key is None else _plans.get(key)
    except TypeError:  # an option without a hash
        key = plan = None
    if plan is None:
        plan = _plan(op, arguments)
        for name, (wanted, _) in plan.taken.items():
            _say(op.name, name, arguments[name], wanted)
        if key is not None:
            if len(_plans) >= MOST_REMEMBERED:
                _plans.clear()
            _plans[key] = plan
    there, rule = arguments, plan.rule
    if plan.moved:
        there = arguments.copy()
        for name in plan.moved:
            there[name] = _redistributed(arguments[name], plan.mesh, plan.taken[name][0])
    local = arguments.copy()
    if plan.divides_alone and key is not None:
        for name in plan.taken:
            local[name] = _arrived(there[name]._local_tensor)  # `to_local` without its autograd function
        found = op.call_parts(demand, local, Parts(op, plan, arguments, op._pick_tensors(there)))
        if found is not NotImplemented:
            return found
    for name, (_, gradient) in plan.taken.items():
        local[name] = _local(there[name], gradient)
    done = Call(op, demand, local, plan.spread, plan.sizes)
    result = rule.run(done) if rule else done.run()
    if not isinstance(result, tuple):
        return _wrap(op, plan, done, 0, result, arguments)
    results = cast("tuple[Any, ...]", result)
    wrapped = tuple(None if v is None else _wrap(op, plan, done, n, v, arguments) for n, v in enumerate(results))
    return wrapped if op.result is None else op.result(*wrapped)


def explained(op: Op[..., Any], arguments: dict[str, Any]) -> Iterator[str]:
    """What a call divides and sends: lines for `liger_core.explain`."""
    plan = _plan(op, arguments)
    over = plan.mesh.mesh_dim_names or tuple(f"dimension {number} of the mesh" for number in range(plan.mesh.ndim))
    divided = [f"{dim} over {over[number]}" for number, dim in enumerate(plan.divided) if dim is not None]
    yield f"divides {', '.join(divided)}" if divided else "divides nothing: every process makes the whole result"
    layout = op.dimensions
    assert layout is not None
    counted = {layout.tensors[result.counted][0] for result in layout.results if result.counted is not None}
    sends: list[str] = []
    for name, (wanted, _) in plan.taken.items():
        if isinstance(tensor := arguments[name], DTensor):
            for number, (at, to) in enumerate(zip(tensor.placements, wanted, strict=True)):
                if (how := _collective(at, to)) is not None:
                    sends.append(f"{name} over {over[number]} by {how}")
    for number, dim in enumerate(plan.divided):
        if dim is not None and plan.rule is not None and plan.results[number] is None:
            sends.append(f"statistics of each row over {over[number]} by {plan.rule.gathers}")
        elif dim in counted or (dim == "n" and plan.rule is not None and arguments.get("reduction") != "none"):
            sends.append(f"the number of labels over {over[number]} by an all-reduce")
    yield f"sends forward: {'; '.join(sends) or 'nothing'}"
    for name, (_, gradient) in plan.taken.items():
        where = [over[number] for number, at in enumerate(gradient or ()) if at.is_partial()]
        if where and arguments[name].requires_grad:
            yield f"the gradient of {name} is a sum over {', '.join(where)}, added up where it is read"


cast("Any", call).explain = explained


def _collective(at: Placement, to: Placement) -> str | None:
    """The collective that takes a tensor from one placement to another, or None if nothing is sent."""
    if at == to or at.is_replicate():
        return None
    if at.is_partial():
        return "a reduce-scatter" if to.is_shard() else "an all-reduce"
    return "an all-to-all" if to.is_shard() else "an all-gather"


def _key(op: Op[..., Any], demand: str | None, arguments: dict[str, Any]) -> Any:
    """The metadata of a call; None if an option is a tensor."""
    options = op._pick_options(arguments)
    for option in options:
        if isinstance(option, Tensor):
            return None
    found: list[Any] = []
    for tensor in op._pick_tensors(arguments):
        if isinstance(tensor, DTensor):
            # The spec includes its shape and dtype. The mesh is compared by identity: one of other process groups may be equal
            # to it.
            found.append((tensor._spec, id(tensor._spec.mesh), tensor.requires_grad))
        elif tensor is not None:
            found.append((tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad))
        else:
            found.append(None)
    kinds = tuple(map(op._type_of, options))  # 1, 1.0 and True are equal
    return op.name, demand, torch.is_grad_enabled(), tuple(found), options, kinds


def _plan(op: Op[..., Any], arguments: dict[str, Any]) -> Plan:
    """Check a call, and decide what it divides."""
    layout, rule = op.dimensions, RULES.get(op.name)
    if layout is None:
        raise TypeError(f"{op.name} doesn't say which of its dimensions are independent, so it takes no DTensors")
    given: dict[str, Tensor] = {name: arguments[name] for name in op.tensors if arguments[name] is not None}
    mesh = _mesh_of(op, given)
    op._checks(
        **arguments | ({"memory_budget": None} if "memory_budget" in arguments else {})
    )  # a budget is that of one process

    names = {name: layout.of(name, tensor.dim(), arguments) for name, tensor in given.items()}
    sizes: dict[str, int] = {}
    for name, tensor in given.items():
        for dim, size in zip(names[name], tensor.shape, strict=True):
            sizes[dim] = max(size, sizes.get(dim, 0))
    more = rule.divides if rule else ()
    names |= {name: ("*",) for name in (rule.keeps if rule else ()) if name in names}
    chosen = _choose(mesh, given, names, more)
    if not _may_be_divided(op, arguments, rule is not None and rule.means):
        chosen = [dim if dim in more else None for dim in chosen]
    taken: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...] | None]] = {}
    for name, tensor in given.items():
        wanted = _placements(chosen, names[name], tensor.shape, Replicate())
        gradient = _placements(chosen, names[name], tensor.shape, Partial())
        taken[name] = wanted, gradient if name in op.differentiable else None
    spread = Spread([(dim, mesh.get_group(number)) for number, dim in enumerate(chosen) if dim is not None])
    results = [None if rule and dim in rule.combines else dim for dim in chosen]
    if rule is not None and not rule.means and not any(dim in more for dim in chosen):
        counts = [mesh.size(number) for number, dim in enumerate(chosen) if dim is not None and dim == rule.fills]
        if not counts or not _leaves_nothing(sizes[rule.fills or ""], counts):
            rule = None
    alone = rule is None and all(result.counted is None for result in layout.results)
    grad = torch.is_grad_enabled()
    needs = tuple([grad and name in given and given[name].requires_grad for name in op.differentiable])
    moved = tuple(name for name, (wanted, _) in taken.items() if getattr(given[name], "placements", None) != wanted)
    return Plan(mesh, taken, spread, sizes, chosen, results, rule, alone, needs, moved, {}, {})


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
        known = _as_one(op, plan, number, value, arguments)
        if not compiling():
            plan.wrapped[key] = known
    placements, whole, stride = known
    return DTensor.from_local(value, plan.mesh, placements, run_check=False, shape=whole, stride=stride)


def _as_one(
    op: Op[..., Any], plan: Plan, number: int, value: Tensor, arguments: dict[str, Any]
) -> tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]:
    """The placements, shape and stride of a result, of which this process has `value`."""
    layout = op.dimensions
    assert layout is not None
    dims = layout.of_result(number, value.dim(), arguments) if value.dim() else ()
    shape = [plan.sizes[d] if d.rstrip("'") in plan.results else s for d, s in zip(dims, value.shape, strict=True)]
    return _placements(plan.results, dims, shape, Partial()), torch.Size(shape), _stride(value, shape)


def _made(
    value: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...]
) -> Made:
    with torch.no_grad():
        first = DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)
    incoming = tuple(Replicate() if place.is_partial() else place for place in placements)
    return Made(first._spec, shape, stride, placements, incoming)


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
    """Whether the results' parts are as declared. If the result is a mean of all rows, they are neither parts nor addends."""
    return ruled or arguments.get("reduction", "none") in ("none", "sum")


def _choose(
    mesh: DeviceMesh, given: dict[str, Tensor], names: dict[str, tuple[str, ...]], more: tuple[str, ...]
) -> list[str | None]:
    """For each dimension of the mesh the name that it divides, or None.

    Names that a rule divides come first, and only once: a weight divided along the vocabulary isn't gathered for x's sake.
    """
    chosen: list[str | None] = []
    for number in range(mesh.ndim):
        votes: dict[str, int] = {}
        for name, tensor in given.items():
            if isinstance(tensor, DTensor):
                at = tensor.placements[number]
                along: int | None = cast("Any", at).dim if _in_order(at) else None
                if along is not None and tensor.shape[along] > (0 if names[name][along] in more else 1):
                    dim = names[name][along].rstrip("'")
                    if (independent(dim) or dim in more) and not (dim in more and dim in chosen):
                        votes[dim] = votes.get(dim, 0) + tensor.numel() * tensor.element_size()
        most: str | None = None  # names of a rule come first; Dynamo up to torch 2.9 has no max with a key
        for dim, size in votes.items():
            if most is None or (dim in more, size) > (most in more, votes[most]):
                most = dim
        chosen.append(most)
    return chosen


def _in_order(at: Placement) -> bool:
    """Whether a tensor is divided, and its parts follow each other as the processes do.

    Those of a `_StridedShard`, which in torch 2.9 is a `Shard`, don't.
    `type(at) is Shard` would say the same, but Dynamo of torch 2.12 doesn't trace it.
    """
    return isinstance(at, Shard) and not isinstance(at, _StridedShard)


def _leaves_nothing(size: int, counts: list[int]) -> bool:
    """Whether a process gets an empty part of a dimension that is divided by these counts, one after the other."""
    parts = [size]
    for count in counts:
        parts = [max(0, min(-(-size // count), size - n * -(-size // count))) for size in parts for n in range(count)]
    return 0 in parts


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


def _local(there: DTensor, gradient: tuple[Placement, ...] | None) -> Tensor:
    """This process's part, which autograd records if it can get a gradient."""
    tensor = there if gradient is not None else cast("DTensor", there.detach())
    return _arrived(tensor.to_local(grad_placements=gradient))


def _redistributed(tensor: Tensor, mesh: DeviceMesh, wanted: tuple[Placement, ...]) -> DTensor:
    """The tensor in the wanted placements. A plain tensor is the same everywhere."""
    there = tensor if isinstance(tensor, DTensor) else _same_everywhere(tensor, mesh)
    return there if there.placements == wanted else there.redistribute(mesh, wanted)


def _same_everywhere(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _arrived(local: Tensor) -> Tensor:
    kind = type(local)
    if kind is Tensor or kind is Parameter:
        return local
    return tensors.arrived(local) if tensors.full_name(kind) == tensors.IN_FLIGHT else local


def _stride(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the local tensor's order of dimensions."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        stride[dim], step = step, step * max(shape[dim], 1)
    return tuple(stride)


def _say(op: str, name: str, tensor: Tensor, wanted: tuple[Placement, ...]) -> None:
    """Log once which tensor is gathered because the op needs it whole."""
    if not isinstance(tensor, DTensor) or compiling():
        return
    gathered = any(_in_order(a) and b.is_replicate() for a, b in zip(tensor.placements, wanted, strict=True))
    if gathered and (key := (op, name, tensor.placements, wanted)) not in _said:
        _said.add(key)
        log.warning("%s gathers %s: it is placed %s, and taken %s", op, name, tensor.placements, wanted)
