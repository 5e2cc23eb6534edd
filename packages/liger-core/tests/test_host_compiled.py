"""Linear losses under torch.compile, with kernels that it can't trace, as those of most languages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.budget import padded_columns, temporary_memory
from liger_core.custom_op import opaque
from liger_core.host.fused_linear_jsd import DivergenceInputs, DivergenceKernels, FusedLinearJSD
from liger_core.host.linear import Linear
from liger_core.host.rows import Logits
from liger_core.ops.fused_linear_jsd import fused_linear_jsd

VOCABULARY, HIDDEN = 131, 8


def _rows(losses: Tensor, statistics: Tensor, student: Tensor, teacher: Tensor, columns: int, first: int) -> None:
    """Forward KL divergences."""
    rows = slice(first, first + student.shape[0])
    p, q = teacher[:, :columns].log_softmax(1), student[:, :columns].log_softmax(1)
    losses[rows] = (p.exp() * (p - q)).sum(1)
    statistics[0, rows] = student[:, :columns].logsumexp(1)


def _gradient(dstudent: Tensor, teacher: Tensor, columns: int, statistics: Tensor, count: Tensor, first: int) -> None:
    rows = slice(first, first + dstudent.shape[0])
    q = torch.exp(dstudent[:, :columns] - statistics[0, rows, None])
    dstudent[:, :columns] = q - teacher[:, :columns].softmax(1)
    dstudent[:, columns:] = torch.nan


def _scale(y: Tensor, dloss: Tensor, count: Tensor) -> None:
    y.mul_(dloss / count)


rows, gradient, scale = (
    opaque(writes=writes)(launch)
    for writes, launch in ((("losses", "statistics"), _rows), (("dstudent",), _gradient), (("y",), _scale))
)


class ToyLinear(Linear):
    def scale(self, y: Tensor, x: Tensor, dloss: Tensor, divisor: Tensor | None) -> None:
        assert divisor is not None
        scale(y.copy_(x), dloss, divisor)


class ToyKernels(DivergenceKernels):
    def rows(
        self,
        losses: Tensor,
        statistics: Tensor | None,
        student: Logits,
        teacher: Logits,
        inputs: DivergenceInputs,
        first: int,
    ) -> None:
        assert statistics is not None
        rows(losses, statistics, student.memory, teacher.memory, student.columns, first)

    def gradient(
        self,
        dstudent: Logits,
        student: Logits | None,
        teacher: Logits,
        inputs: DivergenceInputs,
        statistics: Tensor,
        incoming: Any,
        first: int,
    ) -> None:
        assert student is None
        gradient(dstudent.memory, teacher.memory, dstudent.columns, statistics, incoming[1], first)

    def count(self, x: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        return x.new_full((), x.shape[0])

    def mean(self, losses: Tensor, count: Tensor) -> Tensor:
        return losses.sum() / count


def test_kernels_of_a_compiled_loss_get_the_rows_that_they_would_get() -> None:
    """Logits have padded rows, and sizes are dynamic. Each chunk is rows of another tensor."""
    host = FusedLinearJSD(ToyKernels(), ToyLinear())
    run = differentiable(fused_linear_jsd, SimpleNamespace(forward=host.forward, backward=host.backward), "toy")

    def loss(*layers: Tensor, memory_budget: int) -> Tensor:
        arguments = fused_linear_jsd.bind(layers, {"beta": 0.0, "memory_budget": memory_budget})
        return run(arguments, (True, True), {name: arguments[name] for name in fused_linear_jsd.options})

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    assert padded_columns(VOCABULARY) > VOCABULARY
    for n in (40, 33):
        generator = torch.Generator().manual_seed(n)
        layers = [torch.randn(size, HIDDEN, generator=generator) for size in (n, VOCABULARY, n, VOCABULARY)]
        x, weight = (tensor.requires_grad_() for tensor in layers[:2])
        how: Any = {"accum_dtype": torch.float32, "weight_grad": True, "teacher_x": layers[2]}
        budget = temporary_memory(16, x, weight, **how)
        expected, actual = (f(*layers, memory_budget=budget) for f in (loss, compiled))
        torch.testing.assert_close(actual, expected)
        gradients = [torch.autograd.grad(result, (x, weight)) for result in (expected, actual)]
        torch.testing.assert_close(gradients[1], gradients[0])
