"""Align a model with TRL's DPOTrainer, a reference model and, with --lora, adapters: without liger and with it.

    python examples/dpo.py                                  # a tiny model, both runs, on any machine
    python examples/dpo.py --lora --liger --model Qwen/Qwen3-0.6B

The preferences are made up: a piece of source code goes on as it does, or by a piece of another file.
"""

from __future__ import annotations

from collections.abc import Sequence

import peft
import runs
from datasets import Dataset
from torch import nn
from trl import DPOConfig, DPOTrainer

import liger_transformers


def main(words: Sequence[str] | None = None) -> list[runs.Result]:
    """Run the command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("--lora", action="store_true", help="train adapters; the model below them is the reference")
    options = parser.parse_args(words)
    texts = runs.texts(400, 80)
    pairs = zip(texts, texts[7:], strict=False)
    rows = Dataset.from_list([{"prompt": a[:40], "chosen": a[40:], "rejected": b[40:]} for a, b in pairs])
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if options.lora else None

    def make(model: nn.Module, swap: bool) -> DPOTrainer:
        reference = None if options.lora else runs.model_of(options.model)
        for one in [model, *filter(None, [reference])] if swap else []:
            print(liger_transformers.apply(one, trl=True, lean=True))
        arguments = DPOConfig(**runs.common(options.steps), max_length=128, gradient_checkpointing=False)
        tokenizer = runs.tokenizer_of(options.model)
        return DPOTrainer(model, reference, arguments, train_dataset=rows, processing_class=tokenizer, peft_config=lora)

    return runs.compare(options, make)


if __name__ == "__main__":
    main()
