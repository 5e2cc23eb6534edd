"""Host time of a call on DTensors beside one on plain tensors: python benchmarks/dtensors.py.

The kernel of rms_norm only allocates, and the group of two processes is torch's fake one, which sends nothing: what is
left is the host's part. Any machine will do: a time is that of the processor, the least of the medians of three rounds in turn.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from liger_core import BackendInfo, backend, rms_norm

CALLS, REPEATS, ROUNDS = 50, 40, 3


def forward(needs: Any, x: Tensor, weight: Tensor, eps: float = 1e-6, **options: Any) -> Any:
    return torch.empty_like(x), (x, weight) if any(needs) else ()


def backward(needs: Any, saved: Any, dy: Tensor, **options: Any) -> Any:
    return torch.empty_like(saved[0]), torch.empty_like(saved[1])


def by_hand(x: Any, weight: Any) -> Any:
    """The call between torch's own `to_local` and `from_local`."""
    from torch.distributed.tensor import DTensor, Partial

    local = x.to_local(grad_placements=x.placements), weight.to_local(grad_placements=(Partial(),))
    y = rms_norm(*local)
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def microseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Time of one call of each."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        for name, call in list(calls.items())[:: -1 if number % 2 else 1]:
            times = []
            for _ in range(REPEATS):
                start = time.process_time()
                for _ in range(CALLS):
                    call()
                times.append((time.process_time() - start) / CALLS * 1e6)
            medians[name].append(statistics.median(times))
    return {name: min(values) for name, values in medians.items()}


def measures(function: Callable[..., Any], x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Callable[[], Any]]:
    """A call with nothing to differentiate, one that is recorded, and one with its backward."""
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()

    def without() -> Any:
        with torch.no_grad():
            return function(x, weight)

    return {
        "forward, no gradients": without,
        "forward": lambda: function(*leaves),
        "forward and backward": lambda: torch.autograd.grad(function(*leaves), leaves, dy),
    }


@contextlib.contextmanager
def ways() -> Iterator[dict[str, dict[str, Callable[[], Any]]]]:
    """The calls by what they are given, in a group of torch's that sends nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    plain = torch.ones(2, 8), torch.ones(8), torch.ones(2, 8)
    spread: Any = [
        DTensor.from_local(tensor, mesh, [at])
        for tensor, at in zip(plain, (Shard(0), Replicate(), Shard(0)), strict=True)
    ]
    kernel = types.ModuleType("allocating.ops.rms_norm")
    kernel.forward, kernel.backward = forward, backward  # type: ignore[attr-defined]
    info = BackendInfo("allocating", ("cpu",), "torch", "allocating", "nothing to install", ("cpu",))
    with (
        mock.patch.object(backend, "discover", return_value=((info,), ())),
        mock.patch.object(BackendInfo, "has_kernel", lambda self, op: op == "rms_norm"),
        mock.patch.object(BackendInfo, "kernel", return_value=kernel),
    ):
        rms_norm.forget_plans()
        yield {
            "plain tensors": measures(rms_norm, *plain),
            "DTensors": measures(rms_norm, *spread),
            "DTensors, by to_local and from_local": measures(by_hand, *spread),
            "DTensors, torch's rms_norm": measures(lambda x, w: torch.nn.functional.rms_norm(x, (8,), w), *spread),
        }
    rms_norm.forget_plans()
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with ways() as calls_by_way:
        print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}; µs a call, and times that on plain tensors\n")
        print("| |", " | ".join(calls_by_way["DTensors"]), "|\n|---|---|---|---|")
        times = microseconds({f"{way}: {name}": c for way, calls in calls_by_way.items() for name, c in calls.items()})
        for way, calls in calls_by_way.items():
            of_plain = [times[f"plain tensors: {name}"] for name in calls]
            cells = [
                f"{times[f'{way}: {name}']:.1f} ({times[f'{way}: {name}'] / p:.1f})"
                for name, p in zip(calls, of_plain, strict=True)
            ]
            print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
