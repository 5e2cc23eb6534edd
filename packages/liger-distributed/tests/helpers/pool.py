"""Processes of one group, started once: they run functions of test files, and return what these return.

With ``LIGER_TEST_DEVICE=cuda`` each has a device of its own, on which the functions' tensors are, and the group sends by NCCL.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = 240.0
"""Seconds that a function may take: the first one imports, and compiles, on a machine that others may use too. A process
that waits for another one for longer than the group's timeout raises before that."""

ROOM = 4 << 30
"""Bytes of a device that the tests may take, with what CUDA and NCCL keep."""


class Pool:
    """The processes. They are started when the first function is run, and again after one that raised."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._processes: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._starts = 0
        self.patience = PATIENCE

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a test file's top level in every process; a list of what they return, by rank.

        Raises:
            AssertionError: with the tracebacks of the processes that raised, or for those that are stuck.
        """
        if not self._processes:
            self._start()
        where = Path(sys.modules[function.__module__].__file__ or "")
        for _, connection in self._processes:
            connection.send((str(where), function.__name__, args))
        answers, failed = [], []
        for rank, (_, connection) in enumerate(self._processes):
            try:
                done, answer = connection.recv() if connection.poll(self.patience) else (False, "it didn't return")
            except EOFError:
                done, answer = False, "it ended; its own output says why"
            answers.append(answer)
            if not done:
                failed.append(f"process {rank}: {answer}")
        if failed:  # all of them: one that waited in vain says nothing of why another didn't come
            self.stop()
            raise AssertionError("\n".join(failed))
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._starts += 1
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            store = f"{self._folder.name}/store{self._starts}"
            process = context.Process(target=work, args=(rank, self._size, store, theirs), daemon=True)
            process.start()
            self._processes.append((process, ours))

    def stop(self) -> None:
        """End the processes."""
        for process, connection in self._processes:
            connection.close()
            process.terminate()
        for process, _ in self._processes:
            process.join()
        self._processes = []


def work(rank: int, size: int, store: str, connection: Connection) -> None:
    """The loop of a process: call the functions that it is sent, until the pipe is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.setdefault("TRITON_INTERPRET", "0" if os.environ.get("LIGER_TEST_DEVICE") else "1")
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "gloo"
    if kind := os.environ.get("LIGER_TEST_DEVICE"):
        torch.accelerator.set_device_index(rank)
        device = torch.device(kind, rank)
        free, _ = torch.get_device_module(kind).mem_get_info(rank)
        if free < ROOM:
            raise MemoryError(
                f"{device} has {free / 1e9:.1f} GB free, and the tests take {ROOM / 1e9:.1f}: others use it"
            )
        torch.set_default_device(device)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    dist.init_process_group(backend, f"file://{store}", timeout=timedelta(seconds=60), rank=rank, world_size=size)
    while True:
        try:
            path, name, args = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(_module(path), name)(*args)
        except BaseException:  # whatever it is: `run` raises it, with this traceback
            answer = False, traceback.format_exc()
        connection.send(answer)


def _module(path: str) -> Any:
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(path, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path])
    return sys.modules[path]
