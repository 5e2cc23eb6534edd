"""The distillations and fused_linear_kl_div, against their formulas written again as arithmetic on single numbers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core.ops.distillation import DIVERGENCES, distillation
from liger_core.ops.fused_linear_distillation import fused_linear_distillation
from liger_core.ops.fused_linear_jsd import fused_linear_jsd
from liger_core.ops.fused_linear_kl_div import fused_linear_kl_div

WIDE = torch.float64
NONE = -100


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=WIDE).requires_grad_(grad)


def softmax(row: list[float]) -> list[float]:
    exps = [math.exp(v) for v in row]
    return [e / sum(exps) for e in exps]


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def soft(student: list[float], teacher: list[float], divergence: str, beta: float, temperature: float) -> float:
    if divergence == "cosine":
        dot = sum(s * t for s, t in zip(student, teacher, strict=True))
        return 1 - dot / math.sqrt(sum(s * s for s in student) * sum(t * t for t in teacher))
    q, p = (softmax([v / temperature for v in row]) for row in (student, teacher))
    if divergence == "tvd":
        return 0.5 * sum(abs(a - b) for a, b in zip(q, p, strict=True))
    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    m = [beta * b + (1 - beta) * a for a, b in zip(q, p, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_is_the_formula(divergence: str, beta: float, softcap: float | None) -> None:
    logits, teacher, labels = randn(4, 5), randn(4, 5, grad=False), torch.tensor([0, NONE, 4, 2])
    options: dict[str, Any] = {"divergence": divergence, "beta": beta, "temperature": 1.7, "reduction": "none"}
    caps = {"student_softcap": softcap, "teacher_softcap": 3.0}

    def call(logits: Tensor) -> Any:
        return distillation(logits, teacher, labels, **options, **caps, soft_weight=0.7, hard_weight=0.4)

    actual = call(logits)
    for row, label in enumerate(labels.tolist()):
        s = [v if softcap is None else softcap * math.tanh(v / softcap) for v in logits[row].tolist()]
        t = [3.0 * math.tanh(v / 3.0) for v in teacher[row].tolist()]
        counts = label != NONE
        expected_soft = soft(s, t, divergence, beta, 1.7) if counts else 0.0
        expected_hard = -math.log(softmax(s)[label]) if counts else 0.0
        expected = 0.7 * expected_soft + 0.4 * expected_hard, expected_soft, expected_hard
        for field, value in zip(actual, expected, strict=True):
            torch.testing.assert_close(field[row].item(), value, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(lambda logits: tuple(call(logits)), logits)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_fused_is_that_of_the_products(divergence: str) -> None:
    x, weight, bias = randn(4, 3), randn(5, 3), randn(5)
    teacher_x, teacher_weight, teacher_bias = randn(4, 2), randn(5, 2), randn(5)
    labels = torch.tensor([0, NONE, 4, 2])
    options: dict[str, Any] = {"divergence": divergence, "hard_weight": 0.5, "temperature": 0.8}
    actual = fused_linear_distillation(x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias, **options)
    logits, teacher = x @ weight.T + bias, teacher_x @ teacher_weight.T + teacher_bias
    expected = distillation(logits, teacher, labels, **options)
    torch.testing.assert_close(actual, expected)
    inputs = x, weight, bias
    grads = [torch.autograd.grad(output.loss, inputs) for output in (actual, expected)]
    torch.testing.assert_close(*grads)
    teacher_gradients = torch.autograd.grad(actual.loss, (teacher_x, teacher_weight, teacher_bias), allow_unused=True)
    assert teacher_gradients == (None, None, None)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("hard_weight", [0.0, 0.5])
def test_what_has_a_gradient(reduction: str, hard_weight: float) -> None:
    """A loss per row is there to be weighed; of a reduced one the parts are for logs."""
    actual = distillation(
        randn(4, 5), randn(4, 5), torch.tensor([0, NONE, 4, 2]), reduction=reduction, hard_weight=hard_weight
    )
    have = {name for name, field in actual._asdict().items() if field is not None and field.requires_grad}
    parts = {"soft_loss", "hard_loss"} if hard_weight else {"soft_loss"}
    assert have == ({"loss"} | parts if reduction == "none" else {"loss"})


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_defaults_are_fused_linear_jsd(beta: float, dtype: torch.dtype) -> None:
    inputs = [torch.randn(*shape).to(dtype) for shape in ((6, 8), (11, 8), (6, 4), (11, 4))]
    labels = torch.tensor([0, NONE, 4, 2, 10, 7])
    x, weight = (t.requires_grad_() for t in inputs[:2])
    mine = fused_linear_distillation(*inputs, labels, beta=beta, temperature=1.5).loss
    other = fused_linear_jsd(*inputs, labels, beta=beta, temperature=1.5)
    torch.testing.assert_close(mine, other)
    grads = [torch.autograd.grad(loss, (x, weight)) for loss in (mine, other)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("items", [None, 7, 2.5, 0.5, torch.tensor(9), torch.tensor(0)])
def test_reductions(items: Any) -> None:
    inputs = randn(4, 5), randn(4, 5, grad=False), torch.tensor([0, NONE, 4, 2])
    rows = distillation(*inputs, hard_weight=0.5, reduction="none")
    total = distillation(*inputs, hard_weight=0.5, reduction="sum")
    mean = distillation(*inputs, hard_weight=0.5, num_items_in_batch=items)
    divisor = 3 if items is None else max(float(items), 1.0)
    for row, summed, averaged in zip(rows, total, mean, strict=True):
        torch.testing.assert_close(row.sum(), summed)
        torch.testing.assert_close(summed / divisor, averaged)


def test_no_row_counts() -> None:
    logits = torch.full((2, 3), torch.nan, requires_grad=True)
    actual = distillation(logits, torch.randn(2, 3), torch.tensor([NONE, NONE]), hard_weight=1.0)
    assert [field.item() for field in actual] == [0.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(actual.loss, logits)
    assert not gradient.any()


def test_no_hard_loss_without_a_weight() -> None:
    labels = torch.tensor([77, NONE])  # only their being ignored has an effect
    actual = distillation(torch.randn(2, 3), torch.randn(2, 3), labels)
    assert actual.hard_loss is None
    assert actual.loss.item() == actual.soft_loss.item()


def test_a_row_of_zeros_has_cosine_loss_1() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = distillation(logits, torch.randn(1, 3), divergence="cosine").loss
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 1.0
    assert not gradient.any()


def test_equal_probabilities_have_no_tvd_gradient() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = distillation(logits, logits.detach(), divergence="tvd").loss
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_kl_div_is_the_formula(log_target: bool, softcap: float | None) -> None:
    """The target adds up to 0.6, with a class of probability 0 and one below eps."""
    x, weight, bias, labels = randn(4, 3), randn(5, 3), randn(5), torch.tensor([0, NONE, 4, 2])
    y = 0.6 * torch.rand(4, 5, dtype=WIDE).softmax(-1)
    y[0, 1], y[2, 3] = 0.0, 1e-4
    options: dict[str, Any] = {"log_target": log_target, "temperature": 1.7, "softcap": softcap, "eps": 1e-3}

    def call(x: Tensor, weight: Tensor, bias: Tensor, reduction: str = "none") -> Tensor:
        target = y.log() if log_target else y
        return fused_linear_kl_div(x, weight, target, labels, bias, **options, reduction=reduction)

    actual = call(x, weight, bias)
    assert actual.shape == (4,)
    least = 0.0 if log_target else 1e-3
    for row, logits in enumerate((x @ weight.T + bias).tolist()):
        z = [v if softcap is None else softcap * math.tanh(v / softcap) for v in logits]
        q = softmax([v / 1.7 for v in z])
        terms = (a * (math.log(max(a, least)) - math.log(b)) for a, b in zip(y[row].tolist(), q, strict=True) if a > 0)
        expected = sum(terms) if labels[row] != NONE else 0.0
        torch.testing.assert_close(actual[row].item(), expected, rtol=1e-9, atol=1e-9)
    total = actual.sum()
    for reduction, divisor in (("sum", 1), ("batchmean", 3), ("mean", 15)):
        torch.testing.assert_close(call(x, weight, bias, reduction), total / divisor)
    assert torch.autograd.gradcheck(call, (x, weight, bias))


def test_kl_div_from_a_teacher_is_its_distillation() -> None:
    """The forward divergence from a teacher's probabilities, if they add up to 1, is that from its logits."""
    x, weight, teacher = randn(4, 3), randn(5, 3), randn(4, 5, grad=False)
    expected = distillation(x @ weight.T, teacher, beta=0.0).loss
    for target, log_target in ((teacher.softmax(-1), False), (teacher.log_softmax(-1), True)):
        actual = fused_linear_kl_div(x, weight, target, log_target=log_target)
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(loss, (x, weight), retain_graph=True) for loss in (actual, expected)]
        torch.testing.assert_close(*grads)


def test_kl_div_gives_its_target_no_gradient_and_takes_any_ignored_one() -> None:
    target = torch.rand(2, 5, requires_grad=True)
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(5, 3)
    with torch.no_grad():
        target[1] = torch.nan
    loss = fused_linear_kl_div(x, weight, target, torch.tensor([0, NONE]))
    dx, dtarget = torch.autograd.grad(loss, (x, target), allow_unused=True)
    assert dtarget is None
    assert loss.isfinite()
    assert dx[0].any()
    assert not dx[1].any()
