"""Rank processes that are started once and reused: importing everything costs a process about 20 seconds.

Each rank runs the worker's own entry on a frozen config, as the launcher would start it, so that a test exercises what
a user runs. A task that fails or hangs takes its ranks down; the next task starts fresh ones.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.launch.local import free_port

TASK_TIMEOUT = 300.0
MAX_THREADS = 400  # of a rank; then fresh ones are started


def run_config(config: str) -> int:
    """The worker's job on this rank; its exit status."""
    from engine.worker import run_job

    return run_job(Path(config))


def _serve(rank: int, pipe: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    import torch

    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        function, kwargs, environment = task
        os.environ |= environment
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                value = function(**kwargs)
            pipe.send((True, value, output.getvalue()))
        except BaseException:
            pipe.send((False, traceback.format_exc(), output.getvalue()))
        function = kwargs = task = value = None
        gc.collect()  # process groups in cycles would keep their threads, a dozen each, for all tests to come


class Ranks:
    """Up to `size` rank processes; `call` runs one function on the first `world` of them."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []

    def call(self, function: Any, world: int, **kwargs: Any) -> list[Any]:
        """The function's value on every rank; raises AssertionError with the ranks' output if one fails."""
        self._start(world)
        environment = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        for _, pipe in self._members[:world]:
            pipe.send((function, kwargs, environment))
        values, failures = [], []
        for rank, (process, pipe) in enumerate(self._members[:world]):
            # One rank's failure leaves the others waiting in a collective: do not wait long for those.
            if not pipe.poll(5.0 if failures else TASK_TIMEOUT):
                failures.append(f"rank {rank}: no answer (alive: {process.is_alive()})")
                continue
            try:
                good, value, output = pipe.recv()
            except EOFError:
                good, value, output = False, f"the process ended with {process.exitcode}", ""
            values.append(value)
            if not good:
                failures.append(f"rank {rank}: {value}\n{output}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        if any(self._threads(process.pid) > MAX_THREADS for process, _ in self._members):
            self.close()
        return values

    @staticmethod
    def _threads(pid: int) -> int:
        """Of a process. Models with experts leave process groups behind, whose threads slow all that follows."""
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())

    def run(self, config: Path, world: int) -> list[int]:
        """Run a frozen config on `world` ranks; the exit statuses."""
        codes = self.call(run_config, world, config=str(config))
        if any(codes):
            self.close()  # a failed job may leave a process group behind
        return codes

    def _start(self, world: int) -> None:
        assert world <= self._size, f"{world} ranks asked of {self._size}"
        if not all(process.is_alive() for process, _ in self._members):  # killed between two tasks
            self.close()
        for rank in range(len(self._members), world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members = []
