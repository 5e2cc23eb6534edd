"""The losses of a divided vocabulary, on two processes, against the same call in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from seen import IN_STEP, Largest, Sent
from torch import Tensor

import liger_distributed
from liger_core import cross_entropy, fused_linear_cross_entropy, losses

ROWS, HIDDEN = 7, 4
EVERYTHING = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
WHOLE: dict[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "token_logprobs": losses.token_logprobs,
    "fused_linear_token_logprobs": losses.fused_linear_token_logprobs,
}


class Call(NamedTuple):
    """A call of one of the functions: the vocabulary's size, and options. A string stands for a tensor of its name."""

    name: str
    vocabulary: int
    options: dict[str, Any]


def given(call: Call, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """The tensors that are differentiated by, the target and the options, the same in every process."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(call.vocabulary)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    options = dict(call.options)
    width = options.pop("width", None)
    target = torch.randint(call.vocabulary, (ROWS, *([width] if width else [])), generator=draw)
    target[1] = -100
    tensors = {"logits": 3 * normal(ROWS, call.vocabulary)}
    if call.name.startswith("fused"):
        tensors = {"x": normal(ROWS, HIDDEN), "linear_weight": normal(call.vocabulary, HIDDEN)}
        if options.pop("bias", False):
            tensors["bias"] = normal(call.vocabulary)
    for name in ("weight", "class_weight"):
        if name in options:
            options[name] = normal(call.vocabulary).abs()
    if options.pop("ties", False):
        tensors["logits"] = tensors["logits"].clamp(max=0)
    return tensors, target, options


def mine(name: str, tensor: Tensor, vocabulary: int) -> Tensor:
    """This process's part of a tensor: all of x, and columns of the vocabulary."""
    if name == "x":
        return tensor
    each = -(-vocabulary // dist.get_world_size())
    first = min(each * dist.get_rank(), vocabulary)
    return tensor.narrow(1 if name == "logits" else 0, first, min(each, vocabulary - first))


def results(outcomes: Any) -> list[Tensor]:
    return [outcomes] if isinstance(outcomes, Tensor) else [one for one in outcomes if one is not None]


def differentiate(function: Callable[..., Any], tensors: dict[str, Tensor], *args: Any, **options: Any) -> Any:
    """The results, and the gradients of the tensors."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    options |= {name: leaf for name, leaf in leaves.items() if name == "bias"}
    outcomes = results(function(*[leaf for name, leaf in leaves.items() if name != "bias"], *args, **options))
    outputs = [one for one in outcomes if one.requires_grad]
    torch.autograd.backward(outputs, [torch.linspace(-1.0, 2.0, one.numel()).view_as(one).to(one) for one in outputs])
    return [one.detach() for one in outcomes], {name: leaf.grad for name, leaf in leaves.items()}


def run_case(case: str, dtype: torch.dtype, compiled: bool) -> list[bytes]:
    """Hold a call on this process's part against one on the whole; the bits of the results."""
    call = CASES[case]
    tensors, target, options = given(call, dtype)
    function = getattr(liger_distributed, call.name)
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    parts = {name: mine(name, tensor, call.vocabulary) for name, tensor in tensors.items()}
    group = dist.group.WORLD
    ours, gradients = differentiate(function, parts, target, group=group, vocabulary=call.vocabulary, **options)
    truth, expected = differentiate(WHOLE[call.name], tensors, target, **options)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours, truth, **tolerance)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, mine(name, expected[name], call.vocabulary), **tolerance)
    return [one.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for one in ours]


SMOOTH = {"label_smoothing": 0.2, "lse_square_scale": 0.1, "softcap": 3.0}
CASES = {
    "mean": Call("cross_entropy", 12, {}),
    "sum-uneven": Call("cross_entropy", 11, {"reduction": "sum"}),
    "rows": Call("cross_entropy", 11, {"reduction": "none"}),
    "everything": Call("cross_entropy", 11, {"weight": True, **SMOOTH, **EVERYTHING}),
    "ties": Call("cross_entropy", 12, {"ties": True, **EVERYTHING}),
    "a-process-without-columns": Call("cross_entropy", 1, {"weight": True, **SMOOTH, **EVERYTHING}),
    "fused-mean": Call("fused_linear_cross_entropy", 12, {}),
    "fused-uneven": Call("fused_linear_cross_entropy", 11, {"bias": True, "reduction": "sum"}),
    "fused-everything": Call(
        "fused_linear_cross_entropy",
        11,
        {"bias": True, "class_weight": True, "token_scaling": True, **SMOOTH, **EVERYTHING},
    ),
    "fused-without-columns": Call("fused_linear_cross_entropy", 1, {"bias": True, **SMOOTH}),
    "logprobs": Call("token_logprobs", 12, {}),
    "logprobs-of-several": Call("token_logprobs", 11, {"width": 3, "return_entropy": True}),
    "logprobs-everything": Call(
        "token_logprobs",
        11,
        {
            "softcap": 3.0,
            "temperature": 0.7,
            "return_entropy": True,
            "return_lse": True,
            "return_predicted_tokens": True,
        },
    ),
    "logprobs-without-columns": Call("token_logprobs", 1, {"return_entropy": True, "return_predicted_tokens": True}),
    "fused-logprobs": Call("fused_linear_token_logprobs", 11, {"return_entropy": True}),
    "fused-logprobs-of-several": Call(
        "fused_linear_token_logprobs", 12, {"bias": True, "width": 2, "temperature": 2.0, "return_lse": True}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(pool: Pool, name: str) -> None:
    """Values and gradients are those of one process, in float64; and all processes have the same bits."""
    first, second = pool.run(run_case, name, torch.float64, False)
    assert first == second


@pytest.mark.parametrize("name", ["everything", "fused-everything", "fused-logprobs"])
def test_the_same_bits_in_bfloat16(pool: Pool, name: str) -> None:
    first, second = pool.run(run_case, name, torch.bfloat16, False)
    assert first == second


@pytest.mark.parametrize("name", ["fused-logprobs"])
def test_compiled(pool: Pool, name: str) -> None:
    """Forward and backward are one graph each."""
    first, second = pool.run(run_case, name, torch.float64, True)
    assert first == second


def differentiate_twice(case: str) -> list[str]:
    """Error texts of differentiating the gradient of each tensor, on the reference."""
    call, errors = CASES[case], []
    tensors, target, options = given(call, torch.float64)
    leaves = {n: mine(n, t, call.vocabulary).clone().requires_grad_() for n, t in tensors.items()}
    options |= {"bias": leaves["bias"]} if "bias" in leaves else {}
    options |= {"group": dist.group.WORLD, "vocabulary": call.vocabulary}
    function = getattr(liger_distributed, call.name)
    outcomes = results(function(*[leaf for name, leaf in leaves.items() if name != "bias"], target, **options))
    loss = torch.stack([one.sum() for one in outcomes if one.requires_grad]).sum()
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    for gradient in first:
        try:
            torch.autograd.grad(gradient.square().sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            errors.append(str(error))
        else:
            errors.append("nothing")
    return errors


@pytest.mark.parametrize(
    "name",
    [
        "mean",
        "everything",
        "a-process-without-columns",
        "fused-uneven",
        "fused-everything",
        "logprobs",
        "fused-logprobs",
    ],
)
def test_a_second_derivative_is_refused(pool: Pool, name: str) -> None:
    """It would lack what the other processes' columns add."""
    for errors in pool.run(differentiate_twice, name):
        assert errors == ["a loss of a vocabulary that is divided among processes has no second derivative"] * len(
            errors
        )
        assert errors


def send(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Collectives of a call, forward and backward, in float32."""
    call = Call(name, 12, options)
    tensors, target, options = given(call, torch.float32)
    parts = {n: mine(n, t, call.vocabulary).clone().requires_grad_() for n, t in tensors.items()}
    function = getattr(liger_distributed, call.name)
    with Sent() as forward:
        outcomes = results(function(*parts.values(), target, group=dist.group.WORLD, **options))
    with Sent() as backward:
        torch.autograd.backward([one.sum() for one in outcomes if one.requires_grad])
    return forward.collectives, backward.collectives


@pytest.mark.parametrize(
    ("name", "options", "each", "dx"),
    [
        ("cross_entropy", {}, 8, False),
        ("cross_entropy", {"label_smoothing": 0.1, "lse_square_scale": 0.1}, 12, False),
        ("cross_entropy", {"return_predicted_tokens": True}, 16, False),
        ("fused_linear_cross_entropy", {}, 8, True),
        ("token_logprobs", {"return_entropy": True}, 12, False),
        ("fused_linear_token_logprobs", {"return_entropy": True}, 12, True),
    ],
)
def test_what_is_sent(pool: Pool, name: str, options: dict[str, Any], each: int, dx: bool) -> None:
    """Forward sends an all-gather, of so many bytes a row and the vocabulary's size; backward the sum of x's gradient alone."""
    forward, backward = pool.run(send, name, options)[0]
    assert forward == [*IN_STEP, ("all_gather_into_tensor", each * ROWS + 4)]
    assert backward == ([("all_reduce", 4 * ROWS * HIDDEN)] if dx else [])


def without_gradient_of_x() -> Any:
    tensors, target, _ = given(Call("fused_linear_cross_entropy", 12, {}), torch.float32)
    weight = mine("linear_weight", tensors["linear_weight"], 12).clone().requires_grad_()
    with Sent() as sent:
        liger_distributed.fused_linear_cross_entropy(tensors["x"], weight, target, group=dist.group.WORLD).backward()
    return [name for name, _ in sent.collectives]


def test_a_frozen_x_sends_nothing_backward(pool: Pool) -> None:
    assert pool.run(without_gradient_of_x) == [["all_gather_into_tensor"] * 2] * 2


def in_flight() -> None:
    """A sequence-parallel block's rows, whose gather isn't waited for, as the input of a divided head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    call = Call("fused_linear_cross_entropy", 12, {})
    tensors, target, _ = given(call, torch.float64)
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    x = distribute_tensor(tensors["x"], mesh, [Shard(0)]).requires_grad_()
    flying = x.redistribute(mesh, [Replicate()], async_op=True).to_local()
    assert type(flying).__name__ == "AsyncCollectiveTensor"
    weight = mine("linear_weight", tensors["linear_weight"], 12).clone().requires_grad_()
    liger_distributed.fused_linear_cross_entropy(flying, weight, target, group=dist.group.WORLD).backward()
    whole = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    fused_linear_cross_entropy(**whole, target=target).backward()
    gradient: Any = x.grad
    torch.testing.assert_close(gradient.full_tensor(), whole["x"].grad, rtol=1e-12, atol=1e-12)


def test_an_input_in_flight_keeps_its_gradient(pool: Pool) -> None:
    pool.run(in_flight)


def allocate() -> tuple[int, int]:
    """The largest tensor of a fused loss on a kernel that takes 8 rows at a time, and the shard's logits."""
    import chunked

    rows, vocabulary = 64, 80
    x, head = torch.randn(rows, HIDDEN), torch.randn(vocabulary, HIDDEN)
    torch.distributed.broadcast(x, 0)
    torch.distributed.broadcast(head, 0)
    target = torch.arange(rows)
    x, part = x.requires_grad_(), mine("linear_weight", head, vocabulary).clone().requires_grad_()
    with chunked.installed(), Largest() as largest:
        loss = liger_distributed.fused_linear_cross_entropy(x, part, target, group=dist.group.WORLD)
        loss.backward()
    whole = head.clone().requires_grad_()
    truth = fused_linear_cross_entropy(x.detach(), whole, target)
    truth.backward()
    # On an accelerator the whole runs in a kernel of its language, whose sums are in another order.
    of_kernels = {"rtol": 1e-4, "atol": 1e-4} if loss.device.type != "cpu" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(loss, truth, **of_kernels)
    torch.testing.assert_close(part.grad, mine("linear_weight", whole.grad, vocabulary), **of_kernels)
    return largest.elements, rows * part.shape[0]


def test_the_logits_of_a_process_are_never_there(pool: Pool) -> None:
    """With a kernel, whose own chunks are the largest that there is: the rest of the loss makes nothing of their size."""
    for largest, logits in pool.run(allocate):
        assert largest <= logits // 8


def refuse(name: str, columns: int, options: dict[str, Any]) -> tuple[str, str]:
    logits, target = torch.zeros(2, columns), torch.tensor([0, options.pop("label", 1)])
    try:
        getattr(liger_distributed, name)(logits, target, group=dist.group.WORLD, **options)
    except (TypeError, ValueError, IndexError) as error:
        return type(error).__name__, str(error)
    return "nothing", "was raised"


@pytest.mark.parametrize(
    ("name", "columns", "options", "error", "says"),
    [
        (
            "cross_entropy",
            4,
            {"vocabulary": 11},
            "ValueError",
            "process 0 of 2 has 4 columns of a vocabulary of 11; it takes 6",
        ),
        ("cross_entropy", 5, {"label": 10}, "IndexError", "cross_entropy: target holds 10"),
        ("cross_entropy", 5, {"reduction": "median"}, "ValueError", "cross_entropy: reduction is 'median'"),
        ("cross_entropy", 5, {"weight": torch.ones(5)}, "ValueError", "weight has shape (5,); it takes (10,)"),
        ("token_logprobs", 5, {"return_lse": 1}, "TypeError", "token_logprobs: return_lse is 1"),
        ("token_logprobs", 5, {"label": -7}, "IndexError", "token_logprobs: target holds -7"),
        ("token_logprobs", 5, {"temperature": 0.0}, "ValueError", "temperature is 0.0"),
    ],
)
def test_what_is_refused(pool: Pool, name: str, columns: int, options: Any, error: str, says: str) -> None:
    for kind, text in pool.run(refuse, name, columns, options)[:1]:
        assert kind == error, text
        assert says in text


CALLS: dict[str, tuple[tuple[int, ...], ...]] = {
    "cross_entropy": ((4, -1),),
    "fused_linear_cross_entropy": ((4, 8), (-1, 8)),
    "token_logprobs": ((4, -1),),
    "fused_linear_token_logprobs": ((4, 8), (-1, 8)),
    "fused_linear_jsd": ((4, 8), (-1, 8), (4, 8), (-1, 8)),
}
"""Shapes of each loss's tensors. -1 is the number of columns."""


def differ(name: str, columns: int, rows: int, vocabulary: int | None, options: dict[str, Any]) -> str:
    """The error of a loss of so many columns and rows, on this process, or its values."""
    shapes = [(rows if size == 4 else columns if size == -1 else size for size in shape) for shape in CALLS[name]]
    tensors = [torch.ones(*shape) for shape in shapes]
    target = torch.zeros(rows, dtype=torch.int64)
    try:
        function = getattr(liger_distributed, name)
        return str(function(*tensors, target, group=dist.group.WORLD, vocabulary=vocabulary, **options))
    except ValueError as error:
        return str(error)


def differ_by_rank(name: str, *calls: tuple[Any, ...]) -> str:
    return differ(name, *calls[dist.get_rank()])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (
            ((3, 4, None, {}), (7, 4, None, {})),
            [
                "the processes take the vocabulary to have 6 and 14 tokens; if they have different numbers of columns, it takes "
            ]
            * 2,
        ),
        (
            ((5, 4, None, {}), (5, 3, 10, {})),
            ["the processes have 4 and 3 rows; it takes the same rows on every process"] * 2,
        ),
        (
            ((5, 4, None, {}), (5, 4, 7, {})),
            [
                "process 1 of 2 raised an error, which says what it takes",
                "process 1 of 2 has 5 columns of a vocabulary of 7",
            ],
        ),
    ],
)
def test_processes_that_differ_all_raise(pool: Pool, name: str, calls: Any, says: list[str]) -> None:
    """Not a wrong number on each, or a number on one and an endless wait on the other."""
    for text, expected in zip(pool.run(differ_by_rank, name, *calls), says, strict=True):
        assert text.startswith(f"{name}: {expected}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cross_entropy", {"reduction": "median"}),
        ("fused_linear_cross_entropy", {"softcap": -1.0}),
        ("token_logprobs", {"temperature": 0.0}),
        ("fused_linear_token_logprobs", {"memory_budget": 1}),
        ("fused_linear_jsd", {"memory_budget": 1}),
    ],
)
def test_an_error_of_one_process_is_one_of_all(pool: Pool, name: str, options: dict[str, Any]) -> None:
    """Options that one process alone has wrong."""
    first, second = pool.run(differ_by_rank, name, (5, 4, None, options), (5, 4, None, {}))
    assert next(iter(options)) in first
    assert second == f"{name}: process 0 of 2 raised an error, which says what it takes"


def differ_compiled(name: str) -> tuple[bool, bool]:
    """Whether the loss and its gradient are NaN, of another number of columns on each process."""
    x = torch.ones(4, 8, requires_grad=True)
    weight, target = torch.ones(3 + 4 * dist.get_rank(), 8), torch.zeros(4, dtype=torch.int64)
    arguments = (x, weight, torch.ones(4, 8), weight.clone(), target) if "jsd" in name else (x, weight, target)
    function = torch.compile(getattr(liger_distributed, name), backend="aot_eager", fullgraph=True)
    loss = function(*arguments, group=dist.group.WORLD).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    return bool(loss.isnan()), bool(gradient.isnan().all())


@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "fused_linear_token_logprobs", "fused_linear_jsd"])
def test_processes_that_differ_get_nan_if_no_error_can_be_raised(pool: Pool, name: str) -> None:
    """In compiled code, as on an accelerator, which would have to wait for an error."""
    assert pool.run(differ_compiled, name) == [(True, True)] * 2


@pytest.mark.parametrize("group", [None, "world"])
def test_what_is_no_group(group: Any) -> None:
    """torch.distributed.group.WORLD is none before init_process_group."""
    x, target = torch.randn(2, 4), torch.tensor([0, 1])
    calls: dict[str, tuple[Any, ...]] = {
        "cross_entropy": (x, target),
        "fused_linear_cross_entropy": (x, x, target),
        "token_logprobs": (x, target),
        "fused_linear_token_logprobs": (x, x, target),
        "fused_linear_jsd": (x, x, x, x),
        "grpo_loss": (torch.randn(1, 3, 4), None, None, target[None], torch.ones(1), None),
    }
    for name, arguments in calls.items():
        with pytest.raises(TypeError, match=f"{name}: group is {group!r}; it takes a torch.distributed.ProcessGroup"):
            getattr(liger_distributed, name)(*arguments, group=group)
    if group is not None:
        with pytest.raises(TypeError, match="LossHead: group is 'world'; it takes a torch.distributed.ProcessGroup"):
            liger_distributed.LossHead(4, 2, group=group)


def refuse_others() -> str | None:
    group = dist.new_group([1])
    x, target = torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(TypeError, match="fused_linear_cross_entropy: vocabulary is '8'; it takes an int"):
        liger_distributed.fused_linear_cross_entropy(x, x, target, group=dist.group.WORLD, vocabulary="8")  # type: ignore[arg-type]
    if dist.get_rank() == 1:
        return None
    with pytest.raises(ValueError, match="only the processes of a group call with it") as caught:
        liger_distributed.fused_linear_cross_entropy(x, x, target, group=group)
    return str(caught.value)


def test_a_group_of_others(pool: Pool) -> None:
    assert "this process is not in `group`" in pool.run(refuse_others)[0]


def fail(rank: int) -> None:
    if dist.get_rank() == rank:
        raise RuntimeError(f"rank {rank} fails")


def test_a_failure_is_told(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="(?s)process 1: .*RuntimeError: rank 1 fails"):
        pool.run(fail, 1)
