"""`apply` as a callback of transformers' Trainer."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_transformers.apply import Report, apply
from liger_transformers.swap import swapped_for

log = logging.getLogger("liger_transformers")


class LigerCallback(TrainerCallback):
    """Swaps the Trainer's model when the Trainer is made, before anything wraps or compiles it.

    A Trainer with `model_init` makes another model in `train`: call `apply` in `model_init` instead.

    Args:
        **kinds: the arguments of `apply`, except the model.

    Attributes:
        report: the result of `apply`.
    """

    def __init__(self, **kinds: bool) -> None:
        self.kinds = kinds
        self.report: Report | None = None

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Swap the model and log the report."""
        if model is not None:
            self.report = apply(model, **self.kinds)
            log.info("%s", self.report)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Raise RuntimeError if the model is not the one that was swapped."""
        strict = self.kinds.get("strict", True)
        if strict and model is not None and not any(swapped_for(module) is not None for module in model.modules()):
            raise RuntimeError(
                "LigerCallback: the Trainer trains another model than it was made with; with model_init, call "
                "liger_transformers.apply in model_init and leave the callback out"
            )
