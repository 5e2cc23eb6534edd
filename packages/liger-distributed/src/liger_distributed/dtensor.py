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

from liger_core import subclasses
from liger_core.contract import Needs, Op, compiling
from liger_core.dimensions import independent
from liger_core.op import MOST_REMEMBERED
from liger_distributed.rules import RULES, LocalCall, Rule, Sharding

log = logging.getLogger("liger_distributed")
_logged: set[tuple[Any, ...]] = set()


class ShardingPlan(NamedTuple):
    """Decisions that a call's metadata makes: the placements of its tensors and of its results.

    Attributes:
        mesh: the mesh of all its DTensors.
        inputs: for each tensor the placements in which the op takes it, and those of its gradient, None if it gets none.
        sharding: the divided names, and the processes that share each.
        sizes: the sizes of the dimensions, by name, as one process would see them.
        divided: the name that each dimension of the mesh divides.
        results: the names that results are divided over, for each dimension of the mesh.
        rule: the op's rule, which makes the results of a part; None if the op alone does.
        divides_alone: there is no rule, and no result is a mean, which would send a count.
        needs: which differentiable tensors require a gradient.
        redistributed: the tensors that have other placements than the op takes.
        layouts: placements, shape and stride of results, by the local tensors' metadata.
        factories: makers of DTensors from a kernel's results and gradients, by the local tensors' metadata.
    """

    mesh: DeviceMesh
    inputs: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...] | None]]
    sharding: Sharding
    sizes: dict[str, int]
    divided: list[str | None]
    results: list[str | None]
    rule: Rule | None
    divides_alone: bool
    needs: Needs
    redistributed: tuple[str, ...]
    layouts: dict[Any, tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]]
    factories: dict[Any, DTensorFactory]


class DTensorFactory(NamedTuple):
    """Makes DTensors of local tensors, with the metadata of the first one.

    `DTensor.from_local` does the same in several times the time: it is an autograd function, and makes the metadata again.

    Attributes:
        spec: a DTensor's metadata. It doesn't change, so DTensors may share it, as torch's own operators let them.
        shape, stride: as one process would see them.
        placements: as in a DTensor.
        incoming: the placements of its gradient, which is whole for addends.
    """

    spec: Any
    shape: torch.Size
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]
    incoming: tuple[Placement, ...]

    def make(self, local: Tensor) -> Tensor:
        """The DTensor. Autograd doesn't record it."""
        # `__init__` does nothing, and would take as long as all the rest.
        return cast("Any", DTensor).__new__(DTensor, local, self.spec, requires_grad=False)

    def make_recorded(self, local: Tensor, mesh: DeviceMesh) -> DTensor:
        """The DTensor, as autograd records it."""
        return DTensor.from_local(local, mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)


class ShardedCall:
    """A call whose kernel runs on local tensors while autograd records it for the DTensors: see `liger_core.autograd.Parts`."""

    __slots__ = ("arguments", "factories", "key", "locals", "needs", "op", "plan", "tensors")

    def __init__(
        self, op: Op[..., Any], plan: ShardingPlan, arguments: dict[str, Any], tensors: tuple[Any, ...]
    ) -> None:
        self.op, self.plan, self.arguments, self.tensors = op, plan, arguments, tensors
        self.needs, self.key = plan.needs, plan.sharding  # `sharding`, because no other plan has it
        self.factories: list[DTensorFactory | None] = []
        self.locals: list[Tensor] = []

    def wrap_results(self, result: Any) -> Any:
        """Results as DTensors."""
        if not isinstance(result, tuple):
            return self._wrap_result(0, result)
        return tuple([self._wrap_result(number, value) for number, value in enumerate(cast("tuple[Any, ...]", result))])

    def _wrap_result(self, number: int, value: Tensor | None) -> Tensor | None:
        if value is None:
            self.factories.append(None)
            return None
        key = number, value.shape, value.stride(), value.dtype
        factory = self.plan.factories.get(key)
        if factory is None:
            placements, shape, stride = _global_layout(self.op, self.plan, number, value, self.arguments)
            factory = self.plan.factories[key] = _factory(value, self.plan.mesh, placements, shape, stride)
        self.factories.append(factory)
        return factory.make(value)

    def unwrap_gradients(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Incoming gradients, divided as the results are; whole for results that are addends."""
        local_gradients: list[Tensor | None] = []
        for gradient, factory in zip(grads, self.factories, strict=True):
            if gradient is None or factory is None:
                local_gradients.append(None)
                continue
            divided = _redistributed(gradient, self.plan.mesh, factory.incoming)
            local_gradients.append(_arrived(divided.to_local() if torch.is_grad_enabled() else divided._local_tensor))
        self.locals = [local for local in local_gradients if local is not None]
        return tuple(local_gradients)

    def wrap_gradients(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients as DTensors; addends for a tensor that all parts take whole."""
        wrapped: list[Tensor | None] = []
        owned = set(map(id, self.locals))
        for name, value in zip(self.op.differentiable, grads, strict=True):
            if value is None:
                wrapped.append(None)
                continue
            if id(value) in owned:
                value = value.clone()  # autograd may add into a gradient in place, and knows of one owner only
            owned.add(id(value))
            key = name, value.shape, value.stride(), value.dtype
            factory = self.plan.factories.get(key)
            if factory is None:
                placements = self.plan.inputs[name][1]
                assert placements is not None
                shape, stride = self.arguments[name].shape, _stride(value, self.arguments[name].shape)
                factory = self.plan.factories[key] = _factory(value, self.plan.mesh, placements, shape, stride)
            if torch.is_grad_enabled():  # keeps the node that says that there is no second derivative
                wrapped.append(factory.make_recorded(value, self.plan.mesh))
            else:
                wrapped.append(factory.make(value))
        return wrapped


_plans: dict[Any, ShardingPlan] = {}


def call(op: Op[..., Any], demand: str | None, arguments: dict[str, Any]) -> Any:
    """Run an op, some of whose arguments are DTensors. They and the results are as one process would see them."""
    key = None if compiling() else _key(op, demand, arguments)
    try:
        plan = None if key is None else _plans.get(key)
    except TypeError:  # an option without a hash
        key = plan = None
    if plan is None:
        plan = _plan(op, arguments)
        for name, (placements, _) in plan.inputs.items():
            _log_gather(op.name, name, arguments[name], placements)
        if key is not None:
            if len(_plans) >= MOST_REMEMBERED:
                _plans.clear()
            _plans[key] = plan
    placed, rule = arguments, plan.rule
    if plan.redistributed:
        placed = arguments.copy()
        for name in plan.redistributed:
            placed[name] = _redistributed(arguments[name], plan.mesh, plan.inputs[name][0])
    local = arguments.copy()
    if plan.divides_alone and key is not None:
        for name in plan.inputs:
            local[name] = _arrived(placed[name]._local_tensor)  # `to_local` without its autograd function
        result = op.call_parts(demand, local, ShardedCall(op, plan, arguments, op._pick_tensors(placed)))
        if result is not NotImplemented:
            return result
    for name, (_, gradient) in plan.inputs.items():
        local[name] = _local(placed[name], gradient)
    local_call = LocalCall(op, demand, local, plan.sharding, plan.sizes)
    result = rule.run(local_call) if rule else local_call.run()
    if not isinstance(result, tuple):
        return _wrap(op, plan, local_call, 0, result, arguments)
    results = cast("tuple[Any, ...]", result)
    wrapped = tuple(None if v is None else _wrap(op, plan, local_call, n, v, arguments) for n, v in enumerate(results))
    return wrapped if op.result is None else op.result(*wrapped)


def _explain(op: Op[..., Any], arguments: dict[str, Any]) -> Iterator[str]:
    """Lines for `liger_core.explain`: the names that a call divides, and the tensors that it sends."""
    plan = _plan(op, arguments)
    mesh_dims = plan.mesh.mesh_dim_names or tuple(f"dimension {number} of the mesh" for number in range(plan.mesh.ndim))
    divided = [f"{dim} over {mesh_dims[number]}" for number, dim in enumerate(plan.divided) if dim is not None]
    yield f"divides {', '.join(divided)}" if divided else "divides nothing: every process makes the whole result"
    layout = op.dimensions
    assert layout is not None
    counted = {layout.tensors[result.counted][0] for result in layout.results if result.counted is not None}
    sends: list[str] = []
    for name, (placements, _) in plan.inputs.items():
        if isinstance(tensor := arguments[name], DTensor):
            for number, (at, to) in enumerate(zip(tensor.placements, placements, strict=True)):
                if (collective := _collective(at, to)) is not None:
                    sends.append(f"{name} over {mesh_dims[number]} by {collective}")
    for number, dim in enumerate(plan.divided):
        if dim is not None and plan.rule is not None and plan.results[number] is None:
            sends.append(f"statistics of each row over {mesh_dims[number]} by {plan.rule.gathers}")
        elif dim in counted or (dim == "n" and plan.rule is not None and arguments.get("reduction") != "none"):
            sends.append(f"the number of labels over {mesh_dims[number]} by an all-reduce")
    yield f"sends forward: {'; '.join(sends) or 'nothing'}"
    for name, (_, gradient) in plan.inputs.items():
        summed = [mesh_dims[number] for number, at in enumerate(gradient or ()) if at.is_partial()]
        if summed and arguments[name].requires_grad:
            yield f"the gradient of {name} is a sum over {', '.join(summed)}, added up where it is read"


cast("Any", call).explain = _explain


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
    metadata: list[Any] = []
    for tensor in op._pick_tensors(arguments):
        if isinstance(tensor, DTensor):
            # The spec includes its shape and dtype. The mesh is compared by identity: one of other process groups may be equal
            # to it.
            metadata.append((tensor._spec, id(tensor._spec.mesh), tensor.requires_grad))
        elif tensor is not None:
            metadata.append((tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad))
        else:
            metadata.append(None)
    types = tuple(map(op._type_of, options))  # 1, 1.0 and True are equal
    return op.name, demand, torch.is_grad_enabled(), tuple(metadata), options, types


def _plan(op: Op[..., Any], arguments: dict[str, Any]) -> ShardingPlan:
    """Check a call, and decide what it divides."""
    layout, rule = op.dimensions, RULES.get(op.name)
    if layout is None:
        raise TypeError(f"{op.name} doesn't say which of its dimensions are independent, so it takes no DTensors")
    inputs: dict[str, Tensor] = {name: arguments[name] for name in op.tensors if arguments[name] is not None}
    mesh = _mesh_of(op, inputs)
    # A memory budget is that of one process, so the whole call is checked without it.
    op._checks(**arguments | ({"memory_budget": None} if "memory_budget" in arguments else {}))

    names = {name: layout.of(name, tensor.dim(), arguments) for name, tensor in inputs.items()}
    sizes: dict[str, int] = {}
    for name, tensor in inputs.items():
        for dim, size in zip(names[name], tensor.shape, strict=True):
            sizes[dim] = max(size, sizes.get(dim, 0))
    by_rule = rule.divides if rule else ()
    names |= {name: ("*",) for name in (rule.keeps if rule else ()) if name in names}
    chosen = _choose(mesh, inputs, names, by_rule)
    if not _may_be_divided(op, arguments, rule is not None and rule.means):
        chosen = [dim if dim in by_rule else None for dim in chosen]
    placements: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...] | None]] = {}
    for name, tensor in inputs.items():
        forward = _placements(chosen, names[name], tensor.shape, sizes, Replicate())
        gradient = _placements(chosen, names[name], tensor.shape, sizes, Partial())
        placements[name] = forward, gradient if name in op.differentiable else None
    sharding = Sharding([(dim, mesh.get_group(number)) for number, dim in enumerate(chosen) if dim is not None])
    results = [None if rule and dim in rule.combines else dim for dim in chosen]
    if rule is not None and not rule.means and not any(dim in by_rule for dim in chosen):
        counts = [mesh.size(number) for number, dim in enumerate(chosen) if dim is not None and dim == rule.fills]
        if not counts or not _has_empty_part(sizes[rule.fills or ""], counts):
            rule = None
    alone = rule is None and all(result.counted is None for result in layout.results)
    grad = torch.is_grad_enabled()
    needs = tuple([grad and name in inputs and inputs[name].requires_grad for name in op.differentiable])
    redistributed = tuple(
        name for name, (forward, _) in placements.items() if getattr(inputs[name], "placements", None) != forward
    )
    return ShardingPlan(
        mesh, placements, sharding, sizes, chosen, results, rule, alone, needs, redistributed, layouts={}, factories={}
    )


def _wrap(
    op: Op[..., Any], plan: ShardingPlan, call: LocalCall, number: int, value: Tensor, arguments: dict[str, Any]
) -> DTensor:
    """A result of this part, as one process would see the whole."""
    layout = op.dimensions
    assert layout is not None
    counted = layout.results[number].counted
    if counted is not None:
        value = value * call.share(counted, layout.tensors[counted][0], value.dtype)
    key = number, value.shape, value.stride()
    global_layout = None if compiling() else plan.layouts.get(key)
    if global_layout is None:
        global_layout = _global_layout(op, plan, number, value, arguments)
        if not compiling():
            plan.layouts[key] = global_layout
    placements, shape, stride = global_layout
    return DTensor.from_local(value, plan.mesh, placements, run_check=False, shape=shape, stride=stride)


def _global_layout(
    op: Op[..., Any], plan: ShardingPlan, number: int, value: Tensor, arguments: dict[str, Any]
) -> tuple[tuple[Placement, ...], torch.Size, tuple[int, ...]]:
    """The placements, shape and stride of a result, of which this process has `value`."""
    layout = op.dimensions
    assert layout is not None
    dims = layout.of_result(number, value.dim(), arguments) if value.dim() else ()
    shape = [plan.sizes[d] if d.rstrip("'") in plan.results else s for d, s in zip(dims, value.shape, strict=True)]
    return _placements(plan.results, dims, shape, plan.sizes, Partial()), torch.Size(shape), _stride(value, shape)


def _factory(
    value: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...]
) -> DTensorFactory:
    with torch.no_grad():
        first = DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)
    incoming = tuple(Replicate() if at.is_partial() else at for at in placements)
    return DTensorFactory(first._spec, shape, stride, placements, incoming)


def _mesh_of(op: Op[..., Any], inputs: dict[str, Tensor]) -> DeviceMesh:
    meshes = {name: tensor.device_mesh for name, tensor in inputs.items() if isinstance(tensor, DTensor)}
    (named, mesh), *others = meshes.items()
    for other, other_mesh in others:
        if other_mesh != mesh:
            raise ValueError(f"{op.name}: {other} is on {other_mesh}; it takes {named}'s mesh, {mesh}")
    if op.names[0] not in meshes:
        raise TypeError(subclasses.mixed(op.name, op.names[0], named))
    return mesh


def _may_be_divided(op: Op[..., Any], arguments: dict[str, Any], means: bool) -> bool:
    """Whether the results' parts are as declared. Means of rows are neither parts nor addends, unless a rule makes them."""
    return means or arguments.get("reduction", "none") in ("none", "sum")


def _choose(
    mesh: DeviceMesh, inputs: dict[str, Tensor], names: dict[str, tuple[str, ...]], by_rule: tuple[str, ...]
) -> list[str | None]:
    """For each dimension of the mesh the name that it divides, or None.

    Names that a rule divides come first, and only once: a weight divided along the vocabulary isn't gathered for x's sake.
    """
    chosen: list[str | None] = []
    for number in range(mesh.ndim):
        votes: dict[str, int] = {}
        for name, tensor in inputs.items():
            if isinstance(tensor, DTensor):
                at = tensor.placements[number]
                along: int | None = cast("Any", at).dim if _in_order(at) else None
                if along is not None and tensor.shape[along] > (0 if names[name][along] in by_rule else 1):
                    dim = names[name][along].rstrip("'")
                    if (independent(dim) or dim in by_rule) and not (dim in by_rule and dim in chosen):
                        votes[dim] = votes.get(dim, 0) + tensor.numel() * tensor.element_size()
        most: str | None = None  # names of a rule come first; Dynamo up to torch 2.9 has no max with a key
        for dim, size in votes.items():
            if most is None or (dim in by_rule, size) > (most in by_rule, votes[most]):
                most = dim
        chosen.append(most)
    return chosen


def _in_order(at: Placement) -> bool:
    """Whether a tensor is divided, and its parts follow each other as the processes do.

    The parts of a `_StridedShard`, which in torch 2.9 is a `Shard`, don't.
    `type(at) is Shard` would say the same, but Dynamo of torch 2.12 doesn't trace it.
    """
    return isinstance(at, Shard) and not isinstance(at, _StridedShard)


def _has_empty_part(size: int, counts: list[int]) -> bool:
    """Whether a process gets an empty part of a dimension that is divided by these counts, one after the other."""
    parts = [size]
    for count in counts:
        parts = [max(0, min(-(-size // count), size - n * -(-size // count))) for size in parts for n in range(count)]
    return 0 in parts


def _placements(
    chosen: Sequence[str | None],
    dims: tuple[str, ...],
    shape: Sequence[int],
    sizes: dict[str, int],
    otherwise: Placement,
) -> tuple[Placement, ...]:
    """The placements of a tensor with these dimensions; `otherwise` if it lacks the chosen name.

    One of size 1 lacks it only beside a larger one of the same name: a single head of q is divided as the heads of k are.
    """
    placements: list[Placement] = []
    bare = [dim.rstrip("'") for dim in dims]
    for dim in chosen:
        if dim is None:
            placements.append(Replicate())
            continue
        at = bare.index(dim) if dim in bare else None
        if at is None or (independent(dim) and shape[at] == 1 < sizes[dims[at]]):
            placements.append(otherwise)
        else:
            placements.append(Shard(at))
    return tuple(placements)


def _local(tensor: DTensor, gradient: tuple[Placement, ...] | None) -> Tensor:
    """This process's part, which autograd records if it can get a gradient."""
    recorded = tensor if gradient is not None else cast("DTensor", tensor.detach())
    return _arrived(recorded.to_local(grad_placements=gradient))


def _redistributed(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """The tensor in these placements. A plain tensor is the same everywhere."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return tensor if tensor.placements == placements else tensor.redistribute(mesh, placements)


def _arrived(local: Tensor) -> Tensor:
    """The local tensor, for which this waits if a collective is still sending it."""
    cls = type(local)
    if cls is Tensor or cls is Parameter:
        return local
    return subclasses.arrived(local) if subclasses.full_name(cls) == subclasses.IN_FLIGHT else local


def _stride(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the local tensor's order of dimensions."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        stride[dim], step = step, step * max(shape[dim], 1)
    return tuple(stride)


def _log_gather(op: str, name: str, tensor: Tensor, placements: tuple[Placement, ...]) -> None:
    """Log once which tensor is gathered because the op needs it whole."""
    if not isinstance(tensor, DTensor) or compiling():
        return
    gathered = any(_in_order(a) and b.is_replicate() for a, b in zip(tensor.placements, placements, strict=True))
    if gathered and (key := (op, name, tensor.placements, placements)) not in _logged:
        _logged.add(key)
        log.warning("%s gathers %s: it is placed %s, and taken %s", op, name, tensor.placements, placements)
