"""liger_core on many devices: a head whose forward is the loss, and losses of plain tensors and a process group.

The ops take DTensors without any import of this package.
"""

from liger_distributed.divergence import fused_linear_jsd
from liger_distributed.head import LossHead
from liger_distributed.losses import (
    cross_entropy,
    fused_linear_cross_entropy,
    fused_linear_token_logprobs,
    token_logprobs,
)
from liger_distributed.policy import grpo_loss

__all__ = [
    "LossHead",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "fused_linear_jsd",
    "fused_linear_token_logprobs",
    "grpo_loss",
    "token_logprobs",
]
