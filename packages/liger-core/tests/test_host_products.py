"""Matrix products of linear losses, counted: how many a step takes, and what torch.compile keeps of them in which memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import (  # pyright: ignore[reportMissingModuleSource]
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from liger_core.autograd import differentiable
from liger_core.budget import padded_columns, temporary_memory
from liger_core.contract import Needs
from liger_core.custom_op import opaque
from liger_core.host.distillation import (
    DistillationFactors,
    DistillationInputs,
    DistillationKernels,
    DistillationResults,
)
from liger_core.host.fused_linear_distillation import FusedLinearDistillation
from liger_core.host.fused_linear_jsd import DivergenceKernels, FusedLinearJSD
from liger_core.host.fused_linear_kl_div import FusedLinearKLDiv
from liger_core.host.fused_linear_logit_statistics import FusedLinearStatistics
from liger_core.host.linear import EVEN, Linear
from liger_core.host.logit_statistics import StatisticsKernels
from liger_core.host.rows import Logits
from liger_core.ops.fused_linear_distillation import fused_linear_distillation
from liger_core.ops.fused_linear_jsd import fused_linear_jsd
from liger_core.ops.fused_linear_kl_div import fused_linear_kl_div
from liger_core.ops.fused_linear_logit_statistics import fused_linear_logit_statistics

ROWS, HIDDEN, TEACHER_HIDDEN, VOCABULARY = 4096, 2048, 4096, 128256
STUDENT, TEACHER = (2 * ROWS * hidden * VOCABULARY for hidden in (HIDDEN, TEACHER_HIDDEN))
BOTH: Needs = (True, True, False)
ROWS_TRACED, WIDTH_TRACED = 4096, 8
FROZEN: Needs = (True, False, False)
NARROW, PADDED = 33, 131
"""Classes. The rows of 131 logits are padded."""


def _launch(y: Tensor, a: Tensor, b: Tensor) -> None:
    """A kernel, as torch.compile sees it."""
    y.add_(a.sum() + b.sum())


_touch = opaque(writes=("y",))(_launch)


class NoLinear(Linear):
    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        _touch(y, x, dloss)


class NoKernels(DistillationKernels):
    def rows(
        self, results: DistillationResults, student: Logits, teacher: Logits, inputs: DistillationInputs, first: int
    ) -> None:
        _touch(results.soft, student.memory, teacher.memory)
        if results.hard is not None:
            _touch(results.hard, student.memory, teacher.memory)

    def gradient(
        self,
        dstudent: Logits,
        student: Logits | None,
        teacher: Logits,
        inputs: DistillationInputs,
        statistics: Tensor,
        incoming: DistillationFactors,
        first: int,
        first_column: int,
    ) -> None:
        factors = [factor for factor in incoming if factor is not None]
        _touch(dstudent.memory, teacher.memory, factors[0] + factors[-1])

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        return torch.ones(1, device=x.device)

    def total(self, losses: Tensor, divisor: Tensor | None) -> Tensor:
        return losses.sum()


class NoStatistics(StatisticsKernels):
    def rows(self, results: Any, logits: Logits, labels: Any, first_row: int) -> None:
        for result in (results.lse, results.picked, results.entropy, results.kept):
            if result is not None:
                _touch(result, logits.memory, logits.memory)

    def gradient(
        self,
        dlogits: Logits,
        logits: Logits | None,
        labels: Any,
        kept: Tensor,
        incoming: Any,
        first_row: int,
        first_column: int,
    ) -> None:
        _touch(dlogits.memory, kept if logits is None else logits.memory, incoming.lse)


class NoDivergence(DivergenceKernels):
    def rows(
        self, losses: Tensor, statistics: Tensor | None, student: Logits, teacher: Logits, inputs: Any, first: int
    ) -> None:
        _touch(losses, student.memory, teacher.memory)

    def gradient(
        self,
        dstudent: Logits,
        student: Logits | None,
        teacher: Logits,
        inputs: Any,
        statistics: Tensor,
        incoming: Any,
        first: int,
    ) -> None:
        _touch(dstudent.memory, teacher.memory, statistics)

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        return torch.ones(1, device=x.device)

    def mean(self, losses: Tensor, count: Tensor) -> Tensor:
        return losses.sum()


class Products(TorchDispatchMode):
    """Adds up the operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        else:
            assert not name.endswith(("mm", "mm_", "matmul", "linear")), f"count {name}, too"
        return func(*args, **(kwargs or {}))


def run_flops(profiled: profile) -> int:
    """FLOPs of the products that ran, including those within custom ops."""
    flops = 0
    for event in profiled.events():
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            (m, rows), (_, n) = event.input_shapes[:2] if event.name == "aten::mm" else event.input_shapes[1:3]
            flops += 2 * m * n * rows
    return flops


def layers(rows: int = ROWS, device: str = "meta") -> dict[str, Tensor]:
    """Tensors of the medium case, without memory."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    return {
        "student_x": empty(rows, HIDDEN),
        "student_weight": empty(VOCABULARY, HIDDEN),
        "teacher_x": empty(rows, TEACHER_HIDDEN),
        "teacher_weight": empty(VOCABULARY, TEACHER_HIDDEN),
    }


def flops_of(op: Any, host: Any, flowing: tuple[str, ...], given: dict[str, Any]) -> int:
    """FLOPs of forward and backward. Only the results in `flowing` receive a gradient."""
    arguments, needs = op.bind((), given), BOTH[: len(op.differentiable)]
    with Products() as products:
        result, saved = host.forward(needs, **arguments)
        fields = result._asdict() if hasattr(result, "_asdict") else {"loss": result}
        keeps = op.has_gradient(arguments) or [True] * len(fields)
        names = [name for name, keep in zip(fields, keeps, strict=True) if keep]
        incoming = [torch.ones_like(fields[name]) if name in flowing else None for name in names]
        options = {name: arguments[name] for name in op.options}
        assert all(g is not None for g in host.backward(needs, saved, *incoming, **options)[:2])
    return products.flops


ONCE, AGAIN = STUDENT + TEACHER, 2 * (STUDENT + TEACHER)
GRADIENTS = 2 * STUDENT


@pytest.mark.parametrize(
    ("flowing", "options", "flops"),
    [
        (("loss",), {"hard_weight": 0.5}, ONCE + GRADIENTS),
        (("loss",), {"hard_weight": 0.5, "reduction": "sum"}, ONCE + GRADIENTS),
        (("loss",), {}, ONCE + GRADIENTS),
        (("loss",), {"hard_weight": 0.5, "reduction": "none"}, AGAIN + GRADIENTS),
        (("soft_loss", "hard_loss"), {"hard_weight": 0.5, "reduction": "none"}, AGAIN + GRADIENTS),
        (("loss",), {"hard_weight": 0.5, "rows": 2048}, (ONCE + GRADIENTS) // 2),
    ],
    ids=str,
)
def test_products_of_a_distillation(flowing: tuple[str, ...], options: dict[str, Any], flops: int) -> None:
    """The logits of both, dx and dweight: what an unfused model takes. 2048 rows are one chunk, whose logits are kept."""
    rows = options.get("rows", ROWS)
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    inputs = {**layers(rows), "labels": labels, **{name: o for name, o in options.items() if name != "rows"}}
    host = FusedLinearDistillation(NoKernels(), NoLinear())
    assert flops_of(fused_linear_distillation, host, flowing, inputs) == flops


def test_products_of_a_divergence() -> None:
    host = FusedLinearJSD(NoDivergence(), NoLinear())
    assert flops_of(fused_linear_jsd, host, ("loss",), layers()) == ONCE + GRADIENTS


@pytest.mark.parametrize(
    ("rows", "budgeted", "each"),
    [
        (4096, None, [1024] * 4),
        (2000, None, [2000]),
        (16384, 8192, [2048] * 8),
        (4096, 1024, [1024] * 4),
        (4096, 256, [256] * 16),
    ],
    ids=["chunks-of-2048", "one-chunk", "a-budget-of-8192", "a-budget-of-1024", "a-budget-of-256"],
)
def test_rows_of_a_teacher_at_a_time(rows: int, budgeted: int | None, each: list[int]) -> None:
    """Few rows make products and kernels slow; with many, the teacher's logits would take as much memory as the student's.

    A budget has room for three logits of its rows: two are the student's, and one is the teacher's.
    """
    chunk_rows: list[int] = []

    class Recorded(NoKernels):
        def rows(
            self, results: DistillationResults, student: Logits, teacher: Logits, given: DistillationInputs, first: int
        ) -> None:
            assert student.memory.shape == teacher.memory.shape
            chunk_rows.append(teacher.memory.shape[0])

    inputs = layers(rows)
    how: Any = {"accum_dtype": torch.float32, "weight_grad": True, "teacher_x": inputs["teacher_x"]}
    budget = budgeted and temporary_memory(budgeted, inputs["student_x"], inputs["student_weight"], **how)
    arguments = fused_linear_distillation.bind((), {**inputs, "memory_budget": budget})
    FusedLinearDistillation(Recorded(), NoLinear()).forward(BOTH, **arguments)
    assert chunk_rows == each


def compiled(op: Any, host: Any, needs: Needs, given: dict[str, Any], classes: int) -> tuple[float, bool]:
    """The products of a compiled step, each of ROWS_TRACED · WIDTH_TRACED · classes, and whether it keeps logits."""
    kernel: Any = SimpleNamespace(forward=host.forward, backward=host.backward)
    run = differentiable(op, kernel, "toy")
    shapes: list[tuple[int, ...]] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        shapes.extend(tuple(node.meta["val"].shape) for node in returned if node is not None)
        return make_boxed_func(graph.forward)

    def first(given: dict[str, Any]) -> Tensor:
        arguments = op.bind((), given)
        return run(arguments, needs, {name: arguments[name] for name in op.options})[0]

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    with profile(record_shapes=True) as profiled:
        torch.compile(first, backend=backend, fullgraph=True)(given).sum().backward()
    keeps = any(shape[-1:] in ((classes,), (padded_columns(classes),)) for shape in shapes)
    return run_flops(profiled) / (2 * ROWS_TRACED * WIDTH_TRACED * classes), keeps


@pytest.mark.parametrize(
    ("options", "products", "classes"),
    [
        ({}, 4, NARROW),
        ({"hard_weight": 0.5}, 4, PADDED),
        ({"reduction": "none"}, 6, NARROW),
        ({"reduction": "none"}, 6, PADDED),
    ],
    ids=str,
)
def test_a_compiled_distillation_keeps_no_logits(options: dict[str, Any], products: int, classes: int) -> None:
    """Backward of a loss per row makes chunks of logits by the products that forward had: torch.compile would see that, and keep
    them all.
    """
    inputs = {
        "student_x": torch.randn(ROWS_TRACED, WIDTH_TRACED, requires_grad=True),
        "student_weight": torch.randn(classes, WIDTH_TRACED, requires_grad=True),
        "teacher_x": torch.randn(ROWS_TRACED, WIDTH_TRACED),
        "teacher_weight": torch.randn(classes, WIDTH_TRACED),
        "labels": torch.zeros(ROWS_TRACED, dtype=torch.int64),
    }
    host = FusedLinearDistillation(NoKernels(), NoLinear())
    assert compiled(fused_linear_distillation, host, BOTH, inputs | options, classes) == (products, False)


@pytest.mark.parametrize(
    ("needs", "dtype", "classes"),
    [
        (BOTH, torch.float32, NARROW),
        (BOTH, torch.bfloat16, PADDED),
        (FROZEN, torch.float32, PADDED),
        (FROZEN, torch.bfloat16, NARROW),
    ],
    ids=str,
)
def test_compiled_statistics_keep_no_logits(needs: Needs, dtype: torch.dtype, classes: int) -> None:
    inputs = {
        "x": torch.randn(ROWS_TRACED, WIDTH_TRACED, dtype=dtype, requires_grad=True),
        "linear_weight": torch.randn(classes, WIDTH_TRACED, dtype=dtype, requires_grad=needs[1]),
        "target": torch.zeros(ROWS_TRACED, dtype=torch.int64),
        "return_entropy": True,
    }
    host = FusedLinearStatistics(NoStatistics(), NoLinear())
    assert compiled(fused_linear_logit_statistics, host, needs, inputs, classes) == (2 + sum(needs), False)


def most_memory(step: Callable[[], Any], trace: Path) -> int:
    """The most bytes at a time that a step allocates on the CPU."""
    with profile(profile_memory=True) as profiled:
        step()
    profiled.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in events))


CALLS = "distillation", "jsd", "kl_div", "statistics", "frozen-statistics"


def loss_of(name: str) -> Callable[..., Tensor]:
    """The sum of an op's first result, of no kernels; of its arguments by name."""
    op, host = {
        "distillation": (fused_linear_distillation, FusedLinearDistillation(NoKernels(), NoLinear())),
        "jsd": (fused_linear_jsd, FusedLinearJSD(NoDivergence(), NoLinear())),
        "kl_div": (fused_linear_kl_div, FusedLinearKLDiv(NoKernels(), NoLinear())),
    }.get(name, (fused_linear_logit_statistics, FusedLinearStatistics(NoStatistics(), NoLinear())))
    run = differentiable(op, SimpleNamespace(forward=host.forward, backward=host.backward), "toy")

    def loss(**given: Any) -> Tensor:
        arguments = op.bind((), given)
        needs = tuple(arguments[each] is not None and arguments[each].requires_grad for each in op.differentiable)
        result: Any = run(arguments, needs, {option: arguments[option] for option in op.options})
        return (result if isinstance(result, Tensor) else result[0]).sum()

    return loss


def given_to(name: str, rows: int, classes: int = 512, hidden: int = 16) -> dict[str, Any]:
    """The arguments of a call that has no room for all logits."""
    x, weight = torch.randn(rows, hidden, requires_grad=True), torch.randn(classes, hidden)
    weight.requires_grad_(name != "frozen-statistics")
    budget = {"memory_budget": 200_000}
    if name in ("distillation", "jsd"):
        teacher = {"teacher_x": torch.randn(rows, hidden), "teacher_weight": torch.randn(classes, hidden)}
        return {"student_x": x, "student_weight": weight} | teacher | budget
    if name == "kl_div":
        return {"x": x, "linear_weight": weight, "target": torch.rand(rows, classes), "reduction": "none"} | budget
    return {"x": x, "linear_weight": weight, "target": torch.zeros(rows, dtype=torch.int64)} | budget


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_is_for_any_number_of_chunks(name: str) -> None:
    """And has as many steps: Dynamo and Inductor take time for each."""
    steps: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        steps.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    loss = torch.compile(loss_of(name), backend=backend, fullgraph=True, dynamic=True)
    for rows in (120, 200, 300):
        call_inputs = given_to(name, rows)
        differentiable = [
            tensor for tensor in call_inputs.values() if isinstance(tensor, Tensor) and tensor.requires_grad
        ]
        torch.autograd.grad(loss(**call_inputs), differentiable)
    assert len(steps) == 2
    assert max(steps) < 80


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_loss_takes_the_memory_of_an_eager_one(name: str, tmp_path: Path) -> None:
    """Inductor makes a product that it traced at the end, and then the gradients of all chunks live at once."""
    inputs, of_given = given_to(name, 1024), loss_of(name)
    differentiable = [tensor for tensor in inputs.values() if isinstance(tensor, Tensor) and tensor.requires_grad]

    def loss() -> Tensor:
        return of_given(**inputs)

    torch.compiler.reset()
    taken: list[int] = []
    for call in (loss, torch.compile(loss, fullgraph=True)):
        torch.autograd.grad(call(), differentiable)
        taken.append(
            most_memory(lambda call=call: torch.autograd.grad(call(), differentiable), tmp_path / "trace.json")
        )
    eager, traced = taken
    assert eager < 1024 * 512  # a quarter of all logits
    assert traced < 1.25 * eager


class Aligned(TorchDispatchMode):
    """Asserts that tensor cores take each product at full speed, but for that of fewer than EVEN columns of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.rests = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            factors = [tensor if tensor.stride(1) == 1 else tensor.t() for tensor in (*args[-2:], result)]
            if any(min(tensor.shape) < EVEN for tensor in factors):
                self.rests += 1
            else:
                layouts = [(tensor.shape, tensor.stride()) for tensor in factors]
                assert not any(shape[1] % EVEN or stride[0] % EVEN for shape, stride in layouts), layouts
        return result


@pytest.mark.parametrize("budget", [None, 100 << 20], ids=["no-budget", "100-mb"])
@pytest.mark.parametrize("name", ["distillation", "kl_div", "jsd", "statistics"])
def test_products_of_a_vocabulary_that_eight_does_not_divide(name: str, budget: int | None) -> None:
    """Products of all columns are several times slower on a GPU. 100 MB can't hold the weight's accumulator."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    vocabulary, hidden = 50257, 1024
    student = {"student_x": empty(ROWS, hidden), "student_weight": empty(vocabulary, hidden)}
    teacher = {"teacher_x": empty(ROWS, hidden), "teacher_weight": empty(vocabulary, hidden)}
    layer = {"x": empty(ROWS, hidden), "linear_weight": empty(vocabulary, hidden)}
    target = torch.empty(ROWS, dtype=torch.int64, device="meta")
    op, host, inputs, flowing = {
        "distillation": (
            fused_linear_distillation,
            FusedLinearDistillation(NoKernels(), NoLinear()),
            student | teacher,
            "loss",
        ),
        "kl_div": (
            fused_linear_kl_div,
            FusedLinearKLDiv(NoKernels(), NoLinear()),
            layer | {"target": empty(ROWS, vocabulary)},
            "loss",
        ),
        "jsd": (fused_linear_jsd, FusedLinearJSD(NoDivergence(), NoLinear()), student | teacher, "loss"),
        "statistics": (
            fused_linear_logit_statistics,
            FusedLinearStatistics(NoStatistics(), NoLinear()),
            layer | {"target": target, "return_entropy": True},
            "lse",
        ),
    }[name]
    if budget is not None:
        inputs["memory_budget"] = budget + (4 * vocabulary * hidden if "teacher_x" in inputs else 0)
    with Aligned() as products:
        flops_of(op, host, (flowing,), inputs)
    assert products.rests > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_logits_has_nothing_of_what_lies_behind_them(transposed: bool, dtype: torch.dtype) -> None:
    """A product on a CPU may read on behind a row: with bfloat16 and AMX, torch 2.13 multiplies what is there by 0."""
    rows, columns = 131, 4200
    memory = torch.full((rows, padded_columns(columns)), torch.nan, dtype=dtype)
    logits = Logits(memory, columns)
    logits.tensor().fill_(1.0)
    b = torch.ones((rows if transposed else columns, 72), dtype=dtype)
    y = torch.empty((columns if transposed else rows, 72), dtype=dtype)
    Linear().write_product_of(y, logits, b, transposed=transposed)
    torch.testing.assert_close(y, torch.full_like(y, rows if transposed else columns))
