"""Losses of preferred, rejected, desirable and undesirable completions, given the log-probability of each."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_core import checks
from liger_core.contract import upcast

REDUCTIONS = ("mean", "sum", "none")
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
DPO_LOSS_TYPES = (
    "sigmoid",
    "robust",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "aot",
    "aot_unpaired",
    "discopop",
)
OF_MARGIN = ("sigmoid", "robust", "hinge", "ipo", "exo_pair", "discopop")
"""DPO's loss types that read the margin alone, so that any divergence can make it."""
CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo", "alphapo")
KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")
LARGEST_EXPONENT = 80.0
"""e^80 is finite in float32."""
SURE = -(2.0**-24)
"""The largest average log-probability that `orpo_loss` tells from 0: half of float32's spacing below 1."""


class PreferenceOutput(NamedTuple):
    """A loss of pairs, with a gradient, and the implicit rewards, ``[B]``, without."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


class ORPOOutput(NamedTuple):
    """`orpo_loss`, with a gradient; the implicit rewards and the log odds ratio, ``[B]``, without."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    log_odds: Tensor


class KTOOutput(NamedTuple):
    """`kto_loss`, with a gradient, and the implicit rewards, ``[B]``, without."""

    loss: Tensor
    rewards: Tensor


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    bco_delta: float = 0.0,
    discopop_tau: float = 0.05,
    reduction: str = "mean",
) -> PreferenceOutput:
    """Direct preference optimisation: a loss of how much more the policy prefers the chosen completion.

    With c, r the log-probabilities of the chosen and the rejected, a = c − ref_chosen, b = r − ref_rejected, u = beta a,
    v = beta b, h = beta (f(a) − f(b)), s = label_smoothing and ℓ = log σ, a pair's loss is, by `loss_type`,

    - ``"sigmoid"``: −(1 − s) ℓ(h) − s ℓ(−h)
    - ``"robust"``: (−(1 − s) ℓ(h) + s ℓ(−h)) / (1 − 2s), s < ½
    - ``"hinge"``: max(0, 1 − h)
    - ``"ipo"``: (h / beta − 1 / (2 beta))²; the log-probabilities are averages over tokens
    - ``"exo_pair"``: σ(h) (ℓ(h) − log(1 − s)) + σ(−h) (ℓ(−h) − log s), 0 < s < 1
    - ``"nca_pair"``: −ℓ(u) − ½ ℓ(−u) − ½ ℓ(−v)
    - ``"bco_pair"``: −ℓ(u − bco_delta) − ℓ(bco_delta − v)
    - ``"sppo_hard"``: (a − 1 / (2 beta))² + (b + 1 / (2 beta))²
    - ``"apo_zero"``: σ(−u) + σ(v)
    - ``"apo_down"``: σ(u) + σ(v − u)
    - ``"aot"``: sigmoid's with beta (sort(c − r) − sort(ref_chosen − ref_rejected)) for h
    - ``"aot_unpaired"``: sigmoid's with beta (sort(a) − sort(b)) for h
    - ``"discopop"``: −ℓ(h) (1 − m) + e^(−h) m, m = σ(h / discopop_tau)

    and f(t) is, by `f_divergence`, t (``"reverse_kl"``), −e^(−t) (``"forward_kl"``), ℓ(t) (``"js_divergence"``) or
    (e^((f_alpha − 1) t) − 1) / (f_alpha − 1) (``"alpha_divergence"``). Exponents are at most 80.

    Args:
        chosen_logps, rejected_logps: ``[B]``, of the policy; a float dtype. A likelihood term is the caller's:
            −Σ lp / tokens over the same token log-probabilities.
        ref_chosen_logps, ref_rejected_logps: ``[B]``, of the reference policy, taken as constants; None is 0.
        beta: greater than 0.
        loss_type: one of ``DPO_LOSS_TYPES``.
        label_smoothing: probability that a preference is the wrong way round; 0 to 1.
        f_divergence: one of ``DIVERGENCES``; another than ``"reverse_kl"`` only with the types of h in ``OF_MARGIN``.
        f_alpha: of ``"alpha_divergence"``; 1 is ``"reverse_kl"``, 0 ``"forward_kl"``.
        bco_delta: the reward that divides good from bad; the caller keeps its running mean.
        discopop_tau: greater than 0.
        reduction: ``"mean"``, over at least one pair; ``"sum"``, for accumulation over batches; ``"none"``: ``[B]``.

    Returns:
        `PreferenceOutput`, with the rewards u and v.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, or an option out of its range.

    Source:
        DPO arXiv 2305.18290, cDPO (label_smoothing) and robust 2403.00409, SLiC (hinge) 2305.10425, IPO 2310.12036,
        EXO 2402.00856, NCA 2402.05369, BCO 2404.04656, SPPO 2405.00675, APO 2408.06266, AOT 2406.05882, DiscoPOP
        2406.08414, f-divergences 2309.16240; names as in TRL's DPOTrainer.

    >>> dpo_loss(torch.tensor([-1.0]), torch.tensor([-3.0]), beta=1.0)
    PreferenceOutput(loss=tensor(0.1269), chosen_rewards=tensor([-1.]), rejected_rewards=tensor([-3.]))
    """
    _check(
        "dpo_loss",
        reduction,
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    checks.number("dpo_loss", above=0, beta=beta, discopop_tau=discopop_tau)
    checks.number("dpo_loss", f_alpha=f_alpha, bco_delta=bco_delta)
    _check_dpo_types(loss_type, f_divergence, label_smoothing)
    c, r = upcast(chosen_logps), upcast(rejected_logps)
    ref_c = torch.zeros_like(c) if ref_chosen_logps is None else upcast(ref_chosen_logps.detach())
    ref_r = torch.zeros_like(r) if ref_rejected_logps is None else upcast(ref_rejected_logps.detach())
    a, b = c - ref_c, r - ref_r
    if loss_type in OF_MARGIN:
        margin = _divergence(a, f_divergence, f_alpha) - _divergence(b, f_divergence, f_alpha)
        loss = _margin_loss(margin, loss_type, beta, label_smoothing, discopop_tau)
    elif loss_type == "aot":
        loss = _smoothed(beta * ((c - r).sort().values - (ref_c - ref_r).sort().values), label_smoothing)
    elif loss_type == "aot_unpaired":
        loss = _smoothed(beta * (a.sort().values - b.sort().values), label_smoothing)
    else:
        loss = _separate_loss(a, b, loss_type, beta, bco_delta)
    return PreferenceOutput(_reduce(loss, reduction), beta * a.detach(), beta * b.detach())


def _check_dpo_types(loss_type: str, f_divergence: str, label_smoothing: float) -> None:
    """`loss_type` and `f_divergence` exist and fit together, and `label_smoothing` is in the loss's range, or ValueError."""
    name, s = "dpo_loss", label_smoothing
    checks.one_of(name, DPO_LOSS_TYPES, loss_type=loss_type)
    checks.one_of(name, DIVERGENCES, f_divergence=f_divergence)
    if f_divergence != "reverse_kl" and loss_type not in OF_MARGIN:
        raise ValueError(
            f"{name}: f_divergence is {f_divergence!r}; it takes 'reverse_kl' with loss_type {loss_type!r}"
        )
    _check_smoothing(name, s)
    if loss_type == "robust" and not s < 0.5:
        raise ValueError(f"{name}: label_smoothing is {s!r}; it takes a number below 0.5 with loss_type 'robust'")
    if loss_type == "exo_pair" and not 0 < s < 1:
        raise ValueError(f"{name}: label_smoothing is {s!r}; it takes a number between 0 and 1 with 'exo_pair'")


def _margin_loss(margin: Tensor, loss_type: str, beta: float, s: float, discopop_tau: float) -> Tensor:
    """`dpo_loss` of each pair, ``[B]``, for the loss types in ``OF_MARGIN``; s is the label smoothing."""
    h = beta * margin
    if loss_type == "sigmoid":
        return _smoothed(h, s)
    if loss_type == "robust":
        return (-(1 - s) * logsigmoid(h) + s * logsigmoid(-h)) / (1 - 2 * s)
    if loss_type == "hinge":
        return (1 - h).clamp(min=0)
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)).square()
    # No infinite logarithm is multiplied by 0: exo_pair's other probability, discopop's derivative of m.
    kind = torch.finfo(h.dtype)
    if loss_type == "exo_pair":
        h = h.clamp(kind.min, kind.max)
        return torch.sigmoid(h) * (logsigmoid(h) - math.log1p(-s)) + torch.sigmoid(-h) * (logsigmoid(-h) - math.log(s))
    finite = h.clamp(min=kind.min)
    m = torch.sigmoid(finite / discopop_tau)
    return -logsigmoid(h) + (logsigmoid(finite) + (-h).clamp(max=LARGEST_EXPONENT).exp()) * m


def _separate_loss(a: Tensor, b: Tensor, loss_type: str, beta: float, bco_delta: float) -> Tensor:
    """`dpo_loss` of each pair, ``[B]``, for the loss types that read the log ratios of chosen and rejected separately."""
    u, v = beta * a, beta * b
    if loss_type == "nca_pair":
        return -logsigmoid(u) - 0.5 * logsigmoid(-u) - 0.5 * logsigmoid(-v)
    if loss_type == "bco_pair":
        return -logsigmoid(u - bco_delta) - logsigmoid(bco_delta - v)
    if loss_type == "sppo_hard":
        return (a - 0.5 / beta).square() + (b + 0.5 / beta).square()
    if loss_type == "apo_zero":
        return torch.sigmoid(-u) + torch.sigmoid(v)
    return torch.sigmoid(u) + torch.sigmoid(v - u)  # apo_down


def orpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1, reduction: str = "mean"
) -> ORPOOutput:
    """Odds ratio preference optimisation's second term: −beta ℓ(o), where o is the log odds ratio of a pair.

    o = (c − r) − (log(1 − e^c) − log(1 − e^r)), for average log-probabilities c and r, is finite for a sure completion.
    The paper adds the likelihood of the chosen, prompt included: the caller's, over the same log-probabilities.

    Args:
        chosen_logps, rejected_logps: ``[B]``, averages over tokens; a float dtype, at most 0.
        beta: greater than 0.
        reduction: as in `dpo_loss`.

    Returns:
        `ORPOOutput`, with the rewards beta c and beta r.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, or an option out of its range.

    Source:
        ORPO arXiv 2403.07691.

    >>> orpo_loss(torch.tensor([-0.5]), torch.tensor([-0.5]), beta=1.0).loss
    tensor(0.6931)
    """
    _check("orpo_loss", reduction, chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    checks.number("orpo_loss", above=0, beta=beta)
    c, r = upcast(chosen_logps), upcast(rejected_logps)
    log_odds = (c - r) - (_log1mexp(c) - _log1mexp(r))
    loss = _reduce(-beta * logsigmoid(log_odds), reduction)
    return ORPOOutput(loss, beta * c.detach(), beta * r.detach(), log_odds.detach())


def simpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> PreferenceOutput:
    """Simple preference optimisation: −(1 − s) ℓ(h) − s ℓ(−h) with h = beta (c − r) − gamma, without a reference.

    Args:
        chosen_logps, rejected_logps: ``[B]``, averages over tokens; a float dtype.
        beta: greater than 0.
        gamma: the margin itself, not its ratio to beta.
        label_smoothing: s; 0 to 1.
        reduction: as in `dpo_loss`.

    Returns:
        `PreferenceOutput`, with the rewards beta c and beta r.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, or an option out of its range.

    Source:
        SimPO arXiv 2405.14734.

    >>> simpo_loss(torch.tensor([-0.5]), torch.tensor([-1.0])).loss
    tensor(0.6931)
    """
    _check("simpo_loss", reduction, chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    checks.number("simpo_loss", above=0, beta=beta)
    checks.number("simpo_loss", gamma=gamma)
    _check_smoothing("simpo_loss", label_smoothing)
    c, r = upcast(chosen_logps), upcast(rejected_logps)
    loss = _smoothed(beta * (c - r) - gamma, label_smoothing)
    return PreferenceOutput(_reduce(loss, reduction), beta * c.detach(), beta * r.detach())


def cpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    alpha: float = 0.0,
    reduction: str = "mean",
) -> PreferenceOutput:
    """Contrastive preference optimisation: a loss of pairs without a reference.

    With d = c − r and s = label_smoothing, a pair's loss is, by `loss_type`,

    - ``"sigmoid"``: −(1 − s) ℓ(h) − s ℓ(−h), h = beta d − gamma
    - ``"hinge"``: max(0, 1 − beta d)
    - ``"ipo"``: (d − 1 / (2 beta))²
    - ``"alphapo"``: sigmoid's with h = beta (q(c) − q(r)) − gamma, q(t) = (1 − e^(−alpha t)) / alpha

    Args:
        chosen_logps, rejected_logps: ``[B]``; sums over tokens, but averages for ``"ipo"`` and ``"alphapo"``; a float
            dtype. The likelihood term is the caller's, with a weight of its own.
        beta: greater than 0.
        loss_type: one of ``CPO_LOSS_TYPES``.
        label_smoothing: s; 0 to 1.
        gamma: margin of ``"sigmoid"`` and ``"alphapo"``.
        alpha: of ``"alphapo"``; at 0, q(t) = t.
        reduction: as in `dpo_loss`.

    Returns:
        `PreferenceOutput`, with the rewards beta c and beta r.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, or an option out of its range.

    Source:
        CPO arXiv 2401.08417, AlphaPO 2501.03884; names as in TRL's CPOTrainer.

    >>> cpo_loss(torch.tensor([-1.0]), torch.tensor([-3.0]), loss_type="hinge").loss
    tensor(0.8000)
    """
    _check("cpo_loss", reduction, chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    checks.number("cpo_loss", above=0, beta=beta)
    checks.number("cpo_loss", gamma=gamma, alpha=alpha)
    checks.one_of("cpo_loss", CPO_LOSS_TYPES, loss_type=loss_type)
    _check_smoothing("cpo_loss", label_smoothing)
    c, r = upcast(chosen_logps), upcast(rejected_logps)
    if loss_type == "hinge":
        loss = (1 - beta * (c - r)).clamp(min=0)
    elif loss_type == "ipo":
        loss = (c - r - 1 / (2 * beta)).square()
    elif loss_type == "alphapo" and alpha != 0:
        exponents = (-alpha * t for t in (r, c))
        q_r, q_c = (torch.expm1(e.clamp(max=LARGEST_EXPONENT)) for e in exponents)
        loss = _smoothed(beta * (q_r - q_c) / alpha - gamma, label_smoothing)
    else:
        loss = _smoothed(beta * (c - r) - gamma, label_smoothing)
    return PreferenceOutput(_reduce(loss, reduction), beta * c.detach(), beta * r.detach())


def kto_loss(
    logps: Tensor,
    ref_logps: Tensor | None,
    desirable: Tensor,
    kl: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
) -> KTOOutput:
    """Kahneman-Tversky optimisation: completions that are each good or bad, without pairs.

    With t = logps − ref_logps, y = 1 for a desirable completion and −1 for another, and w the weight of its class, its
    loss is w σ(−beta y (t − kl)), or w σ(−beta y t) for ``"apo_zero_unpaired"``.

    Args:
        logps: ``[B]``, sums over tokens; a float dtype. The only one with a gradient.
        ref_logps: ``[B]``, of the reference policy; None is 0.
        desirable: bool ``[B]``.
        kl: 0-d or ``[B]``; None is 0. The caller takes the mean of policy − reference over mismatched completions, over
            all processes, and its maximum with 0.
        beta: greater than 0.
        loss_type: one of ``KTO_LOSS_TYPES``.
        desirable_weight, undesirable_weight: at least 0.
        reduction: as in `dpo_loss`.

    Returns:
        `KTOOutput`, with the rewards beta t.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, or an option out of its range.

    Source:
        KTO arXiv 2402.01306, APO 2408.06266; names as in TRL's KTOTrainer.

    >>> kto_loss(torch.zeros(2), None, torch.tensor([True, False])).loss
    tensor(0.5000)
    """
    name = "kto_loss"
    _check(name, reduction, logps=logps, ref_logps=ref_logps)
    checks.dtypes(name, (torch.bool,), desirable=desirable)
    checks.shape(name, "desirable", desirable, tuple(logps.shape), "a value per completion")
    checks.floating(name, kl=kl)
    if kl is not None and kl.dim() != 0:
        checks.shape(name, "kl", kl, tuple(logps.shape), "one value, or one per completion")
    checks.one_of(name, KTO_LOSS_TYPES, loss_type=loss_type)
    checks.number(name, above=0, beta=beta)
    checks.number(name, least=0, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    t = upcast(logps) - (0.0 if ref_logps is None else upcast(ref_logps.detach()))
    against = t if kl is None or loss_type == "apo_zero_unpaired" else t - upcast(kl.detach())
    sign = torch.ones_like(t).masked_fill(~desirable, -1.0)
    weight = torch.full_like(t, desirable_weight).masked_fill(~desirable, undesirable_weight)
    loss = weight * torch.sigmoid(-beta * sign * against)
    return KTOOutput(_reduce(loss, reduction), beta * t.detach())


def _smoothed(h: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(h) - smoothing * logsigmoid(-h)


def _divergence(t: Tensor, name: str, alpha: float) -> Tensor:
    if name == "forward_kl" or (name == "alpha_divergence" and alpha == 0):
        return -(-t).clamp(max=LARGEST_EXPONENT).exp()
    if name == "js_divergence":
        return logsigmoid(t)
    if name == "alpha_divergence" and alpha != 1:
        return torch.expm1(((alpha - 1) * t).clamp(max=LARGEST_EXPONENT)) / (alpha - 1)
    return t


def _log1mexp(t: Tensor) -> Tensor:
    """log(1 − e^t) for t below 0, by the form that is accurate on either side of −log 2."""
    t = t.clamp(max=SURE)
    near = t > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(t)), torch.log1p(-torch.exp(t.masked_fill(near, -1.0))))


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / max(loss.shape[0], 1)


def _check(name: str, reduction: str, **logps: Any) -> None:
    """Log-probabilities are floats, TypeError, and ``[B]`` like the first of them, ValueError."""
    checks.one_of(name, REDUCTIONS, reduction=reduction)
    checks.floating(name, **logps)
    first, *others = logps.items()
    checks.ndim(name, 1, 1, **dict([first]))
    for which, tensor in others:
        checks.shape(name, which, tensor, tuple(first[1].shape), f"the shape of {first[0]}")


def _check_smoothing(name: str, label_smoothing: float) -> None:
    checks.number(name, least=0, label_smoothing=label_smoothing)
    if label_smoothing > 1:
        raise ValueError(f"{name}: label_smoothing is {label_smoothing!r}; it takes a number from 0 to 1")
