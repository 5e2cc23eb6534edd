"""Fine-tune a model with Trainer, or with TRL's SFTTrainer: without liger and with it.

python examples/sft.py                                  # a tiny model, both runs, on any machine
python examples/sft.py --trl --liger --model Qwen/Qwen3-0.6B
accelerate launch --config_file examples/fsdp2.yaml examples/sft.py --liger --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

from collections.abc import Sequence

import runs
from datasets import Dataset
from torch import nn
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_transformers import LigerCallback


def main(words: Sequence[str] | None = None) -> list[runs.Result]:
    """Run the command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("--trl", action="store_true", help="TRL's SFTTrainer")
    options = parser.parse_args(words)
    tokenizer = runs.tokenizer_of(options.model)
    results = []
    for name in runs.names(options):
        callbacks = [LigerCallback(lean=True)] if name == "liger" else []

        def make(model: nn.Module, callbacks: list[LigerCallback] = callbacks) -> Trainer:
            common = runs.common(options.steps)
            if options.trl:
                rows = Dataset.from_list([{"text": text} for text in runs.texts(200)])
                arguments = SFTConfig(**common, gradient_checkpointing=False)
                return SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
            rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in runs.texts(200)]
            collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
            return Trainer(model, TrainingArguments(**common), collate, train_dataset=rows, callbacks=callbacks)

        results.append(runs.train(name, make, runs.model_of(options.model)))
    runs.report(results, options.output)
    return results


if __name__ == "__main__":
    main()
