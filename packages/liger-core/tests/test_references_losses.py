"""The references of the losses, against PyTorch's own functions and against loops over rows."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import liger_core.ops.grpo_loss as grpo
from liger_core.budget import MOST_CHUNKS, chunk_rows, least_memory
from liger_core.host import fused_linear_logit_statistics as statistics
from liger_core.host import linear
from liger_core.ops.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_core.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_core.ops.fused_linear_jsd import fused_linear_jsd
from liger_core.ops.fused_linear_kl_div import fused_linear_kl_div
from liger_core.ops.fused_linear_logit_statistics import least_statistics_memory
from liger_core.ops.grpo_loss import GRPOOutput, grpo_loss
from liger_core.ops.jsd import jsd
from liger_core.ops.kl_div import kl_div
from liger_core.ops.tvd import tvd

WIDE = torch.float64
NONE = -100


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, grad: bool = True, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(*shape, dtype=WIDE).to(dtype).requires_grad_(grad)


def logprobs(*shape: int, grad: bool = True, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(*shape, dtype=WIDE).log_softmax(-1).to(dtype).requires_grad_(grad)


def gradients(result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """For an incoming gradient that is not one, nor uniform."""
    incoming = torch.linspace(0.5, -1.5, result.numel(), dtype=result.dtype).view(result.shape)
    return torch.autograd.grad(result, inputs, incoming)


def assert_same(actual: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, *inputs), gradients(expected, *inputs))


def assert_loops(op: Callable[..., Tensor], expected: float, *inputs: Tensor, **options: Any) -> None:
    """The value is the loop's, and the gradient that of the value."""
    torch.testing.assert_close(op(*inputs, **options).item(), expected)
    assert torch.autograd.gradcheck(lambda *tensors: op(*tensors, **options), inputs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_index", [NONE, 2])
def test_cross_entropy_is_pytorchs(reduction: str, smoothing: float, weighted: bool, ignore_index: int) -> None:
    logits, target = randn(6, 7), torch.tensor([1, 2, ignore_index, 6, 0, 2])
    weight = torch.rand(7, dtype=WIDE) if weighted else None
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": reduction}
    expected = F.cross_entropy(logits, target, weight, **options)
    assert_same(cross_entropy(logits, target, weight, **options), expected, logits)


def loop_cross_entropy(
    logits: list[list[float]],
    target: list[int],
    weight: list[float] | None,
    smoothing: float,
    z_scale: float,
    softcap: float | None,
    token_scaling: bool = False,
) -> tuple[list[float], list[float], float, int]:
    """Row losses without z-loss, row z-losses, and what their means divide by. The formula of the contract, by hand."""
    losses, z_losses, total, counted = [], [], 0.0, 0
    for row, label in zip(logits, target, strict=True):
        if label == NONE:
            losses.append(0.0)
            z_losses.append(0.0)
            continue
        x = [softcap * math.tanh(v / softcap) for v in row] if softcap else row
        w = weight or [1.0] * len(row)
        lse = math.log(sum(math.exp(v) for v in x))
        loss = w[label] * (lse - x[label]) * (1 - smoothing)
        loss += smoothing / len(row) * (lse * sum(w) - sum(a * b for a, b in zip(w, x, strict=True)))
        scale = math.exp(x[label] - lse) if token_scaling else 1.0
        losses.append(loss * scale)
        z_losses.append(z_scale * lse**2 * scale)
        total, counted = total + w[label], counted + 1
    return losses, z_losses, total, counted


TARGET = [1, NONE, 4, 0, 2, NONE]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("token_scaling", [False, True])
def test_cross_entropy_is_the_formula(weighted: bool, softcap: float | None, token_scaling: bool) -> None:
    """Through the linear op, whose `token_scaling` cross_entropy lacks."""
    x, linear_weight, bias, target = randn(6, 3), randn(5, 3), randn(5), torch.tensor(TARGET)
    weight = (torch.rand(5, dtype=WIDE) + 0.1) if weighted else None
    logits = (x @ linear_weight.T + bias).tolist()
    options: dict[str, Any] = {"label_smoothing": 0.2, "lse_square_scale": 0.3, "softcap": softcap}
    losses, z_losses, total, counted = loop_cross_entropy(
        logits, TARGET, None if weight is None else weight.tolist(), 0.2, 0.3, softcap, token_scaling
    )
    for reduction, loss, z_loss in (
        ("mean", sum(losses) / total + sum(z_losses) / counted, sum(z_losses) / counted),
        ("sum", sum(losses) + sum(z_losses), sum(z_losses)),
        ("none", [a + b for a, b in zip(losses, z_losses, strict=True)], z_losses),
    ):
        actual = fused_linear_cross_entropy(
            x,
            linear_weight,
            target,
            bias,
            class_weight=weight,
            reduction=reduction,
            return_z_loss=True,
            token_scaling=token_scaling,
            **options,
        )
        assert isinstance(actual, CrossEntropyOutput)
        assert actual.z_loss is not None
        torch.testing.assert_close(actual.loss, torch.tensor(loss, dtype=WIDE))
        torch.testing.assert_close(actual.z_loss, torch.tensor(z_loss, dtype=WIDE))
        assert not actual.z_loss.requires_grad
        if not token_scaling:
            again = cross_entropy(torch.tensor(logits, dtype=WIDE), target, weight, reduction=reduction, **options)
            torch.testing.assert_close(actual.loss, again)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("token_scaling", [False, True])
def test_fused_linear_cross_entropy_gradient(reduction: str, token_scaling: bool) -> None:
    inputs = randn(4, 3), randn(5, 3), torch.tensor([1, NONE, 4, 0]), randn(5)
    weight = torch.rand(5, dtype=WIDE)
    options: dict[str, Any] = {"class_weight": weight, "label_smoothing": 0.2, "lse_square_scale": 0.3, "softcap": 1.5}

    def call(x: Tensor, linear_weight: Tensor, target: Tensor, bias: Tensor) -> Tensor:
        actual = fused_linear_cross_entropy(x, linear_weight, target, bias, reduction=reduction, **options)
        if not token_scaling:
            return actual
        # The probability is a constant: the gradient is that of the loss times a number.
        with torch.no_grad():
            logits = 1.5 * torch.tanh((x0 @ weight0.T + bias0) / 1.5)
            scale = logits.softmax(-1).gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
        rows = fused_linear_cross_entropy(x, linear_weight, target, bias, reduction="none", **{**options, **plain})
        z_losses = fused_linear_cross_entropy(x, linear_weight, target, bias, reduction="none", **options) - rows
        if reduction == "none":
            return scale * (rows + z_losses)
        total = weight[target.clamp(min=0)][target != NONE].sum()
        return (scale * rows).sum() / total + (scale * z_losses).sum() / (target != NONE).sum()

    plain = {"lse_square_scale": 0.0}
    x0, weight0, _, bias0 = (t.detach().clone() for t in inputs)
    assert torch.autograd.gradcheck(call, inputs)
    actual = fused_linear_cross_entropy(*inputs, reduction=reduction, token_scaling=token_scaling, **options)
    assert_same(actual, call(*inputs), inputs[0], inputs[1], inputs[3])


def test_cross_entropy_says_what_the_argmax_is() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 0.0], [0.0, 0.0, 9.0], [3.0, 3.0, 3.0]], requires_grad=True)
    target = torch.tensor([1, 1, NONE, 0])
    flags: dict[str, Any] = {"return_token_accuracy": True, "return_predicted_tokens": True}
    actual = cross_entropy(logits, target, softcap=0.01, **flags)
    assert isinstance(actual, CrossEntropyOutput)
    assert actual.predicted_tokens.tolist() == [1, 0, -1, 0]
    assert actual.predicted_tokens.dtype is torch.int64
    torch.testing.assert_close(actual.token_accuracy, torch.tensor(2 / 3))
    assert actual.z_loss is None
    assert cross_entropy(logits, target, reduction="none", **flags).token_accuracy.tolist() == [1.0, 0.0, 0.0, 1.0]
    ignored = cross_entropy(logits, torch.full((4,), NONE), return_token_accuracy=True)
    assert ignored.token_accuracy.item() == 0.0
    assert ignored.predicted_tokens is None


@pytest.mark.parametrize("token_scaling", [False, True])
def test_out_of_range_labels_give_nan_rows(token_scaling: bool) -> None:
    x, linear_weight, target = randn(6, 3), randn(5, 3), torch.tensor([0, 5, -1, 1 << 40, NONE, -(1 << 40)])
    for weight in (None, torch.rand(5, dtype=WIDE)):
        options: dict[str, Any] = {"lse_square_scale": 0.1, "label_smoothing": 0.1, "reduction": "none"}
        loss = fused_linear_cross_entropy.reference(
            x, linear_weight, target, class_weight=weight, token_scaling=token_scaling, **options
        )
        (dx,) = torch.autograd.grad(loss.sum(), x)
        for values in (loss, dx):
            nan = values.isnan().view(6, -1)
            assert nan.all(-1).tolist() == nan.any(-1).tolist() == [False, True, True, True, False, True]
    with pytest.raises(IndexError, match="fused_linear_cross_entropy: target holds 5; it takes 0 to 4"):
        fused_linear_cross_entropy(x, linear_weight, target)
    with pytest.raises(IndexError, match="cross_entropy: target holds 5; it takes 0 to 4"):
        cross_entropy(x @ linear_weight.T, target)


def loop_jsd(student: Tensor, teacher: Tensor, labels: list[int] | None, beta: float) -> float:
    def kl(p: list[float], q: list[float]) -> float:
        return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)

    total, counted = 0.0, 0
    for i, (log_q, log_p) in enumerate(zip(student.tolist(), teacher.tolist(), strict=True)):
        if labels is not None and labels[i] == NONE:
            continue
        p, q = [math.exp(v) for v in log_p], [math.exp(v) for v in log_q]
        if beta in (0.0, 1.0):
            total += kl(p, q) if beta == 0.0 else kl(q, p)
        else:
            m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
            total += beta * kl(p, m) + (1 - beta) * kl(q, m)
        counted += 1
    return total / max(counted, 1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("labels", [None, [1, NONE, 0]])
def test_jsd_is_the_formula(beta: float, labels: list[int] | None) -> None:
    student, teacher = logprobs(3, 4), logprobs(3, 4, grad=False)
    target = None if labels is None else torch.tensor(labels)
    assert_loops(jsd, loop_jsd(student, teacher, labels, beta), student, teacher, target, beta=beta)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_of_zero_probabilities(beta: float) -> None:
    """Classes of probability 0 on both sides, and for 0 < beta < 1 on one side, change nothing and get no gradient."""
    student, teacher = logprobs(3, 4), logprobs(3, 4, grad=False)
    student_absent = teacher_absent = torch.tensor([True, False, False, True, False, False])
    if 0 < beta < 1:
        student_absent = torch.tensor([True, True, False, True, False, False])
    places = torch.tensor([1, 2, 4, 5])
    for absent in (-torch.inf, -1e4):
        wide_student, wide_teacher = (
            torch.full((3, 6), absent, dtype=WIDE).index_copy(1, places, t.detach()) for t in (student, teacher)
        )
        wide_student = wide_student.masked_fill(student_absent, absent).requires_grad_()
        loss = jsd(wide_student, wide_teacher, beta=beta)
        (actual,) = gradients(loss, wide_student)
        torch.testing.assert_close(loss.item(), loop_jsd(wide_student, wide_teacher, None, beta))
        if not 0 < beta < 1:
            torch.testing.assert_close(loss, jsd(student, teacher, beta=beta))
            torch.testing.assert_close(actual[:, places], gradients(jsd(student, teacher, beta=beta), student)[0])
        assert actual.isfinite().all()
        assert not actual[:, student_absent & teacher_absent].any()


def test_jsd_of_probabilities_that_underflow() -> None:
    """They are 0, also beside a −inf of the other model, whose mask is another."""
    far, masked = torch.tensor([[0.0, -1e4]]), torch.tensor([[0.0, -torch.inf]])
    for student, teacher, beta in ((masked, far, 0.0), (far, masked, 1.0)):
        student = student.clone().requires_grad_()
        loss = jsd(student, teacher, beta=beta)
        assert loss.item() == 0.0
        assert torch.autograd.grad(loss, student)[0].isfinite().all()


def test_jsd_of_impossible_predictions() -> None:
    """KL is infinite where the second distribution lacks what the first has."""
    several, none = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log()
    assert jsd(none, several, beta=0.0).item() == torch.inf
    assert jsd(several, none, beta=1.0).item() == torch.inf
    torch.testing.assert_close(jsd(none, several, beta=1.0).item(), math.log(2), rtol=1e-6, atol=0)
    disjoint = torch.tensor([[0.0, 1.0]]).log()
    torch.testing.assert_close(jsd(none, disjoint, beta=0.5).item(), math.log(2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_fused_linear_jsd_is_jsd(beta: float, temperature: float) -> None:
    inputs = randn(4, 3), randn(5, 3), randn(4, 2), randn(5, 2), torch.tensor([0, NONE, 3, 1])
    student_x, student_weight, teacher_x, teacher_weight, labels = inputs
    student = F.log_softmax(student_x @ student_weight.T / temperature, -1)
    teacher = F.log_softmax(teacher_x @ teacher_weight.T / temperature, -1)
    expected = jsd(student, teacher, labels, beta=beta)
    actual = fused_linear_jsd(*inputs, beta=beta, temperature=temperature)
    assert_same(actual, expected, student_x, student_weight)
    frozen = [t.detach().requires_grad_(i < 2) if t.is_floating_point() else t for i, t in enumerate(inputs)]
    assert torch.autograd.gradcheck(lambda *t: fused_linear_jsd(*t, beta=beta, temperature=temperature), frozen)


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_is_pytorchs(reduction: str, log_target: bool) -> None:
    log_pred, target = logprobs(4, 5), logprobs(4, 5, grad=False)
    target = target if log_target else target.exp()
    expected = F.kl_div(log_pred, target, reduction=reduction, log_target=log_target)
    assert_same(kl_div(log_pred, target, reduction=reduction, log_target=log_target), expected, log_pred)


def test_kl_div_of_zero_probabilities() -> None:
    """They add nothing, also where the prediction is impossible too; eps bounds the logarithm of what is small."""
    log_pred = torch.tensor([[0.5, 0.5, 0.0]], dtype=WIDE).log().requires_grad_()
    for target, log_target in ((torch.tensor([[1.0, 0.0, 0.0]]), False), (torch.tensor([[1.0, 0.0, 0.0]]).log(), True)):
        loss = kl_div(log_pred, target.double(), log_target=log_target)
        torch.testing.assert_close(loss.item(), math.log(2))
        assert torch.autograd.grad(loss, log_pred)[0].tolist() == [[-1.0, 0.0, 0.0]]
    small = torch.tensor([[0.9, 0.1, 0.0]], dtype=WIDE)
    expected = 0.9 * (math.log(0.9) - math.log(0.5)) + 0.1 * (math.log(0.2) - math.log(0.5))
    torch.testing.assert_close(kl_div(log_pred, small, eps=0.2).item(), expected)
    assert torch.isfinite(kl_div(log_pred, small, eps=0.0))


@pytest.mark.parametrize("labels", [None, [1, NONE, 0, 0]])
def test_tvd_is_the_formula(labels: list[int] | None) -> None:
    p, q = torch.rand(4, 5, dtype=WIDE, requires_grad=True), torch.rand(4, 5, dtype=WIDE)
    q[0, 0] = p[0, 0]
    target = None if labels is None else torch.tensor(labels)
    counted = [i for i in range(4) if labels is None or labels[i] != NONE]
    terms = [
        [0.5 * abs(a - b) if i in counted else 0.0 for a, b in zip(p[i].tolist(), q[i].tolist(), strict=True)]
        for i in range(4)
    ]
    signs = [
        [0.5 * ((a > b) - (a < b)) if i in counted else 0.0 for a, b in zip(p[i].tolist(), q[i].tolist(), strict=True)]
        for i in range(4)
    ]
    total = sum(map(sum, terms))
    for reduction, value, scale in (
        ("batchmean", total / len(counted), 1 / len(counted)),
        ("mean", total / len(counted) / 5, 1 / len(counted) / 5),
        ("sum", total, 1.0),
        ("none", terms, 1.0),
    ):
        actual = tvd(p, q, target, reduction=reduction)
        torch.testing.assert_close(actual, torch.tensor(value, dtype=WIDE))
        (gradient,) = torch.autograd.grad(actual, p, torch.full_like(actual, -3.0))
        torch.testing.assert_close(gradient, -3.0 * scale * torch.tensor(signs, dtype=WIDE))
    assert torch.autograd.grad(tvd(p, q, target), p)[0][0, 0] == 0


def loop_grpo(
    logps: list[list[float]],
    old: list[list[float]],
    ref: list[list[float]] | None,
    advantages: list[float],
    mask: list[list[int]],
    beta: float,
    eps: tuple[float, float],
    delta: float | None,
    loss_type: str,
    level: str,
    correct: bool,
    importance: list[list[float]] | None,
    taus: tuple[float, float],
    max_length: int | None,
    items: float | None,
    clip: float,
) -> tuple[float, float, float, list[list[float]]]:
    """Loss, kl, clip_ratio and the loss of each token, token by token."""
    rows, length = len(logps), len(logps[0])
    losses = [[0.0] * length for _ in range(rows)]
    kls, clips, row_clips = [], [], []
    for i in range(rows):
        count = max(sum(mask[i]), 1)
        mean = sum((logps[i][t] - old[i][t]) * mask[i][t] for t in range(length)) / count
        a, row_clip = advantages[i], False
        for t in range(length):
            log_ratio = logps[i][t] - old[i][t] if level == "token" else mean
            ratio = math.exp(max(-clip, min(clip, log_ratio)))
            low, high = 1 - eps[0], 1 + eps[1]
            clipped = (ratio < low and a < 0) or (ratio > high and a > 0)
            if loss_type == "cispo":
                loss, clipped = -min(ratio, eps[1]) * a * logps[i][t], ratio > eps[1] and a > 0
            elif loss_type == "sapo":
                tau = taus[0] if a > 0 else taus[1]
                loss, clipped = -a * 4 / (1 + math.exp(-tau * (ratio - 1))) / tau, False
            else:
                limited = ratio if delta is None else min(ratio, delta)
                loss = -min(limited * a, min(max(ratio, low), high) * a)
            if importance is not None:
                loss *= importance[i][t]
            if ref is not None and beta:
                difference = max(-clip, min(clip, ref[i][t] - logps[i][t]))
                kl = (math.exp(difference) - difference - 1) * (ratio if correct else 1)
                loss += beta * kl
                kls.append(kl * mask[i][t])
            losses[i][t] = loss
            clips.append(clipped * mask[i][t])
            row_clip = clipped and any(mask[i])
        row_clips.append(row_clip)
    count = max(sum(map(sum, mask)), 1)
    masked = [[loss * m for loss, m in zip(*pair, strict=True)] for pair in zip(losses, mask, strict=True)]
    total = sum(map(sum, masked))
    means = {
        "bnpo": total / count,
        "dr_grpo": total / (rows * (max_length or length)),
        "luspo": total / rows,
    }
    means["dapo"] = means["cispo"] = total / (count if items is None else max(items, 1))
    means["grpo"] = means["sapo"] = sum(sum(masked[i]) / max(sum(mask[i]), 1) for i in range(rows)) / rows
    clip_ratio = sum(row_clips) / rows if level == "sequence" else sum(clips) / count
    return means[loss_type], sum(kls) / count, clip_ratio, masked


def grpo_inputs(dtype: torch.dtype = WIDE) -> dict[str, Any]:
    """Four rows with advantages of both signs; ratios on both sides of the clip; a masked tail, and a masked row."""
    logits, ids = randn(4, 4, 5), torch.randint(5, (4, 3))
    logps = logits.detach()[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return {
        "logits": logits.detach().to(dtype).requires_grad_(),
        "old_logps": logps + 0.5 * torch.randn(4, 3, dtype=WIDE),
        "ref_logps": logps + 0.5 * torch.randn(4, 3, dtype=WIDE),
        "completion_ids": ids,
        "advantages": torch.tensor([1.0, -0.7, 0.4, -2.0], dtype=WIDE),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]]),
    }


LEVEL = "importance_sampling_level"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "delta": 1.1, "importance_sampling_ratio": (4,)},
    {"importance_sampling_level": "sequence", "use_bias_correction_kl": True},
    {"log_ratio_clip": 0.3, "use_bias_correction_kl": True},
    {"log_ratio_clip": 0.1, "importance_sampling_level": "sequence"},
    {"loss_type": "bnpo", "eps_low": 0.1, "eps_high": 0.3, "delta": 1.5, "use_bias_correction_kl": True},
    {"loss_type": "bnpo", "importance_sampling_level": "sequence", "delta": 1.1, "importance_sampling_ratio": (4, 1)},
    {"loss_type": "dr_grpo", "beta": 0.0},
    {"loss_type": "dr_grpo", "max_completion_length": 9, "importance_sampling_ratio": (4, 3)},
    {"loss_type": "dapo", "old_logps": None},
    {"loss_type": "dapo", "num_items_in_batch": 11, "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "num_items_in_batch": 0.25, "completion_mask": None},
    {"loss_type": "cispo", "eps_high": 1.2, "importance_sampling_ratio": (4, 3)},
    {"loss_type": "cispo", "eps_high": 5.0, "num_items_in_batch": torch.tensor(7.5)},
    {"loss_type": "cispo", "eps_high": 0.9, "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "eps_high": 1.1, "importance_sampling_level": "sequence_token"},
    {"importance_sampling_level": "sequence_token", "use_bias_correction_kl": True},
    {"loss_type": "bnpo", "importance_sampling_level": "sequence_token", "importance_sampling_ratio": (4, 3)},
    {"loss_type": "sapo", "beta": 0.0},
    {"loss_type": "sapo", "importance_sampling_level": "sequence", "importance_sampling_ratio": (4, 3)},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5, "use_bias_correction_kl": True},
    {"loss_type": "luspo", "delta": 1.2},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0, "importance_sampling_ratio": (4,)},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "old_logps": None},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_grpo_loss_is_the_formula(options: dict[str, Any]) -> None:
    arguments = grpo_inputs() | options
    shape = options.get("importance_sampling_ratio")
    importance = None if shape is None else torch.rand(shape, dtype=WIDE) + 0.5
    arguments["importance_sampling_ratio"] = importance
    logits, old, mask = (arguments[name] for name in ("logits", "old_logps", "completion_mask"))
    scaled = logits.detach()[:, :-1] / options.get("temperature", 1.0)
    logps = scaled.log_softmax(-1).gather(-1, arguments["completion_ids"][..., None])[..., 0].tolist()
    items = options.get("num_items_in_batch")
    loss, kl, clip_ratio, per_token = loop_grpo(
        logps,
        logps if old is None else old.tolist(),
        arguments["ref_logps"].tolist(),
        arguments["advantages"].tolist(),
        [[1] * 3] * 4 if mask is None else mask.tolist(),
        options.get("beta", 0.04),
        (options.get("eps_low", 0.2), options.get("eps_high", 0.2)),
        options.get("delta"),
        options.get("loss_type", "grpo"),
        options.get("importance_sampling_level", "token"),
        options.get("use_bias_correction_kl", False),
        None if importance is None else importance.reshape(4, -1).expand(4, 3).tolist(),
        (options.get("sapo_temperature_pos", 1.0), options.get("sapo_temperature_neg", 1.05)),
        options.get("max_completion_length"),
        None if items is None else float(items),
        options.get("log_ratio_clip", math.inf),
    )
    actual = grpo_loss(**arguments)
    torch.testing.assert_close(actual.loss.item(), loss)
    torch.testing.assert_close(actual.clip_ratio.item(), clip_ratio)
    assert (actual.kl is None) == (options.get("beta") == 0.0)
    if actual.kl is not None:
        torch.testing.assert_close(actual.kl.item(), kl)
    rows = grpo_loss(**arguments, reduction="none")
    torch.testing.assert_close(rows.loss, torch.tensor(per_token, dtype=WIDE))
    assert rows.clip_ratio.shape == (4, 3)

    # Where the ratio is a constant there is no function of logits that has this gradient: the next test.
    if old is not None and options.get("loss_type") != "cispo" and "_token" not in options.get(LEVEL, ""):
        rest = {name: value for name, value in arguments.items() if name != "logits"}
        assert torch.autograd.gradcheck(lambda logits: grpo_loss(logits, **rest).loss, (logits,))
    (gradient,) = torch.autograd.grad(actual.loss, logits, torch.tensor(-2.0, dtype=WIDE))
    assert gradient.any()
    assert not gradient[:, -1].any()


def test_grpo_loss_gradient_of_constants() -> None:
    """On policy it is −A times that of the log-probability; in cispo, also times the limited ratio; and of a token at
    ``"sequence_token"`` level, times the row's ratio.
    """
    arguments = grpo_inputs() | {"beta": 0.0}
    logits, ids = arguments["logits"], arguments["completion_ids"]
    mask, advantages = arguments["completion_mask"], arguments["advantages"][:, None]

    def logps() -> Tensor:
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    ratio = (logps() - arguments["old_logps"]).exp().clamp(max=1.1).detach()
    mean = ((logps() - arguments["old_logps"]) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    for factor, options in (
        (mean.exp().detach(), {"loss_type": "bnpo", LEVEL: "sequence_token", "eps_low": 1.0, "eps_high": 99.0}),
        (torch.ones_like(ratio), {"loss_type": "bnpo", "old_logps": None}),
        (ratio, {"loss_type": "cispo", "eps_high": 1.1}),
    ):
        expected = -(factor * advantages * logps() * mask).sum() / mask.sum()
        actual = grpo_loss(**(arguments | options)).loss
        torch.testing.assert_close(gradients(actual, logits), gradients(expected, logits))


def test_grpo_loss_ignores_what_is_masked() -> None:
    for options in OPTIONS:
        if "importance_sampling_ratio" in options or "completion_mask" in options:
            continue
        arguments = grpo_inputs() | options
        hidden = arguments["completion_mask"] == 0
        clean = grpo_loss(**arguments)
        expected = gradients(clean.loss, arguments["logits"])
        logits = arguments["logits"].detach().clone()
        logits[:, :-1].masked_fill_(hidden[..., None], torch.nan)
        arguments["logits"] = logits.requires_grad_()
        arguments["completion_ids"] = arguments["completion_ids"].masked_fill(hidden, NONE)
        for name in ("old_logps", "ref_logps"):
            if arguments[name] is not None:
                arguments[name] = arguments[name].masked_fill(hidden, torch.nan)
        actual = grpo_loss(**arguments)
        torch.testing.assert_close(actual, clean)
        torch.testing.assert_close(gradients(actual.loss, logits), expected)


def test_grpo_loss_of_ids_out_of_range() -> None:
    for loss_type in grpo.LOSS_TYPES:
        arguments = grpo_inputs() | {"loss_type": loss_type}
        arguments["completion_ids"][0, 0], arguments["completion_ids"][1, 1] = 5, -1
        with pytest.raises(IndexError, match="grpo_loss: completion_ids holds 5; it takes 0 to 4"):
            grpo_loss(**arguments)
        actual = grpo_loss.reference(**arguments, reduction="none")
        assert actual.loss.isnan().nonzero().tolist() == [[0, 0], [1, 1]]
        (gradient,) = torch.autograd.grad(actual.loss.sum(), arguments["logits"])
        assert gradient.isnan().all(-1).nonzero().tolist() == [[0, 0], [1, 1]]
        assert gradient.isnan().any(-1).nonzero().tolist() == [[0, 0], [1, 1]]


def calls(dtype: torch.dtype = WIDE, rows: int = 3) -> dict[str, tuple[Any, list[Tensor], dict[str, Any]]]:
    """Per op: the op, its first tensors in order (None: left to the rest), the rest. Every float wants a gradient."""
    labels = torch.randint(5, (rows,))
    probabilities = [t.detach().exp().to(dtype).requires_grad_() for t in (logprobs(rows, 5), logprobs(rows, 5))]
    weights = [randn(5, 4, dtype=dtype), randn(5, 2, dtype=dtype)]
    return {
        "cross_entropy": (
            cross_entropy,
            [randn(rows, 5, dtype=dtype), None, randn(5, dtype=dtype)],
            {"target": labels},
        ),
        "fused_linear_cross_entropy": (
            fused_linear_cross_entropy,
            [randn(rows, 4, dtype=dtype), weights[0], None, randn(5, dtype=dtype)],
            {"target": labels, "class_weight": randn(5, dtype=dtype)},
        ),
        "jsd": (jsd, [logprobs(rows, 5, dtype=dtype), logprobs(rows, 5, dtype=dtype)], {"labels": labels}),
        "fused_linear_jsd": (
            fused_linear_jsd,
            [randn(rows, 4, dtype=dtype), weights[0], randn(rows, 2, dtype=dtype), weights[1]],
            {"labels": labels},
        ),
        "fused_linear_kl_div": (
            fused_linear_kl_div,
            [randn(rows, 4, dtype=dtype), weights[0], probabilities[1], None, randn(5, dtype=dtype)],
            {"labels": labels},
        ),
        "kl_div": (kl_div, [logprobs(rows, 5, dtype=dtype), probabilities[1]], {}),
        "tvd": (tvd, probabilities, {"labels": labels}),
        "grpo_loss": (
            grpo_loss,
            [randn(rows, 3, 5, dtype=dtype), randn(rows, 2), randn(rows, 2)],
            {
                "completion_ids": torch.randint(5, (rows, 2)),
                "advantages": randn(rows),
                "completion_mask": torch.ones(rows, 2, dtype=torch.bool),
                "importance_sampling_ratio": randn(rows),
            },
        ),
    }


NAMES = tuple(calls())


def arguments_of(name: str, dtype: torch.dtype = WIDE, rows: int = 3) -> tuple[Any, dict[str, Any]]:
    op, tensors, others = calls(dtype, rows)[name]
    return op, {n: t for n, t in zip(op.names, tensors, strict=False) if t is not None} | others


def loss_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result.loss


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_differentiable_gets_a_gradient(name: str) -> None:
    op, arguments = arguments_of(name)
    floats = {n: t for n, t in arguments.items() if t.is_floating_point()}
    assert all(t.requires_grad for t in floats.values())
    actual = torch.autograd.grad(loss_of(op(**arguments)), list(floats.values()), allow_unused=True)
    for (n, tensor), gradient in zip(floats.items(), actual, strict=True):
        assert (gradient is not None) == (n in op.differentiable), n
        assert gradient is None or (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "kl_div"])
@pytest.mark.parametrize("dtype", [WIDE, torch.float32, torch.bfloat16])
def test_nothing_that_counts_is_zero(name: str, dtype: torch.dtype) -> None:
    """0 and not NaN, with gradients of 0."""
    op, arguments = arguments_of(name, dtype)
    for label in ("target", "labels"):
        if label in arguments and not arguments[label].is_floating_point():
            arguments[label].fill_(NONE)
    if name == "grpo_loss":
        arguments["completion_mask"].fill_(False)
    for loss_type in grpo.LOSS_TYPES if name == "grpo_loss" else (None,):
        options = {} if loss_type is None else {"loss_type": loss_type}
        loss = loss_of(op(**arguments, **options))
        assert loss.item() == 0.0
        for gradient in torch.autograd.grad(loss, [arguments[n] for n in op.differentiable if n in arguments]):
            assert not gradient.any()


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows(name: str) -> None:
    op, arguments = arguments_of(name, rows=0)
    loss = loss_of(op(**arguments))
    assert loss.item() == 0.0
    for n in op.differentiable:
        (gradient,) = torch.autograd.grad(loss, arguments[n], retain_graph=True)
        assert gradient.shape == arguments[n].shape
        assert not gradient.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """Losses are float32 and near the float64 ones; gradients have their inputs' dtypes."""
    op, arguments = arguments_of(name, dtype)
    if name == "grpo_loss":
        arguments |= {n: t.detach().float() for n, t in arguments.items() if t.dtype is WIDE}
    wide = {n: t.detach().double().requires_grad_() if t.is_floating_point() else t for n, t in arguments.items()}
    loss, expected = loss_of(op(**arguments)), loss_of(op(**wide))
    assert loss.dtype is torch.float32
    eps = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=eps, atol=eps)
    for n in op.differentiable:
        if n in arguments:
            (gradient,) = torch.autograd.grad(loss, arguments[n], retain_graph=True)
            (truth,) = torch.autograd.grad(expected, wide[n], retain_graph=True)
            assert gradient.dtype is dtype
            torch.testing.assert_close(gradient.double(), truth, rtol=eps, atol=eps * truth.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_compiles_whole(name: str) -> None:
    op, arguments = arguments_of(name, torch.float32)
    if name.startswith("fused"):
        arguments["memory_budget"] = 1 << 20
    torch.compiler.reset()
    compiled = torch.compile(
        lambda **call_inputs: loss_of(op(**call_inputs)),
        fullgraph=True,
        dynamic=name == "grpo_loss",
        backend="aot_eager",
    )
    inputs = [arguments[n] for n in op.differentiable]
    loss, expected = compiled(**arguments), loss_of(op(**arguments))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs))


def test_none_reductions_of_elements_have_the_inputs_dtype() -> None:
    log_pred = logprobs(2, 3, dtype=torch.bfloat16)
    assert kl_div(log_pred, log_pred.detach().exp(), reduction="none").dtype is torch.bfloat16
    assert tvd(log_pred.exp(), log_pred.detach().float(), reduction="none").dtype is torch.bfloat16


def test_grpo_output_names() -> None:
    actual = grpo_loss(**grpo_inputs())
    assert isinstance(actual, GRPOOutput)
    assert actual.loss.requires_grad
    assert not actual.kl.requires_grad
    assert not actual.clip_ratio.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("teacher", [False, True])
def test_memory_budget(dtype: torch.dtype, teacher: bool) -> None:
    """A byte below the least is an error that names it; the least itself, and anything above it, gives a chunk."""
    x, weight = randn(9, 4, dtype=dtype), randn(7, 4, dtype=dtype)
    sizes: dict[str, Any] = {"accum_dtype": torch.float32, "weight_grad": True, "teacher_x": x if teacher else None}
    least = least_memory(x, weight, **sizes)

    def call(budget: int) -> Tensor:
        if teacher:
            return fused_linear_jsd(x, weight, x, weight, memory_budget=budget)
        return fused_linear_cross_entropy(x, weight, torch.zeros(9, dtype=torch.int64), memory_budget=budget)

    with pytest.raises(ValueError, match=f"memory_budget is {least - 1}; it takes at least {least} bytes"):
        call(least - 1)
    call(least)
    chunks = [chunk_rows(budget, x, weight, **sizes) for budget in range(least, least + 1000)]
    assert chunks[0] == 1
    assert chunks[-1] == 9
    assert chunks == sorted(chunks)
    assert chunk_rows(None, x, weight, **sizes) == 9
    with torch.no_grad():
        assert least_memory(x, weight, **{**sizes, "weight_grad": False}) <= least
        call(least_memory(x, weight, **{**sizes, "weight_grad": False}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("teacher", [False, True])
def test_the_least_budget_makes_no_long_sums(dtype: torch.dtype, teacher: bool) -> None:
    """A float32 sum over very many chunks would be off by more than its terms are."""
    x, weight = (torch.empty(size, 4, device="meta", dtype=dtype) for size in (100_000, 200_000))
    sizes: dict[str, Any] = {"accum_dtype": torch.float32, "weight_grad": True}
    sizes |= {"teacher_x": x if teacher else None}
    inputs: Any = {"accum_dtype": torch.float32, "memory_budget": least_memory(x, weight, **sizes)}
    plan = linear.plan_of((True, True, True), x, weight, teacher_x=sizes["teacher_x"], **inputs)
    assert plan.columns is not None or 100_000 / plan.chunk <= MOST_CHUNKS  # with columns, no sum is over chunks
    assert not teacher or plan.columns is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(100_000, 200_000), (100_000, 50), (50, 200_000)])
def test_the_least_budget_of_statistics_makes_no_long_sums(dtype: torch.dtype, rows: int, vocabulary: int) -> None:
    x, weight = (torch.empty(size, 4, device="meta", dtype=dtype) for size in (rows, vocabulary))
    least = least_statistics_memory(x, weight, accum_dtype=torch.float32, weight_grad=True)
    inputs: Any = {"accum_dtype": torch.float32, "memory_budget": least, "picked_alone": False}
    plan = statistics.plan_of((True, True, True), x, weight, **inputs)
    assert (vocabulary / plan.columns if plan.by_columns else rows / plan.rows) <= MOST_CHUNKS


def test_default_chunk_is_bounded() -> None:
    x, weight = torch.empty(1 << 15, 4096, device="meta"), torch.empty(128256, 4096, device="meta")
    sizes: dict[str, Any] = {"accum_dtype": torch.float32, "weight_grad": True}
    assert chunk_rows(None, x, weight, **sizes) == 4096
    assert chunk_rows(None, x[:, :64], weight[:, :64], **sizes) == 1024


@pytest.mark.parametrize("ignore_index", [2**63, -(2**63) - 1])
def test_labels_of_more_than_64_bits(ignore_index: int) -> None:
    """No label can be that; neither is it what is left of it in 64 bits. Those next to it are labels like others."""
    rows, label = torch.randn(2, 3, dtype=torch.float32).log_softmax(-1), torch.tensor([0, 1])
    weight = torch.randn(3, 3)
    near = ignore_index - 1 if ignore_index > 0 else ignore_index + 1
    calls: dict[str, Callable[[int], Any]] = {
        "cross_entropy": lambda index: cross_entropy(rows, label, ignore_index=index),
        "fused_linear_cross_entropy": lambda index: fused_linear_cross_entropy(rows, weight, label, ignore_index=index),
        "jsd": lambda index: jsd(rows, rows, label, ignore_index=index),
        "fused_linear_jsd": lambda index: fused_linear_jsd(rows, weight, rows, weight, label, ignore_index=index),
        "tvd": lambda index: tvd(rows.exp(), rows.exp(), label, ignore_index=index),
    }
    for name, call in calls.items():
        call(near)
        with pytest.raises(ValueError, match=f"{name}: ignore_index is {ignore_index}; it takes an int of 64 bits"):
            call(ignore_index)
