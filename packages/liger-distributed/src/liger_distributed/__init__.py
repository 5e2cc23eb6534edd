"""liger_core's losses where the vocabulary is divided among processes: plain tensors, and a process group."""

from liger_distributed.losses import (
    cross_entropy,
    fused_linear_cross_entropy,
    fused_linear_token_logprobs,
    token_logprobs,
)

__all__ = ["cross_entropy", "fused_linear_cross_entropy", "fused_linear_token_logprobs", "token_logprobs"]
