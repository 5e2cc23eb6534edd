"""Train a Hugging Face model under FSDP2 in a loop of your own: without liger and with it.

torchrun --nproc-per-node 2 examples/fsdp2.py           # a tiny model, both runs; GPUs, or processes on a CPU
"""

from __future__ import annotations

from collections.abc import Sequence

import runs
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from tqdm import tqdm

import liger_transformers


def train(name: str, model_name: str | None, steps: int) -> runs.Result:
    """Train divided among all processes, each with its own rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, size = dist.get_rank(), dist.get_world_size()
    model = runs.model_of(model_name).to(device)
    if name == "liger":
        liger_transformers.apply(model, lean=True)  # before the model is divided
    mesh = init_device_mesh(device, (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokenizer = runs.tokenizer_of(model_name)
    rows = [tokenizer(text)["input_ids"][:64] for text in runs.texts(4 * size * steps)]
    meter, losses = runs.Meter(model), []
    for step in tqdm(range(steps), desc=name, disable=rank > 0):
        first = (step * size + rank) * 4
        tokens = torch.tensor(rows[first : first + 4], device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
        meter.step()
    return meter.result(name, losses)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line in each process of torchrun."""
    options = runs.parser(__doc__).parse_args(words)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    results = [train(name, options.model, options.steps) for name in runs.names(options)]
    if dist.get_rank() == 0:
        runs.report(results, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
