"""The losses of log-probabilities, against their sources' formulas, written again as arithmetic on single numbers."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from liger_core import losses, policy
from liger_core.losses import preference
from liger_core.ops.grpo_loss import grpo_loss
from liger_core.ops.logit_statistics import logit_statistics

WIDE = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def logps(*shape: int, grad: bool = True) -> Tensor:
    return (-4 * torch.rand(*shape, dtype=WIDE) - 0.05).requires_grad_(grad)


def sigmoid(t: float) -> float:
    return 1 / (1 + math.exp(-t))


def log_sigmoid(t: float) -> float:
    return math.log(sigmoid(t))


def smoothed(h: float, s: float) -> float:
    return -(1 - s) * log_sigmoid(h) - s * log_sigmoid(-h)


def assert_gradient(loss: Callable[..., Tensor], *inputs: Tensor) -> None:
    assert torch.autograd.gradcheck(loss, inputs)


def pair_loss(
    kind: str, c: float, r: float, ref_c: float, ref_r: float, beta: float, s: float, f: Callable[[float], float]
) -> float:
    a, b = c - ref_c, r - ref_r
    u, v = beta * a, beta * b
    h = beta * (f(a) - f(b))
    return {
        "sigmoid": lambda: smoothed(h, s),
        "robust": lambda: (-(1 - s) * log_sigmoid(h) + s * log_sigmoid(-h)) / (1 - 2 * s),
        "hinge": lambda: max(0.0, 1 - h),
        "ipo": lambda: (h / beta - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: (
            sigmoid(h) * (math.log(sigmoid(h)) - math.log(1 - s)) + sigmoid(-h) * (math.log(sigmoid(-h)) - math.log(s))
        ),
        "nca_pair": lambda: -log_sigmoid(u) - 0.5 * log_sigmoid(-u) - 0.5 * log_sigmoid(-v),
        "bco_pair": lambda: -log_sigmoid(u - 0.3) - log_sigmoid(-(v - 0.3)),
        "sppo_hard": lambda: (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
        "apo_zero": lambda: (1 - sigmoid(u)) + sigmoid(v),
        "apo_down": lambda: sigmoid(u) + (1 - sigmoid(u - v)),
        "discopop": lambda: -log_sigmoid(h) * (1 - sigmoid(h / 0.05)) + math.exp(-h) * sigmoid(h / 0.05),
    }[kind]()


DIVERGENCES: dict[str, Callable[[float], float]] = {
    "reverse_kl": lambda t: t,
    "forward_kl": lambda t: -math.exp(-t),
    "js_divergence": log_sigmoid,
    "alpha_divergence": lambda t: (math.exp(-0.5 * t) - 1) / -0.5,
}


@pytest.mark.parametrize(
    ("kind", "divergence"),
    [(k, "reverse_kl") for k in preference.DPO_LOSS_TYPES if not k.startswith("aot")]
    + list(itertools.product(preference.OF_MARGIN, list(DIVERGENCES)[1:])),
)
@pytest.mark.parametrize("reference", [False, True])
def test_dpo_is_the_formula(kind: str, divergence: str, reference: bool) -> None:
    c, r = logps(5), logps(5)
    refs = [logps(5), logps(5)] if reference else [None, None]
    options: dict[str, Any] = {"beta": 0.4, "loss_type": kind, "label_smoothing": 0.2, "f_divergence": divergence}
    options |= {"bco_delta": 0.3}
    actual = losses.dpo_loss(c, r, *refs, **options, reduction="none")
    constants = [[0.0] * 5 if t is None else t.tolist() for t in refs]
    rows = zip(c.tolist(), r.tolist(), *constants, strict=True)
    expected = [pair_loss(kind, *row, 0.4, 0.2, DIVERGENCES[divergence]) for row in rows]
    torch.testing.assert_close(actual.loss, torch.tensor(expected, dtype=WIDE), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual.chosen_rewards, 0.4 * (c - torch.tensor(constants[0])).detach())
    torch.testing.assert_close(actual.rejected_rewards, 0.4 * (r - torch.tensor(constants[1])).detach())
    assert not actual.chosen_rewards.requires_grad
    assert_gradient(lambda c, r: losses.dpo_loss(c, r, *refs, **options, reduction="sum").loss, c, r)
    if reference:
        grads = torch.autograd.grad(actual.loss.sum(), refs, allow_unused=True)
        assert grads == (None, None)


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_dpo_by_optimal_transport(kind: str) -> None:
    c, r, ref_c, ref_r = logps(6), logps(6), logps(6, grad=False), logps(6, grad=False)
    actual = losses.dpo_loss(c, r, ref_c, ref_r, beta=0.4, loss_type=kind, label_smoothing=0.1, reduction="none")
    rows = list(zip(c.tolist(), r.tolist(), ref_c.tolist(), ref_r.tolist(), strict=True))
    if kind == "aot":
        first, second = sorted(row[0] - row[1] for row in rows), sorted(row[2] - row[3] for row in rows)
    else:
        first, second = sorted(row[0] - row[2] for row in rows), sorted(row[1] - row[3] for row in rows)
    expected = [smoothed(0.4 * (x - y), 0.1) for x, y in zip(first, second, strict=True)]
    torch.testing.assert_close(actual.loss.tolist(), expected)
    assert_gradient(lambda c, r: losses.dpo_loss(c, r, ref_c, ref_r, loss_type=kind, label_smoothing=0.1).loss, c, r)


def test_alpha_divergence_joins_the_others() -> None:
    """At 0 it is the forward, at 1 the reverse divergence; beside 1 it comes near that."""
    c, r = logps(4, grad=False), logps(4, grad=False)

    def loss(divergence: str, alpha: float = 0.5) -> Tensor:
        return losses.dpo_loss(c, r, beta=0.3, f_divergence=divergence, f_alpha=alpha).loss

    assert loss("alpha_divergence", 0.0) == loss("forward_kl")
    assert loss("alpha_divergence", 1.0) == loss("reverse_kl")
    torch.testing.assert_close(loss("alpha_divergence", 1 - 1e-9), loss("reverse_kl"))


@pytest.mark.parametrize("divergence", list(DIVERGENCES))
@pytest.mark.parametrize("kind", preference.OF_MARGIN)
def test_dpo_far_from_the_reference_is_finite(kind: str, divergence: str) -> None:
    c = torch.tensor([-2000.0, 0.0, -1e4], requires_grad=True)
    r = torch.tensor([0.0, -2000.0, -1e4], requires_grad=True)
    options: dict[str, Any] = {"loss_type": kind, "f_divergence": divergence, "label_smoothing": 0.1, "beta": 0.01}
    for reduction in ("mean", "sum"):
        assert losses.dpo_loss(c, r, **options, reduction=reduction).chosen_rewards.isfinite().all()
    if divergence == "reverse_kl":
        loss = losses.dpo_loss(c, r, **options).loss
        assert loss.isfinite()
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (c, r)))


def test_orpo_is_the_formula() -> None:
    c, r = logps(5), logps(5)
    actual = losses.orpo_loss(c, r, beta=0.7, reduction="none")
    odds = [
        math.log(math.exp(x) / (1 - math.exp(x))) - math.log(math.exp(y) / (1 - math.exp(y)))
        for x, y in zip(c.tolist(), r.tolist(), strict=True)
    ]
    torch.testing.assert_close(actual.log_odds.tolist(), odds)
    torch.testing.assert_close(actual.loss.tolist(), [-0.7 * log_sigmoid(o) for o in odds])
    assert_gradient(lambda c, r: losses.orpo_loss(c, r, beta=0.7).loss, c, r)


def test_orpo_of_a_sure_completion_is_finite() -> None:
    """log(1 − e^t) is −inf in float32 from t = −6e-8 on, unless t is kept away from 0."""
    c = torch.tensor([0.0, -1e-9, -100.0], requires_grad=True)
    r = torch.tensor([-1.0, 0.0, -1e-3], requires_grad=True)
    actual = losses.orpo_loss(c, r)
    assert actual.log_odds.isfinite().all()
    for gradient in torch.autograd.grad(actual.loss, (c, r)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_is_the_formula(smoothing: float) -> None:
    c, r = logps(5), logps(5)
    actual = losses.simpo_loss(c, r, beta=2.5, gamma=0.6, label_smoothing=smoothing, reduction="none")
    rows = zip(c.tolist(), r.tolist(), strict=True)
    torch.testing.assert_close(actual.loss.tolist(), [smoothed(2.5 * (x - y) - 0.6, smoothing) for x, y in rows])
    assert_gradient(lambda c, r: losses.simpo_loss(c, r, label_smoothing=smoothing).loss, c, r)


@pytest.mark.parametrize("kind", preference.CPO_LOSS_TYPES)
def test_cpo_is_the_formula(kind: str) -> None:
    c, r = logps(5), logps(5)
    options: dict[str, Any] = {"beta": 0.3, "loss_type": kind, "label_smoothing": 0.1, "gamma": 0.2, "alpha": 0.4}
    formula: dict[str, Callable[[float, float], float]] = {
        "sigmoid": lambda x, y: smoothed(0.3 * (x - y) - 0.2, 0.1),
        "hinge": lambda x, y: max(0.0, 1 - 0.3 * (x - y)),
        "ipo": lambda x, y: (x - y - 1 / 0.6) ** 2,
        "alphapo": lambda x, y: smoothed(
            0.3 * ((1 - math.exp(-0.4 * x)) / 0.4 - (1 - math.exp(-0.4 * y)) / 0.4) - 0.2, 0.1
        ),
    }
    actual = losses.cpo_loss(c, r, **options, reduction="none")
    rows = zip(c.tolist(), r.tolist(), strict=True)
    torch.testing.assert_close(actual.loss.tolist(), [formula[kind](x, y) for x, y in rows])
    assert_gradient(lambda c, r: losses.cpo_loss(c, r, **options).loss, c, r)


def test_alphapo_without_alpha_is_simpo() -> None:
    c, r = logps(5, grad=False), logps(5, grad=False)
    expected = losses.simpo_loss(c, r, beta=0.3, gamma=0.2).loss
    assert losses.cpo_loss(c, r, beta=0.3, gamma=0.2, loss_type="alphapo").loss == expected
    near = losses.cpo_loss(c, r, beta=0.3, gamma=0.2, loss_type="alphapo", alpha=1e-8).loss
    torch.testing.assert_close(near, expected)


@pytest.mark.parametrize("kind", preference.KTO_LOSS_TYPES)
@pytest.mark.parametrize("kl", [None, (), (6,)])
def test_kto_is_the_formula(kind: str, kl: tuple[int, ...] | None) -> None:
    t, ref = logps(6), logps(6)
    desirable = torch.tensor([True, False, True, True, False, False])
    estimate = None if kl is None else torch.rand(kl, dtype=WIDE)
    options: dict[str, Any] = {"beta": 0.4, "loss_type": kind, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    actual = losses.kto_loss(t, ref, desirable, estimate, **options, reduction="none")
    used = torch.zeros(6) if estimate is None or kind != "kto" else estimate.expand(6)
    expected = [
        1.5 * (1 - sigmoid(0.4 * (x - y - k))) if good else 0.5 * (1 - sigmoid(-0.4 * (x - y - k)))
        for x, y, good, k in zip(t.tolist(), ref.tolist(), desirable.tolist(), used.tolist(), strict=True)
    ]
    torch.testing.assert_close(actual.loss.tolist(), expected)
    torch.testing.assert_close(actual.rewards, 0.4 * (t - ref).detach())
    assert_gradient(lambda t: losses.kto_loss(t, ref, desirable, estimate, **options).loss, t)
    assert torch.autograd.grad(actual.loss.sum(), ref, allow_unused=True) == (None,)


CALLS: dict[str, Callable[..., Any]] = {
    "dpo_loss": losses.dpo_loss,
    "orpo_loss": losses.orpo_loss,
    "simpo_loss": losses.simpo_loss,
    "cpo_loss": losses.cpo_loss,
    "kto_loss": lambda c, r, **options: losses.kto_loss(c, r, torch.ones_like(c, dtype=torch.bool), **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_reductions(name: str) -> None:
    c, r = logps(4), logps(4)
    rows = CALLS[name](c, r, reduction="none").loss
    assert rows.shape == (4,)
    torch.testing.assert_close(CALLS[name](c, r, reduction="sum").loss, rows.sum())
    torch.testing.assert_close(CALLS[name](c, r).loss, rows.mean())
    empty = CALLS[name](c[:0], r[:0])
    assert empty.loss.item() == 0.0


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    c, r = logps(4, grad=False).to(dtype), logps(4, grad=False).to(dtype)
    actual = CALLS[name](c, r).loss
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual, CALLS[name](c.float(), r.float()).loss)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: losses.dpo_loss(logps(3), logps(4)), ValueError, r"rejected_logps has shape \(4,\); it takes \(3,\)"),
        (lambda: losses.dpo_loss(logps(3, 1), logps(3)), ValueError, "chosen_logps has 2 dimensions"),
        (lambda: losses.dpo_loss(logps(3), logps(3), loss_type="dpo"), ValueError, "loss_type is 'dpo'; it takes"),
        (
            lambda: losses.dpo_loss(logps(3), logps(3), beta=0),
            ValueError,
            "beta is 0; it takes a number greater than 0",
        ),
        (
            lambda: losses.dpo_loss(logps(3), logps(3), loss_type="robust", label_smoothing=0.5),
            ValueError,
            "label_smoothing is 0.5; it takes a number below 0.5",
        ),
        (lambda: losses.dpo_loss(logps(3), logps(3), loss_type="exo_pair"), ValueError, "label_smoothing is 0.0"),
        (
            lambda: losses.dpo_loss(logps(3), logps(3), loss_type="nca_pair", f_divergence="forward_kl"),
            ValueError,
            "f_divergence is 'forward_kl'; it takes 'reverse_kl'",
        ),
        (lambda: losses.dpo_loss(logps(3), logps(3), discopop_tau=0.0), ValueError, "discopop_tau is 0.0"),
        (lambda: losses.orpo_loss(logps(3), logps(3), reduction="avg"), ValueError, "reduction is 'avg'"),
        (lambda: losses.simpo_loss(logps(3), logps(3), gamma="1"), TypeError, "gamma is '1'; it takes a number"),
        (lambda: losses.cpo_loss(logps(3), logps(3), loss_type="simpo"), ValueError, "loss_type is 'simpo'"),
        (lambda: losses.kto_loss(logps(3), None, torch.ones(3)), TypeError, "desirable has dtype float32"),
        (
            lambda: losses.kto_loss(logps(3), None, torch.ones(3, dtype=torch.bool), logps(2)),
            ValueError,
            r"kl has shape \(2,\); it takes \(3,\)",
        ),
        (lambda: losses.sequence_logprobs(logps(3)), ValueError, "logprobs has 1 dimensions"),
        (lambda: losses.sequence_logprobs(logps(3, 2), torch.ones(3)), ValueError, r"mask has shape \(3,\)"),
        (lambda: losses.topk_kl(logps(3, 2), logps(3, 3)), ValueError, "teacher_logprobs has shape"),
        (lambda: losses.policy_loss(logps(3), None, None, logps(3)), ValueError, "logprobs has 1 dimensions"),
        (
            lambda: losses.policy_loss(logps(2, 3), None, None, logps(3)),
            ValueError,
            r"advantages has shape \(3,\); it takes \(2,\) or \(2, 3\)",
        ),
        (
            lambda: losses.policy_loss(logps(2, 3), None, None, logps(2, 3), beta=0.0, loss_type="vespo"),
            ValueError,
            "it takes .* when loss_type is 'vespo'",
        ),
        (lambda: losses.sequence_logprobs(logps(1, 2), torch.tensor([[1, -100]])), ValueError, "mask holds -100"),
        (lambda: losses.topk_kl(logps(2, 2), logps(2, 2), torch.tensor([0.5, 1])), ValueError, "mask holds 0.5"),
        (
            lambda: losses.policy_loss(logps(1, 2), None, None, logps(1), torch.tensor([[7, 1]]), beta=0.0),
            ValueError,
            "completion_mask holds 7; it takes 0 and 1",
        ),
        (
            lambda: losses.policy_loss(logps(1, 2), None, None, logps(1), beta=0.0, num_items_in_batch=-3),
            ValueError,
            "num_items_in_batch is -3; it takes a number greater than 0",
        ),
        (
            lambda: losses.policy_loss(logps(1, 2), None, None, logps(1), beta=0.0, num_items_in_batch=torch.tensor(0)),
            ValueError,
            "num_items_in_batch is 0; it takes a number greater than 0",
        ),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize("tau", [0.05, 50.0])
def test_discopop_of_an_impossible_completion(tau: float) -> None:
    """Loss and slope go on: −h and −beta."""
    chosen = torch.tensor([-torch.inf, -1e4], requires_grad=True)
    loss = losses.dpo_loss(
        chosen, torch.zeros(2), beta=1.0, loss_type="discopop", discopop_tau=tau, reduction="none"
    ).loss
    assert loss.tolist() == [math.inf, 1e4]
    assert torch.autograd.grad(loss.sum(), chosen)[0].tolist() == [-1.0, -1.0]


def test_exo_of_an_impossible_completion() -> None:
    """The term of a margin of ±inf that vanishes has the product 0, in the loss and in the gradient."""
    margin = torch.tensor([-torch.inf, torch.inf, -1e4, 1e4], requires_grad=True)
    loss = losses.dpo_loss(
        margin, torch.zeros(4), beta=1.0, loss_type="exo_pair", label_smoothing=0.1, reduction="none"
    ).loss
    expected = [-math.log(0.1), -math.log(0.9)] * 2
    torch.testing.assert_close(loss, torch.tensor(expected))
    assert torch.autograd.grad(loss.sum(), margin)[0].tolist() == [0.0] * 4


def test_sequence_logprobs_of_what_is_masked_or_empty() -> None:
    logprobs = torch.tensor([[-1.0, torch.nan, -2.0], [torch.inf, -1.0, -3.0], [torch.nan] * 3], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0]])
    for average, expected in ((False, [-3.0, -4.0, 0.0]), (True, [-1.5, -2.0, 0.0])):
        actual = losses.sequence_logprobs(logprobs, mask, average=average)
        assert actual.tolist() == expected
        (gradient,) = torch.autograd.grad(actual.sum(), logprobs)
        assert gradient.isfinite().all()
        assert not gradient[mask == 0].any()


@pytest.mark.parametrize("average", [False, True])
def test_sequences_of_a_packed_row_are_those_of_padded_ones(average: bool) -> None:
    lengths = torch.tensor([3, 0, 5, 1])
    packed, mask = logps(11), torch.rand(11) < 0.6
    actual = losses.sequence_logprobs(packed, mask, lengths=lengths, average=average)
    padded, padded_mask = torch.zeros(4, 5, dtype=WIDE), torch.zeros(4, 5)
    start = 0
    for row, length in enumerate(lengths.tolist()):
        padded[row, :length] = packed[start : start + length]
        padded_mask[row, :length] = mask[start : start + length]
        start += length
    expected = losses.sequence_logprobs(padded, padded_mask, average=average)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), packed)[0] for t in (actual, expected)))


@pytest.mark.parametrize("tail", [False, True])
def test_topk_kl_is_the_formula(tail: bool) -> None:
    student = torch.randn(3, 9, dtype=WIDE).log_softmax(-1)
    teacher = torch.randn(3, 9, dtype=WIDE).log_softmax(-1)
    top = teacher.topk(4)
    chosen = student.gather(1, top.indices).requires_grad_()
    actual = losses.topk_kl(chosen, top.values, torch.tensor([1, 0, 1]), tail=tail)
    for row in range(3):
        expected = 0.0
        for i in top.indices[row].tolist():
            expected += math.exp(teacher[row, i]) * float(teacher[row, i] - student[row, i])
        if tail:
            rest = 1 - sum(math.exp(t) for t in top.values[row].tolist())
            mine = 1 - sum(math.exp(student[row, i]) for i in top.indices[row].tolist())
            expected += rest * math.log(rest / mine)
        torch.testing.assert_close(actual[row].item(), expected if row != 1 else 0.0)
    assert_gradient(lambda lp: losses.topk_kl(lp, top.values, tail=tail), chosen)


def test_topk_kl_over_all_tokens_is_the_divergence() -> None:
    student, teacher = (torch.randn(3, 5, dtype=WIDE).log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(losses.topk_kl(student, teacher), expected)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_token_logprobs_are_those_of_log_softmax(linear: bool, many: bool) -> None:
    x, weight, bias = (torch.randn(*s, dtype=WIDE, requires_grad=True) for s in ((6, 4), (9, 4), (9,)))
    target = torch.randint(9, (6, 3) if many else (6,))
    target[2] = -100
    if many:
        target[0, 1] = -100
        target[1, 0] = target[1, 2]
    options: dict[str, Any] = {"temperature": 0.7, "softcap": 3.0}
    flags = {"return_entropy": True, "return_lse": True, "return_predicted_tokens": True}
    logits = x @ weight.T + bias
    z = 3.0 * torch.tanh(logits / 3.0) / 0.7
    log_p = z.log_softmax(-1)
    counted = target != -100
    picked = log_p.gather(1, target.clamp(min=0).view(6, -1)).view(target.shape).masked_fill(~counted, 0.0)
    row = counted if not many else counted.any(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).masked_fill(~row, 0.0)
    lse = z.logsumexp(-1).masked_fill(~row, 0.0)
    if linear:
        actual = losses.fused_linear_token_logprobs(x, weight, target, bias, **options, **flags)
    else:
        actual = losses.token_logprobs(logits, target, **options, **flags)
    assert isinstance(actual, losses.TokenLogprobsOutput)
    torch.testing.assert_close((actual.logprobs, actual.entropy, actual.lse), (picked, entropy, lse))
    assert actual.predicted_tokens.tolist() == logits.argmax(-1).masked_fill(~row, -1).tolist()
    for mine, theirs in ((actual.logprobs, picked), (actual.entropy, entropy), (actual.lse, lse)):
        incoming = torch.randn_like(theirs)
        grads = torch.autograd.grad(mine, (x, weight, bias), incoming, retain_graph=True)
        torch.testing.assert_close(grads, torch.autograd.grad(theirs, (x, weight, bias), incoming, retain_graph=True))


def test_token_logprobs_alone_are_a_tensor() -> None:
    actual = losses.token_logprobs(torch.zeros(2, 4), torch.tensor([[0, 1], [2, -100]]))
    assert isinstance(actual, Tensor)
    torch.testing.assert_close(actual, torch.tensor([[0.25, 0.25], [0.25, 1.0]]).log())


@pytest.mark.parametrize("token", [-1, 4])
def test_a_target_that_is_no_token(token: int) -> None:
    with pytest.raises(IndexError, match=f"target holds {token}; it takes 0 to 3, or ignore_index -100"):
        losses.token_logprobs(torch.zeros(2, 4), torch.tensor([0, token]))


def test_ratio_of_equal_policies_is_one() -> None:
    """Operands are bfloat16: logits that are rounded to bfloat16 near 20 would be off by percents."""
    x, weight = torch.randn(64, 32, dtype=torch.bfloat16) * 4, torch.randn(50, 32, dtype=torch.bfloat16)
    target = torch.randint(50, (64,))
    old = losses.fused_linear_token_logprobs(x, weight, target)
    exact = losses.fused_linear_token_logprobs(x.double(), weight.double(), target)
    assert isinstance(old, Tensor)
    assert isinstance(exact, Tensor)
    assert (torch.exp(old.double() - exact) - 1).abs().max() < 1e-5
    rounded = losses.token_logprobs(x @ weight.T, target)
    assert isinstance(rounded, Tensor)
    assert (torch.exp(rounded.double() - exact) - 1).abs().max() > 1e-2


def policy_inputs(rows: int = 3, length: int = 5) -> dict[str, Any]:
    return {
        "logprobs": logps(rows, length),
        "old_logps": logps(rows, length, grad=False),
        "ref_logps": logps(rows, length, grad=False),
        "advantages": torch.randn(rows, dtype=WIDE),
        "completion_mask": torch.rand(rows, length) < 0.7,
    }


@pytest.mark.parametrize("ratio", [None, (3,), (3, 1), (3, 5)])
@pytest.mark.parametrize("num_items", [None, 7, 2.5, torch.tensor(9)])
def test_vespo_is_the_formula(ratio: tuple[int, ...] | None, num_items: Any) -> None:
    inputs = policy_inputs()
    inputs["advantages"] = torch.tensor([1.5, -0.5, 0.0], dtype=WIDE)
    importance = None if ratio is None else torch.rand(ratio, dtype=WIDE) + 0.5
    if ratio == (3, 5):
        importance = importance.masked_fill(~inputs["completion_mask"], torch.nan)
    actual = losses.policy_loss(
        **inputs, beta=0.0, loss_type="vespo", importance_sampling_ratio=importance, num_items_in_batch=num_items
    )
    total, mask = 0.0, inputs["completion_mask"]
    for row in range(3):
        lp, old = inputs["logprobs"][row].tolist(), inputs["old_logps"][row].tolist()
        log_w = sum(x - y for x, y, counts in zip(lp, old, mask[row].tolist(), strict=True) if counts)
        if importance is not None:
            of_row = importance.view(3, -1)[row]
            log_w += sum(math.log(v) for v in (of_row if len(of_row) == 1 else of_row[mask[row]]).tolist())
        advantage = inputs["advantages"][row].item()
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        phi = math.exp(rate + k * log_w - rate * math.exp(log_w))
        total += sum(-phi * advantage * x for x, counts in zip(lp, mask[row].tolist(), strict=True) if counts)
    divisor = mask.sum().item() if num_items is None else max(float(num_items), 1.0)
    torch.testing.assert_close(actual.loss.item(), total / divisor)
    assert actual.clip_ratio.item() == 0.0


def test_vespo_weight_is_a_constant() -> None:
    inputs = policy_inputs()
    loss = losses.policy_loss(**inputs, beta=0.0, loss_type="vespo", reduction="none").loss
    (gradient,) = torch.autograd.grad(loss.sum(), inputs["logprobs"])
    torch.testing.assert_close(gradient * inputs["logprobs"].detach(), loss.detach())


def test_an_advantage_per_token() -> None:
    """Equal advantages of a row's tokens are the row's."""
    inputs = policy_inputs()
    for kind in policy.LOSS_TYPES:
        if kind != "vespo":
            expected = losses.policy_loss(**inputs, loss_type=kind)
            each = inputs | {"advantages": inputs["advantages"][:, None].expand(3, 5)}
            torch.testing.assert_close(losses.policy_loss(**each, loss_type=kind), expected)
    first = inputs | {"advantages": torch.eye(3, 5, dtype=WIDE)}
    loss = losses.policy_loss(**first, beta=0.0, reduction="none").loss
    assert not loss[torch.eye(3, 5) == 0].any()


@pytest.mark.parametrize("reduction", policy.REDUCTIONS)
@pytest.mark.parametrize("level", policy.LEVELS)
@pytest.mark.parametrize("kind", policy.LOSS_TYPES)
def test_what_is_masked_may_hold_anything(kind: str, level: str, reduction: str) -> None:
    if level != "token" and kind == "vespo":
        with pytest.raises(ValueError, match=f"level is '{level}'; it takes 'token' when loss_type is 'vespo'"):
            losses.policy_loss(**policy_inputs(), loss_type=kind, importance_sampling_level=level)
        return
    inputs = policy_inputs() | {"importance_sampling_ratio": torch.rand(3, 5, dtype=WIDE) + 0.5}
    mask = inputs["completion_mask"]
    options: dict[str, Any] = {"loss_type": kind, "importance_sampling_level": level, "reduction": reduction}
    options |= {"eps_low": 1.0, "eps_high": 99.0}  # a clipped ratio has no gradient that could be wrong
    expected = losses.policy_loss(**inputs, **options)
    for name in ("logprobs", "old_logps", "ref_logps", "importance_sampling_ratio"):
        inputs[name] = inputs[name].detach().masked_fill(~mask, torch.nan)
    inputs["logprobs"].requires_grad_()
    actual = losses.policy_loss(**inputs, **options)
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual.loss.sum(), inputs["logprobs"])
    assert gradient[mask].isfinite().all()
    assert not gradient[~mask].any()


@pytest.mark.parametrize("level", policy.LEVELS)
@pytest.mark.parametrize(
    ("kind", "advantage", "options", "expected"),
    [
        ("grpo", 2.0, {}, -2.4),
        ("grpo", -2.0, {"delta": 3.0}, 6.0),
        ("grpo", 0.0, {}, 0.0),
        ("grpo", 0.0, {"eps_high": math.inf}, 0.0),
        ("grpo", -2.0, {"importance_sampling_ratio": torch.zeros(1)}, 0.0),
        ("grpo", -2.0, {}, math.inf),
        ("grpo", 2.0, {"eps_high": math.inf}, -math.inf),
        ("grpo", -2.0, {"eps_high": math.inf, "delta": 3.0}, math.inf),
        ("cispo", 2.0, {"eps_high": 3.0}, 3.0),
        ("sapo", 2.0, {}, -8.0),
        ("sapo", -2.0, {"sapo_temperature_neg": 2.0}, 4.0),
    ],
)
def test_a_ratio_that_overflows(kind: str, level: str, advantage: float, options: Any, expected: float) -> None:
    """Its gradient is 0 and its loss that of any large ratio, if the loss doesn't depend on it; otherwise infinite."""
    lp = torch.full((1, 3), -0.5, requires_grad=True)
    actual = losses.policy_loss(
        lp, lp.detach() - 100, None, torch.tensor([advantage]), beta=0.0, loss_type=kind,
        importance_sampling_level=level, **options,
    ).loss  # fmt: skip
    assert actual.item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(actual, lp)
    if kind == "cispo":
        assert gradient.tolist() == [[pytest.approx(-2.0)] * 3]
    elif math.isfinite(expected):
        assert not gradient.any()
    bounded = losses.policy_loss(
        lp, lp.detach() - 100, lp.detach() + 100, torch.tensor([advantage]), loss_type=kind,
        importance_sampling_level=level, log_ratio_clip=20.0, use_bias_correction_kl=True, **options,
    ).loss  # fmt: skip
    assert bounded.isfinite()
    assert torch.autograd.grad(bounded, lp)[0].isfinite().all()


@pytest.mark.parametrize("kind", [k for k in policy.LOSS_TYPES if k != "vespo"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_grpo_loss_is_log_probabilities_and_the_policy_loss(kind: str, reduction: str) -> None:
    """To the bit."""
    logits, ids = torch.randn(3, 6, 7, requires_grad=True), torch.randint(7, (3, 5))
    inputs = {n: t.detach().float() for n, t in policy_inputs().items() if n not in ("logprobs", "completion_mask")}
    options: dict[str, Any] = {"loss_type": kind, "reduction": reduction}
    actual = grpo_loss(logits, completion_ids=ids, temperature=0.8, **inputs, **options)
    lp = losses.token_logprobs(logits[:, :-1].flatten(0, 1), ids.flatten(), temperature=0.8)
    assert isinstance(lp, Tensor)
    expected = losses.policy_loss(lp.view(3, 5), **inputs, **options)
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)
    grads = [torch.autograd.grad(t.loss.sum(), logits)[0] for t in (actual, expected)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo", "cpo", "kto", "policy", "sequence", "topk"])
def test_compiles_whole_for_sizes_that_change(name: str) -> None:
    """The first call compiles one graph: other shapes don't compile again."""
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "dpo": lambda a, b: losses.dpo_loss(a[:, 0], b[:, 0]).loss,
        "orpo": lambda a, b: losses.orpo_loss(a[:, 0], b[:, 0]).loss,
        "simpo": lambda a, b: losses.simpo_loss(a[:, 0], b[:, 0]).loss,
        "cpo": lambda a, b: losses.cpo_loss(a[:, 0], b[:, 0]).loss,
        "kto": lambda a, b: losses.kto_loss(a[:, 0], b[:, 0], a[:, 0] > -2).loss,
        "policy": lambda a, b: losses.policy_loss(a, b, b, a[:, 0], a > -3).loss,
        "sequence": lambda a, b: losses.sequence_logprobs(a, b < -1, average=True).sum(),
        "topk": lambda a, b: losses.topk_kl(a, b).sum(),
    }
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(calls[name], fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for rows, length in ((4, 6), (5, 9), (7, 3)):
        a, b = logps(rows, length), logps(rows, length, grad=False)
        actual, expected = compiled(a, b), calls[name](a, b)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual, a), torch.autograd.grad(expected, a))
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]


def test_statistics_of_shards_make_those_of_the_whole() -> None:
    """lse, log-probabilities and entropy of a vocabulary in three parts, one of them of a single column."""
    logits, target = torch.randn(5, 11, dtype=WIDE, requires_grad=True), torch.tensor([0, 4, 10, -100, 5])
    whole = logit_statistics(logits, target, return_entropy=True, return_total=True, return_best=True)
    ends = (0, 4, 5, 11)
    parts = [
        logit_statistics(logits[:, a:b], target, first=a, return_entropy=True, return_total=True, return_best=True)
        for a, b in itertools.pairwise(ends)
    ]
    counted = target != -100
    lse_r = torch.stack([p.lse for p in parts])
    lse = lse_r.logsumexp(0).masked_fill(~counted, 0.0)
    share = (lse_r - lse).exp()
    entropy = (share * (torch.stack([p.entropy for p in parts]) + lse - lse_r)).sum(0).masked_fill(~counted, 0.0)
    joined = {
        "lse": lse,
        "picked": sum(p.picked for p in parts),
        "entropy": entropy,
        "total": sum(p.total for p in parts),
    }
    for name, actual in joined.items():
        expected = getattr(whole, name)
        torch.testing.assert_close(actual, expected)
        incoming = torch.randn_like(expected)
        grads = torch.autograd.grad(actual, logits, incoming, retain_graph=True)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, logits, incoming, retain_graph=True))
    best = torch.stack([p.best for p in parts]).max(0)
    assert torch.equal(best.values, whole.best)
    index = torch.stack([p.best_index for p in parts]).gather(0, best.indices[None])[0]
    assert torch.equal(index, whole.best_index)


def test_statistics_with_their_gradients_are_the_formula() -> None:
    """dz = g_lse p + Σ g_picked [target] + g_total w − g_entropy p (log p + entropy), times softcap's derivative."""
    logits, weight = torch.randn(4, 6, dtype=WIDE, requires_grad=True), torch.rand(6, dtype=WIDE)
    target = torch.tensor([[7, 7], [5, 99], [10, -100], [-100, -100]])
    actual = logit_statistics(
        logits,
        target,
        weight,
        first=5,
        softcap=2.0,
        temperature=0.5,
        return_entropy=True,
        return_total=True,
        return_log_sum_squares=True,
    )
    row = torch.tensor([True, True, True, False])[:, None]
    z = (2.0 * torch.tanh(logits / 2.0) / 0.5).detach()
    p = z.softmax(-1)
    entropy = -(p * p.log()).sum(-1, keepdim=True)
    torch.testing.assert_close(actual.log_sum_squares, p.square().sum(-1).log().masked_fill(~row[:, 0], 0.0))
    torch.testing.assert_close(actual.total, (weight * z).sum(-1).masked_fill(~row[:, 0], 0.0))
    g = {n: torch.randn_like(t) for n, t in zip(actual._fields[:4], actual[:4], strict=True)}
    (gradient,) = torch.autograd.grad(actual[:4], logits, list(g.values()))
    dz = g["lse"][:, None] * p + g["total"][:, None] * weight - g["entropy"][:, None] * p * (p.log() + entropy)
    for i, k in ((0, 0), (0, 1), (1, 0), (2, 0)):
        dz[i, target[i, k] - 5] += g["picked"][i, k]
    expected = dz * (1 - torch.tanh(logits.detach() / 2.0).square()) / 0.5
    torch.testing.assert_close(gradient, expected.masked_fill(~row, 0.0))


@pytest.mark.parametrize("hidden", [-torch.inf])
def test_forbidden_tokens(hidden: float) -> None:
    """A logit of −inf: its log-probability is −inf; entropy and gradients stay finite."""
    logits = torch.tensor([[1.0, hidden, 0.5], [0.0, 0.0, 0.0]], dtype=WIDE, requires_grad=True)
    actual = losses.token_logprobs(logits, torch.tensor([[1, 0], [2, 2]]), return_entropy=True)
    assert isinstance(actual, losses.TokenLogprobsOutput)
    assert actual.logprobs[0, 0] == hidden
    assert actual.entropy is not None
    (gradient,) = torch.autograd.grad(actual.entropy.sum() + actual.logprobs[:, 1].sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0
