"""Policy-gradient losses of token log-probabilities."""

from torch import Tensor

from liger_core import checks
from liger_core.ops.grpo_loss import GRPOOutput
from liger_core.policy import MASK_DTYPES, PolicyOptions, VespoOptions, check_options, check_values, loss_of_logprobs


def policy_loss(
    logprobs: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    *,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    delta: float | None = None,
    log_ratio_clip: float | None = None,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    num_items_in_batch: int | float | Tensor | None = None,
    use_bias_correction_kl: bool = False,
    importance_sampling_ratio: Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    reduction: str = "mean",
) -> GRPOOutput:
    """`grpo_loss` of log-probabilities lp that are there already, such as `fused_linear_token_logprobs` makes.

    It has `grpo_loss`'s options but the temperature, an advantage per token, and one more `loss_type`:

    - ``"vespo"``: −φ A lp, where φ = exp(λ + k log w − λ w) is taken as a constant; w is the row's importance weight,
      log w = Σ over unmasked tokens of clamp(lp − old_logps, −20, 20), plus Σ log importance_sampling_ratio, clamped to
      [log 1e-8, 20]; k and λ are vespo_k_pos and vespo_lambda_pos if A ≥ 0, else those of neg. A φ that is not finite
      is 0. importance_sampling_ratio, each logarithm clamped to [log 1e-8, 20], is in w and multiplied no second time.
      importance_sampling_level is ``"token"``.

    A masked token has loss and gradient 0, whatever its log-probabilities.

    Args:
        logprobs: ``[B, L]``, log-probabilities of the completions' tokens; a float dtype. The only one with a gradient.
        old_logps: ``[B, L]``, log-probabilities under the policy that sampled; None: logprobs, taken as a constant.
        ref_logps: ``[B, L]``, log-probabilities under the reference policy. None only when `beta` is 0.
        advantages: ``[B]``, or ``[B, L]``, an advantage per token (not with ``"vespo"``).
        completion_mask: ``[B, L]``, bool, int or float: 1, and 0 at masked tokens; None masks nothing.
        vespo_k_pos, vespo_k_neg: at least 0.
        vespo_lambda_pos, vespo_lambda_neg: at least 0; below 1e-4 they are taken as 1e-4.
        beta, eps_low, eps_high, delta, log_ratio_clip, loss_type, importance_sampling_level: as in `grpo_loss`.
        max_completion_length: as in `grpo_loss`.
        num_items_in_batch: as in `grpo_loss`, for ``"vespo"`` too: this process's share of the tokens of the batch.
        use_bias_correction_kl, importance_sampling_ratio, sapo_temperature_pos, sapo_temperature_neg: as in
            `grpo_loss`.
        reduction: as in `grpo_loss`; the mean of ``"vespo"`` is that of ``"dapo"``.

    Returns:
        `GRPOOutput`.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together; no `ref_logps` beside a `beta` that is not 0; `delta` or sequence
            level with a loss_type that has none; an option out of its range; on the CPU, a mask of other values.

    Source:
        as `grpo_loss`; VESPO arXiv 2602.10693; names and means as in TRL's GRPOTrainer.

    >>> import torch
    >>> policy_loss(torch.tensor([[-0.5, -1.5]]), None, None, torch.ones(1), beta=0.0)
    GRPOOutput(loss=tensor(-1.), kl=None, clip_ratio=tensor(0.))
    """
    options = PolicyOptions(
        beta=beta,
        eps_low=eps_low,
        eps_high=eps_high,
        delta=delta,
        log_ratio_clip=log_ratio_clip,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        max_completion_length=max_completion_length,
        use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        reduction=reduction,
    )
    vespo = VespoOptions(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    inputs = old_logps, ref_logps, advantages, completion_mask, importance_sampling_ratio, num_items_in_batch
    _check(logprobs, *inputs, options, vespo)
    return GRPOOutput(*loss_of_logprobs(logprobs, *inputs, options, vespo))


def _check(
    logprobs: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor | None,
    importance_sampling_ratio: Tensor | None,
    num_items_in_batch: int | float | Tensor | None,
    options: PolicyOptions,
    vespo: VespoOptions,
) -> None:
    name = "policy_loss"
    checks.floating(name, logprobs=logprobs, old_logps=old_logps, ref_logps=ref_logps, advantages=advantages)
    checks.floating(name, importance_sampling_ratio=importance_sampling_ratio)
    checks.dtypes(name, MASK_DTYPES, completion_mask=completion_mask)
    checks.ndim(name, 2, 2, logprobs=logprobs)
    tokens = tuple(logprobs.shape)
    for which, tensor in (
        ("old_logps", old_logps),
        ("ref_logps", ref_logps),
        ("completion_mask", completion_mask),
    ):
        checks.shape(name, which, tensor, tokens, "the shape of logprobs")
    if tuple(advantages.shape) not in (tokens[:1], tokens):
        raise ValueError(f"{name}: advantages has shape {tuple(advantages.shape)}; it takes {tokens[:1]} or {tokens}")
    check_options(name, tokens, ref_logps, importance_sampling_ratio, num_items_in_batch, options)
    check_values(name, completion_mask, num_items_in_batch)
    checks.number(name, least=0, **{f"vespo_{option}": value for option, value in vespo._asdict().items()})
    if options.loss_type == "vespo" and advantages.dim() == 2:
        raise ValueError(f"{name}: advantages has shape {tokens}; it takes {tokens[:1]} when loss_type is 'vespo'")
