"""Losses that are arithmetic on log-probabilities: plain PyTorch functions, without kernels and dispatch.

`token_logprobs` and `fused_linear_token_logprobs` make the log-probabilities, with the kernels of their ops.
"""

from liger_core.losses.grouped import fused_linear_grouped_loss
from liger_core.losses.logprobs import (
    TokenLogprobsOutput,
    fused_linear_token_logprobs,
    sequence_logprobs,
    token_logprobs,
    topk_kl,
)
from liger_core.losses.policy import policy_loss
from liger_core.losses.preference import (
    KTOOutput,
    ORPOOutput,
    PreferenceOutput,
    cpo_loss,
    dpo_loss,
    kto_loss,
    orpo_loss,
    simpo_loss,
)
from liger_core.ops.grpo_loss import GRPOOutput

__all__ = [
    "GRPOOutput",
    "KTOOutput",
    "ORPOOutput",
    "PreferenceOutput",
    "TokenLogprobsOutput",
    "cpo_loss",
    "dpo_loss",
    "fused_linear_grouped_loss",
    "fused_linear_token_logprobs",
    "kto_loss",
    "orpo_loss",
    "policy_loss",
    "sequence_logprobs",
    "simpo_loss",
    "token_logprobs",
    "topk_kl",
]
