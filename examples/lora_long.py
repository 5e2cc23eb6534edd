"""Train adapters of a model of 8 B parameters on one long sequence, with checkpointing: without liger and with it.

    python examples/lora_long.py --length 41984 --liger     # as long as an H200 holds, in the record of longest sequences
    python examples/lora_long.py --tiny --length 256        # on any machine

The weights are random, with the sizes of Llama 3.1 8B; `--model` takes others.
"""

from __future__ import annotations

from collections.abc import Sequence

import peft
import runs
import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

import liger_transformers

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def adapted(name: str | None, tiny: bool, device: str) -> nn.Module:
    """The model with adapters on every linear layer of its blocks."""
    set_seed(0)
    if tiny or name is not None:
        model = runs.model_of(name).to(device)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA_8B), dtype=torch.bfloat16)
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(name: str, model: nn.Module, length: int, steps: int, device: str) -> runs.Result:
    """Train on random tokens."""
    if name == "liger":
        print(liger_transformers.apply(model, lean=True, mlp=True))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    meter, losses = runs.Meter(model), []
    for _ in tqdm(range(steps), desc=name):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        meter.step()
    return meter.result(name, losses)


def main(words: Sequence[str] | None = None) -> list[runs.Result]:
    """Run the command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the sequence")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    options = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for name in runs.names(options):
        model = adapted(options.model, options.tiny, device)
        results.append(train(name, model, options.length, options.steps, device))
        del model
    runs.report(results, options.output)
    return results


if __name__ == "__main__":
    main()
