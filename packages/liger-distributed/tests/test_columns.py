"""fused_linear_jsd and grpo_loss of a divided vocabulary, on two processes, against the same call in one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from seen import IN_STEP, Largest, Sent
from torch import Tensor

import liger_core
import liger_distributed

ROWS, HIDDEN, TEACHERS, LENGTH = 7, 4, 3, 5


def mine(tensor: Tensor, at: int, vocabulary: int) -> Tensor:
    """This process's columns of the vocabulary."""
    each = -(-vocabulary // dist.get_world_size())
    first = min(each * dist.get_rank(), vocabulary)
    return tensor.narrow(at, first, min(each, vocabulary - first))


def normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def divergence(vocabulary: int, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """Arguments of a divergence by name, and the vocabulary's dimension in those that have it."""
    draw, options = torch.Generator(torch.get_default_device()).manual_seed(vocabulary), dict(options)
    arguments: dict[str, Any] = {
        "student_x": normal(draw, ROWS, HIDDEN),
        "student_weight": normal(draw, vocabulary, HIDDEN),
        "teacher_x": normal(draw, ROWS, TEACHERS),
        "teacher_weight": normal(draw, vocabulary, TEACHERS),
    }
    arguments = {name: value.to(dtype) for name, value in arguments.items()}
    if options.pop("labels", True):
        arguments["labels"] = torch.tensor([0, -100, 3, 7, 1, 2, -100])
    return arguments | options, {"student_weight": 0, "teacher_weight": 0}


def policy(vocabulary: int, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """The same of grpo_loss."""
    draw, options = torch.Generator(torch.get_default_device()).manual_seed(vocabulary), dict(options)
    arguments: dict[str, Any] = {
        "logits": normal(draw, ROWS, LENGTH + 1, vocabulary),
        "old_logps": normal(draw, ROWS, LENGTH) - 2,
        "ref_logps": normal(draw, ROWS, LENGTH) - 2,
        "advantages": normal(draw, ROWS),
    }
    arguments = {name: value.to(dtype) for name, value in arguments.items()}
    arguments["completion_ids"] = torch.randint(vocabulary, (ROWS, LENGTH), generator=draw)
    if options.pop("mask", True):
        arguments["completion_mask"] = torch.rand((ROWS, LENGTH), generator=draw) > 0.3
        arguments["completion_mask"][1] = False
    if options.pop("ratio", False):
        arguments["importance_sampling_ratio"] = normal(draw, ROWS, LENGTH).abs().to(dtype)
        if arguments.get("completion_mask") is not None:
            arguments["importance_sampling_ratio"].masked_fill_(~arguments["completion_mask"], torch.nan)
    return arguments | options, {"logits": 2}


DIFFERENTIABLE = {"fused_linear_jsd": ("student_x", "student_weight"), "grpo_loss": ("logits",)}
JSD, GRPO = "fused_linear_jsd", "grpo_loss"
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "jsd": (JSD, 12, {}),
    "jsd-uneven": (JSD, 11, {"beta": 0.2, "temperature": 2.0, "labels": False}),
    "jsd-forward-kl": (JSD, 11, {"beta": 0.0, "temperature": 0.5}),
    "jsd-reverse-kl": (JSD, 11, {"beta": 1.0, "ignore_index": 3}),
    "jsd-without-columns": (JSD, 1, {"beta": 0.4}),
    "jsd-by-single-rows": (JSD, 11, {"beta": 0.4, "memory_budget": 1500}),
    "grpo": (GRPO, 12, {}),
    "grpo-uneven": (GRPO, 11, {"temperature": 0.7, "reduction": "none", "ratio": True, "mask": False}),
    "grpo-sequences": (
        GRPO,
        11,
        {"importance_sampling_level": "sequence", "delta": 1.5, "use_bias_correction_kl": True, "ratio": True},
    ),
    "grpo-log-ratio-clip": (GRPO, 11, {"log_ratio_clip": 0.8, "importance_sampling_level": "sequence"}),
    "grpo-dapo": (GRPO, 11, {"loss_type": "dapo", "num_items_in_batch": 9, "eps_high": 0.3}),
    "grpo-dr": (GRPO, 11, {"loss_type": "dr_grpo", "max_completion_length": 8, "beta": 0.0}),
    "grpo-bnpo": (GRPO, 11, {"loss_type": "bnpo"}),
    "grpo-cispo": (GRPO, 11, {"loss_type": "cispo", "eps_high": 2.0}),
    "grpo-cispo-sequence": (
        GRPO,
        11,
        {"loss_type": "cispo", "eps_high": 0.9, "importance_sampling_level": "sequence"},
    ),
    "grpo-sequence-token": (GRPO, 11, {"importance_sampling_level": "sequence_token"}),
    "grpo-sapo": (GRPO, 11, {"loss_type": "sapo", "sapo_temperature_pos": 0.8}),
    "grpo-luspo": (GRPO, 11, {"loss_type": "luspo"}),
    "grpo-without-columns": (GRPO, 1, {}),
}


def results(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [one for one in result if one is not None]


def differentiate(function: Any, name: str, arguments: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The results, and the gradients of those that have one."""
    leaves = {tensor: arguments[tensor].clone().requires_grad_() for tensor in DIFFERENTIABLE[name]}
    tensors = results(function(**arguments | leaves))
    tensors[0].backward(torch.linspace(1.0, 2.0, tensors[0].numel()).view_as(tensors[0]).to(tensors[0]))
    return [one.detach() for one in tensors], {
        tensor: leaf.grad for tensor, leaf in leaves.items() if leaf.grad is not None
    }


def run_case(case: str, dtype: torch.dtype, compiled: bool) -> list[bytes]:
    """Hold a call on this process's part against one on the whole in float64; the bits of the results."""
    name, vocabulary, options = CASES[case]
    arguments, places = (divergence if name == JSD else policy)(vocabulary, options, dtype)
    function: Any = getattr(liger_distributed, name)
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    parts = arguments | {tensor: mine(arguments[tensor], at, vocabulary) for tensor, at in places.items()}
    ours, gradients = differentiate(function, name, parts | {"group": dist.group.WORLD, "vocabulary": vocabulary})
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in arguments.items()}
    truth, expected = differentiate(
        getattr(liger_core, name), name, wide | ({"memory_budget": None} if name == JSD else {})
    )
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours, truth, **tolerance, check_dtype=False)
    assert {*gradients} == {*expected}
    for tensor, gradient in gradients.items():
        whole = expected[tensor] if tensor not in places else mine(expected[tensor], places[tensor], vocabulary)
        torch.testing.assert_close(gradient, whole, **tolerance, check_dtype=False)
        assert gradient.dtype is dtype
    return [one.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for one in ours]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(pool: Pool, name: str) -> None:
    """Values and gradients are those of one process, in float64; and all processes have the same bits."""
    first, second = pool.run(run_case, name, torch.float64, False)
    assert first == second


@pytest.mark.parametrize("name", ["jsd", "jsd-reverse-kl", "grpo"])
def test_the_same_bits_in_bfloat16(pool: Pool, name: str) -> None:
    first, second = pool.run(run_case, name, torch.bfloat16, False)
    assert first == second


@pytest.mark.parametrize("name", ["jsd", "grpo"])
def test_compiled(pool: Pool, name: str) -> None:
    """Forward and backward are one graph each."""
    first, second = pool.run(run_case, name, torch.float64, True)
    assert first == second


def send(case: str) -> tuple[Any, Any]:
    """Collectives of a call, forward and backward, in float32."""
    name, vocabulary, options = CASES[case]
    arguments, places = (divergence if name == JSD else policy)(vocabulary, options, torch.float32)
    arguments |= {tensor: mine(arguments[tensor], at, vocabulary) for tensor, at in places.items()}
    arguments |= {tensor: arguments[tensor].clone().requires_grad_() for tensor in DIFFERENTIABLE[name]}
    with Sent() as forward:
        tensors = results(getattr(liger_distributed, name)(**arguments, group=dist.group.WORLD, vocabulary=vocabulary))
    with Sent() as backward:
        tensors[0].backward()
    return forward.collectives, backward.collectives


def test_what_is_sent(pool: Pool) -> None:
    """A divergence sends 12 bytes a row, and the sum; a policy 8 bytes a token. Backward sends the sum of x's gradient alone.

    Each all-gather has 4 bytes more, the vocabulary's size. On the CPU a divergence sends 24 bytes before, by `in_step`.
    """
    gather = "all_gather_into_tensor"
    assert pool.run(send, "jsd")[0] == (
        [*IN_STEP, (gather, 8 * ROWS + 4), (gather, 4 * ROWS + 4 + 4)],
        [("all_reduce", 4 * ROWS * HIDDEN)],
    )
    assert pool.run(send, "grpo")[0] == ([(gather, 8 * ROWS * (LENGTH + 1) + 4)], [])


def under_autocast() -> tuple[torch.dtype, torch.dtype]:
    arguments, places = divergence(12, {"labels": False}, torch.float32)
    arguments |= {tensor: mine(arguments[tensor], at, 12) for tensor, at in places.items()}
    arguments["student_weight"] = arguments["student_weight"].clone().requires_grad_()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        loss = liger_distributed.fused_linear_jsd(**arguments, group=dist.group.WORLD)
    loss.backward()
    rounded = arguments | {n: arguments[n].detach().bfloat16() for n in ("student_x", "teacher_x", *places)}
    torch.testing.assert_close(loss, liger_distributed.fused_linear_jsd(**rounded, group=dist.group.WORLD))
    return loss.dtype, arguments["student_weight"].grad.dtype


def test_under_autocast(pool: Pool) -> None:
    assert pool.run(under_autocast)[0] == (torch.float32, torch.float32)


def allocate() -> tuple[int, int]:
    """The largest tensor of a divergence on a kernel that takes 8 rows at a time, and the shard's logits."""
    import chunked

    rows, vocabulary = 64, 80
    draw = torch.Generator(torch.get_default_device()).manual_seed(0)
    x, teacher = (normal(draw, rows, HIDDEN).float() for _ in range(2))
    head, teachers = (normal(draw, vocabulary, HIDDEN).float() for _ in range(2))
    part, its = (mine(weight, 0, vocabulary).clone() for weight in (head, teachers))
    x, part = x.requires_grad_(), part.requires_grad_()
    budget = 64 * rows + 8 * 40 * part.shape[0]
    with chunked.installed(), Largest() as largest:
        loss = liger_distributed.fused_linear_jsd(x, part, teacher, its, group=dist.group.WORLD, memory_budget=budget)
        loss.backward()
    whole = head.clone().requires_grad_()
    truth = liger_core.fused_linear_jsd(x.detach(), whole, teacher, teachers)
    truth.backward()
    # On an accelerator the whole runs in a kernel of its language, whose sums are in another order.
    of_kernels = {"rtol": 1e-4, "atol": 1e-4} if loss.device.type != "cpu" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(loss, truth, **of_kernels)
    torch.testing.assert_close(part.grad, mine(whole.grad, 0, vocabulary), **of_kernels)
    return largest.elements, rows * part.shape[0]


def test_the_logits_of_a_process_are_never_there(pool: Pool) -> None:
    for largest, logits in pool.run(allocate):
        assert largest <= logits // 8


def refuse(case: str, changed: dict[str, Any]) -> tuple[str, str]:
    name, vocabulary, options = CASES[case]
    arguments, places = (divergence if name == JSD else policy)(vocabulary, options, torch.float32)
    arguments |= {tensor: mine(arguments[tensor], at, vocabulary) for tensor, at in places.items()}
    try:
        getattr(liger_distributed, name)(**arguments | changed, group=dist.group.WORLD)
    except (TypeError, ValueError, IndexError) as error:
        return type(error).__name__, str(error)
    return "nothing", "was raised"


@pytest.mark.parametrize(
    ("case", "changed", "error", "says"),
    [
        ("jsd", {"vocabulary": 14}, "ValueError", "process 1 of 2 has 6 columns of a vocabulary of 14; it takes 7"),
        ("jsd", {"beta": 1.5}, "ValueError", "fused_linear_jsd: beta is 1.5; it takes a number from 0 to 1"),
        ("jsd", {"memory_budget": 100}, "ValueError", "fused_linear_jsd: memory_budget is 100; it takes at least"),
        ("jsd", {"teacher_weight": torch.ones(5, 3)}, "ValueError", "teacher_weight has shape (5, 3); it takes (6, 3)"),
        ("grpo", {"loss_type": "vespo"}, "ValueError", "grpo_loss: loss_type is 'vespo'"),
        ("grpo", {"ref_logps": None}, "ValueError", "grpo_loss: ref_logps is None"),
        (
            "grpo",
            {"completion_mask": torch.full((ROWS, LENGTH), 2)},
            "ValueError",
            "grpo_loss: completion_mask holds 2",
        ),
        ("grpo", {"num_items_in_batch": 0}, "ValueError", "grpo_loss: num_items_in_batch is 0"),
        (
            "grpo",
            {"completion_ids": torch.full((ROWS, LENGTH), 12), "completion_mask": None},
            "IndexError",
            "grpo_loss: completion_ids holds 12",
        ),
    ],
)
def test_what_is_refused(pool: Pool, case: str, changed: Any, error: str, says: str) -> None:
    kind, text = pool.run(refuse, case, changed)[1]
    assert kind == error, text
    assert says in text


@pytest.mark.parametrize("name", sorted(set(liger_distributed.__all__) - {"LossHead"}))
def test_every_option_is_there(name: str) -> None:
    """Options are those of the function of one process, and the group; with the same defaults."""
    whole = inspect.signature(getattr(liger_core, name, None) or getattr(liger_core.losses, name)).parameters
    ours = inspect.signature(getattr(liger_distributed, name)).parameters
    assert {*ours} == {*whole, "group", "vocabulary"}
    for option, parameter in whole.items():
        assert (ours[option].default, ours[option].kind) == (parameter.default, parameter.kind)
