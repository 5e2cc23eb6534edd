"""Overrides for torchtitan: its norms, rotary embedding, SwiGLU and loss become liger's, by its own `override.imports`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE

import liger_core
import liger_distributed


class LigerNorm(RMSNorm):
    """`liger_core.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """The configuration of the norm it replaces."""

    def forward(self, input: Tensor) -> Tensor:  # torchtitan's sharding knows it by this name
        return liger_core.rms_norm(input, self.weight, self.eps)


class LigerFeedForward(FeedForward):
    """`liger_core.swiglu`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """The configuration of the module it replaces."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(liger_core.swiglu(self.w1(x), self.w3(x)))


class LigerRope(ComplexRoPE):
    """`liger_core.llama4_rope`, for batches whose samples all begin at position 0."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """The configuration of the embedding it replaces."""

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if positions is not None:
            raise NotImplementedError("llama4_rope has one row of angles per position, the same for each sample")
        return liger_core.llama4_rope(query, key, self.cache[: query.shape[1]])


class LigerLoss(BaseLoss):
    """Cross-entropy of logits whose columns the processes of tensor parallelism divide: one all-gather."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """The configuration of the loss it replaces."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        del compile_config
        self.vocabulary = config.global_vocab_size

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        rows, target = pred.flatten(0, 1).float(), labels.flatten()
        if isinstance(rows, DTensor):
            loss = liger_core.cross_entropy(rows, target, reduction="sum")
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        elif spmd_mesh_size("tp") > 1:
            group = current_spmd_mesh().get_group("tp")
            loss = liger_distributed.cross_entropy(
                rows, target, group=group, vocabulary=self.vocabulary, reduction="sum"
            )
        else:
            loss = liger_core.cross_entropy(rows, target, reduction="sum")
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


@override(target=RMSNorm.Config, exact=True, description="liger_core.rms_norm")
def norm(config: Any) -> Any:
    return derive(config, LigerNorm.Config)


@override(target=FeedForward.Config, exact=True, description="liger_core.swiglu")
def feed_forward(config: Any) -> Any:
    return derive(config, LigerFeedForward.Config)


@override(target=ComplexRoPE.Config, exact=True, description="liger_core.llama4_rope")
def rope(config: Any) -> Any:
    return derive(config, LigerRope.Config)


@override(target=CrossEntropyLoss.Config, exact=True, description="liger's vocabulary-parallel cross_entropy")
def loss(config: Any) -> Any:
    return derive(config, LigerLoss.Config)


ALL = [f"{__name__}.{name}" for name in ("norm", "feed_forward", "rope", "loss")]
