"""`apply` as a callback of transformers' Trainer."""

from __future__ import annotations

import logging
from typing import Any, cast

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_transformers.apply import Report, apply, pretrained_in
from liger_transformers.head import bound_forward
from liger_transformers.swap import swapped_for
from liger_transformers.trl import serves

log = logging.getLogger("liger_transformers")


class LigerCallback(TrainerCallback):
    """Swaps the Trainer's model when the Trainer is made, before anything wraps or compiles it, and prints the report.

    Added to a Trainer that exists, or with `model_init`, it swaps the model when training begins. If mixed precision, FSDP or
    DeepSpeed has prepared the model by then, RuntimeError says what to do.

    The report goes to the logger ``liger_transformers`` if that logs INFO. Otherwise the main process prints it, unless the
    logger is set to leave out warnings.

    Args:
        **kinds: the arguments of `apply`, except the model. With a TRL trainer ``trl=True`` is the default.

    Attributes:
        report: the result of `apply`.
    """

    def __init__(self, **kinds: Any) -> None:
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
        """Swap the model and show the report."""
        if model is not None:
            self._swap(args, state, model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Swap the model if it isn't the one that was swapped. RuntimeError if it is too late."""
        if model is None:
            return
        if not any(swapped_for(module) is not None for module in model.modules()):
            why = self._too_late(args, model)
            if why is None:
                self._swap(args, state, model)
            elif self.kinds.get("strict", True):
                raise RuntimeError(why)
            else:
                log.warning(why)
        pretrained = pretrained_in(model)
        if pretrained is None or swapped_for(pretrained) is None or self.kinds.get("lazy") or not _is_trl(args):
            return
        if serves(vars(pretrained).get("forward")) is None:
            _say(
                state,
                "LigerCallback: this trainer doesn't use TRL's fused head. If its loss reads output.logits, as those of CPO and "
                "ORPO do, LigerCallback(lazy=True) computes it without them",
            )

    def _swap(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        for_trl = _is_trl(args) and bool(self.kinds.get("loss", True))
        switches: dict[str, Any] = {"trl": for_trl, **self.kinds}
        self.report = apply(model, **switches)
        _say(state, str(self.report))

    def _too_late(self, args: TrainingArguments, model: nn.Module) -> str | None:
        """The error of swapping the model when training begins, or None if that works."""
        pretrained = pretrained_in(model)
        why = "FSDP or DeepSpeed has prepared it" if args.fsdp or cast("Any", args).deepspeed else None
        if why is None and pretrained is not None:
            why = bound_forward(pretrained, bool(self.kinds.get("trl", _is_trl(args))))
        if why is None:
            return None
        return (
            f"LigerCallback: the model is not the one that the Trainer was made with, or the callback came later, and now {why}. "
            "Pass callbacks=[LigerCallback()] to the Trainer; with model_init, call liger_transformers.apply in model_init and "
            "leave the callback out"
        )


def _is_trl(args: TrainingArguments) -> bool:
    """Whether these are the arguments of a TRL trainer."""
    return any(cls.__module__.partition(".")[0] == "trl" for cls in type(args).__mro__)


def _say(state: TrainerState, text: str) -> None:
    """Log the text, or print it for a user who set up no logging."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    elif log.isEnabledFor(logging.WARNING) and state.is_world_process_zero:
        print(text)
