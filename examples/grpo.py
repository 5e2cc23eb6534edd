"""Train a model by rewards with TRL's GRPOTrainer: without liger and with it.

    python examples/grpo.py                                 # a tiny model, both runs, on any machine
    python examples/grpo.py --lora --liger --model Qwen/Qwen3-0.6B

The reward is made up: the share of lower-case letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
import runs
from datasets import Dataset
from torch import nn
from trl import GRPOConfig, GRPOTrainer

import liger_transformers


def reward(completions: list[str], **_: Any) -> list[float]:
    """Share of lower-case letters."""
    return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in completions]


def main(words: Sequence[str] | None = None) -> list[runs.Result]:
    """Run the command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("--lora", action="store_true", help="train adapters; the model below them is the reference")
    options = parser.parse_args(words)
    rows = Dataset.from_list([{"prompt": text} for text in runs.texts(200, 40)])
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if options.lora else None

    def make(model: nn.Module, swap: bool) -> GRPOTrainer:
        if swap:
            print(liger_transformers.apply(model, trl=True, lean=True))
        sizes = {"num_generations": 4, "max_completion_length": 16, "beta": 0.04 if options.lora else 0.0}
        arguments = GRPOConfig(**runs.common(options.steps), **sizes, gradient_checkpointing=False)
        tokenizer = runs.tokenizer_of(options.model)
        return GRPOTrainer(
            model, reward, args=arguments, train_dataset=rows, processing_class=tokenizer, peft_config=lora
        )

    return runs.compare(options, make)


if __name__ == "__main__":
    main()
