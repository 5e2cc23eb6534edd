"""Every op on DTensors, on two processes, against the reference on the whole."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from seen import Sent
from torch import Tensor

import liger_core
from liger_conformance.case import Make, cases_of
from liger_conformance.dividing import divisible, names_of
from liger_conformance.evaluate import complete, incoming_of, name_results
from liger_core.contract import Op, ops
from liger_core.dimensions import independent

ROOT = Path(__file__).resolve().parent.parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import pages  # noqa: E402  a command of the repository, which is no package


@functools.cache
def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))


def arguments_of(op: Op[..., Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The first case of an op in float64, with other options; of a `reduction`, that which divides.

    ``vocabulary=1`` leaves one column of it.
    """
    known, options = cases_of(op.name), dict(options or {})
    arguments = complete(op, known.make(known.cases[0], Make(torch.float64, str(torch.get_default_device()))))
    if "reduction" in op.options:
        arguments["reduction"] = "none"
    if "vocabulary" in options:
        for tensor, names in names_of(op, arguments).items():
            if "V" in names:
                arguments[tensor] = arguments[tensor].narrow(names.index("V"), 0, options["vocabulary"]).contiguous()
            elif not arguments[tensor].is_floating_point():
                arguments[tensor] = arguments[tensor].clamp(max=options["vocabulary"] - 1)
        del options["vocabulary"]
    return arguments | options


def spread(tensor: Tensor, at: int | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(tensor, mesh(), [Replicate() if at is None else Shard(at)])


def placed(op: Op[..., Any], arguments: dict[str, Any], over: str) -> dict[str, Any]:
    """The arguments, whose tensors that have the name are divided; what an op takes whole is a plain tensor."""
    from liger_distributed.rules import RULES

    parts = dict(arguments)
    for tensor, names in names_of(op, arguments).items():
        value, bare = arguments[tensor], [dim.rstrip("'") for dim in names]
        at = bare.index(over) if over in bare else None
        if at is not None and value.shape[at] == 1 and independent(over):
            at = None
        if op.name not in RULES or tensor not in RULES[op.name].keeps:
            parts[tensor] = spread(value, at)
    return parts


def divided(name: str, over: str, options: dict[str, Any], compiled: bool = False) -> tuple[Any, Any]:
    """Hold an op whose tensors are divided over a name against its reference; the collectives, forward and backward."""
    arguments = arguments_of(ops[name], options)
    return hold(ops[name], arguments, placed(ops[name], arguments, over), compiled)


def hold(op: Op[..., Any], arguments: dict[str, Any], parts: dict[str, Any], compiled: bool = False) -> tuple[Any, Any]:
    """Call an op on parts, and its reference on the whole, in float64: the same results and gradients."""
    from torch.distributed.tensor import DTensor

    whole = dict(arguments)
    for tensor in op.differentiable:
        if arguments[tensor] is not None:
            whole[tensor], parts[tensor] = arguments[tensor].clone().requires_grad_(), parts[tensor].requires_grad_()

    def call(**inputs: Any) -> Any:
        return op(**inputs)

    if compiled:
        results = name_results(op, torch.compile(call, backend="aot_eager", fullgraph=True)(**parts))
        forward = Sent()
    else:
        with Sent() as forward:
            results = name_results(op, call(**parts))
    truth = name_results(op, op.reference(**whole))
    for result, value in truth.items():
        if value is not None:
            assert isinstance(results[result], DTensor), f"{result} is a {type(results[result]).__name__}"
            torch.testing.assert_close(results[result].full_tensor().detach(), value.detach(), rtol=1e-12, atol=1e-12)
    outputs = [result for result, value in truth.items() if value is not None and value.requires_grad]
    incoming = incoming_of(op, arguments)
    torch.autograd.backward([truth[result] for result in outputs], [incoming[result] for result in outputs])
    flowing = [distribute(incoming[result], results[result].device_mesh) for result in outputs]
    with Sent() as backward:
        torch.autograd.backward([results[result] for result in outputs], flowing)
    for tensor in op.differentiable:
        if arguments[tensor] is not None:
            torch.testing.assert_close(parts[tensor].grad.full_tensor(), whole[tensor].grad, rtol=1e-12, atol=1e-12)
    return [kind for kind, _ in forward.collectives], [kind for kind, _ in backward.collectives]


def distribute(tensor: Tensor, on: Any) -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(tensor, on, [Replicate()] * on.ndim)


def independent_names() -> list[tuple[str, str]]:
    return [(name, over) for name in sorted(ops) for over in divisible(ops[name], arguments_of(ops[name]))]


@pytest.mark.parametrize(("name", "over"), independent_names())
def test_a_divided_dimension(pool: Pool, name: str, over: str) -> None:
    """Nothing is sent forward, except for the count of the labels that a mean divides by."""
    forward, _ = pool.run(divided, name, over, {})[0]
    assert forward == (["all_reduce"] if over in pages.counted(ops[name]) else [])


OF_HEADS = ["rope", "qwen2vl_mrope", "llama4_rope"]


def with_one_q_head(op: Op[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with one head of q, and six of k."""
    heads = names_of(op, arguments)["q"].index("h")
    q, k = (arguments[name].narrow(heads, 0, 1) for name in ("q", "k"))
    return arguments | {"q": q, "k": torch.cat([k * factor for factor in range(1, 7)], heads)}


def of_one_q_head(name: str) -> None:
    import reference_kernels

    arguments = with_one_q_head(ops[name], arguments_of(ops[name]))
    hold(ops[name], arguments, placed(ops[name], arguments, "h"))
    with reference_kernels.installed():
        hold(ops[name], arguments, placed(ops[name], arguments, "h"))


@pytest.mark.parametrize("name", OF_HEADS)
def test_one_q_head_beside_divided_k_heads(pool: Pool, name: str) -> None:
    """A result whose dimension has one element is no sum over the processes: no other tensor of that name has more."""
    pool.run(of_one_q_head, name)


GATHER = ["all_gather_into_tensor"]
SMOOTH = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 3.0, "return_predicted_tokens": True}


@pytest.mark.parametrize(
    ("name", "options", "sent"),
    [
        ("embedding", {}, []),
        ("embedding", {"padding_idx": -4}, []),
        ("embedding", {"vocabulary": 1}, []),
        ("cross_entropy", {}, GATHER),
        ("cross_entropy", {"reduction": "mean", **SMOOTH}, GATHER),
        ("cross_entropy", {"vocabulary": 1, "weight": None, "reduction": "sum"}, GATHER),
        ("fused_linear_cross_entropy", {"reduction": "sum"}, GATHER),
        ("fused_linear_cross_entropy", {"vocabulary": 1, "class_weight": None}, GATHER),
        ("fused_linear_jsd", {"beta": 0.3, "temperature": 2.0}, GATHER * 2),
        ("fused_linear_jsd", {"beta": 0.0, "vocabulary": 1, "labels": None}, GATHER * 2),
        ("fused_linear_jsd", {"beta": 1.0}, GATHER * 2),
        ("grpo_loss", {}, GATHER),
        ("grpo_loss", {"reduction": "mean", "loss_type": "bnpo", "temperature": 0.7}, GATHER),
        ("grpo_loss", {"vocabulary": 1, "reduction": "mean"}, GATHER),
    ],
)
def test_a_divided_vocabulary(pool: Pool, name: str, options: dict[str, Any], sent: list[str]) -> None:
    """Where one process may have no column. Backward, the parts of dx stay addends until they are read."""
    forward, backward = pool.run(divided, name, "V", options)[0]
    assert forward == sent
    assert backward == []


def of_one_expert() -> None:
    """Each token has one expert, which process 1 has none of; results and gradients, in float64."""
    op = ops["fused_moe"]
    arguments = arguments_of(op)
    arguments |= {name: arguments[name][:, :1].contiguous() for name in ("expert_indices", "expert_weights")}
    parts = dict(arguments)
    for tensor, names in names_of(op, arguments).items():
        parts[tensor] = spread(arguments[tensor], names.index("k") if "k" in names else None)
    hold(op, arguments, parts)


def test_a_process_without_experts_of_a_token(pool: Pool) -> None:
    pool.run(of_one_expert)


@pytest.mark.parametrize(
    ("name", "weight"), [("cross_entropy", "weight"), ("fused_linear_cross_entropy", "class_weight")]
)
def test_a_mean_over_divided_rows_counts_all_labels(pool: Pool, name: str, weight: str) -> None:
    """A number is sent for the labels that count, and another for the weights of theirs."""
    with_z_loss = {"reduction": "mean", "return_z_loss": True, "return_token_accuracy": True, "lse_square_scale": 0.1}
    forward, _ = pool.run(divided, name, "n", with_z_loss | {weight: None})[0]
    assert forward == ["all_reduce"]
    forward, _ = pool.run(divided, name, "n", {"reduction": "mean"})[0]
    assert set(forward) == {"all_reduce"}


def two_divisors() -> str:
    with pytest.raises(ValueError, match="cross_entropy: a mean over divided rows") as caught:
        divided("cross_entropy", "n", {"reduction": "mean", "lse_square_scale": 0.1})
    return str(caught.value)


def test_a_mean_that_has_no_one_divisor_is_refused(pool: Pool) -> None:
    assert "it takes reduction='sum'" in pool.run(two_divisors)[0]


def of_two_dimensions(name: str, sizes: tuple[int, int], rows: str) -> None:
    """Rows divided over the first dimension of a mesh, the vocabulary over the second."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    op, on = ops[name], init_device_mesh(torch.get_default_device().type, sizes, mesh_dim_names=("dp", "tp"))
    means = "reduction" in op.options and name != "grpo_loss"  # its mean is of whole rows
    arguments = arguments_of(op, {"reduction": "mean"} if means else {})
    parts = dict(arguments)
    for tensor, names in names_of(op, arguments).items():
        at = [Shard(names.index(dim)) if dim in names else Replicate() for dim in (rows, "V")]
        parts[tensor] = distribute_tensor(arguments[tensor], on, at)
    hold(op, arguments, parts)


OF_VOCABULARY = {"cross_entropy": "n", "fused_linear_cross_entropy": "n", "fused_linear_jsd": "n", "grpo_loss": "b"}
"""Losses whose vocabulary may be divided, and the name of their rows."""


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", OF_VOCABULARY)
def test_a_mesh_of_two_dimensions(pool: Pool, name: str, sizes: tuple[int, int]) -> None:
    pool.run(of_two_dimensions, name, sizes, OF_VOCABULARY[name])


@pytest.mark.slow
def test_four_processes() -> None:
    """Two by two, and parts that are uneven or empty among four."""
    four = Pool(4)
    for name, rows in OF_VOCABULARY.items():
        four.run(of_two_dimensions, name, (2, 2), rows)
    for name, over in independent_names():
        four.run(divided, name, over, {})
    four.stop()


def partial() -> tuple[Any, Any]:
    """x is addends, as a matrix product along a divided dimension leaves it; the residual is divided by rows."""
    from torch.distributed.tensor import DTensor, Partial

    op = ops["fused_add_rms_norm"]
    arguments = arguments_of(op)
    parts = placed(op, arguments, "...0")
    share = 0.25 if dist.get_rank() == 0 else 0.75
    parts["x"] = DTensor.from_local(arguments["x"] * share, mesh(), [Partial()])
    return hold(op, arguments, parts)


def test_addends_become_parts_in_one_step(pool: Pool) -> None:
    forward, _ = pool.run(partial)[0]
    assert forward == ["reduce_scatter_tensor"]


@pytest.mark.parametrize(("name", "over"), [("rms_norm", "H"), ("softmax", "V")])
def test_what_is_needed_whole_is_gathered(pool: Pool, name: str, over: str) -> None:
    forward, _ = pool.run(divided, name, over, {})[0]
    assert set(forward) == {"all_gather_into_tensor"}


@pytest.mark.parametrize(("name", "over"), [("rms_norm", "...0"), ("fused_linear_cross_entropy", "V")])
def test_compiled(pool: Pool, name: str, over: str) -> None:
    pool.run(divided, name, over, {}, True)


def graphs(divided: bool) -> list[list[str]]:
    """Operators of a compiled call's two graphs, forward and backward, but for views, which do nothing."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    operators: list[list[str]] = []
    torch.compiler.reset()  # sizes that another graph had would be dynamic

    def keep(module: Any, inputs: Any) -> Any:
        called = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        operators.append([name for name in called if name != "aten.view.default"])
        return make_boxed_func(module)

    x, weight = torch.ones(2, 4), torch.ones(4)
    if divided:
        x, weight = spread(torch.ones(4, 4), 0), spread(weight, None)
    call = torch.compile(
        lambda *tensors: liger_core.rms_norm(*tensors), backend=aot_autograd(fw_compiler=keep), fullgraph=True
    )
    call(x.requires_grad_(), weight.requires_grad_()).sum().backward()
    return operators


def compare_graphs() -> tuple[list[list[str]], list[list[str]]]:
    return graphs(True), graphs(False)


def test_compiled_it_costs_nothing(pool: Pool) -> None:
    """The graphs of a call on DTensors are those of one on the local tensors."""
    ours, plain = pool.run(compare_graphs)[0]
    assert ours == plain
    assert [bool(graph) for graph in plain] == [True, True]


def of_plain_tensors() -> None:
    """A plain weight beside a divided x is the same everywhere, and so is its gradient."""
    op = ops["rms_norm"]
    arguments = arguments_of(op)
    whole = {name: arguments[name].clone().requires_grad_() for name in ("x", "weight")}
    x, weight = spread(arguments["x"], 0).requires_grad_(), arguments["weight"].clone().requires_grad_()
    op(x, weight).full_tensor().sum().backward()
    op.reference(**whole).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole["x"].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.grad, whole["weight"].grad, rtol=1e-12, atol=1e-12)


def test_a_plain_weight_is_the_same_everywhere(pool: Pool) -> None:
    pool.run(of_plain_tensors)


def in_flight() -> list[str]:
    """A tensor whose gather isn't waited for, as a plain one and within a DTensor: its type, and its gradient."""
    op, kinds = ops["rms_norm"], []
    arguments = arguments_of(op)
    whole = arguments["x"].clone().requires_grad_()
    op.reference(whole, arguments["weight"]).sum().backward()
    for plain in (True, False):
        x = spread(arguments["x"], 0).requires_grad_()
        flying = x.redistribute(mesh(), distribute(arguments["x"], mesh()).placements, async_op=True)
        kinds.append(type(flying.to_local()).__name__)
        y = op(flying.to_local() if plain else flying, arguments["weight"])
        (y if plain else y.to_local()).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)
    return kinds


def test_a_gather_in_flight_keeps_its_gradient(pool: Pool) -> None:
    assert pool.run(in_flight)[0] == ["AsyncCollectiveTensor"] * 2


def in_flight_into_a_compiled_function() -> None:
    """A gather that eager code has begun, into what torch.compile makes of an op."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor_autograd

    op = ops["rms_norm"]
    arguments = arguments_of(op)
    whole = torch.cat([arguments["x"]] * dist.get_world_size()).requires_grad_()
    op.reference(whole, arguments["weight"]).sum().backward()
    x = arguments["x"].clone().requires_grad_()
    flying = all_gather_tensor_autograd(x, 0, mesh())
    assert isinstance(flying, AsyncCollectiveTensor)
    compiled = torch.compile(lambda *tensors: op(*tensors), backend="aot_eager", fullgraph=True)
    compiled(flying, arguments["weight"]).sum().backward()
    expected = whole.grad.chunk(dist.get_world_size())[dist.get_rank()] * dist.get_world_size()
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


def test_a_gather_in_flight_keeps_its_gradient_in_a_compiled_function(pool: Pool) -> None:
    pool.run(in_flight_into_a_compiled_function)


def explain_strided_parts() -> str:
    """Rows 0, 1, 4 and 5 on the first process: how FSDP leaves a weight whose rows tensor parallelism has divided before."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    x = DTensor.from_local(torch.ones(4, 2), mesh(), [_StridedShard(0, split_factor=2)], run_check=False)
    return str(liger_core.explain("rms_norm", x, None))


def test_strided_parts_are_gathered(pool: Pool) -> None:
    assert "divides nothing: every process makes the whole result" in pool.run(explain_strided_parts)[0]


def logged() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("liger_distributed")
    log.addHandler(handler)
    for _ in range(2):
        liger_core.softmax(spread(torch.ones(3, 6, 2), 2))
        liger_core.softmax(spread(torch.ones(3, 6, 2), 0))
    log.removeHandler(handler)
    return messages


def test_what_is_gathered_is_said_once(pool: Pool) -> None:
    (message,) = pool.run(logged)[0]
    assert message == "softmax gathers x: it is placed (Shard(dim=2),), and taken (Replicate(),)"


def remembered() -> tuple[int, str]:
    """How many plans calls of one kind make, and what a wrong call after them raises."""
    from liger_distributed import dtensor

    dtensor._plans.clear()
    x, weight = spread(torch.ones(3, 4), 0), spread(torch.ones(4), None)
    for _ in range(3):
        liger_core.rms_norm(x, weight)
    count = len(dtensor._plans)
    with pytest.raises(ValueError, match="weight has shape") as caught:
        liger_core.rms_norm(x, spread(torch.ones(3), None))
    other = liger_core.rms_norm(spread(torch.ones(3, 4), 1), weight)
    assert other.placements[0].is_replicate()
    return count, str(caught.value)


def test_what_metadata_decides_is_remembered(pool: Pool) -> None:
    """By all of it: another shape is checked, and other placements are chosen for, anew."""
    count, text = pool.run(remembered)[0]
    assert count == 1
    assert "weight has shape (3,); it takes (4,), x's last dimension" in text


def explained() -> dict[str, tuple[str, list[str]]]:
    """Lines of `explain` for calls, without its table of languages, and the collectives that the calls then send forward."""
    from torch.distributed.tensor import DTensor, Partial

    x, weight, target = torch.ones(6, 4), torch.ones(4, requires_grad=True), torch.tensor([1, 2, 0, 3, -100, 1])
    head = torch.ones(8, 4)
    addends = DTensor.from_local(x, mesh(), [Partial()], run_check=False)
    calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "rows": (liger_core.rms_norm, (spread(x, 0), spread(weight, None)), {}),
        "columns": (liger_core.rms_norm, (spread(x, 1), spread(weight.detach(), 0)), {}),
        "addends": (liger_core.fused_add_rms_norm, (addends, spread(x, 0), spread(weight.detach(), None)), {}),
        "vocabulary": (liger_core.fused_linear_cross_entropy, (spread(x, None), spread(head, 0), target), {}),
        "labels": (liger_core.fused_linear_cross_entropy, (spread(x, 0), spread(head, None), target), {}),
        "a teacher's vocabulary": (
            liger_core.fused_linear_jsd,
            (spread(x, None), spread(head, 0), spread(x, None), spread(head, 0)),
            {},
        ),
        "whole": (liger_core.softmax, (spread(x, None),), {}),
    }
    lines_and_sent = {}
    for name, (op, args, options) in calls.items():
        lines = "\n".join(liger_core.explain(op, *args, **options).parts)
        with Sent() as sent:
            op(*args, **options)
        lines_and_sent[name] = lines, [name for name, _ in sent.collectives]
    return lines_and_sent


def test_explain_says_what_is_divided_and_sent(pool: Pool) -> None:
    gathers = "sends forward: x over tp by an all-gather; weight over tp by an all-gather"
    assert pool.run(explained)[0] == {
        "rows": (
            "divides ...0 over tp\nsends forward: nothing\nthe gradient of weight is a sum over tp, added up where it is read",
            [],
        ),
        "columns": (
            f"divides nothing: every process makes the whole result\n{gathers}",
            ["all_gather_into_tensor"] * 2,
        ),
        "addends": ("divides ...0 over tp\nsends forward: x over tp by a reduce-scatter", ["reduce_scatter_tensor"]),
        "vocabulary": (
            "divides V over tp\nsends forward: statistics of each row over tp by an all-gather",
            ["all_gather_into_tensor"],
        ),
        "a teacher's vocabulary": (
            "divides V over tp\nsends forward: statistics of each row over tp by two all-gathers",
            ["all_gather_into_tensor"] * 2,
        ),
        "labels": ("divides n over tp\nsends forward: the number of labels over tp by an all-reduce", ["all_reduce"]),
        "whole": ("divides nothing: every process makes the whole result\nsends forward: nothing", []),
    }


def mixed() -> str:
    weight = spread(torch.ones(4), 0)
    try:
        liger_core.rms_norm(torch.ones(2, 4), weight)
    except TypeError as error:
        return str(error)
    return ""


def test_a_plain_tensor_beside_a_divided_weight(pool: Pool) -> None:
    assert "register_fsdp_forward_method" in pool.run(mixed)[0]


def able(name: str, device: str) -> Any:
    """The language of a device that has a kernel of an op."""
    from liger_core.resolve import tried_backends

    return next(b for b in tried_backends(device, None) if b.missing(device) is None and b.has_kernel(name))


def on_a_kernel(name: str, over: str) -> tuple[list[str], list[str]]:
    """Hold an op whose tensors are divided, in float32 on a kernel, against its reference; what ran, and its nodes.

    On an accelerator the kernel is that of its language.
    """
    import reference_kernels

    real = torch.get_default_device().type != "cpu"
    near: dict[str, float] = {"rtol": 1e-3, "atol": 1e-3} if real else {}

    op = ops[name]
    arguments = arguments_of(op)
    arguments = {n: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in arguments.items()}
    whole, parts = dict(arguments), placed(op, arguments, over)
    for tensor in op.differentiable:
        if arguments[tensor] is not None:
            whole[tensor], parts[tensor] = arguments[tensor].clone().requires_grad_(), parts[tensor].requires_grad_()
    truth = name_results(op, op.reference(**whole))
    outputs = [result for result, value in truth.items() if value is not None and value.requires_grad]
    incoming = incoming_of(op, arguments)
    torch.autograd.backward([truth[r] for r in outputs], [incoming[r] for r in outputs])
    with contextlib.ExitStack() as stack:
        if real:
            stack.enter_context(liger_core.use(able(name, torch.get_default_device().type).language))
        ran = [name] * 3 if real else stack.enter_context(reference_kernels.installed())
        for _ in range(2):  # chosen for, and remembered
            for tensor in op.differentiable:
                if arguments[tensor] is not None:
                    parts[tensor].grad = None
            results = name_results(op, op(**parts))
            nodes = [type(results[r].grad_fn).__name__ for r in outputs]
            flowing = [distribute(incoming[r], results[r].device_mesh) for r in outputs]
            torch.autograd.backward([results[r] for r in outputs], flowing)
            for result, value in truth.items():
                if value is not None:
                    torch.testing.assert_close(results[result].full_tensor().detach(), value.detach(), **near)
            for tensor in op.differentiable:
                if arguments[tensor] is not None:
                    torch.testing.assert_close(parts[tensor].grad.full_tensor(), whole[tensor].grad, **near)
        with torch.no_grad():
            for result, value in name_results(op, op(**parts)).items():
                assert (value is None) == (truth[result] is None)
                assert value is None or not value.requires_grad
        return list(ran), nodes


def sends_of_its_own(op: Op[..., Any]) -> bool:
    """Whether a call has a rule or counts labels, or options that can't be looked up: then PyTorch records its parts."""
    from liger_distributed.rules import RULES

    assert op.dimensions is not None
    options = [arguments_of(op)[name] for name in op.options]
    counted = any(result.counted for result in op.dimensions.results)
    means = op.name in RULES and RULES[op.name].means
    return means or counted or any(isinstance(option, list | tuple) for option in options)


@pytest.mark.parametrize(("name", "over"), independent_names())
def test_kernels_of_a_divided_dimension(pool: Pool, name: str, over: str) -> None:
    """The same results and gradients, when a call is chosen for and when it is remembered."""
    ran, nodes = pool.run(on_a_kernel, name, over)[0]
    assert len(ran) >= 3
    if not sends_of_its_own(ops[name]):
        assert set(ran) == {name}
        assert all(node.startswith(name) for node in nodes), "the kernel's own node is the DTensor's"


def by_the_suites_rule(name: str, over: str, one_q_head: bool = False) -> int:
    """Hold a language's kernel of an op, on parts of a dimension, to the reference as the conformance suite does.

    In float32, gathered as one process sees it. Returns how many kernels were launched.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from liger_conformance import interpreters
    from liger_conformance.suite.test_values import check
    from liger_conformance.target import Target
    from liger_core.backend import backends
    from liger_distributed.rules import RULES

    op, device = ops[name], str(torch.get_default_device())
    kind = torch.device(device).type
    language = next(b for b in backends() if b.language == "triton") if kind == "cpu" else able(name, kind)
    if kind == "cpu":
        interpreters.repair(language)
    known = cases_of(name)

    def build(draw: int) -> dict[str, Any]:
        arguments = complete(op, known.build(known.cases[0], torch.float32, device, draw))
        if one_q_head:
            arguments = with_one_q_head(op, arguments)
        return arguments | ({"reduction": "none"} if "reduction" in op.options else {})

    def call(**arguments: Any) -> Any:
        parts = dict(arguments)
        for tensor, names in names_of(op, arguments).items():
            bare = [dim.rstrip("'") for dim in names]
            at = bare.index(over) if over in bare else None
            if name in RULES and tensor in RULES[name].keeps:
                continue
            here = DTensor.from_local(arguments[tensor], mesh(), [Replicate()], run_check=False)
            whole = at is None or (arguments[tensor].shape[at] == 1 and independent(over))
            parts[tensor] = here if whole else here.redistribute(placements=[Shard(at)])
        result = op(**parts)
        if not isinstance(result, tuple):
            return result.full_tensor()
        whole = [None if value is None else cast("DTensor", value).full_tensor() for value in result]
        return whole if op.result is None else op.result(*whole)

    with interpreters.launches() as launches:
        check(
            Target(op, language.language, kind, language, "interpreted" if kind == "cpu" else "passed"),
            build,
            call=call,
        )
    return len(launches)


@pytest.mark.parametrize(("name", "over"), [*independent_names(), *((name, "V") for name in OF_VOCABULARY)])
def test_a_languages_kernels_by_the_suites_rule(pool: Pool, name: str, over: str) -> None:
    assert min(pool.run(by_the_suites_rule, name, over)) > 0


@pytest.mark.parametrize("name", OF_HEADS)
def test_a_languages_kernels_of_one_q_head(pool: Pool, name: str) -> None:
    """The process without a head of q runs the reference."""
    assert max(pool.run(by_the_suites_rule, name, "h", True)) > 0


def shared_gradient() -> None:
    """Two leaves whose gradient is one tensor get one each."""
    import reference_kernels

    draw = torch.Generator(torch.get_default_device()).manual_seed(0)
    x, residual = (spread(torch.randn(4, 8, generator=draw), 0).requires_grad_() for _ in range(2))
    weight = spread(torch.ones(8), None).requires_grad_()
    with reference_kernels.installed():
        for _ in range(2):
            y, added = liger_core.fused_add_rms_norm(x, residual, weight)
            (y.sum() + added.sum()).backward()
    torch.testing.assert_close(x.grad.to_local(), residual.grad.to_local())
    assert x.grad.to_local().data_ptr() != residual.grad.to_local().data_ptr()


def test_gradients_share_no_memory(pool: Pool) -> None:
    pool.run(shared_gradient)


def of_modes() -> list[str]:
    """Under autocast, after `use`, within a checkpoint, of a second derivative: which kernels ran."""
    import reference_kernels

    x, weight = spread(torch.rand(4, 8), 0).requires_grad_(), spread(torch.rand(8), None).requires_grad_()
    lines: list[str] = []
    with reference_kernels.installed() as ran:
        truth = torch.autograd.grad(liger_core.rms_norm(x, weight).sum(), (x, weight))
        again = torch.utils.checkpoint.checkpoint(liger_core.rms_norm, x, weight, use_reentrant=False)
        for ours, theirs in zip(torch.autograd.grad(again.sum(), (x, weight)), truth, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor())
        lines.append(f"checkpoint {len(ran)}")
        with liger_core.use("torch"):
            liger_core.rms_norm(x, weight)
        lines.append(f"torch {len(ran)}")
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            rows = spread(torch.rand(4, 8), 0)
            statistics: Any = liger_core.fused_linear_logit_statistics(
                rows, spread(torch.rand(6, 8), None), spread(torch.ones(4, dtype=torch.int64), 0)
            )
        lines.append(f"autocast {statistics.lse.dtype}")
        (first,) = torch.autograd.grad(liger_core.rms_norm(x, weight).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="rms_norm in references has no second derivative"):
            first.sum().backward()
    return lines


def test_modes_of_kernels(pool: Pool) -> None:
    assert pool.run(of_modes)[0] == ["checkpoint 3", "torch 3", "autocast torch.float32"]
