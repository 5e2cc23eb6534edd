"""train_lm's training on the processes that torchrun starts: FSDP2, tensor and sequence parallelism, or both.

The processes are a mesh of data-parallel groups times `tp`. Each group of `tp` processes sees the same rows of a batch.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import liger_core as liger


class Processes:
    """The processes of a training whose model is divided.

    Args:
        device: this process's.
        fsdp: divide weights, gradients and optimizer states among the data-parallel processes.
        tp: how many processes divide each matrix product, the vocabulary and, between the products, the sequence.

    Raises:
        ValueError: the processes can't be divided so.
    """

    def __init__(self, device: torch.device, fsdp: bool, tp: int) -> None:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world % tp or (world > tp) != fsdp:
            right = "--fsdp where more processes than --tp are started, and a number of them that --tp divides"
            raise ValueError(f"{world} processes, --tp {tp}{' --fsdp' if fsdp else ''}: it takes {right}")
        if not dist.is_initialized():
            dist.init_process_group("gloo" if device.type == "cpu" else None)
        self.mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
        self.fsdp, self.tp = fsdp, tp
        self.name = f"{world} processes" + (" --fsdp" if fsdp else "") + (f" --tp {tp}" if tp > 1 else "")
        self.ops = on_mesh(self.mesh["tp"]) if tp > 1 else liger

    def divide(self, model: Any) -> None:
        """Divide a `train_lm.Llama` made with `ops`, in place."""
        if self.tp > 1:
            divide_products(model, self.mesh["tp"])
        if self.fsdp:
            for module in (*model.blocks, model):
                fully_shard(module, mesh=self.mesh["dp"])

    def rows(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """This process's part of a batch that all have drawn alike."""
        parts = [tensor.tensor_split(self.mesh["dp"].size()) for tensor in batch]
        return [part[self.mesh["dp"].get_local_rank()] for part in parts]

    def mean(self, losses: Tensor) -> Tensor:
        """Mean losses of all processes. Each has as many labels, so a mean of means is the mean."""
        losses = losses.clone()
        dist.all_reduce(losses)
        return losses / dist.get_world_size()

    def gradients(self, model: Any) -> dict[str, Tensor]:
        """Each parameter's gradient, whole, as an undivided model has it."""
        gradients = {}
        for name, weight in model.named_parameters():
            gradient = weight.grad.full_tensor()
            for packed, sizes in packed_rows(model):
                if name.endswith(packed) and self.tp > 1:
                    gradient = torch.empty_like(gradient).index_copy_(
                        0, order(sizes, self.tp).to(gradient.device), gradient
                    )
            gradients[name] = gradient
        return gradients


def on_mesh(mesh: DeviceMesh) -> Any:
    """liger_core's ops for the model: tokens are the same on all processes, embedded rows are divided by their place."""

    def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
        whole = DTensor.from_local(tokens, mesh, [Replicate()], run_check=False)
        embedded: Any = liger.embedding(whole, weight)  # addends: each process has a part of the vocabulary
        return embedded.redistribute(placements=[Shard(1)])

    names = ("rms_norm", "fused_add_rms_norm", "rope", "swiglu", "fused_linear_cross_entropy")
    return SimpleNamespace(embedding=embedding, **{name: getattr(liger, name) for name in names})


def divide_products(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism within the blocks, sequence parallelism between them, and a divided vocabulary."""
    heads = model.blocks[0].heads
    if model.size.experts:
        raise ValueError("--tp divides no experts: take --fsdp, or a preset without them")
    if any(count % mesh.size() for count in heads):
        raise ValueError(f"--tp {mesh.size()} doesn't divide {min(heads)} heads")
    columns = ColwiseParallel(input_layouts=Shard(1))  # a local tensor comes out: of some heads, or some columns
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan = {"qkv": columns, "attention_out": rows, "mlp.gate_up": columns, "mlp.down": rows}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for packed, sizes in packed_rows(model):
                if name.endswith(packed):
                    weight.copy_(weight[order(sizes, mesh.size()).to(weight.device)])
    for block in model.blocks:
        block.heads = tuple(count // mesh.size() for count in heads)
        parallelize_module(block, mesh, plan)
        place(block, mesh, Replicate(), "mlp_norm", "next_norm")
    place(model, mesh, Replicate(), "first_norm")
    place(model, mesh, Shard(0), "embedding", *([] if model.size.tied else ["head"]))
    if model.size.tied:
        model.head = model.embedding
    model.blocks[-1].register_forward_hook(whole_rows)
    model.register_forward_hook(lambda module, args, loss: loss.to_local().clone())  # FSDP2 warns of views


def whole_rows(block: nn.Module, args: Any, output: tuple[Any, Any]) -> tuple[Any, Any]:
    """The last block's normalised rows, gathered: the loss takes every row with this process's part of the vocabulary."""
    x, residual = output
    return x.redistribute(placements=[Replicate()]), residual


def place(module: nn.Module, mesh: DeviceMesh, at: Replicate | Shard, *names: str) -> None:
    for name in names:
        setattr(module, name, nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, [at])))


def packed_rows(model: Any) -> list[tuple[str, list[int]]]:
    """The weights that are several in one, with the number of rows of each."""
    block, size = model.blocks[0], model.size
    heads = (size.heads, size.kv_heads, size.kv_heads)
    return [("qkv.weight", [count * block.width for count in heads]), ("gate_up.weight", [size.feed_forward] * 2)]


def order(sizes: Sequence[int], parts: int) -> Tensor:
    """The rows of a packed weight in an order that cuts into parts with rows of each: for two parts of q, k and v, the
    first halves of the three, then the second ones.
    """
    pieces = [piece.chunk(parts) for piece in torch.arange(sum(sizes)).split(list(sizes))]
    return torch.cat(list(itertools.chain.from_iterable(zip(*pieces, strict=True))))


def device_of(kind: str) -> torch.device:
    """This process's device of a kind, as torchrun numbers processes. From here on it is the current one."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)  # of which kernels and NCCL ask
    return device


def leave(status: int) -> NoReturn:
    """End this process, without what Python does at its end.

    FSDP keeps the group, so gloo's threads outlive `destroy_process_group`. One that drops its last tensor after Python's end
    aborts the process (seen with torch 2.13).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
