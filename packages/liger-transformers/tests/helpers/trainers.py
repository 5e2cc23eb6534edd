"""Trainers of TRL and transformers on a tiny model, with data of a few words: trainer.train() takes two steps."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tiny_models import TEXT, VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<end>", "<image>"]
WORDS = [f"w{i}" for i in range(VOCABULARY - len(SPECIAL))]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} <end> {% else %}<assistant> "
    "{% generation %}{{ m['content'] }} <end> {% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
assert TEXT["pad_token_id"] == 0


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A word per token."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def text(seed: int, length: int) -> str:
    return " ".join(WORDS[(5 * seed + 3 * j * j + j) % len(WORDS)] for j in range(length))


TEXTS = [(text(i, 5 + i % 3), text(i + 31, 6 + i % 4), text(i + 57, 5 + (i + 1) % 4)) for i in range(8)]
"""A prompt and two completions, of different lengths."""


def common(**more: Any) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "gradient_checkpointing": False,
        "bf16": False,
        **more,
    }


def sft(model: Any, data: str = "text", callbacks: Any = None, **options: Any) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    rows: list[dict[str, Any]] = [{"text": f"{prompt} {one}"} for prompt, one, _ in TEXTS]
    if data == "chat":
        roles = ("user", "assistant")
        rows = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, t, strict=False)]} for t in TEXTS]
    elif data == "completion":
        rows = [{"prompt": prompt, "completion": f" {one}"} for prompt, one, _ in TEXTS]
    arguments = SFTConfig(**common(), **options)
    data_set = Dataset.from_list(rows)
    return SFTTrainer(model, args=arguments, train_dataset=data_set, processing_class=tokenizer(), callbacks=callbacks)


def preferences() -> Dataset:
    return Dataset.from_list([{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in TEXTS])


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": prompt} for prompt, *_ in TEXTS])


def dpo(model: Any, reference: Any = None, **options: Any) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(**common(), max_length=64, **options)
    return DPOTrainer(
        model, ref_model=reference, args=arguments, train_dataset=preferences(), processing_class=tokenizer()
    )


def kto(model: Any, reference: Any = None, **options: Any) -> Trainer:
    from trl import KTOConfig, KTOTrainer

    rows = [{"prompt": a, "completion": f" {(c, b)[i % 2]}", "label": bool(i % 2)} for i, (a, b, c) in enumerate(TEXTS)]
    arguments = KTOConfig(**common(), max_length=64, **options)
    data = Dataset.from_list(rows)
    return KTOTrainer(model, ref_model=reference, args=arguments, train_dataset=data, processing_class=tokenizer())


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(len(word) + ord(word[-1]) % 5 for word in completion.split())) for completion in completions]


def grpo(model: Any, **options: Any) -> Trainer:
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(**common(), num_generations=4, max_completion_length=6, **{"beta": 0.0, **options})
    return GRPOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=prompts(), processing_class=tokenizer()
    )


def rloo(model: Any, **options: Any) -> Trainer:
    from trl import RLOOConfig, RLOOTrainer

    arguments = RLOOConfig(**common(), num_generations=4, max_completion_length=6, **{"beta": 0.0, **options})
    return RLOOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=prompts(), processing_class=tokenizer()
    )


def cpo(model: Any, **options: Any) -> Trainer:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    arguments = CPOConfig(**common(remove_unused_columns=False), max_length=64, **options)
    return CPOTrainer(model, args=arguments, train_dataset=preferences(), processing_class=tokenizer())


def orpo(model: Any, **options: Any) -> Trainer:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    arguments = ORPOConfig(**common(remove_unused_columns=False), max_length=64, **options)
    return ORPOTrainer(model, args=arguments, train_dataset=preferences(), processing_class=tokenizer())


def tpo(model: Any, **options: Any) -> Trainer:
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    rows = [{"prompt": a, "chosen": f" {b}", "rejected": f" {c}", "reference": f" {c} {b}"} for a, b, c in TEXTS]
    arguments, data = TPOConfig(**common(), max_length=64, **options), Dataset.from_list(rows)
    return TPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer())


def hf(model: Any, loss: Callable[..., Any] | None = None, **options: Any) -> Trainer:
    """transformers' own Trainer, with gradient accumulation."""
    ids = [tokenizer()(f"{a} {b}", padding="max_length", max_length=16)["input_ids"] for a, b, _ in TEXTS]
    rows = [
        {"input_ids": row, "labels": [t or -100 for t in row], "attention_mask": [int(t != 0) for t in row]}
        for row in ids
    ]
    sizes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    arguments = TrainingArguments(**{**common(), **sizes, **options})
    return Trainer(model, args=arguments, train_dataset=rows, compute_loss_func=loss)


def cross_entropy(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A `compute_loss_func`."""
    logits = outputs.logits[:, :-1].float()
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum")
    return total / num_items_in_batch
