"""Cost of `fused_linear_cross_entropy` with its vocabulary divided among processes, beside one process with all of it.

    torchrun --nproc-per-node 2 benchmarks/divided_loss.py            # accelerators, by their own collectives (NCCL)
    torchrun --nproc-per-node 2 benchmarks/divided_loss.py --smoke    # gloo on a CPU, a tiny size: no record

Every process has all rows. A row is a way:

- ``one process``: the loss of liger_core on the whole vocabulary, in each process alone;
- ``process group``: the loss of liger_distributed on this process's part of the vocabulary;
- ``DTensors``: the loss of liger_core on the same parts.

A time is that of the slowest process, the least of the medians of three turns. Memory is the most that any process takes
beyond its inputs, for the forward and backward. ``sent`` is what one process puts into collectives, in bytes. The errors are
the norms of differences to one process, relative. Divided losses have the same bits in all processes, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import records
import torch
import torch.distributed as dist
from command import Command
from jobs import TURNS, in_turns
from timing import peak_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import liger_core
import liger_distributed

SIZE, TINY = (8192, 4096, 128_256), (16, 8, 101)
"""Rows, hidden size and vocabulary: the head of a Llama of 8 B on 8192 tokens."""

COLUMNS = (
    *("way", "processes", "rows", "hidden", "vocabulary", "dtype"),
    *("forward_ms", "ms", "peak_gb", "sent_forward", "sent_backward", "loss_off", "dx_off", "dweight_off"),
)

ONE, GROUP, DTENSORS = "one process", "process group", "DTensors"
REPEATS = 10
"""Calls of a turn, the same number in all processes: they wait for each other."""

Row = dict[str, str]


class Sent(TorchDispatchMode):
    """The bytes that this process puts into collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = function._schema.name.partition("::")
        if library in ("_c10d_functional", "c10d") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.bytes += sum(a.nbytes for a in tree_leaves(args) if isinstance(a, Tensor))
        return function(*args, **(kwargs or {}))


class Way(NamedTuple):
    """A loss of x and a weight, with the leaves that it is differentiated by."""

    loss: Callable[[Tensor, Tensor], Tensor]
    leaves: tuple[Tensor, Tensor]

    def forward(self) -> Tensor:
        """Without anything to differentiate."""
        with torch.no_grad():
            return self.loss(*self.leaves)

    def both(self) -> tuple[Tensor, ...]:
        """The loss, and its gradients."""
        loss = self.loss(*self.leaves)
        return loss.detach(), *torch.autograd.grad(loss, self.leaves)


def ways_of(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> dict[str, Way]:
    """The same loss in each way, of the same numbers in every process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rows, hidden, vocabulary = size
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    weight = torch.randn(vocabulary, hidden, device=device, dtype=dtype) * hidden**-0.5
    target = torch.randint(vocabulary, (rows,), device=device)
    target[::17] = -100
    for tensor in (x, weight, target):
        dist.broadcast(tensor, 0)
    mesh, group = init_device_mesh(device.type, (dist.get_world_size(),)), dist.group.WORLD
    part = weight.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def by_dtensors(x: Tensor, part: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        place = {"shape": weight.shape, "stride": weight.stride()}
        divided = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, **place)
        loss: Any = liger_core.fused_linear_cross_entropy(whole, divided, target)
        return loss.to_local()

    def by_group(x: Tensor, part: Tensor) -> Tensor:
        return liger_distributed.fused_linear_cross_entropy(x, part, target, group=group, vocabulary=vocabulary)

    def alone(x: Tensor, weight: Tensor) -> Tensor:
        return liger_core.fused_linear_cross_entropy(x, weight, target)

    leaves = [tensor.requires_grad_() for tensor in (x, weight, part)]
    return {
        ONE: Way(alone, (leaves[0], leaves[1])),
        GROUP: Way(by_group, (leaves[0], leaves[2])),
        DTENSORS: Way(by_dtensors, (leaves[0], leaves[2])),
    }


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value in any process."""
    largest = torch.tensor(values, device=device, dtype=torch.float32)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of what a call takes in the slowest process, when all begin at once."""
    module, times = torch.get_device_module(device), []
    for _ in range(
        2 + (REPEATS if device.type != "cpu" else 1)
    ):  # the first ones compile; a CPU runs the smoke test alone
        slowest([0.0], device)
        module.synchronize()
        start = time.perf_counter()
        call()
        module.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(slowest(times[2:], device))


def off(value: Tensor, truth: Tensor) -> str:
    """The difference's norm, relative to that of what is true."""
    return f"{((value.float() - truth.float()).norm() / truth.float().norm()).item():.1e}"


def sent_by(call: Callable[[], Any]) -> int:
    with Sent() as sent:
        call()
    return sent.bytes


def measure(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Row]:
    """A row for each way, the same in every process."""
    ways, world = ways_of(size, dtype, device), dist.get_world_size()
    rows, first = {}, dist.get_rank() * -(-size[2] // world)
    _, dx, dweight = ways[ONE].both()
    truth = ways[ONE].forward(), dx, dweight[first : first + -(-size[2] // world)].clone()
    del dweight
    for name, way in ways.items():
        results = way.both()
        forward, peak = sent_by(way.forward), peak_memory(way.both, device.type)
        everywhere = [torch.empty_like(results[0]) for _ in range(world)]
        dist.all_gather(everywhere, results[0])
        if name != ONE and not all(torch.equal(results[0], other) for other in everywhere):
            raise AssertionError(f"{name}: the processes' losses differ: {[loss.item() for loss in everywhere]}")
        mine = (*results[:2], results[2] if name != ONE else truth[2])
        of = dict(zip(("loss_off", "dx_off", "dweight_off"), map(off, mine, truth), strict=True))
        rows[name] = dict.fromkeys(COLUMNS, "") | {
            "way": name,
            "processes": "1" if name == ONE else f"{world}",
            **dict(zip(("rows", "hidden", "vocabulary"), map(str, size), strict=True)),
            "dtype": str(dtype).removeprefix("torch."),
            "peak_gb": "" if peak is None else f"{slowest([peak / 1e9], device)[0]:.2f}",
            "sent_forward": f"{forward}",
            "sent_backward": f"{sent_by(way.both) - forward}",
            **of,
        }
    times: dict[tuple[str, str], list[float]] = {}
    for name in in_turns([*ways]):
        times.setdefault((name, "forward_ms"), []).append(milliseconds(ways[name].forward, device))
        times.setdefault((name, "ms"), []).append(milliseconds(ways[name].both, device))
    for (name, column), turns in times.items():
        assert len(turns) == TURNS
        rows[name][column] = f"{min(turns):.3f}"
    return [*rows.values()]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; without torchrun's variables it ends the program."""
    command = Command(__doc__, smoke="gloo and the best language there")
    for name, value in zip(("rows", "hidden", "vocabulary"), SIZE, strict=True):
        command.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    options = command.parse_args(words)
    if options.smoke:
        options.device, (options.rows, options.hidden, options.vocabulary) = "cpu", TINY
    command.check(options)
    if "RANK" not in os.environ:
        command.error("not run: it takes several processes: torchrun --nproc-per-node 2 benchmarks/divided_loss.py")
    return options


def main(words: Sequence[str] | None = None) -> list[Row]:
    """Measure; the first process prints, and writes the record. Returns the rows."""
    options = parse(words)
    device = torch.device(options.device)
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    backend = "gloo" if device.type == "cpu" else None  # NCCL and its like for the device, gloo beside it
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    dtype = torch.float32 if options.smoke else torch.bfloat16
    rows = measure((options.rows, options.hidden, options.vocabulary), dtype, device)
    if dist.get_rank() == 0:
        head = records.head_of(device.type)
        lines = [[row[column] for column in COLUMNS] for row in rows]
        print(records.comment(head) + "\n".join(",".join(line) for line in (COLUMNS, *lines)), flush=True)
        if not options.smoke:
            title = "fused_linear_cross_entropy of a divided vocabulary"
            name = f"parallel-{dist.get_world_size()}"
            records.write(name, head, rows, COLUMNS, title, records.table(COLUMNS, lines), options.out)
    dist.barrier()  # gloo aborts a process whose peer has ended already
    dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
